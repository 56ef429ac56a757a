"""Where a server's results go."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from byteps_py.runtime import Runtime
from byteps_py.server.contribution_listeners import LocalPeer
from byteps_py.server.reducer import Arrival, FrameMemory, copy_to_moved, plan
from byteps_py.tensors import Op
from byteps_py.wire.data_link import NO_RESULT, SUPPLY, Header, Kind

REAL = Runtime(loop=cast(Any, None))


def arrival(machine: int, answer: FrameMemory | None) -> Arrival:
    return Arrival(Header(Kind.PUSH, machine), cast(Any, None), 6, answer=answer)


def memory(data: bytes) -> FrameMemory:
    return FrameMemory(zmq.Frame(bytearray(data)))


@pytest.mark.parametrize("is_in_shared_memory", [True, False])
def test_a_machine_that_connects_again_meanwhile_finds_the_result_where_it_looks(is_in_shared_memory: bool) -> None:
    result, before, now = memory(b"result"), memory(b"result"), memory(b"......")
    first, other = arrival(0, before if is_in_shared_memory else None), arrival(1, None)
    copy_to_moved(REAL, [first, other], [arrival(0, now), other], None if is_in_shared_memory else result)
    assert ctypes.string_at(now.address, now.nbytes) == b"result"


def test_a_machine_that_did_not_reconnect_has_the_result_already() -> None:
    answer = memory(b"......")
    one = arrival(0, answer)
    copy_to_moved(REAL, [one], [one], memory(b"result"))
    assert ctypes.string_at(answer.address, answer.nbytes) == b"......"


def local_peer(nbytes: int) -> LocalPeer:
    """A machine of which segment 0 is known."""
    segment = SimpleNamespace(address=4096, nbytes=nbytes, fd=-1)
    peer = LocalPeer(cast(Any, None), cast(Any, SimpleNamespace(runtime=SimpleNamespace(segment=lambda *_: segment))))
    peer.accept_segment(Header(Kind.SEGMENT, 0, length=nbytes), [0])
    return peer


@pytest.mark.parametrize("flags", [NO_RESULT, SUPPLY])
def test_nothing_is_written_for_a_local_machine_that_wants_no_result(flags: int) -> None:
    """Its message names no place for one: what it says there, the beginning of its memory, is another tensor's."""
    header = Header(Kind.PUSH, 0, length=64, segment_offset=64, flags=flags)
    local = local_peer(256).arrival(header)
    assert local.answer is None
    other = Arrival(Header(Kind.PUSH, 1, length=64), cast(Any, None), 64, memory(bytes(64)))
    call = plan(Op.SUM, [local, other])
    assert other.payload is not None
    assert call.outputs == (other.payload.address,)


def test_a_result_is_written_where_a_local_machine_wants_it() -> None:
    local = local_peer(256).arrival(Header(Kind.PUSH, 0, length=64, segment_offset=64, answer_offset=128))
    assert local.answer is not None
    assert plan(Op.SUM, [local]).outputs == (4096 + 128,)
