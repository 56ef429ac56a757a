"""A partition leaves the summation service of its own machine, which lives, and comes back in the same round."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.worker_core import slot, tensor

from byteps_py.config.settings import Settings
from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.shm import Block
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.events import BytesReady
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import Part
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.network import Network
from byteps_py.worker.io.piece_executor import Cores
from byteps_py.worker.io.slot_memory import SlotMemory

HERE, THERE = 7, 8  # the servers


class Line:
    """To a server, whose other end is the test."""

    is_open, is_local = True, False
    bytes_sent = bytes_received = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        self.pushed: list[Header] = []

    def push(self, header: Header, payload: Block | None, offset: int, answer: Block | None) -> None:
        if answer is not None:
            header.answer_segment, header.answer_offset = answer.segment, answer.offset
        self.pushed.append(header)

    def close(self) -> None: ...


class LocalLine(Line):
    """To that of this machine."""

    is_local = True


class _Network(Network):
    tcp_link_class = cast(Any, Line)
    local_link_class = cast(Any, LocalLine)


class Machine:
    """Machine 0, with two ranks and a server of its own; round 1 of its tensor is given to that."""

    def __init__(self) -> None:
        self.read: list[int] = []  # addresses of answers that were delivered
        loop = SimpleNamespace(time=time.monotonic)
        runtime = Runtime(loop=cast(Any, loop), kernels=cast(Any, SimpleNamespace(bind=self._bind)))
        self.memory = SlotMemory(runtime, 2, 2)
        queue: PushQueue[Part] = PushQueue()
        pipeline = RoundPipeline(4, queue)
        nothing: Any = None
        self.executor = Executor(
            runtime, cast(Any, _All()), self.memory, Cores(nothing, pipeline, nothing, nothing), 0, nothing, self._fail
        )
        self.network = self.executor.network = _Network(
            runtime, Settings(), topology(), self.memory, self.executor.answered, self.executor.on_reconnected, nothing
        )
        self.line = cast(Line, self.network._links[HERE])
        slots = [slot(0), slot(1)]
        made = tensor(slots, contributions=True)
        self.executor.start(made, [(0, 16, HERE)])
        (self.part,) = made.parts
        for each in slots:
            self.executor.run(pipeline.handle(BytesReady(each, 1, 16), 0.0))

    def _bind(
        self, op: object, dtype: object, inputs: tuple[int, ...], *more: object, past_caches: bool = False
    ) -> Callable[[], None]:
        return lambda: self.read.extend(inputs)

    def _fail(self, error: Exception) -> None:
        raise error

    def move(self, server: int) -> None:
        """An epoch with this server for the partition."""
        self.executor.move(lambda part: server)

    def answer(self, pushed: Header) -> None:
        self.executor.answered(dataclasses.replace(pushed, kind=Kind.ANSWER), None, HERE)


class _All:
    """Kernels that are there."""

    def __contains__(self, pair: object) -> bool:
        return True


def topology() -> Topology:
    workers = [
        pb.Member(member_id=i, machine_index=i, local_size=2, first_rank=2 * i, machine_id=f"m{i}") for i in (0, 1)
    ]
    servers = [
        pb.Member(member_id=HERE, address="tcp://a:1", weight=1, machine_id="m0", local_address="ss"),
        pb.Member(member_id=THERE, address="tcp://b:1", weight=1, machine_id="m8"),
    ]
    return Topology.of(pb.Membership(epoch=1, workers=workers, servers=servers, workers_since=1), 0)


@pytest.fixture(name="machine")
def machine_with_a_server() -> Iterator[Machine]:
    machine = Machine()
    machine.read.clear()  # the ranks' inputs
    yield machine
    machine.network.close()
    machine.memory.machine.close()


def test_it_is_answered_where_it_was_given_last(machine: Machine) -> None:
    machine.move(THERE)
    machine.move(HERE)
    first, taken_back, again = machine.line.pushed
    assert [first.kind, taken_back.kind, again.kind] == [Kind.PUSH, Kind.WITHDRAW, Kind.PUSH]
    assert again.is_resent
    assert again.answer_place != first.answer_place
    block = machine.part.answer
    assert block is not None
    machine.answer(again)
    assert (machine.read, machine.executor.rounds) == ([block.address], 1)


def test_what_it_was_given_first_is_no_answer_to_what_was_given_last(machine: Machine) -> None:
    """The server was adding it up already, and then gets it once more: nobody has written to the later place yet."""
    machine.move(THERE)
    machine.move(HERE)
    first, _, again = machine.line.pushed
    machine.answer(first)
    assert (machine.read, machine.executor.rounds) == ([], 0)
    block = machine.part.answer
    assert block is not None
    machine.answer(again)
    assert (machine.read, machine.executor.rounds) == ([block.address], 1)


def test_an_answer_in_a_place_of_nobodys_is_an_error(machine: Machine) -> None:
    (pushed,) = machine.line.pushed
    with pytest.raises(ProtocolError, match="tensor 'w': an answer lies in memory that was not given for it"):
        machine.answer(dataclasses.replace(pushed, answer_offset=pushed.answer_offset + 4096))
