"""What a rank can ask of its communication service once the cluster is complete. Owned by the loop's thread."""

from __future__ import annotations

import contextlib
import math
import struct

from byteps_py.errors import PeerLostError, ProtocolError, UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.flight_recorder import RecordingTail
from byteps_py.system.log import logger
from byteps_py.tensors import Layout
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.chunks import Arriving
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.events import (
    Action,
    BytesReady,
    DirectAction,
    Fail,
    NameDeclared,
    PiecesDeclared,
    PiecesReady,
    RankLeft,
)
from byteps_py.worker.core.local_ranks import Introduce, PeerIntroductions
from byteps_py.worker.core.pace import OwnTimes
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.rank_connection import DirectWait, RankConnection
from byteps_py.worker.io.slot_memory import SlotMemory
from byteps_py.worker.ranks.hosting import Hosting
from byteps_py.worker.ranks.join_handler import JoinHandler


class RequestHandler:
    """``released``: barriers passed so far."""

    arriving_class: type[Arriving] = Arriving
    hosting_class: type[Hosting] = Hosting

    def __init__(
        self,
        topology: Topology,
        memory: SlotMemory,
        agreement: Agreement,
        pipeline: RoundPipeline,
        direct: PieceExchange,
        executor: Executor,
        joining: JoinHandler,
    ) -> None:
        self.topology = topology
        self.memory = memory
        self.executor = executor
        self.joining = joining
        self.hosting = self.hosting_class(topology, memory, executor, pipeline)
        self.released = 0  # barriers passed
        self._introductions = PeerIntroductions()
        self._arrived = 0
        self.barrier_since: float | None = None  # since then a local rank has waited at a barrier
        self._agreement = agreement
        self._pipeline = pipeline
        self._direct = direct
        self._layouts: dict[int, Layout] = {}  # by slot: of a round that is about to be handed over
        #: Descriptors of flight recorders by local rank, also of ranks that have left.
        self.flight_recorders: dict[int, int] = {}
        self._own_times: dict[int, tuple[RecordingTail, OwnTimes]] = {}  # what was read of these, by local rank

    def describe(self, local_rank: int, pid: int) -> str:
        """``rank 3 (process 4711 on node7)``."""
        return f"rank {self.topology.first_rank + local_rank} (process {pid} on {self.topology.me.host})"

    def keep_flight_recorder(self, rank: RankConnection) -> None:
        """It has given the descriptor of its memory."""
        if (fd := rank.take_flight_recorder()) >= 0:
            if (before := self.flight_recorders.get(rank.local_rank)) is not None:
                self.executor.runtime.close_fd(before)
            self.flight_recorders[rank.local_rank] = fd
            number = self.topology.first_rank + rank.local_rank
            try:
                self._own_times[rank.local_rank] = RecordingTail(fd), OwnTimes(number)
            except (UsageError, OSError, struct.error) as error:
                self._own_times.pop(rank.local_rank, None)
                logger.warning("what rank %d does is not known: it has given no flight recorder (%s)", number, error)

    def report_spans(self) -> list[pb.RankSpans]:
        """What the local ranks did since this was called before, by their flight recorders."""
        found = []
        for local_rank in self.executor.ranks:
            if (own := self._own_times.get(local_rank)) is not None:
                tail, own_times = own
                spans = tail.read()  # first: their results were delivered before
                own_times.add_deliveries(self.executor.pace.take_deliveries(local_rank))
                own_times.add(spans)
                if (report := own_times.report()) is not None:
                    found.append(report)
        return found

    def close(self) -> None:
        """Close what outlives ranks."""
        for fd in self.flight_recorders.values():
            self.executor.runtime.close_fd(fd)
        self.flight_recorders.clear()
        self._own_times.clear()

    def declare(self, rank: RankConnection, message: protocol.Declare) -> None:
        """Give the rank memory for its tensors at once; whether all ranks agree will turn out. Raises ProtocolError,
        and OSError if there is no memory."""
        slots = [self.memory.new_slot(rank, fields.spec()) for fields in message.specs]
        actions: list[Action | DirectAction] = []
        for slot in slots:
            if slot.spec.op.bypasses_servers:  # before the answer, which says with which round it goes on
                declared = PiecesDeclared(self.topology.first_rank + rank.local_rank, slot)
                actions += self._direct.handle(declared, self.executor.time())
        places = [
            protocol.SlotFields(
                slot.id,
                slot.spec.result_nbytes(self.topology.first_rank + slot.local_rank, self.topology.size),
                slot.round,
                slot.result.segment,
                slot.result.offset,
                tuple((block.segment, block.offset) for block in slot.inputs),
                ((slot.coded_state.segment, slot.coded_state.offset),) if slot.coded_state is not None else (),
            )
            for slot in slots
        ]
        rank.send(protocol.Declared(message.request, tuple(places)))
        self.executor.expect(slot.spec for slot in slots)
        for slot in slots:
            if not slot.spec.op.bypasses_servers:
                actions += self._agreement.handle(NameDeclared(slot))
        self.executor.run(actions)

    def lay_out(self, message: protocol.SetLayout) -> None:
        """A rank says how its next round of a gather or an exchange is laid out. Raises ProtocolError."""
        slot = self.memory.slots.get(message.slot)
        if slot is None:
            raise ProtocolError(f"a layout for slot {message.slot}, which does not exist")
        layout = message.layout()
        try:
            layout.check(slot.spec, len(slot.spec.members(self.topology.size)))
        except UsageError as error:
            raise ProtocolError(str(error)) from None
        self._layouts[slot.id] = layout

    def take_in_chunks(self, rank: RankConnection, message: protocol.WantChunks) -> None:
        """A rank wants to hear of each chunk of a slot's results."""
        slot = self.memory.slots.get(message.slot)
        if slot is not None and slot.local_rank == rank.local_rank:  # else its declaration has failed meanwhile
            nbytes = slot.spec.result_nbytes(self.topology.first_rank + slot.local_rank, self.topology.size)
            slot.arriving = self.arriving_class(nbytes, self.memory.chunk_bytes)

    def ready(self, message: protocol.Ready) -> None:
        """Ranks have handed over rounds, or the beginnings of them."""
        now = self.executor.time()
        actions: list[Action | DirectAction] = []
        for slot_id, round_, nbytes in message.rounds:
            slot = self.memory.slots.get(slot_id)
            if slot is None:  # its declaration failed while the message was on its way
                continue
            rank = self.executor.ranks.get(slot.local_rank)
            if rank is not None and not slot.is_void:  # else it has been told already that it waits for nothing
                self.executor.pace.ready(slot.local_rank, rank.pid, slot_id, round_, now)
            if slot.spec.op.bypasses_servers:
                layout = self._layouts.pop(slot_id, None)
                if self.joining.everywhere and (error := self.joining.objection(slot.spec, round_)) is not None:
                    actions.append(Fail((slot,), error))
                else:
                    actions += self._direct.handle(PiecesReady(slot, round_, layout), now)
            else:
                ready = BytesReady(slot, round_, nbytes)
                actions += self._pipeline.handle(ready, now)
                actions += self._agreement.handle(ready)
        self.executor.run(actions)

    def introduce(self, rank: RankConnection, message: protocol.AskIntroduction) -> None:
        """A rank wants to deal with others of this machine directly. Raises ProtocolError."""
        if rank.inbox_fd < 0:
            raise ProtocolError(f"local rank {rank.local_rank} wants to meet others and gave no way to it")
        ranks = self.executor.ranks
        for action in self._introductions.ask(rank.local_rank, message.key, message.members):
            told = ranks[action.rank]
            with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                if isinstance(action, Introduce):
                    told.send(protocol.PeerInbox(action.other), (ranks[action.other].inbox_fd,))
                else:
                    told.send(protocol.Introduced(action.key))

    def wait_begun(self, rank: RankConnection, message: protocol.WaitBegun) -> None:
        """A rank has waited for others of this machine for a while. Raises ProtocolError."""
        if not 0 <= message.age_s < math.inf:
            raise ProtocolError(f"local rank {rank.local_rank} has waited for {message.age_s} s")
        since = self.executor.time() - message.age_s
        rank.direct_waits[message.id] = DirectWait(message.name, message.round, since, message.group)

    def enter_barrier(self, rank: RankConnection, message: protocol.EnterBarrier) -> None:
        """A rank waits at its next barrier."""
        rank.barriers = rank.barriers_before + message.sequence
        self.poll_barrier()

    def join(self, rank: RankConnection) -> None:
        """A rank has no more data. Raises ProtocolError."""
        self.joining.join(rank)
        self.poll_barrier()

    def poll_barrier(self) -> None:
        """A local rank has come to a barrier, or joined: tell the scheduler when all have come to the next one."""
        ranks = self.executor.ranks.values()
        active = [rank.barriers for rank in ranks if rank.local_rank not in self.joining.here]
        if max(active, default=0) > self.released:
            self.barrier_since = self.barrier_since or self.executor.time()
        if len(ranks) == self.topology.local_size and min(active, default=0) > self._arrived:
            self._arrived += 1
            self.executor.send(pb.MemberMessage(arrive=pb.Arrive(sequence=self._arrived)))

    def release_barrier(self, sequence: int) -> None:
        self.released = sequence
        self._arrived = max(self._arrived, sequence)  # if all local ranks have joined, it did not wait for them
        self.barrier_since = None
        for rank in self.executor.ranks.values():
            if sequence <= rank.barriers_before:  # before this rank came
                continue
            if rank.barriers >= sequence:
                with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                    rank.send(protocol.BarrierReleased(sequence - rank.barriers_before))
            else:  # it has joined; its own count goes on from here
                rank.barriers_before += 1
                rank.barriers += 1

    def at_barrier(self) -> tuple[list[int], float]:
        """The local ranks that wait at a barrier, and for how long the first has."""
        waiting = [rank.local_rank for rank in self.executor.ranks.values() if rank.barriers > self.released]
        age_s = self.executor.time() - self.barrier_since if waiting and self.barrier_since else 0.0
        return waiting, age_s

    def forget(self, local_rank: int) -> None:
        self._introductions.forget(local_rank)
        self.hosting.forget(local_rank)
        self.executor.run(self._agreement.handle(RankLeft(local_rank)))
        for _, member in self._direct.members(local_rank):
            member.slot.rank_left()
