"""The copies of this machine's optimizer states that servers on other machines keep in step (*shadows*). Pure.

A shadow makes the same steps with the same sums as the owner's service. It is told of each step, and needs the sum only
if another server has added it. The life of one copy is in shadow_copies.py.

What a server has not acknowledged is kept, with its memory, and is sent again in the same order on a new connection.

A step is *held* for a rank when its record, and the step of each of its partitions that are FOLLOWING, have been
acknowledged. The least such step of all ranks is durable: then a shadow applies it. Servers may refuse a record, if
they have no memory for it, and hold a later one of the rank. So a rank is also told its latest step that was refused,
and no step up to that of any rank becomes durable. Partitions that are not FOLLOWING do not count; while there are any,
nothing can be restored anyway, and their states will be newer. A rank is told as well whether all of its partitions
have been FOLLOWING: from then on, states of earlier runs are needed no more.

When a partition's sums move to another server, its copy follows: it is FOLLOWING there, and durable as of a step that
it has, before it ends here.

Where there are CPU machines, each partition has one copy there. Else it has two, on the next two GPU machines: if one
machine of the job is lost, there is still a copy of every partition on those that are left. BYTEPS_SHADOW_COPIES asks
for more: on further CPU machines, and where there are not as many, on the next GPU machines. Records have as many
copies as partitions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from byteps_py.placement.hosted_shares import GPU_MACHINES_COPIES
from byteps_py.proto import control_pb2 as pb
from byteps_py.worker.core.hosted_steps import OwnedPart
from byteps_py.worker.core.shadow_copies import (
    COPYING,
    EMPTY,
    FOLLOWING,
    SEEDING,
    CatchUp,
    CopyStates,
    M,
    PartitionStepped,
    RecordCopies,
    RecordPacked,
    ReleaseMemory,
    SendEnd,
    SendRecord,
    SendStates,
    SendStep,
    SentMessage,
    ServerHolds,
    ServerLacks,
    ServerReconnected,
    ShadowCopy,
    ShadowedPiece,
    ShadowingAction,
    ShadowingEvent,
    ShadowMemory,
    StatesEnded,
    StatesWatched,
    StepBegun,
    StepDue,
    TellHeld,
    TellRecorded,
    TopologyChanged,
)
from byteps_py.worker.core.topology import Topology

#: Bytes of states that may be on their way to servers at once; one partition always may.
CREDIT_BYTES = 64 << 20
#: States that a server has not taken are sent again after 2, 4, 8 … steps, at most after so many.
MOST_STEPS_BETWEEN = 1024


@dataclass(frozen=True, slots=True)
class CopyServers:
    """The servers that keep copies. ``members``: by member id, those of CPU machines first, then those of the next GPU
    machines; ``spare``: the number of the former; ``copies``: of each partition and record; ``asked``: for so many."""

    members: Sequence[int]
    spare: int
    copies: int
    asked: int = 1

    @classmethod
    def of(cls, topology: Topology) -> CopyServers:
        """The servers for the states of this machine."""
        others = [server for server in topology.servers if server.machine_id != topology.me.machine_id]
        spare = sorted(server.member_id for server in others if server.kind != pb.MACHINE_KIND_GPU)
        gpu = [server for server in others if server.kind == pb.MACHINE_KIND_GPU]
        gpu.sort(key=lambda server: (server.machine_index - topology.machine_index) % topology.machines)
        wanted = max(topology.shadow_copies, 1 if spare else GPU_MACHINES_COPIES)
        members = [*spare, *(server.member_id for server in gpu[: max(0, wanted - len(spare))])]
        return cls(members, len(spare), min(wanted, len(members)), topology.shadow_copies)

    @property
    def survives(self) -> str:
        """The loss that the copies survive where they are, in words."""
        if not self.spare:
            return "the loss of one GPU machine of an elastic job" if self.is_safe else "nothing"
        if (more := min(self.copies, self.spare) - 1) > 0:
            return f"the loss of all GPU machines and {more} CPU machine{'s' if more > 1 else ''}"
        if self.copies > 1:
            return "the loss of all GPU machines, or of the CPU machine"
        return "the loss of all GPU machines"

    @property
    def is_safe(self) -> bool:
        """There are enough for copies to be of use."""
        return bool(self.spare) or len(self.members) >= GPU_MACHINES_COPIES

    def of_part(self, part: OwnedPart) -> Sequence[int]:
        """The servers of a partition's copies: among CPU machines, first the one that adds it, if it is there."""
        spare = self.members[: self.spare]
        return self._beginning_at(spare.index(part.server) if part.server in spare else part.tensor.key + part.index)

    def of_record(self, rank: int) -> Sequence[int]:
        """The servers of a rank's records."""
        return self._beginning_at(rank)

    def _beginning_at(self, turn: int) -> Sequence[int]:
        """The first ``copies`` servers; CPU machines take turns."""
        start = turn % self.spare if self.spare else 0
        spare, gpu = self.members[: self.spare], self.members[self.spare :]
        return [*spare[start:], *spare[:start], *gpu][: self.copies]


class Shadowing(Generic[M]):
    """The copies of all partitions that ranks of this machine own.

    ``credit_bytes``: see CREDIT_BYTES. ``handle`` is the only method that changes anything; no deadline is kept here,
    so it takes no time.
    """

    def __init__(self, topology: Topology, credit_bytes: int = CREDIT_BYTES) -> None:
        self._credit_bytes = credit_bytes
        self._run = 0
        self._durable = 0  # step of the run
        self._pieces: dict[tuple[int, int], ShadowedPiece[M]] = {}
        self._unacknowledged: dict[int, deque[SentMessage[M]]] = {}  # by server
        self._seeding_bytes = 0
        self._awaited: dict[int, Counter[int]] = {}  # by rank: messages and due partitions of each step
        self._recorded: dict[int, deque[int]] = {}  # by rank: steps with a record that are not held
        self._held: dict[int, int] = {}  # by rank: the latest step that is
        self._refused: dict[int, int] = {}  # by rank: the latest step whose record no server has taken
        self.servers = CopyServers.of(topology)
        self._handlers: Mapping[type, Callable[[Any], list[ShadowingAction[M]]]] = {
            StatesWatched: self._watch,
            StatesEnded: lambda event: self._give_up(event.parts),
            StepBegun: self._begin,
            StepDue: self._due,
            PartitionStepped: self._stepped,
            RecordPacked: self._record,
            ServerHolds: self._holds,
            ServerLacks: self._lacks,
            ServerReconnected: self._again,
            TopologyChanged: self._change,
        }

    def handle(self, event: ShadowingEvent[M]) -> list[ShadowingAction[M]]:
        """Return the actions that ``event`` requires."""
        return self._handlers[type(event)](event)

    @property
    def restorable_step(self) -> int | None:
        """The latest step that is held for all ranks of this machine; 0 if some states have no copy that is in step;
        None if there are no states."""
        if not self._pieces:
            return None
        if not all(any(copy.state is FOLLOWING for copy in piece.copies) for piece in self._pieces.values()):
            return 0
        return min(self._held.get(piece.part.owner, 0) for piece in self._pieces.values())

    def is_behind(self, part: OwnedPart) -> bool:
        """A server has not acknowledged an earlier sum of the partition. On a machine alone nothing else keeps its
        ranks from being faster than the link."""
        piece = self._piece(part)
        return piece is not None and piece.sums > 0

    def needs_sum(self, part: OwnedPart) -> bool:
        """A copy follows at a server that has not added the partition's sum."""
        piece = self._piece(part)
        return piece is not None and any(
            copy.server != part.server for copy in piece.copies if copy.state in (SEEDING, FOLLOWING)
        )

    def awaits_record(self, server: int, place: tuple[int, int], step: int) -> bool:
        """The record of this step and ``place``, its run and rank, was sent to a server that has not said that it holds
        it."""
        return any(isinstance(each, SendRecord) for each in self._sent(server, place, step))

    def _piece(self, part: OwnedPart) -> ShadowedPiece[M] | None:
        return self._pieces.get((part.tensor.key, part.index))

    # ---- partitions --------------------------------------------------------------------------------------------

    def _watch(self, event: StatesWatched) -> list[ShadowingAction[M]]:
        run = event.run
        actions: list[ShadowingAction[M]] = []
        if run != self._run:
            actions += self._give_up([piece.part for piece in self._pieces.values()])
            self._run, self._durable = run, 0
            self._awaited, self._recorded, self._held, self._refused = {}, {}, {}, {}
        for part, state_bytes in event.parts:
            piece = self._piece(part)
            if piece is not None and piece.run == run and _is_same(piece.part, part):
                piece.part = part
                actions += [*self._settle_due(piece), *self._place(piece)]
                continue
            if piece is not None:  # it is cut anew: servers keep the old states until they have the new ones
                actions += [each for each in self._end(piece) if not isinstance(each, SendEnd)]
            piece = ShadowedPiece(part, run, state_bytes)
            piece.copies += [ShadowCopy(piece, server) for server in self.servers.of_part(part)]
            self._pieces[piece.place] = piece
        self._awaited.setdefault(event.rank, Counter())
        return actions

    def _give_up(self, parts: Iterable[OwnedPart]) -> list[ShadowingAction[M]]:
        actions: list[ShadowingAction[M]] = []
        for part in parts:
            piece = self._piece(part)
            if piece is not None and piece.part is part:
                del self._pieces[piece.place]
                actions += self._end(piece)
        return actions

    def _end(self, piece: ShadowedPiece[M]) -> list[ShadowingAction[M]]:
        actions = self._settle_due(piece)
        for copy in list(piece.copies):
            actions += self._discard(copy)
        return actions

    # ---- steps -------------------------------------------------------------------------------------------------

    def _begin(self, event: StepBegun) -> list[ShadowingAction[M]]:
        awaited = self._awaited.setdefault(event.rank, Counter())
        for part in event.parts:
            piece = self._piece(part)
            if piece is not None and not piece.due:
                piece.due = event.step
                awaited[event.step] += 1
        return []

    def _due(self, event: StepDue) -> list[ShadowingAction[M]]:
        piece = self._piece(event.part)
        if piece is None:
            return []
        empty = next((copy for copy in piece.copies if copy.state is EMPTY and copy.not_before <= piece.due), None)
        if empty is None or (self._seeding_bytes and self._seeding_bytes + piece.state_bytes > self._credit_bytes):
            return []
        self._seeding_bytes += piece.state_bytes
        empty.move_to(COPYING)
        return [CopyStates()]

    def _stepped(self, event: PartitionStepped[M]) -> list[ShadowingAction[M]]:
        part, made, states, total = event.part, event.made, event.states, event.total
        piece = self._piece(part)
        if piece is None:
            return [ReleaseMemory(unused) for unused in (states, total) if unused is not None]
        actions: list[ShadowingAction[M]] = []
        kept_states = None if states is None else ShadowMemory(states)
        kept_sum = None if total is None else ShadowMemory(total)
        awaited = 0
        for copy in piece.copies:
            rank = copy.part.part.owner
            if copy.state is COPYING:
                if kept_states is None or kept_states.users:
                    self._give_back(copy)
                    copy.move_to(EMPTY)
                    continue
                copy.move_to(SEEDING)
                copy.seed = copy.last = made.numbers.step
                kept_states.users = 1
                actions.append(self._send(SendStates(copy.server, rank, made.numbers.step, False, kept_states, copy)))
            elif copy.state in (SEEDING, FOLLOWING):
                is_awaited = copy.state is FOLLOWING and copy.part.due == made.numbers.step
                awaited += is_awaited
                held = kept_sum if copy.server != part.server else None
                if held is not None:
                    held.users += 1
                    copy.part.sums += 1
                message = SendStep(copy.server, rank, made.numbers.step, is_awaited, held, copy, made, copy.last)
                copy.last = made.numbers.step
                actions.append(self._send(message))
        kept = [each for each in (kept_states, kept_sum) if each is not None and not each.users]
        actions += [ReleaseMemory(unused.memory) for unused in kept]
        if awaited:
            self._awaited[piece.part.owner][piece.due] += awaited - 1  # the messages count in its place
            piece.due = 0
        else:
            actions += self._settle_due(piece)
        self._durable = max(self._durable, made.numbers.durable)
        return [*actions, *self._moved(piece)]

    def _record(self, event: RecordPacked[M]) -> list[ShadowingAction[M]]:
        rank, run, step, packed, is_paced = event.rank, event.run, event.step, event.packed, event.is_paced
        servers = self.servers.of_record(rank)
        self._recorded.setdefault(rank, deque()).append(step)
        if not servers:
            self._refused[rank] = step
            return [ReleaseMemory(packed), *((TellRecorded(rank, run, step),) if is_paced else ())]
        self._awaited.setdefault(rank, Counter())[step] += len(servers)
        memory, copies = ShadowMemory(packed, len(servers)), RecordCopies(set(servers))
        return [self._send(SendRecord(server, rank, step, True, memory, run, copies, is_paced)) for server in servers]

    # ---- servers -----------------------------------------------------------------------------------------------

    def _holds(self, event: ServerHolds) -> list[ShadowingAction[M]]:
        found = next(self._sent(event.server, event.place, event.step), None)
        if found is None:
            return []  # it says again what it has said before
        if isinstance(found, SendRecord):
            found.copies.held.add(event.server)
        actions = self._remove(found)
        if isinstance(found, SendStates) and not found.is_void and found.copy.state is SEEDING:
            self._give_back(found.copy)
            found.copy.move_to(FOLLOWING)
            found.copy.refusals = 0
            self._await_steps_of(found.copy)
            actions += self._moved(found.copy.part)
        if not isinstance(found, SendRecord) and found.copy.state is FOLLOWING:
            # Steps that were sent behind the states count only once they are there, too.
            found.copy.part.has_followed |= found.step == found.copy.last
        return actions

    def _await_steps_of(self, copy: ShadowCopy[M]) -> None:
        """It follows from now on: the steps that were sent behind its states count as well."""
        for message in self._unacknowledged.get(copy.server, ()):
            if isinstance(message, SendStep) and self._counts(message, copy):
                message.is_awaited = True
                self._awaited.setdefault(message.rank, Counter())[message.step] += 1

    @staticmethod
    def _counts(message: SentMessage[M], copy: ShadowCopy[M]) -> bool:
        return not isinstance(message, SendRecord) and message.copy is copy and not message.is_void

    def _lacks(self, event: ServerLacks) -> list[ShadowingAction[M]]:
        server, place, step = event.server, event.place, event.step
        for record in self._sent(server, place, step):
            if isinstance(record, SendRecord):
                if record.is_last_hope:
                    self._recorded[record.rank].remove(step)
                    self._refuse(record)
                return self._remove(record)
        piece = self._pieces.get(place)
        copy = next((each for each in piece.copies if each.server == server), None) if piece is not None else None
        if copy is None or copy.state in (EMPTY, COPYING) or step < copy.seed:
            return self._read(server, place, step)  # that was said of earlier states
        if copy.state is SEEDING:  # it has no memory, perhaps
            copy.refusals += 1
            copy.not_before = copy.seed + min(1 << copy.refusals, MOST_STEPS_BETWEEN)
        return [*self._drop(copy), *self._read(server, place, step)]

    def _refuse(self, record: SendRecord[M]) -> None:
        """No server takes it: the step is never durable, though the rank's later ones may be held."""
        if record.run == self._run:
            self._refused[record.rank] = max(record.step, self._refused.get(record.rank, 0))

    def _read(self, server: int, place: tuple[int, int], step: int) -> list[ShadowingAction[M]]:
        """A server has read a message, of which it makes nothing."""
        read = [each for each in self._sent(server, place, step) if each.is_void]
        return [action for each in read for action in self._remove(each)]

    def _remove(self, message: SentMessage[M]) -> list[ShadowingAction[M]]:
        self._unacknowledged[message.server].remove(message)
        return self._acknowledged(message)

    def _again(self, event: ServerReconnected) -> list[ShadowingAction[M]]:
        queue = self._unacknowledged.get(event.server, deque())
        released = [action for each in list(queue) if each.is_void for action in self._remove(each)]
        return [*released, *queue]

    def _change(self, event: TopologyChanged) -> list[ShadowingAction[M]]:
        self.servers = CopyServers.of(event.topology)
        actions: list[ShadowingAction[M]] = []
        members = {server.member_id for server in event.topology.servers}
        for message in [each for queue in self._unacknowledged.values() for each in queue]:
            if isinstance(message, SendRecord):
                message.copies.held &= members
        for server in [known for known in self._unacknowledged if known not in members]:
            for message in self._unacknowledged.pop(server):
                others = self._others(message) if isinstance(message, SendRecord) else ()
                if isinstance(message, SendRecord) and others:
                    message.server = others[0]
                    message.copies.sent.add(message.server)
                    actions.append(self._send(message))
                else:
                    if isinstance(message, SendRecord) and message.is_last_hope:
                        self._refuse(message)
                    actions += self._acknowledged(message)
        for piece in self._pieces.values():
            for copy in [copy for copy in piece.copies if copy.server not in members]:
                actions += self._drop(copy)
                piece.copies.remove(copy)
            actions += self._place(piece)
        return actions

    def _others(self, record: SendRecord[M]) -> Sequence[int]:
        """Servers that were not sent a record yet."""
        return [server for server in self.servers.of_record(record.rank) if server not in record.copies.sent]

    def _place(self, piece: ShadowedPiece[M]) -> list[ShadowingAction[M]]:
        """Copies belong to other servers, perhaps."""
        actions: list[ShadowingAction[M]] = []
        wanted = self.servers.of_part(piece.part)
        for copy in [copy for copy in piece.copies if copy.server not in wanted and copy.state is not FOLLOWING]:
            actions += self._discard(copy)
        missing = [server for server in wanted if all(copy.server != server for copy in piece.copies)]
        piece.copies += [ShadowCopy(piece, server) for server in missing]
        return [*actions, *self._moved(piece)]

    def _moved(self, piece: ShadowedPiece[M]) -> list[ShadowingAction[M]]:
        """End the copies beside those that belong where they are, once these have the durable step: until then it may
        be there alone."""
        servers = self.servers.of_part(piece.part)
        wanted = [copy for copy in piece.copies if copy.server in servers]
        is_there = len(wanted) == len(servers)
        if len(piece.copies) == len(wanted) or not (is_there and all(self._has_durable(copy) for copy in wanted)):
            return []
        actions: list[ShadowingAction[M]] = []
        for copy in [copy for copy in piece.copies if copy not in wanted]:
            actions += self._discard(copy)
        return actions

    def _has_durable(self, copy: ShadowCopy[M]) -> bool:
        """A server has said that it can deliver the durable step."""
        unsaid = (each.step for each in self._unacknowledged.get(copy.server, ()) if self._counts(each, copy))
        return copy.state is FOLLOWING and copy.seed <= self._durable < min(unsaid, default=self._durable + 1)

    def _discard(self, copy: ShadowCopy[M]) -> list[ShadowingAction[M]]:
        copy.part.copies.remove(copy)
        is_known = copy.state in (SEEDING, FOLLOWING)
        actions = self._drop(copy)
        return [*actions, SendEnd(copy.server, copy.part.part)] if is_known else actions

    # ---- inside ------------------------------------------------------------------------------------------------

    def _sent(self, server: int, place: tuple[int, int], step: int) -> Iterator[SentMessage[M]]:
        """Unacknowledged messages about a step of a partition, or of a rank's record. ``place``: as in ServerHolds."""
        for each in self._unacknowledged.get(server, ()):
            its_place = (each.run, each.rank) if isinstance(each, SendRecord) else each.copy.part.place
            if each.step == step and its_place == place:
                yield each

    def _send(self, message: SentMessage[M]) -> SentMessage[M]:
        self._unacknowledged.setdefault(message.server, deque()).append(message)
        return message

    def _drop(self, copy: ShadowCopy[M]) -> list[ShadowingAction[M]]:
        """The server's copy is void. One that is being copied stays so until the step is made."""
        actions: list[ShadowingAction[M]] = []
        queue = self._unacknowledged.get(copy.server, deque())
        for message in [each for each in queue if self._counts(each, copy)]:
            if message.held is None:
                actions += self._remove(message)
            else:
                was_awaited, message.is_awaited, message.is_void = message.is_awaited, False, True
                actions += self._settle(message.rank, message.step) if was_awaited else ()
        if copy.state in (SEEDING, COPYING):
            self._give_back(copy)
        if copy.state is not EMPTY:
            copy.move_to(EMPTY)
        return actions

    def _give_back(self, copy: ShadowCopy[M]) -> None:
        self._seeding_bytes -= copy.part.state_bytes

    def _acknowledged(self, message: SentMessage[M]) -> list[ShadowingAction[M]]:
        """It is not waited for any more."""
        actions: list[ShadowingAction[M]] = []
        if message.held is not None:
            message.held.users -= 1
            if not message.held.users:
                actions.append(ReleaseMemory(message.held.memory))
            if isinstance(message, SendStep):
                piece = message.copy.part
                piece.sums -= 1
                actions += () if piece.sums else [CatchUp(piece.part)]
        if isinstance(message, SendRecord) and message.is_paced and not (message.held and message.held.users):
            actions.append(TellRecorded(message.rank, message.run, message.step))
        return [*actions, *(self._settle(message.rank, message.step) if message.is_awaited else ())]

    def _settle_due(self, piece: ShadowedPiece[M]) -> list[ShadowingAction[M]]:
        due, piece.due = piece.due, 0
        return self._settle(piece.part.owner, due) if due else []

    def _settle(self, rank: int, step: int) -> list[ShadowingAction[M]]:
        """One thing less is awaited for a step of a rank."""
        awaited = self._awaited.get(rank)
        if awaited is None or not awaited[step]:
            return []  # of an earlier run
        awaited[step] -= 1
        if not awaited[step]:
            del awaited[step]
        recorded, held = self._recorded.get(rank, deque()), 0
        while recorded and (not awaited or recorded[0] < min(awaited)):
            held = recorded.popleft()
        if not held:
            return []
        self._held[rank] = max(held, self._held.get(rank, 0))
        is_whole = all(piece.has_followed for piece in self._pieces.values() if piece.part.owner == rank)
        return [TellHeld(rank, held, is_whole, self._refused.get(rank, 0))]


def _is_same(one: OwnedPart, other: OwnedPart) -> bool:
    return (one.owner, one.first, one.count) == (other.owner, other.first, other.count)
