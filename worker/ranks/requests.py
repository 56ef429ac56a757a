"""What a rank can ask of its communication service once the cluster is complete. Owned by the loop's thread."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from byteps_py import rank_protocol as protocol
from byteps_py.chunks import Arriving
from byteps_py.errors import PeerLostError, ProtocolError, UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.tensors import Layout
from byteps_py.worker.core.actions import Action, DirectAction, Fail
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.peer_introductions import Introduce, PeerIntroductions
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.pipeline import RoundPipeline
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.memory import Memory
from byteps_py.worker.io.rank_connection import DirectWait, RankConnection
from byteps_py.worker.ranks.hosting import Hosting
from byteps_py.worker.ranks.joining import Joining


class Requests:
    """``released``: barriers passed so far."""

    arriving_class: type[Arriving] = Arriving
    hosting_class: type[Hosting] = Hosting

    def __init__(
        self,
        topology: Topology,
        memory: Memory,
        agreement: Agreement,
        pipeline: RoundPipeline,
        direct: PieceExchange,
        executor: Executor,
        joining: Joining,
    ) -> None:
        self.topology = topology
        self.memory = memory
        self.executor = executor
        self.joining = joining
        self.hosting = self.hosting_class(topology, memory, executor, pipeline)
        self.released = 0  # barriers passed
        self._meetings = PeerIntroductions()
        self._arrived = 0
        self._barrier_since: float | None = None
        self._agreement = agreement
        self._pipeline = pipeline
        self._direct = direct
        self._layouts: dict[int, Layout] = {}  # by slot: of a round that is about to be handed over

    def describe(self, local_rank: int, pid: int) -> str:
        """``rank 3 (process 4711 on node7)``."""
        return f"rank {self.topology.first_rank + local_rank} (process {pid} on {self.topology.me.host})"

    def declare(self, rank: RankConnection, fields: dict[str, Any]) -> list[Action | DirectAction]:
        """Give the rank memory for its tensors at once; whether all ranks agree will turn out."""
        slots = [self.memory.new_slot(rank, protocol.spec_from_json(spec)) for spec in fields["specs"]]
        actions: list[Action | DirectAction] = []
        for slot in slots:
            if slot.spec.op.is_direct:  # before the answer, which says with which round it goes on
                actions += self._direct.declare(self.topology.first_rank + rank.local_rank, slot)
        places = [
            {
                "id": slot.id,
                "inputs": [[block.segment, block.offset] for block in slot.inputs],
                "result": [slot.result.segment, slot.result.offset],
                "nbytes": slot.spec.result_nbytes(self.topology.first_rank + slot.local_rank, self.topology.size),
                "round": slot.round,
            }
            for slot in slots
        ]
        rank.send(protocol.pack(RankMessageKind.DECLARED, request=fields["request"], slots=places))
        self.executor.expect(slot.spec for slot in slots)
        for slot in slots:
            if not slot.spec.op.is_direct:
                actions += self._agreement.declare(slot)
        return actions

    def lay_out(self, rank: RankConnection, fields: dict[str, Any]) -> None:
        """A rank says how its next round of a gather or an exchange is laid out. Raises ProtocolError."""
        slot = self.memory.slots[fields["slot"]]
        layout = protocol.layout_of(fields)
        try:
            layout.check(slot.spec, len(slot.spec.members(self.topology.size)))
        except UsageError as error:
            raise ProtocolError(str(error)) from None
        self._layouts[slot.id] = layout

    def take_in_chunks(self, rank: RankConnection, fields: dict[str, Any]) -> None:
        """A rank wants to hear of each chunk of a slot's results."""
        slot = self.memory.slots.get(int(fields["slot"]))
        if slot is not None and slot.local_rank == rank.local_rank:  # else its declaration has failed meanwhile
            nbytes = slot.spec.result_nbytes(self.topology.first_rank + slot.local_rank, self.topology.size)
            slot.arriving = self.arriving_class(nbytes, self.memory.chunk_bytes)

    def ready(self, message: bytes) -> list[Action | DirectAction]:
        now = self.executor.time()
        actions: list[Action | DirectAction] = []
        for slot_id, round_, nbytes in protocol.records_of(message):
            slot = self.memory.slots.get(slot_id)
            if slot is None:  # its declaration failed while the message was on its way
                continue
            rank = self.executor.ranks.get(slot.local_rank)
            if rank is not None and not slot.is_void:  # else it has been told already that it waits for nothing
                self.executor.pace.ready(slot.local_rank, rank.pid, slot_id, round_, now)
            if slot.spec.op.is_direct:
                layout = self._layouts.pop(slot_id, None)
                if (error := self.joining.objection(slot.spec, round_)) is not None:
                    actions.append(Fail((slot,), error))
                else:
                    actions += self._direct.ready(slot, round_, layout, now)
            else:
                actions += self._pipeline.ready(slot, round_, nbytes, now)
                actions += self._agreement.came(slot)
        return actions

    def meet(self, rank: RankConnection, fields: dict[str, Any]) -> None:
        """A rank wants to deal with others of this machine directly. Raises ProtocolError."""
        if rank.door < 0:
            raise ProtocolError(f"local rank {rank.local_rank} wants to meet others and gave no way to it")
        ranks = self.executor.ranks
        for action in self._meetings.ask(rank.local_rank, int(fields["key"]), fields["members"]):
            told = ranks[action.rank]
            with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                if isinstance(action, Introduce):
                    message = protocol.pack(RankMessageKind.PEER, local_rank=action.other)
                    told.send(message, (ranks[action.other].door,))
                else:
                    told.send(protocol.pack(RankMessageKind.INTRODUCED, key=action.key))

    def waits(self, rank: RankConnection, fields: dict[str, Any]) -> None:
        """A rank has waited for others of this machine for a while. Raises ValueError or TypeError for what the
        scheduler can't be told."""
        age_s = float(fields["age_s"])
        if not 0 <= age_s < math.inf:
            raise ProtocolError(f"local rank {rank.local_rank} has waited for {age_s} s")
        said = pb.Waiting(name=fields["name"], round=fields["round"], group=fields["group"])
        wait = DirectWait(said.name, said.round, self.executor.time() - age_s, tuple(said.group))
        rank.direct_waits[int(fields["id"])] = wait

    def poll_barrier(self) -> None:
        """A local rank has come to a barrier, or joined: tell the scheduler when all have come to the next one."""
        ranks = self.executor.ranks.values()
        active = [rank.barriers for rank in ranks if rank.local_rank not in self.joining.here]
        if max(active, default=0) > self.released:
            self._barrier_since = self._barrier_since or self.executor.time()
        if len(ranks) == self.topology.local_size and min(active, default=0) > self._arrived:
            self._arrived += 1
            self.executor.send(pb.MemberMessage(arrive=pb.Arrive(sequence=self._arrived)))

    def release_barrier(self, sequence: int) -> None:
        self.released = sequence
        self._arrived = max(self._arrived, sequence)  # if all local ranks have joined, it did not wait for them
        self._barrier_since = None
        for rank in self.executor.ranks.values():
            if rank.barriers >= sequence:
                with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                    rank.send(protocol.pack(RankMessageKind.RELEASED, sequence=sequence - rank.barriers_before))
            else:  # it has joined; its own count goes on from here
                rank.barriers_before += 1
                rank.barriers += 1

    def at_barrier(self) -> tuple[list[int], float]:
        """The local ranks that wait at a barrier, and for how long the first has."""
        waiting = [rank.local_rank for rank in self.executor.ranks.values() if rank.barriers > self.released]
        age_s = self.executor.time() - self._barrier_since if waiting and self._barrier_since else 0.0
        return waiting, age_s

    def forget(self, local_rank: int) -> None:
        self._meetings.forget(local_rank)
        self.hosting.forget(local_rank)
        self.executor.run(self._agreement.forget_rank(local_rank))
        for _, member in self._direct.members(local_rank):
            member.slot.rank_left()
