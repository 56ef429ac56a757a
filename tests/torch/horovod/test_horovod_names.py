"""Horovod's names with Horovod's arguments, and what scripts ask about the build."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch
from support.threaded import ThreadedCluster

import byteps_py
import byteps_py.torch as hvd
from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.session.solo import SoloSession
from byteps_py.torch.collectives.context import Context, use
from byteps_py.worker.core.topology import Topology

#: Parameters in order; ``=``: has a default.
SCALED = "prescale_factor=1.0 postscale_factor=1.0 process_set=global"
SIGNATURES = {
    "init": "comm=None process_sets=None",
    "shutdown": "",
    "is_initialized": "",
    "size": "",
    "local_size": "",
    "cross_size": "",
    "rank": "",
    "local_rank": "",
    "cross_rank": "",
    "is_homogeneous": "",
    "mpi_threads_supported": "",
    "mpi_enabled": "",
    "mpi_built": "",
    "gloo_enabled": "",
    "gloo_built": "",
    "nccl_built": "",
    "ddl_built": "",
    "ccl_built": "",
    "cuda_built": "",
    "rocm_built": "",
    "allreduce": f"tensor average=None name=None compression=none op=None {SCALED}",
    "allreduce_": f"tensor average=None name=None op=None {SCALED}",
    "allreduce_async": f"tensor average=None name=None op=None {SCALED}",
    "allreduce_async_": f"tensor average=None name=None op=None {SCALED}",
    "grouped_allreduce": f"tensors average=None name=None compression=none op=None {SCALED}",
    "grouped_allreduce_": f"tensors average=None name=None op=None {SCALED}",
    "grouped_allreduce_async": f"tensors average=None name=None op=None {SCALED}",
    "grouped_allreduce_async_": f"tensors average=None name=None op=None {SCALED}",
    "sparse_allreduce_async": "tensor name op process_set=global",
    "allgather": "tensor name=None process_set=global",
    "allgather_async": "tensor name=None process_set=global",
    "grouped_allgather": "tensors name=None process_set=global",
    "grouped_allgather_async": "tensors name=None process_set=global",
    "broadcast": "tensor root_rank name=None process_set=global",
    "broadcast_": "tensor root_rank name=None process_set=global",
    "broadcast_async": "tensor root_rank name=None process_set=global",
    "broadcast_async_": "tensor root_rank name=None process_set=global",
    "alltoall": "tensor splits=None name=None process_set=global",
    "alltoall_async": "tensor splits=None name=None process_set=global",
    "reducescatter": "tensor name=None compression=none op=Average process_set=global "
    "prescale_factor=1.0 postscale_factor=1.0",
    "reducescatter_async": "tensor name=None op=Average process_set=global prescale_factor=1.0 postscale_factor=1.0",
    "grouped_reducescatter": "tensors name=None compression=none op=Average process_set=global "
    "prescale_factor=1.0 postscale_factor=1.0",
    "grouped_reducescatter_async": "tensors name=None op=Average process_set=global "
    "prescale_factor=1.0 postscale_factor=1.0",
    "join": "device=-1",
    "barrier": "process_set=global",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank",
    "broadcast_object": "obj root_rank=0 name=None process_set=global",
    "allgather_object": "obj name=None process_set=global",
    "start_timeline": "file_path mark_cycles=False",
    "stop_timeline": "",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": "optimizer named_parameters=None compression=none backward_passes_per_step=1 op=Average "
    "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set=global",
}
OTHER = {
    *("Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "SyncBatchNorm"),
    *("ProcessSet", "global_process_set", "HorovodInternalError", "elastic"),
}


def _default(value: object) -> str:
    names = {hvd.global_process_set: "global", hvd.Compression.none: "none", hvd.Average: "Average"}
    try:
        return names.get(value, repr(value))
    except TypeError:
        return repr(value)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_horovods(name) -> None:
    expected = SIGNATURES[name].split()
    parameters = list(inspect.signature(getattr(hvd, name)).parameters.values())
    found = [
        p.name if p.default is p.empty else f"{p.name}={_default(p.default)}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert found[: len(expected)] == expected
    # What comes behind is ours, and need not be given.
    assert all(p.default is not p.empty for p in parameters[len(expected) :] if p.kind is not p.VAR_KEYWORD)


def test_every_name_is_on_the_package() -> None:
    assert len({*SIGNATURES, *OTHER}) == 68
    for name in {*SIGNATURES, *OTHER}:
        assert getattr(byteps_py, name) is getattr(hvd, name)
        assert name in hvd.__all__
    assert all(hasattr(hvd.elastic, name) for name in ("run", "TorchState", "ElasticSampler"))


def test_answers_about_the_build() -> None:
    with use(Context(lambda settings: SoloSession())):
        assert not hvd.gloo_enabled()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.mpi_threads_supported()
        hvd.init(settings=Settings())
        assert hvd.gloo_enabled()
        assert hvd.gloo_built()
        assert hvd.mpi_threads_supported()
        assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built()))
        assert hvd.nccl_built() == 0
        assert isinstance(hvd.nccl_built(), int)
        assert hvd.cuda_built() == (torch.version.cuda is not None)
        assert hvd.rocm_built() == (torch.version.hip is not None)
        assert hvd.is_homogeneous()
        hvd.shutdown()
        assert not hvd.gloo_enabled()


@pytest.mark.parametrize(("machines", "expected"), [((2, 1, 3), False), ((1, 2), False), ((2, 2), True), ((3,), True)])
def test_whether_machines_are_alike_is_the_same_on_all_ranks(machines: tuple[int, ...], expected: bool) -> None:
    assert set(ThreadedCluster(machines).run(lambda rank: hvd.is_homogeneous())) == {expected}
    workers = tuple(pb.Member(machine_index=i, local_size=size) for i, size in enumerate(machines))
    assert Topology(1, 0, workers, (), 4096, 1).is_homogeneous == expected


def test_init_takes_what_bytepss_scripts_give() -> None:
    with use(Context(lambda settings: SoloSession())):
        hvd.init(True, settings=Settings())  # byteps.torch.init(lazy)
        hvd.init(lazy=False)
        assert hvd.size() == 1
        hvd.shutdown()


def test_the_module_that_horovods_scripts_import_from() -> None:
    mpi_ops = byteps_py.mpi_ops
    here = {name for name in SIGNATURES if hasattr(mpi_ops, name)}
    assert {"synchronize", "allreduce_async_", "rank", "HorovodInternalError"} <= set(mpi_ops.__all__)
    assert {"allreduce", "join", "poll", "nccl_built", "grouped_reducescatter_async"} <= here
    assert all(getattr(mpi_ops, name) is getattr(hvd, name) for name in mpi_ops.__all__)


@pytest.mark.slow
def test_modules_are_found_under_the_package_too() -> None:
    """As after ``horovod.torch`` was replaced everywhere in a script, whatever comes first; and each is there once."""
    code = """
from byteps_py.elastic.sampler import ElasticSampler
from byteps_py.elastic.state import TorchState
from byteps_py.mpi_ops import synchronize
import byteps_py.compression, byteps_py.functions, byteps_py.optimizer, byteps_py.sync_batch_norm
import byteps_py as hvd, byteps_py.torch as there
assert hvd.elastic is there.elastic and hvd.elastic.ElasticSampler is ElasticSampler
assert hvd.elastic.TorchState is TorchState
assert hvd.mpi_ops is there.mpi_ops and hvd.synchronize is synchronize
assert hvd.elastic.__spec__.name == "byteps_py.torch.elastic"
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        importlib.import_module("byteps_py.elastic.nothing")


ONE = ("push_pull", "push_pull_async", "push_pull_inplace", "allreduce", "allreduce_", "allgather", "broadcast",
       "broadcast_", "alltoall", "reducescatter", "sparse_allreduce_async")  # fmt: skip


@pytest.mark.parametrize("name", [*ONE, "grouped_allreduce", "grouped_allgather", "grouped_reducescatter"])
def test_what_is_no_tensor_is_refused_by_name(name: str) -> None:
    more = {"broadcast": (0,), "broadcast_": (0,), "sparse_allreduce_async": ("numbers", hvd.Average)}.get(name, ())
    given = [[1, 2]] if name.startswith("grouped") else [1, 2]
    hvd.init()
    try:
        with pytest.raises(hvd.UsageError, match=r"is a list, and only a torch.Tensor can be communicated"):
            getattr(hvd, name)(given, *more)
    finally:
        hvd.shutdown()
