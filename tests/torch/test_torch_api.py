"""push_pull, broadcast and their kin on threads that are ranks, compared exactly with the contract."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.threaded import ThreadedCluster, combine, contract
from torch import nn
from torch_values import same, values

import byteps_py
import byteps_py.torch as bps
from byteps_py.config.settings import Settings
from byteps_py.torch.collectives.context import Context, NameSource, use
from byteps_py.torch.collectives.dtypes import WIRE

MACHINES = (2, 1)
SIZE = sum(MACHINES)
OPS = {"AVERAGE": "SUM", "SUM": "SUM", "MIN": "MIN", "MAX": "MAX", "PRODUCT": "PRODUCT"}


# ---- push_pull -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(WIRE), ids=str)
def test_every_op_and_form(dtype) -> None:
    def main(rank: int):
        x = values(rank, dtype)
        found = {}
        for op in (bps.ReduceOp[name] for name in OPS):
            found[op.name] = bps.push_pull(x, op=op, name=f"x.{op.name}")
        inplace = x.clone()
        assert bps.push_pull_inplace(inplace, average=False, name="in place") is inplace
        pending = bps.push_pull_async(x, name="async"), bps.byteps_push_pull(x, op=bps.Max)
        return found, inplace, [bps.synchronize(handle) for handle in pending], x

    parts = [values(rank, dtype) for rank in range(SIZE)]
    bits = torch.int16 if dtype in (torch.float16, torch.bfloat16) else dtype
    for found, inplace, (mean, largest), x in ThreadedCluster(MACHINES).run(main):
        for op, wire_op in OPS.items():
            expected = contract(parts, MACHINES, getattr(byteps_py.tensors.Op, wire_op), op == "AVERAGE")
            assert same(found[op].view(bits), expected.view(bits)), op
        assert torch.equal(inplace, found["SUM"])
        assert torch.equal(mean, found["AVERAGE"])
        assert largest is x
        assert torch.equal(x, found["MAX"])


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_shapes_and_strides(shared_memory, named) -> None:
    def main(rank: int):
        base = values(rank, torch.float32, (4, 6, 2))
        tensors = [base[0, 0, 0], base[:0], base[::2, 1:4].transpose(0, 1), base.permute(2, 0, 1), base.new_empty(0, 3)]
        for i, tensor in enumerate(tensors):
            for _ in range(3):
                mine = tensor.clone(memory_format=torch.preserve_format)
                result = bps.push_pull(tensor, average=False, name=f"{i}" if named else None)
                assert result.is_contiguous()
                assert torch.equal(tensor, mine)
                bps.push_pull_inplace(mine, op=bps.Min, name=f"{i} in place" if named else None)
            tensors[i] = result, mine
        return tensors

    bases = [values(rank, torch.float32, (4, 6, 2)) for rank in range(SIZE)]
    total, least = contract(bases, MACHINES), combine(byteps_py.tensors.Op.MIN, bases)
    for found in ThreadedCluster(MACHINES, shared_memory).run(main):
        for i, whole in ((0, total), (1, least)):
            cuts = [whole[0, 0, 0], whole[:0], whole[::2, 1:4].transpose(0, 1), whole.permute(2, 0, 1)]
            for pair, expected in zip(found, [*cuts, whole.new_empty(0, 3)], strict=True):
                assert torch.equal(pair[i], expected)


@pytest.mark.parametrize("compression", [bps.Compression.fp16, bps.Compression.bf16])
def test_compression(compression) -> None:
    wire = compression.wire_dtype(torch.float32)
    assert compression.wire_dtype(torch.int32) is torch.int32
    assert compression.decompress(*compression.compress(torch.ones(1))).dtype is torch.float32

    def main(rank: int):
        return bps.push_pull(values(rank, torch.float32), compression=compression)

    parts = [values(rank, torch.float32).to(wire) for rank in range(SIZE)]
    for found in ThreadedCluster(MACHINES).run(main):
        assert torch.equal(found, contract(parts, MACHINES, average=True).float())


def test_push_pull_is_differentiable() -> None:
    def main(rank: int):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = bps.push_pull(x * (rank + 1), average=False, name="y")
        z = bps.push_pull(x, name="z")
        (y * (rank + 1) + z).square().sum().backward()
        with pytest.raises(ValueError, match="op=Max is not differentiable"):
            bps.push_pull(x, op=bps.Max).sum().backward()
        return x.grad

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    total = x * 1 + x * 2
    sum(((total * (rank + 1) + (x + x) / 2).square().sum() for rank in range(2)), torch.zeros(())).backward()
    for found in ThreadedCluster((2,)).run(main):
        assert found is not None
    assert torch.equal(sum(ThreadedCluster((2,)).run(main)), x.grad)


def test_unnamed_tensors_meet_in_order_and_share_few_names() -> None:
    def main(rank: int):
        handles = []
        for i in range(100):  # more than there are names: earlier ones are finished for their owners
            handles.append(bps.push_pull_async(torch.tensor([float(i + rank)])))
            if rank == i % 2:
                bps.poll(handles[i // 2])
        return [bps.synchronize(handle).item() for handle in handles]

    cluster = ThreadedCluster((1, 1))
    assert cluster.run(main) == [[i + 0.5 for i in range(100)]] * 2
    assert len({name for name, _ in cluster.rounds}) == 32


def test_names_of_unnamed_tensors() -> None:
    source = NameSource()
    given = 0
    for nbytes, count in ((8, 32), (64 << 10, 8), (4 << 20, 2)):
        names = [source.next("sum", nbytes, nbytes) for _ in range(40)]
        assert list(dict.fromkeys(names)) == [f"sum.noname.{given + i}" for i in range(count)]
        given += count
    source.restart(0)
    source.restart(0)  # a second restart in the same epoch has no effect
    assert [source.next("sum", 8, 8), source.in_turn("gather")] == ["sum.noname.1.0", "gather.noname.1.0"]


def test_unnamed_tensors_that_differ_are_an_error_and_ranks_go_on_alike() -> None:
    def main(rank: int):
        assert bps.push_pull(torch.ones(2)).tolist() == [1.0, 1.0]
        with pytest.raises(bps.MismatchError, match=r"rank 0 gave average of float32\[2\]; rank 1 .*\[3\]"):
            bps.push_pull(torch.ones(2 + rank))
        for _ in range(40):
            assert bps.push_pull(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
            assert bps.push_pull(torch.ones(2)).tolist() == [1.0, 1.0]

    ThreadedCluster((1, 1)).run(main)


def test_priority_reaches_the_service_and_a_name_may_change_its_shape() -> None:
    def main(rank: int):
        bps.push_pull(torch.ones(2), name="a", priority=5)
        assert bps.push_pull(torch.ones(3), name="a", average=False).tolist() == [2.0, 2.0, 2.0]

    cluster = ThreadedCluster((1, 1))
    cluster.run(main)
    assert cluster.rounds == [("a", 5), ("a", 0)]


# ---- misuse and errors ---------------------------------------------------------------------------------------


def test_misuse() -> None:
    def main(rank: int):
        handle = bps.push_pull_async(torch.ones(2), name="a")
        with pytest.raises(ValueError, match="Duplicate tensor name 'a'"):
            bps.push_pull_async(torch.ones(2), name="a")
        with pytest.raises(ValueError, match="Duplicate tensor name 'a'"):
            bps.push_pull_async(torch.ones(3), name="a")
        assert bps.synchronize(handle).tolist() == [1.0, 1.0]
        assert bps.synchronize(handle) is None
        assert bps.synchronize(12345) is None
        with pytest.raises(ValueError, match="12345 was not created or has been cleared"):
            bps.poll(12345)
        with pytest.raises(ValueError, match=r"bool.*float32.*bfloat16.*uint8"):
            bps.push_pull(torch.tensor([True]))
        with pytest.raises(ValueError, match="sparse"):
            bps.push_pull(torch.eye(2).to_sparse())
        with pytest.raises(ValueError, match="meta"):
            bps.push_pull(torch.ones(2, device="meta"))
        with pytest.raises(ValueError, match="op must be one of"):
            bps.push_pull(torch.ones(2), op="sum")
        with pytest.raises(ValueError, match="op=Adasum is not supported here"):
            bps.push_pull(torch.ones(2), op=bps.Adasum)
        with pytest.raises(ValueError, match="contradicts"):
            bps.push_pull(torch.ones(2), average=False, op=bps.Average)
        with pytest.raises(ValueError, match="ranks go from 0 to 1"):
            bps.broadcast(torch.ones(2), 2)
        with pytest.raises(ValueError, match="ranks go from 0 to 1"):
            bps.broadcast_object(1, -1)
        with pytest.raises(ValueError, match="empty"):
            bps.declare("")
        bps.declare("fine")
        layer = nn.Linear(1, 1, bias=False)
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(layer.parameters()), layer.named_parameters())
        with pytest.raises(ValueError, match="belongs to a gradient"):
            bps.push_pull(torch.ones(1, 1), name="Gradient.weight")
        assert optimizer is not None

    ThreadedCluster((1, 1)).run(main)


def test_polling_alone_finishes_a_tensor_in_place() -> None:
    def main(rank: int):
        x = torch.tensor([1.0 + rank])
        handle = bps.push_pull_async_inplace(x, name="x")
        bps.barrier()
        assert bps.poll(handle)
        assert x.item() == 1.5
        again = bps.push_pull_async_inplace(x, name="x")
        assert bps.synchronize(again) is x
        assert bps.synchronize(handle) is x

    ThreadedCluster((1, 1)).run(main)


def test_a_mismatch_is_told_to_all_and_the_name_stays_usable() -> None:
    def main(rank: int):
        for _ in range(2):
            with pytest.raises(bps.MismatchError, match=r"'w'.*rank 1 gave average of float32\[3\]"):
                bps.push_pull(torch.ones(2 + rank), name="w")
            assert bps.push_pull(torch.ones(2), name="w").tolist() == [1.0, 1.0]

    ThreadedCluster((1, 1)).run(main)


def test_before_init_and_after_shutdown() -> None:
    calls = [
        bps.rank,
        bps.size,
        bps.local_rank,
        bps.local_size,
        bps.cross_rank,
        bps.cross_size,
        bps.barrier,
        lambda: bps.push_pull(torch.ones(1)),
        lambda: bps.broadcast_(torch.ones(1), 0),
        lambda: bps.broadcast_object(1),
        lambda: bps.broadcast_parameters({}, 0) or bps.rank(),
        lambda: bps.poll(0),
        lambda: bps.synchronize(0),
        lambda: bps.declare("x"),
        lambda: bps.DistributedDataParallel(nn.Linear(1, 1)),
    ]
    with use(Context()):
        for call in calls:
            assert not bps.is_initialized()
            with pytest.raises(bps.NotInitializedError, match="init"):
                call()
        bps.init(settings=Settings())
        bps.init()
        assert bps.is_initialized()
        assert (bps.rank(), bps.size(), bps.local_size(), bps.cross_size()) == (0, 1, 1, 1)
        handle = bps.push_pull_async(torch.ones(1), name="left over")
        with pytest.raises(ValueError, match="suspend"):
            bps.resume(1, 0)
        bps.shutdown()
        bps.shutdown()
        with pytest.raises(bps.NotInitializedError):
            bps.synchronize(handle)
        bps.init(settings=Settings())
        assert bps.push_pull(torch.ones(1), name="left over").item() == 1.0
        bps.suspend()
        bps.resume(1, 0)
        assert bps.size() == 1
        bps.shutdown()


def test_ranks_know_their_place() -> None:
    def main(rank: int):
        bps.barrier()
        return bps.rank(), bps.size(), bps.local_rank(), bps.local_size(), bps.cross_rank(), bps.cross_size()

    assert ThreadedCluster((2, 1)).run(main) == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]


# ---- the package ---------------------------------------------------------------------------------------------


def test_all_names_exist_and_are_found_on_the_package() -> None:
    for name in bps.__all__:
        assert getattr(byteps_py, name) is getattr(bps, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        byteps_py.no_such_name  # noqa: B018


def test_importing_shared_ground_does_not_import_torch() -> None:
    ground = "byteps_py.session, byteps_py.wire.control_link, byteps_py.wire.data_link"
    code = f"import sys, {ground}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
