"""allreduce and grouped_allreduce in their forms, on threads that are ranks, compared exactly with the contract."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster, combine, contract
from torch_values import same, values

import byteps_py.torch as hvd
from byteps_py.config.settings import Settings
from byteps_py.session.solo import SoloSession
from byteps_py.tensors import Op
from byteps_py.torch.collectives.context import Context, use
from byteps_py.torch.collectives.dtypes import WIRE

CLUSTERS = [(2,), (4,), (2, 2), (1, 1)]
OPS = {"Sum": Op.SUM, "Min": Op.MIN, "Max": Op.MAX, "Product": Op.PRODUCT}


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
def test_every_form(machines) -> None:
    dtypes = [dtype for dtype in WIRE if dtype is not torch.uint8]
    size = sum(machines)

    def main(rank: int):
        found = {}
        for dtype in dtypes:
            x = values(rank, dtype)
            for name in OPS:
                found[dtype, name] = hvd.allreduce(x, op=getattr(hvd, name))
            found[dtype, "mean"] = hvd.allreduce(x, name="x")
            handle = hvd.allreduce_async(x, None, "y", hvd.Sum, 0.5, 3.0)
            found[dtype, "scaled"] = hvd.synchronize(handle)
            assert hvd.synchronize(handle) is None
            y = x.clone()
            assert hvd.allreduce_(y, op=hvd.Sum, name="y") is y
            z = x.clone()
            assert hvd.synchronize(hvd.allreduce_async_(z, op=hvd.Max)) is z
            found[dtype, "in place"] = y, z
            assert same(x.view(torch.uint8), values(rank, dtype).view(torch.uint8))
        return found

    for found in ThreadedCluster(machines).run(main):
        for dtype in dtypes:
            parts = [values(rank, dtype) for rank in range(size)]
            for name, op in OPS.items():
                assert torch.equal(found[dtype, name], contract(parts, machines, op)), (dtype, name)
            total = contract(parts, machines)
            assert torch.equal(found[dtype, "mean"], contract(parts, machines, average=True, rounding="trunc"))
            halves = contract([scaled(part, 0.5) for part in parts], machines)
            assert torch.equal(found[dtype, "scaled"], scaled(halves, 3.0)), dtype
            assert torch.equal(found[dtype, "in place"][0], total)
            assert torch.equal(found[dtype, "in place"][1], combine(Op.MAX, parts))


def test_the_old_average() -> None:
    with use(Context(lambda settings: SoloSession())):
        hvd.init(settings=Settings())
        with pytest.warns(DeprecationWarning, match="replaced with `op`"):
            assert hvd.allreduce(torch.tensor([2.0]), average=True).item() == 2.0
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async):
            with pytest.raises(ValueError, match="op parameter supersedes average"):
                call(torch.ones(1), average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="op must be one of"):
            hvd.allreduce(torch.ones(1), op="sum")
        with pytest.raises(ValueError, match="list of tensors"):
            hvd.grouped_allreduce(torch.ones(1))
        hvd.shutdown()


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
def test_groups_of_tensors(machines) -> None:
    size = sum(machines)

    def group(rank: int) -> list[torch.Tensor]:
        dtypes = (torch.float32, torch.int64, torch.float32, torch.float16, torch.float32)
        shapes = ((), (3, 2), (4, 5), (7,), (0, 3))
        return [values(rank, dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]

    def main(rank: int):
        xs = group(rank)
        mean = hvd.grouped_allreduce(xs, name="g")
        assert isinstance(mean, list)
        total = hvd.synchronize(hvd.grouped_allreduce_async(xs, op=hvd.Sum, prescale_factor=2.0))
        assert isinstance(total, tuple)
        ys = [x.clone() for x in xs]
        least = hvd.grouped_allreduce_(ys, op=hvd.Min, name="g")
        assert isinstance(least, tuple)
        assert all(a is b for a, b in zip(least, ys, strict=True))
        assert hvd.grouped_allreduce([]) == []
        compressed = hvd.grouped_allreduce(xs[2:3], compression=hvd.Compression.fp16)
        return mean, total, least, compressed

    parts = list(zip(*[group(rank) for rank in range(size)], strict=True))
    cluster = ThreadedCluster(machines)
    for mean, total, least, compressed in cluster.run(main):
        for i, tensors in enumerate(parts):
            assert torch.equal(mean[i], contract(tensors, machines, average=True, rounding="trunc"))
            assert torch.equal(total[i], contract([scaled(t, 2.0) for t in tensors], machines))
            assert torch.equal(least[i], combine(Op.MIN, tensors))
        halves = [tensor.half() for tensor in parts[2]]
        assert torch.equal(compressed[0], contract(halves, machines, average=True).float())
    assert len(cluster.rounds) == 3 * 3 + 1  # one tensor per dtype


def test_truth_values() -> None:
    def main(rank: int):
        x = torch.tensor([rank == 0, True, False])
        found = [hvd.allreduce(x, op=op) for op in (hvd.Min, hvd.Max, hvd.Product)]
        assert [t.tolist() for t in found] == [[False, True, False], [True, True, False], [False, True, False]]
        assert all(t.dtype is torch.bool for t in found)
        assert hvd.allreduce_(x, op=hvd.Max) is x
        assert x.tolist() == [True, True, False]
        for op in (hvd.Sum, hvd.Average):
            with pytest.raises(ValueError, match="bool"):
                hvd.allreduce(x, op=op)

    ThreadedCluster((1, 1)).run(main)


@pytest.mark.parametrize("named", [True, False])
def test_gradients(named) -> None:
    def main(rank: int):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = hvd.allreduce(x * (rank + 1), op=hvd.Sum, name="y" if named else None, prescale_factor=0.5)
        z, w = hvd.grouped_allreduce([x, x * 3], name="z" if named else None)
        ((y * (rank + 1)).sum() + z.sum() + (w * rank).sum()).backward()
        with pytest.raises(ValueError, match="op=Max is not differentiable"):
            hvd.allreduce(x, op=hvd.Max).sum().backward()
        return x.grad.tolist()

    # y: the gradients 1 and 2 of the ranks, halved and added up; z: averaged; w: the average of 0 and 1, times 3
    assert ThreadedCluster((1, 1)).run(main) == [[1.5 + 1 + 1.5] * 2, [2 * 1.5 + 1 + 1.5] * 2]


def test_compressed_and_gradients() -> None:
    def main(rank: int):
        x = values(rank, torch.float32).requires_grad_()
        y = hvd.allreduce(x, compression=hvd.Compression.fp16)
        y.sum().backward()
        assert x.grad.tolist() == torch.ones_like(x).tolist()
        return y.detach()

    parts = [values(rank, torch.float32).half() for rank in range(2)]
    for found in ThreadedCluster((1, 1)).run(main):
        assert torch.equal(found, contract(parts, (1, 1), average=True).float())


def test_among_some_of_the_ranks() -> None:
    machines = (2, 2)

    def main(rank: int):
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
        mine = odd if rank % 2 else even
        other = even if rank % 2 else odd
        x = values(rank, torch.float32)
        with pytest.raises(ValueError, match=f"Rank {rank} is not a member"):
            hvd.allreduce(x, process_set=other)
        handle = hvd.allreduce_async(x, name="x")  # of all ranks, under the same name
        mean = hvd.allreduce(x, name="x", process_set=mine)
        group = hvd.grouped_allreduce([x, x.double()], op=hvd.Max, process_set=mine)
        hvd.barrier(process_set=mine)
        return mean, group, hvd.synchronize(handle)

    parts = [values(rank, torch.float32) for rank in range(4)]
    for rank, (mean, group, of_all) in enumerate(ThreadedCluster(machines).run(main)):
        members = parts[rank % 2 :: 2]
        assert torch.equal(mean, contract(members, (1, 1), average=True))
        assert torch.equal(group[0], combine(Op.MAX, members))
        assert torch.equal(group[1], combine(Op.MAX, members).double())
        assert torch.equal(of_all, contract(parts, machines, average=True))


def test_adasum() -> None:
    def main(rank: int):
        x = torch.tensor([1.0, 0.0]) if rank else torch.tensor([0.0, 2.0])
        assert hvd.allreduce(x, op=hvd.Adasum).tolist() == [1.0, 2.0]
        assert hvd.allreduce_(torch.ones(2), op=hvd.Adasum, name="x").tolist() == [1.0, 1.0]
        together = hvd.grouped_allreduce([x, torch.ones(2)], op=hvd.Adasum, postscale_factor=2.0)
        assert [t.tolist() for t in together] == [[2.0, 4.0], [2.0, 2.0]]

    ThreadedCluster((1, 1)).run(main)


def test_sparse() -> None:
    def main(rank: int):
        x = torch.sparse_coo_tensor([[rank, 2]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=False)
        total = hvd.sparse_allreduce_async(x, "s", hvd.Sum)()
        mean = hvd.sparse_allreduce_async(x, name="s", op=hvd.Average)()
        no_indices = torch.empty(1, 0, dtype=torch.long)
        nothing = torch.sparse_coo_tensor(no_indices, torch.empty(0, 2), (4, 2), check_invariants=False)
        one = hvd.sparse_allreduce_async(x if rank else nothing, "s", hvd.Sum)()
        with pytest.raises(ValueError, match="op=Sum or op=Average"):
            hvd.sparse_allreduce_async(x, "s", hvd.Max)
        with pytest.raises(ValueError, match="not sparse"):
            hvd.sparse_allreduce_async(x.to_dense(), "s", hvd.Sum)
        return [t.to_dense().tolist() for t in (total, mean, one)]

    for total, mean, one in ThreadedCluster((1, 1)).run(main):
        assert total == [[1, 2], [1, 2], [6, 8], [0, 0]]
        assert mean == [[0.5, 1], [0.5, 1], [3, 4], [0, 0]]
        assert one == [[0, 0], [1, 2], [3, 4], [0, 0]]


@pytest.mark.parametrize("machines", [(1, 1, 1, 1), (2, 1, 2)], ids=str)
def test_sparse_sums_of_rows_that_many_ranks_have(machines) -> None:
    """Owners add them (collectives/row_owners.py), in rank order."""

    def given(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        rows = (torch.rand(4000, generator=generator) ** 4 * 3000).long()
        values = torch.randn(4000, 32, generator=generator)
        return torch.sparse_coo_tensor(rows[None], values, (3000, 32), check_invariants=False).coalesce()

    def main(rank: int):
        mean = hvd.sparse_allreduce_async(given(rank), "rows", hvd.Average)()
        assert mean.is_coalesced()
        return mean.to_dense()

    total = torch.zeros(3000, 32)
    for rank in range(sum(machines)):
        total[given(rank).indices()[0]] += given(rank).values()
    cluster = ThreadedCluster(machines)
    assert all(torch.equal(found, total / sum(machines)) for found in cluster.run(main))
    assert any("rows.sums" in name for name, _ in cluster.rounds)
