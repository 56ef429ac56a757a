"""Collectives that reduce, against what they must give, computed here from what every rank is known to have given."""

from __future__ import annotations

import functools
import os
import weakref
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import byteps_py.torch as bps
from backend.common import feature, machines, raises, rank, same, size, values
from backend.groups import DTYPES, OTHER_DTYPES, given, groups
from byteps_py.torch.collectives import context, peer_streams
from byteps_py.wire.chunks import CHUNK_BYTES


@feature
def all_reduce() -> None:
    for group, ranks, me in groups():
        for dtype in DTYPES:
            parts = given(ranks, 3, 5, dtype=dtype)
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
        parts = given(ranks, 4)
        tensor = parts[me].clone()
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT, group=group)
        same(tensor, torch.stack(parts).prod(0))
        tensor = parts[me].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), group=group)
        same(tensor, torch.stack(parts).sum(0) / 2)


@feature
def all_reduce_of_other_dtypes_and_operations() -> None:
    for group, ranks, me in groups():
        bits = given(ranks, 6, dtype=torch.int64)
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
        flags = given(ranks, 9, dtype=torch.bool)
        for op, expected in (
            (dist.ReduceOp.MAX, torch.stack(flags).any(0)),
            (dist.ReduceOp.MIN, torch.stack(flags).all(0)),
        ):
            tensor = flags[me].clone()
            dist.all_reduce(tensor, op, group=group)
            same(tensor, expected)
        waves = given(ranks, 5, dtype=torch.complex64)
        tensor = waves[me].clone()
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.stack(waves).sum(0))
        impossible = functools.partial(dist.all_reduce, torch.ones(2), dist.ReduceOp.BAND, group)
        raises(bps.UsageError, "can't be reduced", impossible)


@feature
def small_sums_are_the_same_in_any_way() -> None:
    """The first of a kind takes another way than the next ones, if all ranks are on one machine."""
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, *((dist.ReduceOp.AVG,) if dtype.is_floating_point else ())):
            for count in (1, 7, 1000):
                generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * rank() + count)
                given_ = (torch.randn(count * size(), generator=generator, dtype=torch.float64) * 100).to(dtype)
                found: list[list[torch.Tensor]] = []
                for _ in range(3):
                    summed, piece, at_root = given_.clone(), torch.empty(count, dtype=dtype), given_.clone()
                    dist.all_reduce(summed, op)
                    dist.reduce_scatter_tensor(piece, given_, op)
                    dist.reduce(at_root, size() - 1, op)
                    found.append([summed, piece, at_root if rank() == size() - 1 else summed])
                for later in found[1:]:
                    same(later, found[0])


@feature
def small_sums_of_which_some_are_waited_for() -> None:
    """On one machine, who waits for a small sum carries it out in the call, if the others come soon."""
    at_once_s = peer_streams._AT_ONCE_S
    for turn, count in enumerate((1, 1000, 9000) * 4):
        expected = torch.stack([values(100 * turn + who, count) for who in range(size())]).sum(0)
        tensor = values(100 * turn + rank(), count)
        match (rank() + turn) % 3:
            case 0:
                dist.all_reduce(tensor)
            case 1:
                peer_streams._AT_ONCE_S = 0.0  # the others come late
                dist.all_reduce(tensor)
                peer_streams._AT_ONCE_S = at_once_s
            case 2:
                work = dist.all_reduce(tensor, async_op=True)
                scratch = torch.ones(3 + turn)
                dist.all_reduce(scratch)
                same(scratch, torch.full_like(scratch, size()))
                work.wait()
                same(tensor, expected)
                continue
        same(tensor, expected)
        scratch = torch.ones(3 + turn)
        dist.all_reduce(scratch)
        same(scratch, torch.full_like(scratch, size()))


@feature
def large_sums_are_the_same_in_any_way() -> None:
    """The first of a kind goes through the service, the next ones, if all ranks are on one machine, in shares: of one
    chunk, of several, of less than there are ranks."""
    for dtype, count in [(dtype, 300_001) for dtype in DTYPES] + [(torch.float32, 1_700_003), (torch.uint8, 700_001)]:
        for op in (dist.ReduceOp.SUM, *((dist.ReduceOp.AVG,) if dtype.is_floating_point else ())):
            generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * rank() + count)
            given_ = (torch.randn(count, generator=generator, dtype=torch.float64) * 100).to(dtype)
            found: list[list[torch.Tensor]] = []
            for _ in range(3):
                summed, at_root = given_.clone(), given_.clone()
                dist.all_reduce(summed, op)
                dist.reduce(at_root, size() - 1, op)
                same(at_root, summed if rank() == size() - 1 else given_)
                found.append([summed])
            for later in found[1:]:
                same(later, found[0])


@feature
def large_sums_in_flight() -> None:
    """Also where some ranks wait for each at once and others do not, where a rank does not wait for long, and in groups
    that share ranks."""
    for turn in range(3):
        for group, ranks, me in groups():
            parts = [values(r + turn, 150_001) for r in ranks]
            total = torch.stack(parts).sum(0)
            tensors = [parts[me] * (i + 1) for i in range(5)]
            works = [
                dist.all_reduce(tensor, group=group, async_op=True) if (rank() + i) % 2 else
                dist.all_reduce(tensor, group=group)
                for i, tensor in enumerate(tensors)
            ]  # fmt: skip
            for work in reversed(works):
                assert work is None or work.wait()
            same(tensors, [total * (i + 1) for i in range(5)])
            work = dist.all_reduce(tensors[0].copy_(parts[me]), group=group, async_op=True)
            assert work is not None
            same(work.get_future().wait()[0], total)
            work = dist.all_reduce(tensors[0].copy_(parts[me]), group=group, async_op=True)
            assert work is not None
            dist.barrier(group)  # a rank that waits late does not delay the others
            while not work.is_completed():
                os.sched_yield()
            same(tensors[0], total)
            pieces = [parts[me][:40_000].clone(), parts[me][40_000:].clone().reshape(3, -1).t()]
            with dist._coalescing_manager(group):
                for piece in pieces:
                    dist.all_reduce(piece, group=group)
            same(pieces, [total[:40_000], total[40_000:].reshape(3, -1).t()])


@feature
def a_large_sum_that_is_waited_for_twice() -> None:
    parts = [values(r, 200_001) for r in range(size())]
    for _ in range(2):
        tensor = parts[rank()].clone()
        if rank() == 0:
            for other in range(1, size()):
                dist.recv(torch.empty(1), other, tag=77)
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            raises(
                bps.StallError, "not complete within its timeout", functools.partial(work.wait, timedelta(seconds=0.05))
            )
            dist.send(torch.ones(1), 0, tag=77)
            work.wait()
        same(tensor, torch.stack(parts).sum(0))


@feature
def memory_of_large_sums_in_groups_that_come_and_go() -> None:
    peers = context.current().session.peers
    for turn in range(36):  # a segment has room for 16
        group = dist.new_group()
        tensor = torch.full((100_001,), float(turn + rank()))
        for _ in range(2):
            dist.all_reduce(tensor, group=group)
        same(tensor, torch.full((100_001,), float(size() * sum(turn + r for r in range(size())))))
        dist.destroy_process_group(group)
        dist.barrier()
    assert peers is None or len(peers._outgoing.segments) <= 2


@feature
def shapes_and_memory() -> None:
    _, ranks, me = next(groups())
    for shape in ((), (0,), (1,), (2, 0, 3), (70_001,)):
        tensor = torch.full(shape, float(me + 1))
        dist.all_reduce(tensor)
        same(tensor, torch.full(shape, float(sum(r + 1 for r in ranks))))
    parts = given(ranks, 4, 6)
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
    _, ranks, me = next(groups())
    for count in [*range(1, 270), *range(1, 20)]:
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
def large_tensors() -> None:
    """Of other machines, their results are taken in chunks, twice; what lies otherwise is taken as a whole."""
    _, ranks, me = next(groups())
    n = len(ranks)
    count = 3 * CHUNK_BYTES // 4 + 5
    base = torch.arange(count, dtype=torch.int32)
    bases = [(base * (r + 1)) % 1013 for r in ranks]
    for _ in range(2):
        works, expected, found = [], [], []
        total = torch.stack(bases).sum(0, dtype=torch.int32)
        found.append(bases[me].clone())
        works.append(dist.all_reduce(found[-1], async_op=True))
        expected.append(total)
        found.append(bases[me].clone().view(1, count).expand(2, count).t().contiguous().t())  # not as it lies
        works.append(dist.all_reduce(found[-1], async_op=True))
        expected.append(total.expand(2, count))
        memory = np.empty(n * count, np.int32)
        is_kept = weakref.ref(memory)
        found.append(torch.from_numpy(memory).to(base.device))
        works.append(dist.all_gather_into_tensor(found[-1], bases[me], async_op=True))
        expected.append(torch.cat(bases))
        found.append(torch.empty(count, dtype=torch.int32))
        rows = torch.cat([bases[me] + r for r in ranks])
        works.append(dist.reduce_scatter_tensor(found[-1], rows, async_op=True))
        expected.append(total + n * me)
        found.append(torch.empty(n * count, dtype=torch.int32))
        works.append(dist.all_to_all_single(found[-1], rows, async_op=True))
        expected.append(torch.cat([each + me for each in bases]))
        found.append(bases[me].clone())
        works.append(dist.broadcast(found[-1], ranks[-1], async_op=True))
        expected.append(bases[-1])
        for work in works:
            work.wait()
        same(found, expected)
        del work, works, found, memory
        assert len(machines()) == 1 or is_kept() is None, "an output's memory is kept alive"


@feature
def broadcast_and_reduce() -> None:
    for group, ranks, me in groups():
        for root, dtype in zip([*ranks, *ranks, *ranks], [*DTYPES, *OTHER_DTYPES], strict=False):
            parts = given(ranks, 2, 3, dtype=dtype)
            tensor = parts[me].clone()
            dist.broadcast(tensor, root, group=group)
            same(tensor, parts[ranks.index(root)])
        for root in ranks:
            parts = given(ranks, 5, seed=2)
            tensor = parts[me].clone()
            dist.reduce(tensor, root, group=group)
            same(tensor, torch.stack(parts).sum(0) if rank() == root else parts[me])


@feature
def reduce_scatter() -> None:
    for group, ranks, me in groups():
        n = len(ranks)
        for dtype in DTYPES:
            parts = given(ranks, 2 * n, 3, dtype=dtype)
            total = torch.stack(parts).sum(0, dtype=dtype)
            output = torch.empty(2, 3, dtype=dtype)
            dist.reduce_scatter_tensor(output, parts[me].clone(), group=group)
            same(output, total[2 * me : 2 * me + 2])
            dist.reduce_scatter(output, [*parts[me].clone().chunk(n)], group=group)
            same(output, total[2 * me : 2 * me + 2])
        output = torch.empty(2, 3)
        parts = given(ranks, 2 * n, 3, seed=1)
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
        uneven = given(ranks, sum(sizes))
        output = torch.empty(sizes[me])
        dist.reduce_scatter(output, [*uneven[me].split(sizes)], group=group)
        same(output, torch.stack(uneven).sum(0).split(sizes)[me])


@feature
def large_reduce_scatter() -> None:
    """Of an odd size: to where the own share lies, or others do, or to other memory; as it lies, and not."""
    for group, ranks, me in groups():
        n = len(ranks)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32):
            count = 130_001 * 4 // dtype.itemsize
            parts = given(ranks, n * count, dtype=dtype)
            own = slice(me * count, (me + 1) * count)
            expected = torch.stack(parts).sum(0, dtype=dtype)[own]
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[: 1 + dtype.is_floating_point]:
                # A GPU divides by a number as it multiplies by its reciprocal.
                total = (expected.cpu() / n).to(expected.device) if op == dist.ReduceOp.AVG else expected
                for first in (me * count, 0, count // 2) if n > 1 else (0,):
                    whole = parts[me].clone()
                    output = whole[first : first + count]
                    dist.reduce_scatter_tensor(output, whole, op, group=group)
                    same(output, total)
                output = torch.zeros(count, 2, dtype=dtype)[:, 0]
                rest = torch.empty(count, dtype=dtype)
                works = [
                    dist.reduce_scatter_tensor(rest, parts[me], op, group=group, async_op=True),
                    dist.reduce_scatter_tensor(output, parts[me], op, group=group, async_op=True),
                ]
                for work in reversed(works):
                    work.wait()
                same([rest, output], [total, total])


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
def averages_of_integers_do_not_wrap() -> None:
    """The sum of any of these would be none of their dtype's numbers."""
    n = size()
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        largest, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        for count in (3, 40_000):  # small and large go different ways on one machine
            x = torch.full((2, count), largest, dtype=dtype)
            x[1] = least
            want = x.clone()
            for _ in range(2):
                mine = x.clone()
                dist.all_reduce(mine, dist.ReduceOp.AVG)
                assert torch.equal(mine, want), (dtype, mine)
            work = dist.all_reduce(mine, dist.ReduceOp.AVG, async_op=True)
            work.wait()
            assert torch.equal(mine, want), (dtype, mine)
            dist.reduce(mine, 1, dist.ReduceOp.AVG)
            assert torch.equal(mine, want), (dtype, mine)
            out = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter_tensor(out, x[0].repeat(n), dist.ReduceOp.AVG)
            assert torch.equal(out, want[0]), (dtype, out)
            dist.reduce_scatter(out, [x[1]] * n, dist.ReduceOp.AVG)
            assert torch.equal(out, want[1]), (dtype, out)
        with dist._coalescing_manager(async_ops=True) as together:
            one, other = x[:, :2].clone(), x[:, 1:3].clone()
            dist.all_reduce(one, dist.ReduceOp.AVG)
            dist.all_reduce(other, dist.ReduceOp.AVG)
        together.wait()
        assert torch.equal(one, want[:, :2])
        assert torch.equal(other, want[:, 1:3])
        sparse = torch.sparse_coo_tensor([[rank() % 2, 1]], torch.tensor([largest, 1 - rank() % 2], dtype=dtype), (2,))
        dist.all_reduce(sparse, dist.ReduceOp.AVG)
        first, odd = -(-n // 2), n // 2  # ranks
        assert sparse.to_dense().tolist() == [largest * first // n, (largest * odd + first) // n], sparse
    mine = torch.ones(7, dtype=torch.int8 if rank() else torch.uint8)
    raises(bps.MismatchError, "average of uint8", lambda: dist.all_reduce(mine, dist.ReduceOp.AVG))
