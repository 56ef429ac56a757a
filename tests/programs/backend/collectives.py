"""Every collective against what it must give, computed here from what every rank is known to have given."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import byteps_py.torch as bps
from backend.common import feature, raises, rank, same, size, values

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
_OTHER_DTYPES = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16)
_groups: list[tuple[dist.ProcessGroup, list[int]]] = []


def groups() -> Iterator[tuple[dist.ProcessGroup, list[int], int]]:
    """(group, its ranks, position in it) of the world and of all sub-groups of this rank."""
    if not _groups:
        _groups.append((dist.group.WORLD, list(range(size()))))  # type: ignore[arg-type]
        if size() > 2:
            for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3], [2]):
                group = dist.new_group(ranks)
                if rank() in ranks:
                    _groups.append((group, ranks))
    for group, ranks in _groups:
        yield group, ranks, ranks.index(rank())


def _of(ranks: list[int], *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """What each of ``ranks`` gives."""
    return [values(100 * seed + r, *shape, dtype=dtype) for r in ranks]


@feature
def all_reduce() -> None:
    for group, ranks, me in groups():
        for dtype in _DTYPES:
            parts = _of(ranks, 3, 5, dtype=dtype)
            stacked = torch.stack(parts)
            total = stacked.sum(0, dtype=dtype)
            average = total / len(ranks) if dtype.is_floating_point else total // len(ranks)
            for op, expected in (
                (dist.ReduceOp.SUM, total),
                (dist.ReduceOp.AVG, average.to(dtype)),
                (dist.ReduceOp.MIN, stacked.amin(0)),
                (dist.ReduceOp.MAX, stacked.amax(0)),
            ):
                tensor = parts[me].clone()
                dist.all_reduce(tensor, op, group=group)
                if not (op == dist.ReduceOp.AVG and len(ranks) == 3):
                    same(tensor, expected)
        parts = _of(ranks, 4)
        tensor = parts[me].clone()
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT, group=group)
        same(tensor, torch.stack(parts).prod(0))
        tensor = parts[me].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), group=group)
        same(tensor, torch.stack(parts).sum(0) / 2)


@feature
def all_reduce_of_other_dtypes_and_operations() -> None:
    for group, ranks, me in groups():
        bits = _of(ranks, 6, dtype=torch.int64)
        for op, fold in (
            (dist.ReduceOp.BAND, torch.bitwise_and),
            (dist.ReduceOp.BOR, torch.bitwise_or),
            (dist.ReduceOp.BXOR, torch.bitwise_xor),
        ):
            expected = bits[0]
            for other in bits[1:]:
                expected = fold(expected, other)
            tensor = bits[me].clone()
            dist.all_reduce(tensor, op, group=group)
            same(tensor, expected)
        flags = _of(ranks, 9, dtype=torch.bool)
        for op, expected in (
            (dist.ReduceOp.MAX, torch.stack(flags).any(0)),
            (dist.ReduceOp.MIN, torch.stack(flags).all(0)),
        ):
            tensor = flags[me].clone()
            dist.all_reduce(tensor, op, group=group)
            same(tensor, expected)
        waves = _of(ranks, 5, dtype=torch.complex64)
        tensor = waves[me].clone()
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.stack(waves).sum(0))
        raises(bps.UsageError, "can't be reduced", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group))


@feature
def shapes_and_memory() -> None:
    group, ranks, me = next(groups())
    for shape in ((), (0,), (1,), (2, 0, 3), (70_001,)):
        tensor = torch.full(shape, float(me + 1))
        dist.all_reduce(tensor)
        same(tensor, torch.full(shape, float(sum(r + 1 for r in ranks))))
    parts = _of(ranks, 4, 6)
    tensor = parts[me].clone().t()
    dist.all_reduce(tensor)
    same(tensor, torch.stack(parts).sum(0).t())
    outputs = [torch.empty(4, 6).t() for _ in ranks]
    dist.all_gather(outputs, parts[me].t())
    same(outputs, [part.t() for part in parts])
    whole = torch.empty(6, 4 * len(ranks)).t()
    dist.all_gather_into_tensor(whole, parts[me])
    same(whole, torch.cat(parts))
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf)
    same(leaf, torch.full((3,), float(size())))


@feature
def many_sizes_and_many_in_flight() -> None:
    group, ranks, me = next(groups())
    for count in [*range(1, 300), *range(1, 40)]:
        tensor = torch.full((count,), float(me))
        dist.all_reduce(tensor)
        assert tensor.sum().item() == count * sum(ranks)
    tensors = [torch.full((7,), float(me + i)) for i in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    same(tensors, [torch.full((7,), float(sum(ranks) + len(ranks) * i)) for i in range(40)])
    gathered = [[torch.empty(5) for _ in ranks] for _ in range(20)]
    gathers = [
        dist.all_gather(outputs, torch.full((5,), me + i * 1.0), async_op=True) for i, outputs in enumerate(gathered)
    ]
    for work in reversed(gathers):
        work.wait()
    for i, outputs in enumerate(gathered):
        same(outputs, [torch.full((5,), r + i * 1.0) for r in ranks])


@feature
def broadcast_and_reduce() -> None:
    for group, ranks, me in groups():
        for root, dtype in zip([*ranks, *ranks, *ranks], [*_DTYPES, *_OTHER_DTYPES], strict=False):
            parts = _of(ranks, 2, 3, dtype=dtype)
            tensor = parts[me].clone()
            dist.broadcast(tensor, root, group=group)
            same(tensor, parts[ranks.index(root)])
        for root in ranks:
            parts = _of(ranks, 5, seed=2)
            tensor = parts[me].clone()
            dist.reduce(tensor, root, group=group)
            same(tensor, torch.stack(parts).sum(0) if rank() == root else parts[me])


@feature
def all_gather() -> None:
    for group, ranks, me in groups():
        for dtype in (*_DTYPES, *_OTHER_DTYPES):
            parts = _of(ranks, 3, 2, dtype=dtype)
            outputs = [torch.empty_like(parts[0]) for _ in ranks]
            dist.all_gather(outputs, parts[me], group=group)
            same(outputs, parts)
            whole = torch.empty(3 * len(ranks), 2, dtype=dtype)
            dist.all_gather_into_tensor(whole, parts[me], group=group)
            same([*whole.view(torch.uint8).chunk(len(ranks))], [part.view(torch.uint8) for part in parts])
        stacked = torch.empty(len(ranks), 3, 2)
        dist.all_gather_into_tensor(stacked, _of(ranks, 3, 2)[me], group=group)
        same([*stacked], _of(ranks, 3, 2))
        uneven = [torch.full((r + 1,), float(r)) for r in ranks]
        outputs = [torch.empty_like(part) for part in uneven]
        dist.all_gather(outputs, uneven[me], group=group)
        same(outputs, uneven)
        found: list[object] = [None] * len(ranks)
        dist.all_gather_object(found, {"rank": rank(), "text": "x" * rank()}, group=group)
        assert found == [{"rank": r, "text": "x" * r} for r in ranks]
        for count in (2, 10, 100_000):  # its memory grows
            outputs = [torch.empty(count) for _ in ranks]
            dist.all_gather(outputs, torch.full((count,), float(rank())), group=group)
            same(outputs, [torch.full((count,), float(r)) for r in ranks])


@feature
def reduce_scatter() -> None:
    for group, ranks, me in groups():
        n = len(ranks)
        for dtype in _DTYPES:
            parts = _of(ranks, 2 * n, 3, dtype=dtype)
            total = torch.stack(parts).sum(0, dtype=dtype)
            output = torch.empty(2, 3, dtype=dtype)
            dist.reduce_scatter_tensor(output, parts[me].clone(), group=group)
            same(output, total[2 * me : 2 * me + 2])
            dist.reduce_scatter(output, [*parts[me].clone().chunk(n)], group=group)
            same(output, total[2 * me : 2 * me + 2])
        output = torch.empty(2, 3)
        parts = _of(ranks, 2 * n, 3, seed=1)
        dist.reduce_scatter_tensor(output, parts[me], dist.ReduceOp.MAX, group=group)
        same(output, torch.stack(parts).amax(0)[2 * me : 2 * me + 2])
        bits = [part.long() for part in parts]
        whole = torch.empty(2, 3, dtype=torch.int64)
        dist.reduce_scatter_tensor(whole, bits[me], dist.ReduceOp.BOR, group=group)
        expected = bits[0]
        for other in bits[1:]:
            expected = expected | other
        same(whole, expected[2 * me : 2 * me + 2])
        sizes = [r + 1 for r in range(n)]
        uneven = _of(ranks, sum(sizes))
        output = torch.empty(sizes[me])
        dist.reduce_scatter(output, [*uneven[me].split(sizes)], group=group)
        same(output, torch.stack(uneven).sum(0).split(sizes)[me])


@feature
def all_to_all() -> None:
    for group, ranks, me in groups():
        n = len(ranks)
        for dtype in (torch.float32, torch.bool, torch.int64):
            parts = _of(ranks, 2 * n, 3, dtype=dtype)
            output = torch.empty(2 * n, 3, dtype=dtype)
            dist.all_to_all_single(output, parts[me], group=group)
            same(output, torch.cat([part[2 * me : 2 * me + 2] for part in parts]))
        rows = [[(3 * a + b) % 4 for b in range(n)] for a in range(n)]  # from a to b; some nothing
        parts = [values(r, sum(rows[a]), 2) for a, r in enumerate(ranks)]
        expected = [parts[a].split(rows[a])[me] for a in range(n)]
        due = [rows[a][me] for a in range(n)]
        output = torch.empty(sum(due), 2)
        dist.all_to_all_single(output, parts[me], due, rows[me], group=group)
        same(output, torch.cat(expected))
        outputs = [torch.empty(count, 2) for count in due]
        dist.all_to_all(outputs, [*parts[me].split(rows[me])], group=group)
        same(outputs, expected)


@feature
def gather_and_scatter() -> None:
    for group, ranks, me in groups():
        for root in ranks:
            parts = _of(ranks, 2, 3, dtype=torch.float16)
            outputs = [torch.empty_like(part) for part in parts] if rank() == root else None
            dist.gather(parts[me], outputs, root, group=group)
            if outputs is not None:
                same(outputs, parts)
            inputs = _of(ranks, 4, seed=root) if rank() == root else None
            output = torch.empty(4)
            dist.scatter(output, inputs, root, group=group)
            same(output, _of(ranks, 4, seed=root)[me])
        found: list[object] | None = [None] * len(ranks) if rank() == ranks[-1] else None
        dist.gather_object(("of", rank()), found, ranks[-1], group=group)
        assert found is None or found == [("of", r) for r in ranks]
        said = [f"from {ranks[0]}", {"n": len(ranks)}] if me == 0 else [None, None]
        dist.broadcast_object_list(said, ranks[0], group=group)
        assert said == [f"from {ranks[0]}", {"n": len(ranks)}]
        mine: list[object] = [None]
        dist.scatter_object_list(mine, [("for", r) for r in ranks], ranks[0], group=group)
        assert mine == [("for", rank())]


@feature
def send_and_receive() -> None:
    for group, ranks, me in groups():
        n = len(ranks)
        if n == 1:
            continue
        after, before = ranks[(me + 1) % n], ranks[(me - 1) % n]
        for count in (1, 1000, 3, 0, 100_000):  # memory grows while earlier messages may still be unread
            sent, got = torch.full((count,), float(rank())), torch.empty(count)
            dist.send(sent, after, group=group)
            dist.recv(got, before, group=group)
            same(got, torch.full((count,), float(before)))
        messages = [
            torch.full((3 + i,), float(rank() + i)) for i in range(12)
        ]  # more than are kept for a late receiver
        works = [dist.isend(message, after, group=group) for message in messages]
        inbox = [torch.empty(3 + i) for i in range(12)]
        works += [dist.irecv(tensor, before, group=group) for tensor in inbox]
        for work in works:
            assert work is not None
            work.wait()
        same(inbox, [torch.full((3 + i,), float(before + i)) for i in range(12)])
        ops = [
            dist.P2POp(dist.irecv, got := torch.empty(2), before, group),
            dist.P2POp(dist.isend, torch.full((2,), rank() * 1.0), after, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(got, torch.full((2,), float(before)))


@feature
def tags_and_any_source() -> None:
    group, ranks, me = next(groups())
    after, before = (me + 1) % size(), (me - 1) % size()
    dist.send(torch.tensor([1.0]), after, tag=1)
    dist.send(torch.tensor([2, 2]), after, tag=2)
    one, two = torch.empty(1), torch.empty(2, dtype=torch.int64)
    dist.recv(two, before, tag=2)
    dist.recv(one, before, tag=1)
    same([one, two], [torch.tensor([1.0]), torch.tensor([2, 2])])
    if me:
        dist.send(torch.tensor([float(me)]), 0)
        dist.send(torch.tensor([10.0 * me, me]), 0)
    else:
        seen = []
        for _ in ranks[1:]:
            tensor = torch.empty(1)
            seen.append(dist.recv(tensor))
            assert tensor.item() == seen[-1]
            more = torch.empty(2)
            dist.recv(more, seen[-1])
            same(more, torch.tensor([10.0 * seen[-1], seen[-1]]))
        assert sorted(seen) == ranks[1:]
    dist.barrier()


@feature
def coalesced() -> None:
    for group, ranks, me in groups():
        n = len(ranks)
        mixed = [values(rank(), 3), values(rank(), 2, dtype=torch.int64), values(rank(), 4, 2)]
        with dist._coalescing_manager(group):
            for tensor in mixed:
                dist.all_reduce(tensor, group=group)
        expected = [
            torch.stack([values(r, *tensor.shape, dtype=tensor.dtype) for r in ranks]).sum(0) for tensor in mixed
        ]
        same(mixed, expected)
        inputs = [values(rank(), 3), values(rank() + 7, 2, 2)]
        outputs = [torch.empty(3 * n), torch.empty(2 * n, 2)]
        with dist._coalescing_manager(group):
            for output, input in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, input, group=group)
        same(outputs, [torch.cat([values(r, 3) for r in ranks]), torch.cat([values(r + 7, 2, 2) for r in ranks])])
        parts = [[values(r, 2 * n), values(r + 9, n, 3)] for r in ranks]
        shares = [torch.empty(2), torch.empty(1, 3)]
        with dist._coalescing_manager(group):
            for share, whole in zip(shares, parts[me], strict=True):
                dist.reduce_scatter_tensor(share, whole, group=group)
        totals = [torch.stack([part[i] for part in parts]).sum(0) for i in range(2)]
        same(shares, [totals[0][2 * me : 2 * me + 2], totals[1][me : me + 1]])


@feature
def barriers() -> None:
    for group, _, _ in groups():
        dist.barrier(group)
        work = dist.barrier(group, async_op=True)
        assert work is not None
        work.wait()
        group.monitored_barrier(timedelta(seconds=30))
    if rank() != size() - 1:
        world = dist.group.WORLD
        assert world is not None
        text = f"rank {size() - 1} did not come" if rank() == 0 else "has not let rank"
        raises(bps.StallError, text, lambda: world.monitored_barrier(timedelta(seconds=0.5)))
    dist.barrier()


@feature
def work_and_futures() -> None:
    _, ranks, me = next(groups())
    tensor = torch.full((6,), float(me))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.wait(timedelta(seconds=60)) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    same(work.result(), [tensor])
    tensor = torch.full((6,), float(me))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    other = torch.full((3,), float(me))

    def callback(future: torch.futures.Future[list[torch.Tensor]]) -> float:
        dist.all_reduce(other)  # on a thread of the pool, and while it waits for others
        return future.value()[0][0].item() + other[0].item()

    assert work.get_future().then(callback).wait() == 2 * sum(ranks)
    got = torch.empty(1)
    work = dist.irecv(got, (me - 1) % size())
    assert work is not None
    dist.send(torch.tensor([float(me)]), (me + 1) % size())
    work.wait()
    assert work._source_rank() == (me - 1) % size()


@feature
def errors() -> None:
    _, ranks, me = next(groups())
    for again in range(2):
        raises(bps.MismatchError, "float32", lambda: dist.all_reduce(torch.ones(2000 + 10 * again + me)))  # noqa: B023
        raises(bps.MismatchError, "rank", lambda: dist.broadcast(torch.ones(2000), me))
        tensor = torch.ones(3 + again)
        dist.all_reduce(tensor)
        same(tensor, torch.full((3 + again,), float(size())))
    work = dist.all_reduce(torch.ones(3000 + me), async_op=True)
    assert work is not None
    raises(RuntimeError, "MismatchError", work.get_future().wait)
    assert isinstance(work.exception(), bps.MismatchError)
    assert work.is_completed()
    assert not work.is_success()
    group = dist.new_group()
    for count in (3, 4):
        dist.all_reduce(torch.ones(count), group=group)
    text = "operation 3 of a process group"  # what both know already is found out a moment later
    raises(bps.MismatchError, text, lambda: dist.all_reduce(torch.ones(3 if me else 4), group=group))
    raises(bps.MismatchError, text, lambda: dist.all_reduce(torch.ones(3), group=group))
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if me == 0:
        raises(bps.StallError, "not complete within 0.3 s", lambda: dist.all_reduce(torch.ones(5), group=group))
    dist.barrier()
    if me:
        dist.all_reduce(torch.ones(5), group=group)
    sparse = torch.eye(3).to_sparse()
    raises(bps.UsageError, "sparse", lambda: dist.group.WORLD.allreduce([sparse]))  # type: ignore[union-attr]
    raises(bps.UsageError, "times as large", lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)))


@feature
def with_the_own_interface() -> None:
    assert bps.is_initialized()
    assert (bps.rank(), bps.size()) == (rank(), size())
    same(
        bps.push_pull(torch.full((3,), float(rank())), average=False, name="own"),
        torch.full((3,), sum(range(size())) * 1.0),
    )
