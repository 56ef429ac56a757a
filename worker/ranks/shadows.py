"""Sends the states and steps of this machine's ranks to the servers that keep copies of them.

    step made ─► states: SHADOW_BEGIN, SHADOW_STATE …      ─► SHADOW_HELD
                 step:   [SHADOW_SUM,] SHADOW_STEP         ─► SHADOW_HELD, or SHADOW_LACKS
    record of a rank:    SHADOW_RECORD, SHADOW_ATTACHED …  ─► SHADOW_HELD ─► StepsHeld, to the rank

What is sent when is decided in worker/core/shadowing.py. This class has the memory, and packs. Owned by the loop's
thread; states are copied on the pool's threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import zmq

from byteps_py.errors import PeerLostError
from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import StepKind
from byteps_py.proto import control_pb2 as control
from byteps_py.system.log import logger
from byteps_py.system.shm import Block
from byteps_py.tensors import DType
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import Header, Kind, SegmentNumbers, ShadowPartition, ShadowRecord, ShadowStep
from byteps_py.worker.core.hosted_steps import MakeStep, OwnedPart
from byteps_py.worker.core.shadow_copies import (
    CatchUp,
    PartitionStepped,
    RecordPacked,
    ReleaseMemory,
    SendEnd,
    SendRecord,
    SendStates,
    SendStep,
    ServerHolds,
    ServerLacks,
    ServerReconnected,
    ShadowingAction,
    ShadowingEvent,
    StatesEnded,
    StatesWatched,
    StepBegun,
    StepDue,
    StepMade,
    StepNumbers,
    TellHeld,
    TellRecorded,
    TopologyChanged,
)
from byteps_py.worker.core.shadowing import Shadowing
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.rank_connection import RankConnection
from byteps_py.worker.io.slot_memory import SlotMemory


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRecord:
    """A ShadowRecord, and what is attached to it."""

    said: bytes
    attached: bytearray


#: Of states: a block; of a sum: a block or an answer.
Held = Block | zmq.Frame | PackedRecord


class Shadows:
    """The shadows of the ranks of one group."""

    shadowing_class: type[Shadowing[Held]] = Shadowing
    paced_bytes = protocol.PACED_BYTES

    def __init__(self, topology: Topology, memory: SlotMemory, executor: Executor) -> None:
        self._topology = topology
        self._memory = memory
        self._executor = executor
        self._core = self.shadowing_class(topology)
        self._kinds: dict[tuple[int, int], StepKind] = {}  # by key and index of a partition
        self._has_states = False  # its ranks have asked for copies, of which this machine may have none to make
        self._has_warned = self._has_warned_of_place = self._has_warned_of_copies = False
        self._has_warned_of_record = False
        tell_rank = self._tell_rank
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            SendStep: self._send_step,
            SendStates: self._send_states,
            SendRecord: self._send_record,
            SendEnd: lambda it: self._tell(it.server, _header(Kind.SHADOW_END, it.part, 0), b""),
            ReleaseMemory: self._release,
            TellHeld: lambda it: tell_rank(it.rank, protocol.StepsHeld(it.step, it.is_whole, it.refused)),
            TellRecorded: lambda it: tell_rank(it.rank, protocol.RecordTaken(it.run, it.step)),
            CatchUp: lambda it: self._executor.catch_up(it.part),
        }

    def watch(self, rank: int, run: int, kind: StepKind, parts: Sequence[OwnedPart]) -> None:
        """Keep copies of the states of a rank's partitions. ``run``: see ShadowPartition."""
        if not (self._core.servers.is_safe or self._has_warned_of_place):
            self._has_warned_of_place = True
            logger.warning(
                "copies of an optimizer's states, which shadow=True asks for, need a CPU machine, or three GPU "
                "machines in an elastic job: with %d GPU machines alone, all states are lost with one of them",
                self._topology.machines,
            )
        servers = self._core.servers
        if servers.members and servers.copies < servers.asked and not self._has_warned_of_copies:
            self._has_warned_of_copies = True
            logger.warning(
                "BYTEPS_SHADOW_COPIES=%d: other machines of this job have servers for %d; add CPU machines",
                servers.asked, servers.copies,
            )  # fmt: skip
        self._has_states = True
        for part in parts:
            self._kinds[part.tensor.key, part.index] = kind
        sizes = [(part, part.count * kind.state_itemsize * kind.states) for part in parts]
        self._handle(StatesWatched(rank, run, sizes))

    def end(self, parts: Iterable[OwnedPart]) -> None:
        """Their states are given up."""
        self._handle(StatesEnded(parts))

    def abandon(self, parts: Iterable[OwnedPart]) -> None:
        """Their rank is gone: the copies stay, for a restarted job."""
        self._perform(action for action in self._core.handle(StatesEnded(parts)) if not isinstance(action, SendEnd))

    # ---- steps -------------------------------------------------------------------------------------------------

    def begin(self, rank: int, step: int, parts: Iterable[OwnedPart]) -> None:
        """A rank steps with these partitions."""
        self._handle(StepBegun(rank, step, parts))

    def is_behind(self, part: OwnedPart) -> bool:
        """The partition's next sum is to wait until servers have the one before."""
        return self._core.is_behind(part)

    def copy_states(self, step: MakeStep, states: Sequence[int]) -> tuple[Block, Callable[[], None]] | None:
        """If the states of a partition, at these addresses, are to be copied after its step: where to, and the work,
        for any thread."""
        part = step.part
        if not step.is_last or not self._core.handle(StepDue(part)):
            return None
        kind = self._kinds[part.tensor.key, part.index]
        nbytes = part.count * kind.state_itemsize
        block = self._memory.machine.allocate(nbytes * kind.states)
        move = self._executor.runtime.move

        def work() -> None:
            for place, state in enumerate(states):
                move(block.address + place * nbytes, state, nbytes)

        return block, work

    def stepped(
        self, step: MakeStep, numbers: StepNumbers, segments: Sequence[StepSegment], states: Block | None
    ) -> None:
        """A partition's step is made, and its sum is still there. ``states``: their copy."""
        part = step.part
        total = self._executor.detach_sum(part) if self._core.needs_sum(part) else None
        made = StepMade(numbers, part.tensor.round, step.divisor, tuple(segments))
        self._handle(PartitionStepped(part, made, states, total))

    def record(self, rank: int, record: ShadowRecord, attached: bytearray) -> None:
        """Take a rank's record of a step, and its attachment. ``attached`` is this object's from now on."""
        packed = PackedRecord(record.pack(), attached)
        is_paced = len(attached) >= self.paced_bytes
        self._handle(RecordPacked(rank, record.run, record.step, packed, is_paced))

    # ---- servers -----------------------------------------------------------------------------------------------

    def answered(self, header: Header, text: str, server: int) -> None:
        """A server has said what it holds, or lacks."""
        place = header.key, header.index
        if header.kind is Kind.SHADOW_HELD:
            self._handle(ServerHolds(server, place, header.round))
            return
        is_record = self._core.awaits_record(server, place, header.round)
        if is_record and not self._has_warned_of_record:
            self._has_warned_of_record = True
            logger.warning(
                "server %d does not take a rank's record of step %d, so this step can't be restored: %s. Attach less "
                "(optimizer.shadow_extra, the model's buffers), or give the servers more memory",
                server, header.round, text,
            )  # fmt: skip
        elif not is_record and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "server %d can't go on with its copy of an optimizer's states, which are sent again: %s", server, text
            )
        self._handle(ServerLacks(server, place, header.round))

    def on_reconnected(self, server: int) -> None:
        """There is a new connection to a server."""
        self._handle(ServerReconnected(server))

    def tell_servers(self, connection: RankConnection, message: protocol.AskServers) -> None:
        """Tell a rank where servers are."""
        connection.send(protocol.ServersKnown(message.request, self._topology.server_addresses))

    def change(self, topology: Topology) -> None:
        """Other servers."""
        self._topology = topology
        before = self._core.servers
        self._handle(TopologyChanged(topology))
        now = self._core.servers
        if self._has_states and now.survives != before.survives and now.members:
            logger.warning(
                "the servers of the job have changed: once states are copied there, the copies that shadow=True asks "
                "for survive %s (they survived %s)", now.survives, before.survives,
            )  # fmt: skip
        elif self._has_states and before.members and not now.members:
            logger.warning(
                "no server of another machine is left: until there is one again, nothing keeps copies of this "
                "machine's optimizer states, and no later step can be restored"
            )

    @property
    def protection(self) -> control.ShadowProtection:
        """For the scheduler."""
        step, servers = self._core.restorable_step, self._core.servers
        if step is None:
            return control.ShadowProtection()
        return control.ShadowProtection(step=step if servers.members else 0, survives=servers.survives)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _handle(self, event: ShadowingEvent[Held]) -> None:
        self._perform(self._core.handle(event))

    def _perform(self, actions: Iterable[ShadowingAction[Held]]) -> None:
        for action in actions:
            self._handlers[type(action)](action)

    def _release(self, action: ReleaseMemory[Held]) -> None:
        if isinstance(action.memory, Block):
            self._memory.machine.free(action.memory)

    def _tell(self, server: int, header: Header, payload: Held | bytes, offset: int = 0) -> None:
        if isinstance(payload, bytes) and len(payload) > self._topology.partition_bytes:
            self._tell_pieces(server, header, payload)
        elif not isinstance(payload, PackedRecord) and self._executor.network is not None:
            self._executor.network.tell(server, header, payload, offset)

    def _tell_pieces(self, server: int, header: Header, payload: bytes | bytearray) -> None:
        network, most = self._executor.network, self._topology.partition_bytes
        if network is None:
            return
        for start in range(0, len(payload), most):
            piece = memoryview(payload)[start : start + most]
            own = dataclasses.replace(header, offset=start, length=len(piece), segment_offset=len(payload))
            network.tell(server, own, piece, 0)

    def _tell_rank(self, number: int, message: object) -> None:
        local = self._topology.local_rank_of(number)
        rank = self._executor.ranks.get(local) if local is not None else None
        if rank is not None:
            with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                rank.send(message)

    def _send_record(self, action: SendRecord[Held]) -> None:
        packed = action.held.memory if action.held is not None else None
        if not isinstance(packed, PackedRecord):
            return
        header = Header(Kind.SHADOW_RECORD, 0, key=action.run, index=action.rank, round=action.step)
        self._tell(action.server, header, packed.said)
        self._tell_pieces(action.server, dataclasses.replace(header, kind=Kind.SHADOW_ATTACHED), packed.attached)

    def _send_states(self, action: SendStates[Held]) -> None:
        part, kind = action.copy.part.part, self._kinds[action.copy.part.place]
        begin = ShadowPartition(
            run=action.copy.part.run, name=part.tensor.name, first=part.first, count=part.count, step_kind=kind.code,
            step=action.step,
        )  # fmt: skip
        header = functools.partial(_header, part=part, round_=action.step)
        first = header(Kind.SHADOW_BEGIN)
        if (codec := part.tensor.codec) is not None:
            first.codec, first.drawn = codec.on_wire.code, codec.drawn
        self._tell(action.server, first, begin.pack())
        if action.held is None:
            return
        nbytes, most = part.count * kind.state_itemsize, self._topology.partition_bytes
        for state in range(kind.states):
            for start in range(0, nbytes, most):
                chunk = header(Kind.SHADOW_STATE)
                chunk.segment, chunk.offset, chunk.length = state, start, min(most, nbytes - start)
                chunk.dtype = DType.FLOAT64 if kind.state_itemsize == 8 else DType.FLOAT32
                self._tell(action.server, chunk, action.held.memory, state * nbytes + start)

    def _send_step(self, action: SendStep[Held]) -> None:
        part, made = action.copy.part.part, action.made
        if action.held is not None:
            brings = _header(Kind.SHADOW_SUM, part, made.round)
            brings.length, brings.dtype = part.length, part.tensor.spec.dtype
            self._tell(action.server, brings, action.held.memory)
        said = ShadowStep(
            run=action.copy.part.run, step=made.numbers.step, before=action.before, durable=made.numbers.durable,
            whole=made.numbers.is_whole, divisor=made.divisor,
            segments=tuple(
                SegmentNumbers(each.elements.start, each.elements.stop, each.scalars) for each in made.segments
            ),
        )  # fmt: skip
        self._tell(action.server, _header(Kind.SHADOW_STEP, part, made.round), said.pack())


def _header(kind: Kind, part: OwnedPart, round_: int) -> Header:
    return Header(kind, 0, key=part.tensor.key, generation=part.tensor.generation, index=part.index, round=round_)
