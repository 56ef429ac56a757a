"""allgather, alltoall and allgather_object on threads that are ranks."""

from __future__ import annotations

import pytest
import torch
from support.threaded import ThreadedCluster
from torch_values import same, values

import byteps_py.torch as hvd
from byteps_py.config.settings import Settings
from byteps_py.session.solo import SoloSession
from byteps_py.torch.collectives.context import Context, use
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.operations.size_headers import MAX_DIMENSIONS

CLUSTERS = [(2,), (4,), (2, 2)]
DTYPES = [*WIRE, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]


def bits(rank: int, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    octets = values(rank, torch.uint8, (rows, columns * dtype.itemsize))
    return (octets % 2 if dtype is torch.bool else octets).view(dtype)


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# ---- allgather -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
@pytest.mark.parametrize("columns", [3, 1000])  # rides with the headers, and does not
def test_allgather_of_every_dtype_and_length(machines, columns) -> None:
    def rows(rank: int, turn: int) -> int:
        return (rank * 3 + turn) % 5 if rank else 0

    def main(rank: int):
        found = []
        for turn, dtype in enumerate(DTYPES):
            x = bits(rank, dtype, rows(rank, turn), columns)
            found.append(hvd.allgather(x, name="x" if turn % 2 else None))
            assert same(octets(x), octets(bits(rank, dtype, rows(rank, turn), columns)))
        return found

    size = sum(machines)
    for found in ThreadedCluster(machines).run(main):
        for turn, dtype in enumerate(DTYPES):
            expected = torch.cat([octets(bits(rank, dtype, rows(rank, turn), columns)) for rank in range(size)])
            assert found[turn].dtype is dtype
            assert same(octets(found[turn]), expected)


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
def test_allgather_in_all_forms(machines) -> None:
    size = sum(machines)

    def parts(rank: int) -> list[torch.Tensor]:
        return [values(rank, torch.float32, (rank, 500)), values(rank, torch.int8, (3,)), torch.ones(2, 0, 5)]

    def main(rank: int):
        xs = parts(rank)
        handles = [hvd.allgather_async(x.t() if x.dim() == 2 else x, f"{i}") for i, x in enumerate(xs[1:])]
        handles.append(hvd.grouped_allgather_async(xs, "g"))
        many = [hvd.allgather_async(torch.full((rank,), i)) for i in range(20)]  # more than there are names
        group = hvd.grouped_allgather(xs, "g2")
        assert isinstance(group, tuple)
        first, second, again = [hvd.synchronize(handle) for handle in reversed(handles)][::-1]
        assert isinstance(again, tuple)
        assert hvd.synchronize(hvd.grouped_allgather_async([])) == ()
        for i, handle in enumerate(many):
            assert hvd.synchronize(handle).tolist() == [i] * sum(range(size))
        handle = hvd.allgather_async(xs[0])
        hvd.barrier()
        while not hvd.poll(handle):
            pass
        assert torch.equal(hvd.synchronize(handle), group[0])
        with pytest.raises(ValueError, match="not created or has been cleared"):
            hvd.poll(handle)
        return group, again, (first, second)

    expected = [torch.cat(tensors) for tensors in zip(*[parts(rank) for rank in range(size)], strict=True)]
    for group, again, alone in ThreadedCluster(machines).run(main):
        assert all(torch.equal(a, b) for a, b in zip(group, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(alone, expected[1:], strict=True))


def test_ranks_may_wait_in_different_orders() -> None:
    def main(rank: int):
        x = torch.full((300 * (rank + 1), 5), float(rank))
        if rank:
            handle = hvd.allgather_async(x, "early")
            total = hvd.synchronize(handle).sum()
            hvd.barrier()
        else:
            handle = hvd.allgather_async(x, "early")
            hvd.barrier()
            total = hvd.synchronize(handle).sum()
        names = ["a", "b"][:: 1 if rank else -1]
        handles = {name: hvd.allgather_async(x, name) for name in names}
        assert all(hvd.synchronize(handles[name]).sum() == total for name in names)
        assert (hvd.allgather(x, names[0]) if rank else hvd.allgather(x, names[1])).sum() == total
        return total.item()

    assert ThreadedCluster((1, 1)).run(main) == [3000.0, 3000.0]


@pytest.mark.parametrize("named", [True, False])
def test_gradients_of_gathers(named) -> None:
    def main(rank: int):
        x = torch.full((rank + 1, 2), 1.0, requires_grad=True)
        y = hvd.allgather(x, "y" if named else None)
        weights = torch.arange(6.0).view(3, 2) * (rank + 1)
        (y * weights).sum().backward()
        z, w = hvd.grouped_allgather([x, x[:1] * 2], "z" if named else None)
        (z.sum() * rank + w.sum()).backward()
        frozen = hvd.allgather(x.detach())
        assert not frozen.requires_grad
        return x.grad

    mean = torch.arange(6.0).view(3, 2) * 1.5
    first, second = ThreadedCluster((1, 1)).run(main)
    extra = [0.5 + 2, 0.5]
    assert torch.equal(first, mean[:1] + extra[0])
    assert torch.equal(second, mean[1:] + torch.tensor(extra).view(2, 1))


def test_gathers_among_some_of_the_ranks() -> None:
    def main(rank: int):
        sets = [hvd.add_process_set([0, 3]), hvd.add_process_set([1, 2])]
        mine = sets[rank in (1, 2)]
        one = hvd.add_process_set([2])
        x = torch.full((rank + 1,), float(rank), requires_grad=True)
        gathered = hvd.allgather(x, "x", process_set=mine)
        gathered.sum().backward()
        assert x.grad.tolist() == [1.0] * (rank + 1)
        rows, splits = hvd.alltoall(torch.tensor([rank, rank + 10]), [1, 1], process_set=mine)
        assert splits.tolist() == [1, 1]
        objects = hvd.allgather_object(rank, process_set=mine)
        assert hvd.broadcast_object(rank, max(mine.ranks), process_set=mine) == max(mine.ranks)
        if rank == 2:
            assert hvd.allgather(x, process_set=one).tolist() == [2.0] * 3
        with pytest.raises(ValueError, match="not a member"):
            hvd.allgather(x, process_set=sets[rank not in (1, 2)])
        return gathered.tolist(), rows.tolist(), objects

    outer, inner = ([0.0, *[3.0] * 4], [1.0] * 2 + [2.0] * 3)
    found = ThreadedCluster((2, 2)).run(main)
    assert [gathered for gathered, _, _ in found] == [outer, inner, inner, outer]
    assert [rows for _, rows, _ in found] == [[0, 3], [1, 2], [11, 12], [10, 13]]
    assert [objects for _, _, objects in found] == [[0, 3], [1, 2], [1, 2], [0, 3]]


def test_what_is_under_way_ends_with_the_session() -> None:
    def main(rank: int):
        if rank == 0:
            handles = [hvd.allgather_async(torch.ones(2), "a"), hvd.alltoall_async(torch.ones(2), name="b")]
            assert not any(hvd.poll(handle) for handle in handles)
        hvd.shutdown()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.allgather_async(torch.ones(2), "a")

    ThreadedCluster((1, 1)).run(main)


def test_alone() -> None:
    with use(Context(lambda settings: SoloSession())):
        hvd.init(settings=Settings())
        x = torch.rand(500, 3, requires_grad=True)
        y = hvd.allgather(x)
        (y * y).sum().backward()
        assert torch.equal(x.grad, 2 * x)
        assert torch.equal(hvd.synchronize(hvd.allgather_async(x, "x")), x)
        assert torch.equal(hvd.alltoall(x), x)
        rows, splits = hvd.synchronize(hvd.alltoall_async(x))
        assert torch.equal(rows, x)
        assert splits.tolist() == [500]
        part, splits = hvd.alltoall(x, torch.tensor([2], dtype=torch.int32))
        x.grad = None
        part.sum().backward()
        assert x.grad.sum().item() == 6.0
        assert hvd.allgather_object({"a": x.tolist()}) == [{"a": x.tolist()}]
        hvd.shutdown()


def test_misuse_of_gathers() -> None:
    with use(Context(lambda settings: SoloSession())):
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.allgather(torch.ones(1))
        hvd.init(settings=Settings())
        for call in (hvd.allgather, hvd.alltoall, lambda x: hvd.grouped_allgather([x])):
            with pytest.raises(ValueError, match="first dimension"):
                call(torch.tensor(1.0))
            with pytest.raises(ValueError, match=f"more than {MAX_DIMENSIONS}"):
                call(torch.ones([1] * (MAX_DIMENSIONS + 1)))
            with pytest.raises(ValueError, match="sparse"):
                call(torch.eye(2).to_sparse())
        assert hvd.allgather(torch.ones([1] * MAX_DIMENSIONS)).dim() == MAX_DIMENSIONS
        hvd.shutdown()


# ---- alltoall ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
def test_alltoall_of_every_dtype(machines) -> None:
    size = sum(machines)

    def split(rank: int, turn: int) -> list[int]:
        return [(rank * 5 + target * 3 + turn) % 4 if target != turn % size else 0 for target in range(size)]

    def main(rank: int):
        found = []
        for turn, dtype in enumerate(DTYPES):
            splits = split(rank, turn)
            x = bits(rank, dtype, sum(splits) + turn % 2, 7)  # a row that is sent to no rank
            given = torch.tensor(splits, dtype=torch.int32) if turn % 3 else splits
            found.append(hvd.alltoall(x, given, name=None if turn % 2 else "x"))
        return found

    for rank, found in enumerate(ThreadedCluster(machines).run(main)):
        for turn, dtype in enumerate(DTYPES):
            rows, splits = found[turn]
            expected = []
            for source in range(size):
                sent = split(source, turn)
                x = octets(bits(source, dtype, sum(sent) + turn % 2, 7))
                expected.append(x[sum(sent[:rank]) : sum(sent[: rank + 1])])
            assert splits.dtype is torch.int32
            assert splits.tolist() == [len(part) for part in expected]
            assert rows.dtype is dtype
            assert same(octets(rows), torch.cat(expected))


@pytest.mark.parametrize("machines", CLUSTERS, ids=str)
def test_alltoall_in_equal_parts_and_its_gradient(machines) -> None:
    size = sum(machines)

    def main(rank: int):
        x = (torch.arange(2.0 * size) + 100 * rank).requires_grad_()
        y = hvd.alltoall(x)
        (y * (rank + 1)).sum().backward()
        z, splits = hvd.alltoall(x[: rank + 1], [rank + 1] + [0] * (size - 1), "z")
        assert not splits.requires_grad
        z.sum().backward()
        return y.tolist(), z.shape[0], x.grad.tolist()

    for rank, (y, rows, gradient) in enumerate(ThreadedCluster(machines).run(main)):
        assert y == [100.0 * source + 2 * rank + i for source in range(size) for i in range(2)]
        assert rows == (sum(range(size + 1)) if rank == 0 else 0)
        back = [float(target + 1) for target in range(size) for _ in range(2)]
        assert gradient == [g + (i < rank + 1) for i, g in enumerate(back)]


def test_splits_that_do_not_fit() -> None:
    def main(rank: int):
        x = torch.ones(3, 2)
        wrong = {
            "not divisible by the number of ranks, 2": None,
            "Number of entries in splits, 3,": [1, 1, 1],
            "negative": [-1, 2],
            "Sum of splits entries, 4, is greater than the first dimension of the tensor, 3": [2, 2],
            "32-bit integer": torch.tensor([1, 2]),
            "one dimension": torch.ones(1, 2, dtype=torch.int32),
        }
        for message, splits in wrong.items():
            with pytest.raises(ValueError, match=message):
                hvd.alltoall(x, splits)
        rows, _ = hvd.alltoall(x, [1, 2])
        return rows.shape[0]

    assert ThreadedCluster((1, 1)).run(main) == [2, 4]


# ---- objects -------------------------------------------------------------------------------------------------


class _Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


def test_allgather_object() -> None:
    def main(rank: int):
        assert hvd.allgather_object({"rank": rank}, "o") == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert hvd.allgather_object(None if rank else "x" * 5000) == ["x" * 5000, None, None]
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 could not pickle .*: TypeError: not this one"):
            hvd.allgather_object(_Unpicklable() if rank == 1 else 1)
        return hvd.allgather_object(rank)

    assert ThreadedCluster((2, 1)).run(main) == [[0, 1, 2]] * 3
