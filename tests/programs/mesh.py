"""Meshes on real processes. Arguments: the names of cases. Prints "NAME: right" on each rank."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import case, run
from pipe_models import HIDDEN, perceptrons
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import byteps_py as bps
from byteps_py.errors import UsageError
from byteps_py.parallel.mesh import Mesh

CLOSE = 1e-12
mse = nn.functional.mse_loss


def batch(size: int) -> torch.Tensor:
    """The same on all ranks."""
    return torch.randn(size, HIDDEN, generator=torch.Generator(torch.get_default_device()).manual_seed(1))


def error_of(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        function(*arguments, **named)
    except UsageError as error:
        return str(error)
    raise AssertionError(f"{arguments} {named}: no error")


@case
def groups() -> None:
    """Sums over each group are sums of its ranks, in all orders."""
    world, own = dist.get_world_size(), dist.get_rank()
    layouts: list[dict[str, Any]] = [
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2, "order": "paddle"},
        {"cp": 2, "pp": world // 4, "dp": 2, "order": ("pp", "cp", "dp", "tp")},
        {"sharding": 2, "dp": 2, "tp": world // 4, "order": "paddle"},
    ]
    for arguments in layouts:
        mesh = Mesh(**arguments)
        dimensions = [*mesh.layout.order, "dp", "cp", "pp"]
        choices = [(name,) for name in mesh.layout.order] + [("dp", "cp"), ("cp", "dp", "pp"), tuple(dimensions[:4])]
        for names in choices:
            total = torch.tensor(2.0**own)  # tells which ranks took part
            dist.all_reduce(total, group=mesh.group(*names))
            assert total.item() == sum(2.0**rank for rank in mesh.ranks(*names)), (arguments, names)
            assert mesh.ranks(*names)[mesh.rank(*names)] == own
            assert dist.get_rank(mesh.group(*names)) == mesh.rank(*names), (arguments, names)
        assert {name: mesh.rank(name) for name in mesh.layout.order} == mesh.coordinates()
        assert mesh.layout.rank_at(mesh.coordinates()) == own
        copies = [name for name in ("dp", "sharding", "cp") if name in mesh.layout.order]
        assert dist.get_process_group_ranks(mesh.gradient_group) == list(mesh.ranks(*copies))
        assert mesh.gradient_group is mesh.group(*reversed(copies))
        assert mesh.device_mesh.mesh_dim_names == tuple(reversed(mesh.layout.order))


@case
def pipeline() -> None:
    """A pipeline takes the dimensions "pp" and "dp" of the mesh, and ignores the others."""
    mesh = Mesh(pp=2, dp=2)
    pipe = bps.parallel.Pipeline(perceptrons(2), "dapple", 2, mesh=mesh.device_mesh)
    reference = perceptrons(2)
    x = batch(8)
    loss = pipe.step(x.chunk(2)[mesh.rank("dp")], x.chunk(2)[mesh.rank("dp")], mse)
    expected = mse(reference(x), x)
    expected.backward()
    assert abs(loss.item() - expected.item()) <= CLOSE
    gradients = {name: each.grad for name, each in reference.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=CLOSE)


def check_training(model: nn.Module, mesh: Mesh) -> None:
    """One backward pass of each rank's part of the batch, beside all of it in one process."""
    reference = perceptrons(2)
    x = batch(8)
    copies = ("dp", "cp")  # here a rank of "cp" takes other rows of the batch, too
    part = x.chunk(len(mesh.ranks(*copies)))[mesh.rank(*copies)]
    mse(model(part), part).backward()
    mse(reference(x), x).backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor), name
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=0, atol=CLOSE, msg=name)


@case
def sharded() -> None:
    """FSDP2 over "dp" and "cp" together, and HSDP with copies along "dp"."""
    mesh = Mesh(cp=2, dp=2)
    for part in (mesh.submesh("dp", "cp", flat=True), mesh.submesh("cp", "dp")):
        check_training(fully_shard(perceptrons(2), mesh=part), mesh)


@case
def sharded_and_tensor_parallel() -> None:
    """Both submeshes belong to one mesh, as torch wants it."""
    world = dist.get_world_size()
    mesh = Mesh(tp=2, cp=world // 4, dp=2)
    model = perceptrons(2)
    parallelize_module(model, mesh.submesh("tp"), {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})
    check_training(fully_shard(model, mesh=mesh.submesh("dp", "cp", flat=True)), mesh)


@case
def refused() -> None:
    """On all ranks, also if only one of them has other arguments; then they make another mesh."""
    world, own = dist.get_world_size(), dist.get_rank()
    assert f"there are {world} ranks" in error_of(Mesh, tp=3, dp=1)
    text = error_of(Mesh, tp=3 if own == 1 else 1)
    assert ("tp=3 does not divide" if own == 1 else "rank 1 has no mesh") in text, text
    text = error_of(Mesh, tp=2 if own == 1 else 1)
    assert f"rank 0 has the mesh tp 1, cp 1, pp 1, dp {world}, rank 1 has tp 2" in text, text
    text = error_of(Mesh, order="llama" if own else "paddle")
    assert "the same order" in text, text
    mesh = Mesh(tp=2)
    for wrong in ((), ("tp", "tp"), ("xp",), ("sharding",)):
        for method in (mesh.group, mesh.ranks, mesh.submesh):
            assert "tp, cp, pp, dp" in error_of(method, *wrong), wrong
    assert mesh.sharding == 1


@case
def spans_machines() -> None:
    """Machines of 2 ranks: a tensor-parallel group on two of them is a warning, once in the job."""
    for arguments, is_warned in (
        ({"tp": 2}, False),
        ({"tp": 4}, True),
        ({"tp": 2, "order": ("dp", "cp", "pp", "tp")}, True),
        ({"cp": 4}, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mesh = Mesh(**arguments)  # type: ignore[arg-type]
        texts = [str(each.message) for each in caught if "tensor-parallel group" in str(each.message)]
        assert len(texts) == (is_warned and dist.get_rank() == 0), (arguments, texts)
        if texts:
            ranks, words = ("ranks 0-3", "6") if arguments["tp"] == 4 else ("ranks 0, 2", "4")
            assert f"{ranks} spans 2 machines" in texts[0], texts
            assert f"8·b·s·h·(t-1)/t = {words}·b·s·h words" in texts[0], texts
    assert "2     3   machine 1" in Mesh(tp=2).describe()
    assert repr(mesh) == f"Mesh(tp=1, cp=4, pp=1, dp=1; rank {mesh.rank('cp')}: tp 0, cp {mesh.rank('cp')}, pp 0, dp 0)"


@case
def spans_machines_by_hand() -> None:
    """A script that starts its ranks itself says with LOCAL_WORLD_SIZE how many a machine has."""
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    spans_machines()
    os.environ["LOCAL_WORLD_SIZE"] = before
    assert "machine 0" in Mesh(tp=2).describe()
    assert "machine 1" not in Mesh(tp=2).describe()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    run(sys.argv[1:])
