"""Where a server's results go."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest
import zmq

from byteps_py.runtime import Runtime
from byteps_py.server.arrival import Arrival, FrameMemory
from byteps_py.server.reducer import hand_on
from byteps_py.wire import Header, Kind

REAL = Runtime(loop=cast(Any, None))


def arrival(machine: int, answer: FrameMemory | None) -> Arrival:
    return Arrival(Header(Kind.PUSH, machine), cast(Any, None), 6, answer=answer)


def memory(data: bytes) -> FrameMemory:
    return FrameMemory(zmq.Frame(bytearray(data)))


@pytest.mark.parametrize("is_in_shared_memory", [True, False])
def test_a_machine_that_connects_again_meanwhile_finds_the_result_where_it_looks(is_in_shared_memory: bool) -> None:
    result, before, now = memory(b"result"), memory(b"result"), memory(b"......")
    first, other = arrival(0, before if is_in_shared_memory else None), arrival(1, None)
    hand_on(REAL, [first, other], [arrival(0, now), other], None if is_in_shared_memory else result)
    assert ctypes.string_at(now.address, now.nbytes) == b"result"


def test_a_machine_that_did_not_reconnect_has_the_result_already() -> None:
    answer = memory(b"......")
    one = arrival(0, answer)
    hand_on(REAL, [one], [one], memory(b"result"))
    assert ctypes.string_at(answer.address, answer.nbytes) == b"......"
