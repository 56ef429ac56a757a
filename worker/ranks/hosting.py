"""The states of optimizers that a service keeps for its ranks, and the steps that it makes with them.

    rank                                       service
      HOST {nbytes of a state, how many} ────►  memory in the rank's arena: master, moments
      STEP {source, target, scalars} ─────────►  a kernel: sum in the source's result ─► states ─► target's next input
      ◄───────────────────────── STEPPED {step}

States lie in memory that the rank maps too: between steps it reads and writes them itself. Owned by the loop's thread;
kernels run on the engine's threads.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

from byteps_py import rank_protocol as protocol
from byteps_py.errors import BytePSError, PeerLostError, ProtocolError
from byteps_py.kernels.step_segments import StepSegment, run_segments, segments_of
from byteps_py.kernels.steps import prepare_step
from byteps_py.kernels.update_rules import SCALARS, StepKind
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.shm import Block
from byteps_py.worker.core.tensor import RankSlot
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.memory import Memory
from byteps_py.worker.io.rank_connection import RankConnection


@dataclass(slots=True)
class _KeptStates:
    """``step``: the latest that was asked for; ``is_at_work``: it is being made."""

    local_rank: int
    kind: StepKind
    states: tuple[Block, ...]
    step: int = 0
    is_at_work: bool = False
    is_void: bool = False


class Hosting:
    """Of the ranks of one group."""

    def __init__(self, memory: Memory, executor: Executor) -> None:
        self._memory = memory
        self._executor = executor
        self._parts: dict[int, _KeptStates] = {}
        self._next_id = 1

    def host(self, rank: RankConnection, fields: dict[str, Any]) -> None:
        """A rank wants states kept: tell it where they lie. Raises ProtocolError, and OSError if there is no memory."""
        kind, count = _kind_of(fields["step_kind"]), int(fields["count"])
        if count < 1:
            raise ProtocolError(f"local rank {rank.local_rank} wants states of {count} elements")
        states = tuple(rank.allocate(count * kind.state_itemsize) for _ in range(kind.states))
        part_id, self._next_id = self._next_id, self._next_id + 1
        self._parts[part_id] = _KeptStates(rank.local_rank, kind, states)
        self._executor.run_kernel(
            functools.partial(prepare_step, kind), lambda error: None
        )  # an error comes again with the first step
        places = [[block.segment, block.offset] for block in states]
        rank.send(protocol.pack(RankMessageKind.HOSTED, request=fields["request"], id=part_id, states=places))

    def step(self, rank: RankConnection, fields: dict[str, Any]) -> None:
        """A rank wants a step made. A step that was made is not made again. Raises ProtocolError."""
        part_id = int(fields["part"])
        part = self._part(rank, part_id)
        number = int(fields["step"])
        if number <= part.step and not part.is_at_work:
            self._tell(rank, part_id, number, None)
            return
        if number != part.step + 1 or part.is_at_work:
            raise ProtocolError(f"step {number} of states whose step {part.step} is the latest")
        segments = segments_of(fields["segments"], SCALARS)
        source, target = (self._slot(rank, int(fields[what])) for what in ("source", "target"))
        inputs = self._addresses(part, segments, source, target)
        part.step, part.is_at_work = number, True
        states = [block.address for block in part.states]
        work = functools.partial(_make_step, self._memory, part.kind, states, inputs, segments)
        self._executor.run_kernel(work, lambda error: self._stepped(rank, part_id, part, error))

    def release(self, rank: RankConnection, fields: dict[str, Any]) -> None:
        """A rank needs its states no more. Raises ProtocolError."""
        part_id = int(fields["part"])
        part = self._part(rank, part_id)
        part.is_void = True
        if not part.is_at_work:
            self._free(part_id, part)

    def forget(self, local_rank: int) -> None:
        """The rank has left."""
        for part_id, part in [item for item in self._parts.items() if item[1].local_rank == local_rank]:
            part.is_void = True
            if not part.is_at_work:
                self._free(part_id, part)

    def _stepped(self, rank: RankConnection, part_id: int, part: _KeptStates, error: BaseException | None) -> None:
        part.is_at_work = False
        if part.is_void:
            self._free(part_id, part)
        else:
            self._tell(rank, part_id, part.step, error)

    def _tell(self, rank: RankConnection, part_id: int, number: int, error: BaseException | None) -> None:
        said = {} if error is None else {"error": _name_of(error), "message": str(error)}
        with contextlib.suppress(PeerLostError):  # it is found out by its own connection
            rank.send(protocol.pack(RankMessageKind.STEPPED, part=part_id, step=number, **said))

    def _free(self, part_id: int, part: _KeptStates) -> None:
        if self._parts.pop(part_id, None) is not None:
            self._memory.free_states(part.local_rank, part.states)

    # ---- checks: a rank may be of another version, or damaged --------------------------------------------------

    def _part(self, rank: RankConnection, part_id: int) -> _KeptStates:
        part = self._parts.get(part_id)
        if part is None or part.local_rank != rank.local_rank or part.is_void:
            raise ProtocolError(f"local rank {rank.local_rank} has no states {part_id}")
        return part

    def _slot(self, rank: RankConnection, slot_id: int) -> RankSlot:
        slot = self._memory.slots.get(slot_id)
        if slot is None or slot.local_rank != rank.local_rank:
            raise ProtocolError(f"local rank {rank.local_rank} has no slot {slot_id}")
        return slot

    @staticmethod
    def _addresses(
        part: _KeptStates, segments: list[StepSegment], source: RankSlot, target: RankSlot
    ) -> tuple[int, int]:
        """Of the sum, and of where the parameters go."""
        end = max((segment.elements.stop for segment in segments), default=0)
        given, taken = source.result, target.inputs[target.round % len(target.inputs)]
        for block, itemsize in (
            (given, part.kind.gradient.itemsize),
            (taken, part.kind.parameter.itemsize),
            (part.states[0], part.kind.state_itemsize),
        ):
            if end * itemsize > block.nbytes:
                raise ProtocolError(f"a step of {end} elements in memory of {block.nbytes} bytes")
        return given.address, taken.address


def _make_step(
    memory: Memory, kind: StepKind, states: list[int], places: tuple[int, int], segments: list[StepSegment]
) -> None:
    """``memory``: what keeps the addresses mapped until the step is made, even if the group is over meanwhile."""
    run_segments(kind, states, *places, segments)


def _kind_of(said: Any) -> StepKind:
    try:
        return StepKind.from_code(int(said))
    except (ValueError, TypeError) as error:  # a UsageError, too
        raise ProtocolError(f"malformed kind of a step: {error}") from None


def _name_of(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, BytePSError) else "CommunicationError"
