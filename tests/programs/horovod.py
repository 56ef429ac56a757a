"""Every collective of Horovod's interface once, with real services; each rank knows what must come out.

Run by test_horovod_process.py under bpslaunch. The same checks are called on threads by other tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

import byteps_py as hvd


def values(rank: int, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    """What a rank gives: small whole numbers, whose sums are exact in any order."""
    return torch.randint(
        -50, 50, shape, generator=torch.Generator(torch.get_default_device()).manual_seed(rank)
    ).float()


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"rank {hvd.rank()}: {what}")


def equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    check(found.dtype is expected.dtype and torch.equal(found, expected), f"{what}: {found} is not {expected}")


def fails(call: Callable[[], object], *words: str) -> None:
    """On every rank: HorovodInternalError, which says what."""
    try:
        call()
    except hvd.HorovodInternalError as error:
        check(all(word in str(error) for word in words), f"{words} not in: {error}")
    else:
        check(False, f"no error with {words}")


def among(members: list[int], process_set: hvd.ProcessSet, names: bool) -> None:
    """All collectives among ``members``, to which this rank belongs."""
    rank, count = hvd.rank(), len(members)
    me = members.index(rank)
    parts = [values(r) for r in members]
    total = torch.stack(parts).sum(0)
    where = {"process_set": process_set}

    def name(text: str) -> str | None:
        return text if names else None

    equal(hvd.allreduce(parts[me], op=hvd.Sum, name=name("x"), **where), total, "sum")
    equal(hvd.allreduce(parts[me] * count, name=name("x"), **where), total, "average")
    equal(hvd.allreduce(parts[me], op=hvd.Max, name=name("m"), **where), torch.stack(parts).amax(0), "max")
    group = hvd.grouped_allreduce([parts[me], parts[me].long()], op=hvd.Sum, name=name("x"), **where)
    equal(group[0], total, "group")
    equal(group[1], total.long(), "group")
    rows = [values(r, (r + 1, 400)) for r in members]
    equal(hvd.allgather(rows[me], name("x"), **where), torch.cat(rows), "allgather")
    small = [torch.full((r % 2, 2), float(r)) for r in members]
    equal(hvd.allgather(small[me], name("s"), **where), torch.cat(small), "small allgather")
    both = hvd.grouped_allgather([rows[me], small[me].bool()], name("x"), **where)
    equal(both[0], torch.cat(rows), "grouped allgather")
    equal(both[1], torch.cat(small).bool(), "grouped allgather")
    many = hvd.grouped_allgather([small[me] + i for i in range(10)], name("x"), **where)
    equal(many[9], torch.cat(small) + 9, "grouped allgather of many")
    splits = [(rank + r) % 3 for r in members]
    received, counts = hvd.alltoall(torch.full((sum(splits), 300), float(rank)), splits, name("x"), **where)
    equal(counts, torch.tensor([(rank + r) % 3 for r in members], dtype=torch.int32, device="cpu"), "received splits")
    equal(received[:, 0], torch.cat([torch.full(((rank + r) % 3,), float(r)) for r in members]), "alltoall")
    for root in members:
        equal(hvd.broadcast(parts[me], root, name("x"), **where), values(root), "broadcast")
    first = me * (5 // count) + min(me, 5 % count)
    mine = total[first : first + 5 // count + (me < 5 % count)]
    equal(hvd.reducescatter(parts[me], name("x"), op=hvd.Sum, **where), mine, "reducescatter")
    scattered = hvd.grouped_reducescatter([parts[me], parts[me].double()], name("x"), op=hvd.Sum, **where)
    equal(scattered[1], mine.double(), "grouped reducescatter")
    check(hvd.allgather_object((rank, "x"), **where) == [(r, "x") for r in members], "allgather_object")
    check(hvd.broadcast_object(rank, members[-1], **where) == members[-1], "broadcast_object")
    hvd.barrier(process_set=process_set)


def asynchronous() -> None:
    """Many under way at once, waited for in another order on each rank, some while others are at a barrier."""
    rank, size = hvd.rank(), hvd.size()
    rows = {f"{i}": torch.full((rank + i, 50), float(rank)) for i in range(12)}
    gathers = {name: hvd.allgather_async(x, name) for name, x in rows.items()}
    sums = {name: hvd.allreduce_async(x.new_ones(3), name=name, op=hvd.Sum) for name, x in rows.items()}
    swaps = {name: hvd.alltoall_async(torch.arange(2.0 * size), name=name) for name in rows}
    if rank % 2:
        hvd.barrier()
    order = list(rows)[rank:] + list(rows)[:rank]
    for name in order:
        gathered = hvd.synchronize(gathers[name])
        check(gathered.shape[0] == sum(r + int(name) for r in range(size)), "rows of a gather")
        equal(hvd.synchronize(sums[name]), torch.full((3,), float(size)), "asynchronous sum")
        received, _ = hvd.synchronize(swaps[name])
        equal(received, torch.tensor([2.0 * rank, 2.0 * rank + 1] * size), "asynchronous exchange")
    if not rank % 2:
        hvd.barrier()


def mismatches(name: str | None) -> None:
    """Ranks that disagree all learn it, and go on with the same names."""
    rank = hvd.rank()
    odd = rank == hvd.size() - 1
    x = torch.ones(2, 2)
    shape = torch.ones(3, 2) if odd else x
    tail = torch.ones(2, 3) if odd else x
    flat = torch.ones(4) if odd else x
    dtype = x.double() if odd else x
    last = f"rank {hvd.size() - 1}"
    fails(lambda: hvd.allreduce(shape, name=name), "float32[2, 2]", "float32[3, 2]", last)
    fails(lambda: hvd.allreduce(dtype, name=name), "float64[2, 2]", last)
    fails(lambda: hvd.allreduce(x, op=hvd.Sum if odd else hvd.Max, name=name), "sum of", "max of", last)
    factor = 2.0 if odd else 1.0
    fails(lambda: hvd.allreduce(x, prescale_factor=factor, name=name), "prescale factor 2.0", last)
    fails(lambda: hvd.grouped_allreduce([x, flat], name=name), "group of 2", "float32[4]", last)
    fails(lambda: hvd.grouped_allreduce([x] * (2 + odd), name=name), "group of 3", last)
    fails(lambda: hvd.broadcast(x, int(odd), name=name), "from rank 0", "from rank 1", last)
    fails(lambda: hvd.broadcast(shape, 0, name=name), "float32[3, 2]", last)
    fails(lambda: hvd.allgather(tail, name), "Mismatched allgather tensor shapes", "float32[*, 3]", last)
    fails(lambda: hvd.allgather(flat, name), "Mismatched allgather tensor shapes", "float32[*]", last)
    fails(lambda: hvd.allgather(dtype, name), "Mismatched data types", "float64[*, 2]", last)
    fails(lambda: hvd.grouped_allgather([x, tail], name), "number 1 of its group", "float32[*, 3]", last)
    fails(lambda: hvd.grouped_allgather([x] * (2 + odd), name), "Mismatched number of tensors", "group of 3", last)
    fails(lambda: hvd.grouped_allgather([x] * (10 * odd), name), "group of 0", "group of 10")
    fails(lambda: hvd.grouped_allgather([x] * 9 + [tail], name), "number 9 of its group", last)
    splits = [2] + [0] * (hvd.size() - 1)
    fails(lambda: hvd.alltoall(dtype, splits, name), "Mismatched data types", "float64[*, 2]", last)
    fails(lambda: hvd.alltoall(tail, splits, name), "Mismatched alltoall tensor shapes", "float32[*, 3]", last)
    fails(lambda: hvd.reducescatter(tail, name), "scattered average of float32[2, 3]", last)
    equal(hvd.allreduce(x, name=name), x, "allreduce after errors")
    equal(hvd.grouped_allreduce([x, x], name=name)[1], x, "grouped_allreduce after errors")
    equal(hvd.broadcast(x, 0, name=name), x, "broadcast after errors")
    equal(hvd.allgather(x, name), torch.ones(2 * hvd.size(), 2), "allgather after errors")
    equal(hvd.grouped_allgather([x, x], name)[1], torch.ones(2 * hvd.size(), 2), "grouped_allgather after errors")
    check(hvd.alltoall(x, splits, name)[1].sum().item() == (2 * hvd.size() if rank == 0 else 0), "alltoall after")
    check(hvd.reducescatter(x, name).numel() in (0, 2, 4), "reducescatter after errors")


def duplicates() -> None:
    """A name that is under way is refused, whatever else has the same name."""
    x = torch.ones(2)
    calls: list[Callable[[], int]] = [
        lambda: hvd.allreduce_async(x, name="d"),
        lambda: hvd.grouped_allreduce_async([x], name="d"),
        lambda: hvd.allgather_async(x, "d"),
        lambda: hvd.broadcast_async(x, 0, "d"),
        lambda: hvd.alltoall_async(x.new_ones(hvd.size()), name="d"),
        lambda: hvd.reducescatter_async(x, "d"),
        lambda: hvd.push_pull_async(x, name="d"),
    ]
    handles = [call() for call in calls]
    for call in calls:
        try:
            call()
        except ValueError as error:
            check("Duplicate tensor name" in str(error), str(error))
        else:
            check(False, "a duplicate name was taken")
    for handle in handles:
        check(hvd.synchronize(handle) is not None, "no result")
        check(hvd.synchronize(handle) is None, "a second result")


def everything() -> None:
    size = hvd.size()
    for _ in range(2):
        among(list(range(size)), hvd.global_process_set, names=True)
        among(list(range(size)), hvd.global_process_set, names=False)
    asynchronous()
    mismatches("e")
    mismatches(None)
    duplicates()
    if size > 2:
        sets = [list(range(0, size, 2)), list(range(1, size, 2))]
        both = [hvd.add_process_set(ranks) for ranks in sets]
        mine = hvd.rank() % 2
        for names in (True, False):
            among(sets[mine], both[mine], names)
        hvd.remove_process_set(both[0])
        last = [0, size - 1]
        ends = hvd.add_process_set(last)
        if ends.included():
            among(last, ends, names=True)


def joined() -> None:
    """Ranks whose data ends earlier; afterwards all go on together."""
    rank, size = hvd.rank(), hvd.size()
    for turn in range(2):
        handles = []
        for batch in range(rank + 1):
            takes_part = float(size - batch)
            equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), takes_part), "sum of those left")
            equal(hvd.allreduce(torch.ones(2), name="j"), torch.full((2,), takes_part / size), "average of all")
            handles.append(hvd.allreduce_async(torch.ones(1), name=f"j{batch}", op=hvd.Sum))
        if rank + 1 == size > 1:
            for call in (lambda: hvd.broadcast(torch.ones(1), 0), lambda: hvd.allgather(torch.ones(1), "j")):
                try:
                    call()
                except hvd.HorovodInternalError as error:
                    check("join" in str(error) and isinstance(error, ValueError), str(error))
                else:
                    check(False, "something else than a reduction without ranks that have joined")
        check(hvd.join() == size - 1, "who joined last")
        for batch, handle in enumerate(handles):
            equal(hvd.synchronize(handle), torch.tensor([float(size - batch)]), "under way while joining")
        among(list(range(size)), hvd.global_process_set, names=bool(turn))


if __name__ == "__main__":
    if "TEST_DEVICE" in os.environ:
        torch.set_default_device(os.environ["TEST_DEVICE"])
    hvd.init()
    everything()
    joined()
    hvd.shutdown()
    hvd.init()
    among(list(range(hvd.size())), hvd.global_process_set, names=True)
    print(f"rank {hvd.rank()}: all is well")
    hvd.shutdown()
