"""Ranks that do not come to the end of a sum by name, for tests/torch/collectives/test_shares.py.

``python ends_in_shares.py SCENARIO``; for the rest see in_shares.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_shares import IS_LARGE, SHAPE, expect_shared, main, mine, total, without_instructions
from support.threaded import contract
from torch_values import same, values

import byteps_py.torch as bps
from byteps_py.errors import BytePSError
from byteps_py.kernels.all_reduce_table import Status
from byteps_py.session.peers import Votes
from byteps_py.torch.collectives.all_reduce import direct, shared_memory


def in_the_middle(act: Callable[[], None]) -> None:
    """Of the next large sum, when the first step has been written, or the first parts have come."""
    shared_memory.SharedMemoryAllReduce.table = without_instructions  # type: ignore[method-assign]
    shared_memory.SharedMemorySum._add = lambda *_: act()  # type: ignore[assignment]
    direct.DirectSum._add = lambda *_: act()  # type: ignore[assignment]


def said(call: Callable[[], object]) -> None:
    try:
        call()
    except (MemoryError, BytePSError) as error:
        print(f"{bps.rank()}: {type(error).__name__}: {error}\n", end="", flush=True)


def run_out_of_memory() -> None:
    raise MemoryError("of this rank")


def left() -> None:
    """One rank leaves a sum, and does something else: the others hear of it when they have waited for long enough."""
    assert same(bps.push_pull(mine(), average=False, name="x"), total())
    if bps.rank() == 0:
        in_the_middle(run_out_of_memory)
    said(lambda: bps.push_pull(mine(), average=False, name="x"))
    said(bps.barrier)


def interrupted() -> None:
    """One rank is interrupted when it has given all that the others need, and lives on: later sums are right."""
    take_steps = shared_memory.SharedMemorySum._take_steps

    def interrupt(work: shared_memory.SharedMemorySum, table: Any) -> Status:
        if (status := take_steps(work, table)) is Status.DONE:
            raise KeyboardInterrupt
        return status

    assert same(bps.push_pull(mine(), average=False, name="x"), total())
    if bps.rank() == 0:
        shared_memory.SharedMemorySum._take_steps = interrupt  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            bps.push_pull(mine(), average=False, name="x")
        shared_memory.SharedMemorySum._take_steps = take_steps  # type: ignore[method-assign]
    else:
        assert same(bps.push_pull(mine(), average=False, name="x"), total())
    for turn in range(1, 4):
        parts = [values(10 * turn + rank, torch.float32, SHAPE) for rank in range(bps.size())]
        assert same(bps.push_pull(parts[bps.rank()], average=False, name="x"), contract(parts, (len(parts),))), turn
    expect_shared(2 if bps.rank() else 1)  # the rest went through the service


def die() -> None:
    """In the middle of the next sum."""
    if IS_LARGE:
        in_the_middle(lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        Votes.cast = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def killed() -> None:
    """The last rank dies when it has begun."""
    assert same(bps.push_pull(mine(), average=False, name="x"), total())
    if bps.rank() == bps.size() - 1:
        die()
    said(lambda: bps.push_pull(mine(), average=False, name="x"))


def elastic() -> None:
    """A rank dies in the middle of a sum; the others do it again without it."""
    was_odd = bps.rank() == 1

    @bps.elastic.run
    def add_up(state: Any) -> None:
        while state.step < 12:
            if was_odd and state.step == 5:
                die()
            assert same(bps.push_pull(mine(), average=False, name="x"), total()), state.step
            state.step += 1
            state.commit()

    add_up(bps.elastic.ObjectState(bcast_object=bps.broadcast_object, get_rank=bps.rank, step=0))
    expect_shared(12)
    assert bps.size() == 2


if __name__ == "__main__":
    main({run.__name__: run for run in (left, interrupted, killed, elastic)})
