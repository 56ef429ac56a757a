"""Operations of all kinds, as a seed decides, for tests/jobs/test_any_order.py: ``python any_order.py SEED COUNT``.

All ranks make the same calls. Each decides by itself which of them it waits for at once; those by name that it does not
wait for it may make earlier, and wait for later. No such program may hang, whatever the ranks decide: nobody waits for
a call that another one makes only after something that it has to wait for. Results are compared with what they must be.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import byteps_py.torch as bps
from byteps_py.torch.collectives import router
from byteps_py.torch.collectives.all_reduce import negotiated

#: Some in a message, some in one chunk, some in several.
COUNTS = (1, 7, 1000, 5000, 20_000, 40_001, 300_001, 1_300_003)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)
NAMES, EARLIEST, LATEST = 6, 3, 6
BY_NAME = ("sum", "mean", "inplace", "in a set", "group", "broadcast", "gather")
IN_GROUP = ("all_reduce", "all_gather", "reduce_scatter", "dist.broadcast", "barrier")
Wait = Callable[[], None]
#: How often ranks have added up by name among themselves: in messages, in shares.
counts = [0, 0]


@dataclass(frozen=True)
class Call:
    number: int
    kind: str
    name: str
    count: int
    dtype: torch.dtype
    root: int
    ranks: tuple[int, ...]
    patience: float  # how likely a rank is to wait for it at once

    def given(self, rank: int, at: int = 0) -> torch.Tensor:
        """Small numbers: their sums, and twice those, are exact in any dtype."""
        return ((torch.arange(self.count) + self.number + 3 * at) % 5 + rank).to(self.dtype)

    def total(self, at: int = 0) -> torch.Tensor:
        return torch.stack([self.given(rank, at) for rank in self.ranks]).sum(0).to(self.dtype)


def calls(seed: int, count: int, sets: list[tuple[int, ...]]) -> Iterator[Call]:
    choice = random.Random(seed)
    everybody = tuple(range(bps.size()))
    kinds = [f"{choice.choice(BY_NAME)}.{number}" for number in range(NAMES)]  # a name is of one kind
    for number in range(count):
        name = choice.choice([*kinds, *kinds, choice.choice(IN_GROUP)])
        kind = name.split(".")[0] if name in kinds else name
        ranks = everybody
        if kind == "in a set":
            ranks = choice.choice(sets)
            name = f"{name}.{ranks}"
        # Mostly what the name was before, so that ranks find each other waiting.
        mood = random.Random(f"{name} {seed} {number // 60}")
        patience = mood.choice((1.0, 0.97, 0.9, 0.5))
        mind = mood if choice.random() < 0.9 else choice
        yield Call(
            number, kind, name, mind.choice(COUNTS), mind.choice(DTYPES), mind.choice(everybody), ranks, patience
        )


def same(call: Call, found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.dtype != expected.dtype or not torch.equal(found, expected):
        wrong = (found != expected).nonzero().flatten().tolist() if found.shape == expected.shape else []
        raise AssertionError(f"{call}: {len(wrong)} elements differ, the first at {wrong[:3]}: {found}, not {expected}")


def begin(call: Call, is_awaited: bool, sets: dict[tuple[int, ...], bps.ProcessSet]) -> Wait:
    """Make the call. Returns what waits for it, and looks at what it gave."""
    if call.kind in IN_GROUP:
        return begin_in_group(call, is_awaited)
    mine, name = call.given(bps.rank()), call.name
    handle: int | None = None
    found: torch.Tensor | None = None
    expected = call.total()
    match call.kind:
        case "sum" if is_awaited:
            found = bps.push_pull(mine, average=False, name=name)
        case "sum":
            handle = bps.push_pull_async(mine, average=False, name=name)
        case "mean":
            whole = mine * len(call.ranks)  # the mean of which is a whole number
            expected = (expected * len(call.ranks) / len(call.ranks)).to(call.dtype)
            if is_awaited:
                found = bps.allreduce(whole, op=bps.Average, name=name)
            else:
                handle = bps.allreduce_async(whole, op=bps.Average, name=name)
        case "inplace" if is_awaited:
            found = bps.push_pull_inplace(mine, average=False, name=name)
        case "inplace":
            handle = bps.push_pull_async_inplace(mine, average=False, name=name)
        case "in a set":
            which = sets[call.ranks]
            if is_awaited:
                found = bps.allreduce_(mine, op=bps.Sum, name=name, process_set=which)
            else:
                handle = bps.allreduce_async_(mine, op=bps.Sum, name=name, process_set=which)
        case "group":
            parts = [mine, call.given(bps.rank(), 1)]
            totals = [expected, call.total(1)]
            work = bps.grouped_allreduce_async(parts, op=bps.Sum, name=name)

            def wait_for_both() -> None:
                for one, other in zip(bps.synchronize(work), totals, strict=True):
                    same(call, one, other)

            if is_awaited:
                wait_for_both()
                return lambda: None
            return wait_for_both
        case "broadcast":
            handle, expected = bps.broadcast_async(mine, call.root, name), call.given(call.root)
        case "gather":
            handle = bps.allgather_async(mine, name)
            expected = torch.cat([call.given(rank) for rank in call.ranks])

    def wait() -> None:
        result = found if found is not None else bps.synchronize(handle)
        same(call, result, expected)

    if is_awaited:
        wait()
        return lambda: None
    return wait


def begin_in_group(call: Call, is_awaited: bool) -> Wait:
    mine, size = call.given(bps.rank()), bps.size()
    found, expected = mine, call.total()
    match call.kind:
        case "all_reduce":
            work = dist.all_reduce(mine, async_op=not is_awaited)
        case "all_gather":
            found, expected = mine.new_empty(size * call.count), torch.cat([call.given(r) for r in range(size)])
            work = dist.all_gather_into_tensor(found, mine, async_op=not is_awaited)
        case "reduce_scatter":
            pieces = torch.cat([call.given(bps.rank(), at) for at in range(size)])
            found, expected = torch.empty_like(mine), call.total(bps.rank())
            work = dist.reduce_scatter_tensor(found, pieces, async_op=not is_awaited)
        case "dist.broadcast":
            expected = call.given(call.root)
            work = dist.broadcast(mine, call.root, async_op=not is_awaited)
        case _:
            expected = mine
            work = dist.barrier(async_op=not is_awaited)

    def wait() -> None:
        if work is not None:
            work.wait()
        same(call, found, expected)

    if is_awaited:
        wait()
        return lambda: None
    return wait


def count_sums() -> None:
    def count(index: int, kind: type, name: str) -> None:
        how = getattr(kind, name)

        def counted(*arguments: Any) -> None:
            how(*arguments)
            counts[index] += 1

        setattr(kind, name, counted)

    count(0, negotiated._NegotiatedSums, "_add_all")
    count(1, negotiated.NegotiatedGroup, "finish")


def main(seed: int, count: int) -> None:
    torch.set_num_threads(1)
    count_sums()
    router.CORES = int(os.environ.get("TEST_CORES", router.CORES))
    dist.init_process_group("byteps")
    bps.init()
    size, rank = bps.size(), bps.rank()
    some = [[0, size - 1], list(range(1, size))] if size > 2 else []
    sets = {tuple(range(size)): bps.global_process_set, **{tuple(r): bps.add_process_set(r) for r in some}}
    plan = list(calls(seed, count, list(sets)))
    own = random.Random(f"{seed} {rank}")
    begun: dict[int, Wait] = {}
    waits: list[list[int]] = [[] for _ in plan] + [[] for _ in range(LATEST + 1)]
    starts: list[list[int]] = [[] for _ in plan]
    awaited: set[int] = set()
    last: dict[str, int] = {}  # the latest call of each name: until when it is under way
    for number, call in enumerate(plan):
        if rank not in call.ranks:
            continue
        follows = last.get(call.name, -1)
        later = next((n for n in range(number + 1, count) if plan[n].name == call.name), count)
        if own.random() < call.patience:
            awaited.add(number)
            last[call.name] = number
            continue
        is_named = call.kind in BY_NAME
        start = max(follows + 1, number - own.randrange(EARLIEST + 1)) if is_named else number
        end = min(number + own.randrange(LATEST + 1), later - EARLIEST - 1) if is_named else number + own.randrange(3)
        end = max(end, number)
        starts[min(start, number)].append(number)
        waits[end].append(number)
        last[call.name] = end
    for position in range(len(waits)):
        if own.random() < 0.05:
            time.sleep(own.random() * 0.005)
        for number in starts[position] if position < count else []:
            begun[number] = begin(plan[number], False, sets)
        if position in awaited:
            begin(plan[position], True, sets)
        for number in sorted(waits[position], key=lambda _: own.random()):
            begun.pop(number)()
    if begun:
        raise AssertionError(f"never waited for: {sorted(begun)}")
    bps.barrier()
    found = f"all is well; {counts[0]} sums in messages, {counts[1]} in shares"
    os.write(1, f"{rank}: {len(plan)} calls: {found}\n".encode())
    dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
