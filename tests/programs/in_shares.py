"""Ranks that add tensors by name, for tests/torch/collectives/test_shares.py: ``python in_shares.py SCENARIO``.

There is a core for every rank, on one machine or several. Every result is compared, bit for bit, with the one that this
process computes by itself. TEST_SIZE: whether tensors are "small" or "large". TEST_FILE: where a scenario may write.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.threaded import contract
from torch_values import same, values

import byteps_py.torch as bps
from byteps_py.errors import BytePSError, MismatchError
from byteps_py.kernels.all_reduce_table import TableEntry
from byteps_py.torch.collectives import context as contexts, router
from byteps_py.torch.collectives.all_reduce import negotiated, shared_memory
from byteps_py.torch.collectives.dtypes import WIRE

IS_LARGE = os.environ.get("TEST_SIZE") == "large"
HAS_SERVERS = os.environ.get("DMLC_NUM_SERVER", "0") != "0"
#: Several chunks of a slot for every rank, and a multiple of nothing; or what goes in a message.
SHAPE = (5, 40_003) if IS_LARGE else (5, 503)
WAIT_S = 60.0
tables = shared_memory.SharedMemoryAllReduce.table
#: One for each sum that the ranks have added up among themselves, since the last look.
shared: list[None] = []


def count_shared() -> None:
    how = negotiated.NegotiatedGroup.finish if IS_LARGE else negotiated._NegotiatedSums._add_all

    def counted(*arguments: Any) -> None:
        how(*arguments)
        shared.append(None)

    if IS_LARGE:
        negotiated.NegotiatedGroup.finish = counted  # type: ignore[method-assign]
    else:
        negotiated._NegotiatedSums._add_all = counted  # type: ignore[method-assign]


def expect_shared(count: int) -> None:
    assert len(shared) == count, f"{len(shared)} sums among the ranks, not {count}"
    shared.clear()


def is_across() -> bool:
    """True if ranks are on several machines."""
    return bps.size() > bps.local_size()


def added(parts: list[torch.Tensor], ranks: range, average: bool = False) -> torch.Tensor:
    on_machines = Counter(rank // bps.local_size() for rank in ranks)
    return contract(parts, list(on_machines.values()), average=average, rounding="trunc")


def total(dtype: torch.dtype = torch.float32, ranks: range | None = None, average: bool = False) -> torch.Tensor:
    ranks = ranks or range(bps.size())
    return added([values(rank, dtype, SHAPE) for rank in ranks], ranks, average)


def mine(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return values(bps.rank(), dtype, SHAPE)


def dtypes() -> None:
    """The bits of the contract, whichever way they come."""
    for dtype in WIRE:
        x, expected, mean = mine(dtype), total(dtype), total(dtype, average=True)
        assert same(bps.allreduce(x, op=bps.Sum, name=f"sum {dtype}"), expected), dtype
        assert same(bps.push_pull(x, average=False), expected), dtype
        inplace = x.clone()
        assert bps.allreduce_(inplace, op=bps.Sum, name=f"in place {dtype}") is inplace
        assert same(inplace, expected), dtype
        expect_shared(2 if is_across() else 3)  # between machines, those without a name go through the service
        assert same(bps.synchronize(bps.allreduce_async(x, op=bps.Sum, name=f"later {dtype}")), expected), dtype
        expect_shared(0)
        assert same(bps.allreduce(x, name=f"mean {dtype}"), mean), dtype
        expect_shared(1 if dtype.is_floating_point else 0)
        assert same(x, mine(dtype)), dtype


def added_in_python() -> None:
    """Before there are instructions that add, and where there are none."""
    shared_memory.SharedMemoryAllReduce.table = without_instructions  # type: ignore[method-assign]
    try:
        dtypes()
    finally:
        shared_memory.SharedMemoryAllReduce.table = tables  # type: ignore[method-assign]


def sizes() -> None:
    limit = router.NAMED_CONNECTION_BYTES if is_across() else router.NAMED_MESSAGE_BYTES
    most = limit // 4 // (bps.size() - 1)
    small, large = (1, 17, most), (most + 1, shared_memory.SLOT_BYTES // 4 * bps.size() + 17, 1_000_003)
    for count in (*small, *large, *small):
        parts = [values(rank, torch.float32, (count,)) for rank in range(bps.size())]
        for _ in range(3):
            expected = added(parts, range(bps.size()))
            assert same(bps.push_pull(parts[bps.rank()], average=False, name="x"), expected), count
    if HAS_SERVERS:  # large ones go through the service: nobody has waited for the one before the next small one
        expect_shared(17)
    else:
        expect_shared(9 if IS_LARGE else 18)
    assert bps.push_pull(torch.ones(0), name="empty").numel() == 0
    expect_shared(0)


def who_is_not_at_hand() -> None:
    """One rank does not wait, has gaps in its memory, or all want another thing: all go through the service. When all
    have waited once, it is as before."""
    odd = bps.size() - 1
    is_odd = bps.rank() == odd
    for turn in range(3):
        if is_odd:
            handle = bps.allreduce_async(mine(), op=bps.Sum, name="x")
            result = bps.synchronize(handle)
        else:
            result = bps.allreduce(mine(), op=bps.Sum, name="x")
        assert same(result, total()), turn
        x = mine().t().contiguous().t() if is_odd else mine()
        bps.allreduce_(x, op=bps.Sum, name="gaps")
        assert same(x.contiguous(), total()), turn
        expect_shared(0)
        for count in (0, 1, 1):
            assert same(bps.allreduce(mine(), op=bps.Sum, name="x"), total())
            expect_shared(count)
    doubled = bps.allreduce(mine(), op=bps.Sum, name="doubled", postscale_factor=2.0)
    assert same(doubled, total() * 2)
    least = bps.allreduce(mine(), op=bps.Min, name="least")
    assert same(least, torch.stack([values(rank, torch.float32, SHAPE) for rank in range(bps.size())]).amin(0))
    bps.push_pull(mine(), name="half", compression=bps.Compression.fp16)
    assert bps.synchronize(bps.grouped_allreduce_async([], name="none")) == ()
    expect_shared(0)


def in_any_order() -> None:
    """Threads that call names in another order on every rank, and one another's names at the same time."""
    failures: list[BaseException] = []

    def call(names: list[str]) -> None:
        try:
            for name in names:
                assert same(bps.push_pull(mine(), average=False, name=name), total()), name
        except BaseException as error:
            failures.append(error)

    names = [f"x{i}" for i in range(6)]
    for turn in range(4):
        threads = [
            threading.Thread(target=call, args=([name],))
            for name in names[bps.rank() + turn :] + names[: bps.rank() + turn]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures, failures
    shared.clear()  # none, or some: as it came
    handles = [bps.push_pull_async(mine(), average=False, name=f"handle {i}") for i in range(3)]
    call(["between"])
    assert not failures, failures
    expect_shared(1)
    for handle in handles[:: -1 if bps.rank() else 1]:
        assert same(bps.synchronize(handle), total())
    expect_shared(0)


def nobody_is_kept_waiting() -> None:
    """Who has begun, and does something else for which it needs the others, keeps none of them from going on."""
    signal_path = f"{os.environ['TEST_FILE']}.signal"
    odd = bps.size() - 1
    if bps.rank() == odd:
        os.mkfifo(signal_path)
    bps.barrier()
    for turn in range(4):  # the first one, after which nobody has waited; and after all have
        if bps.rank() == odd:
            handle = bps.push_pull_async(mine(), average=False, name="x")
            with open(signal_path) as others:  # until one of them has its result
                others.read()
            assert same(bps.synchronize(handle), total()), turn
        else:
            assert same(bps.push_pull(mine(), average=False, name="x"), total()), turn
            if bps.rank() == 0:
                with open(signal_path, "w"):
                    pass
        expect_shared(0)
        bps.barrier()
        if turn % 2:
            for count in (0, 1):
                bps.push_pull(mine(), average=False, name="x")
                expect_shared(count)


def forked() -> None:
    """A child of a rank neither speaks for it nor changes what it waits for."""
    bps.push_pull(mine(), average=False, name="x")
    child = os.fork()
    if not child:
        try:
            bps.push_pull(mine(), average=False, name="x")
        except BytePSError as error:
            os._exit("fork" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert same(bps.push_pull(mine(), average=False, name="x"), total())
    expect_shared(2)


def in_sets() -> None:
    ranks = range(1, bps.size())
    some = bps.add_process_set(list(ranks))
    is_uneven = len(set(Counter(rank // bps.local_size() for rank in ranks).values())) > 1
    for turn in range(3):
        if bps.rank() in ranks:
            assert same(bps.allreduce(mine(), op=bps.Sum, name="x", process_set=some), total(ranks=ranks)), turn
            expect_shared(1 if len(ranks) > 1 and not (IS_LARGE and is_uneven) else 0)
        assert same(bps.allreduce(mine(), op=bps.Sum, name="x"), total()), turn
        expect_shared(1)


def backwards() -> None:
    x = mine().requires_grad_()
    y = bps.allreduce(x, op=bps.Sum, name="x")
    y.backward(torch.full(SHAPE, float(bps.rank() + 1)))
    expect_shared(2)
    assert x.grad is not None
    assert same(x.grad, torch.full(SHAPE, bps.size() * (bps.size() + 1) / 2))
    z = mine().requires_grad_()
    square = z * z
    kept = square.detach()
    loss = (square * square).sum()  # keeps square
    bps.push_pull_inplace(kept, name="changed")
    expect_shared(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def mistakes() -> None:
    """All ranks hear what differs; the name can be used again."""
    for odd_shape in ((5, 504) if HAS_SERVERS else (5, 40_004), (3,)):
        x = torch.ones(odd_shape if bps.rank() == 1 else SHAPE)
        for _ in range(2):
            with pytest.raises(MismatchError) as caught:
                bps.push_pull(x, average=False, name="x")
            print(f"{bps.rank()}: {caught.value}\n", end="", flush=True)
        assert same(bps.push_pull(mine(), average=False, name="x"), total())
        expect_shared(1)
    with pytest.raises(MismatchError):  # which can't be added up here
        bps.allreduce(mine(), op=bps.Min if bps.rank() == 1 else bps.Sum, name="least")
    how = bps.Compression.fp16 if bps.rank() == 1 else bps.Compression.none
    with pytest.raises(MismatchError):
        bps.push_pull(mine(), name="compressed", compression=how)
    expect_shared(0)
    handle = bps.push_pull_async(mine(), name="twice")
    with pytest.raises(ValueError, match="currently being processed"):
        bps.push_pull(mine(), name="twice")
    bps.synchronize(handle)
    expect_shared(0)


def who_joins() -> None:
    """Others go on without a rank that has no more data; when all have joined, it is as before, and takes no more
    memory."""
    places = set()
    for turn in range(6):
        assert same(bps.push_pull(mine(), average=False, name="x"), total())
        expect_shared(1)
        slots = contexts.current().belongings[negotiated.NegotiatedAllReduce]._groups[()].large_sums.slots
        places.add(slots.block.address if slots is not None and slots.block is not None else 0)
        if bps.rank():
            expected = total(ranks=range(1, bps.size()))
            for _ in range(2):
                assert same(bps.push_pull(mine(), average=False, name="x"), expected), turn
        expect_shared(0)
        bps.join()
    assert len(places) <= 3, places  # the last one's may still be read when the next one begins


def recorded() -> None:
    path = Path(os.environ["TEST_FILE"])
    bps.start_timeline(str(path))
    for _ in range(2):
        bps.push_pull(mine(), average=False, name="x")
    expect_shared(2)
    bps.stop_timeline()
    if bps.rank() == 0:
        events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
        whole = [event for event in events if event["args"]["bytes"] == mine().nbytes]
        assert [event["args"]["round"] for event in whole] == [1, 2], events
        assert len(events) == 2, events
    assert bps.get_pushpull_speed()[1] > 0


def without_instructions(sums: shared_memory.SharedMemoryAllReduce, *what: Any) -> Any:
    """To add with: it is done in Python."""
    table = tables(sums, *what)
    table[TableEntry.ADD] = table[TableEntry.ADD_PAST] = 0
    return table


SCENARIOS: dict[str, Callable[[], None]] = {
    run.__name__: run
    for run in (
        dtypes,
        added_in_python,
        sizes,
        who_is_not_at_hand,
        nobody_is_kept_waiting,
        forked,
        in_any_order,
        in_sets,
        backwards,
        mistakes,
        who_joins,
        recorded,
    )
}


def main(scenarios: dict[str, Callable[[], None]]) -> None:
    torch.set_num_threads(1)
    router.CORES = 64
    count_shared()
    bps.init()
    for word in sys.argv[1:]:
        scenarios[word]()
        print(f"{bps.rank()}: {word}: all is well\n", end="", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main(SCENARIOS)
