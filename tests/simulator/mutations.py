"""Cores that are broken on purpose, each in one way: a simulator that does not find out is of no use.

Each class names the parts that are broken, as subclasses of the real ones. Their seeds are of messages as they come:
batches change which seeds show the rarest, not what can be shown.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from byteps_py.scheduler.core import LinksChanged, SchedulerCore
from byteps_py.scheduler.job import Job
from byteps_py.scheduler.member_links.links import MemberLinks
from byteps_py.scheduler.roster import Roster
from byteps_py.server.round_state import Reduce, Round, RoundState
from byteps_py.server.rounds import Rounds
from byteps_py.tensors import TensorSpec
from byteps_py.wire.data_link import Header, name_of
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.events import BytesReady, NameDeclared, NameRejected, NameReopened, Release
from byteps_py.worker.core.placement_view import PlacementView
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.scatter import Scatter
from byteps_py.worker.core.tensor import Part, RankSlot, SlotState, Tensor
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.slot_memory import SlotMemory
from byteps_py.worker.ranks.join_handler import JoinHandler
from byteps_py.worker.ranks.rank_server import RankServer
from byteps_py.worker.ranks.request_handler import RequestHandler
from byteps_py.worker.service import CommunicationService

from .ledger import LedgerNetwork
from .parts import Parts


class Unbatched:
    """In the place of a BatchingLink."""

    def __init__(self, link: Any, _: object) -> None:
        self.send, self.close = link.send, link.close

    def on_message(self, _: object) -> None:
        pass

    def forget(self) -> None:
        pass


class Mutation(Parts):
    link = Unbatched


def with_roster(roster: type[Roster]) -> type[MemberLinks]:
    job = type("Job", (Job,), {"roster_class": roster})
    core = type("SchedulerCore", (SchedulerCore,), {"job_class": job})
    return type("MemberLinks", (MemberLinks,), {"core_class": core})


class CountADuplicate(Mutation):
    """A server that counts contributions, whoever sends them."""

    class rounds(Rounds[Any]):
        def _collect(self, round_: Round[Any], new: Any, now: float) -> Any:
            if new.header.sender in round_.contributions:
                others = [m for m in range(self.num_machines) if m not in round_.contributions]
                new.header.sender = others[0]
            return super()._collect(round_, new, now)


class DeliverEarly(Mutation):
    """A server that answers when all machines but one have given."""

    class rounds(Rounds[Any]):
        def _collect(self, round_: Round[Any], new: Any, now: float) -> Any:
            actions = super()._collect(round_, new, now)
            if not actions and len(round_.contributions) == self.num_machines - 1 and self.num_machines > 2:
                return [Reduce(round_)]
            return actions


class OrderByArrival(Mutation):
    class rounds(Rounds[Any]):
        class round_class(Round[Any]):
            def in_order(self) -> list[Any]:
                return list(self.contributions.values())


class DivideByOneTooMany(Mutation):
    class pipeline(RoundPipeline):
        def divisor(self, spec: TensorSpec) -> int:
            return super().divisor(spec) + spec.average

    class scatter(Scatter):
        def divisor(self, spec: TensorSpec) -> int:
            return super().divisor(spec) + spec.average


class DivideByAllRanks(Mutation):
    """Also where only a group takes part."""

    class pipeline(RoundPipeline):
        def divisor(self, spec: TensorSpec) -> int:
            return self.size if spec.average else 1

    class scatter(Scatter):
        def divisor(self, spec: TensorSpec) -> int:
            return len(self._machine_of) if spec.average else 1


class DivideByThoseWhoGive(Mutation):
    """As far as a machine knows: without its own ranks that have joined."""

    class joining(JoinHandler):
        def join(self, rank: Any) -> None:
            super().join(rank)
            self._executor._pipeline.size -= 1


class OneContributionBuffer(Mutation):
    """A rank's contribution lies where its next one goes."""

    class memory(SlotMemory):
        class slot_class(RankSlot):
            @property
            def input(self) -> Any:
                return self.inputs[0]


class ForgetWhoWaits(Mutation):
    """Ranks that wait in a round of the old spec are not asked: then those who disagree wait for ever."""

    class agreement(Agreement):
        def _ready(self, event: BytesReady) -> Any:
            return []


class VoteInRoundsOnTheirWay(Mutation):
    class agreement(Agreement):
        def _reopen(self, event: NameReopened) -> Any:
            return super()._reopen(NameReopened(event.name, event.generation, 0))


class DeadWithoutLastWords(Mutation):
    """The end of a process is seen before what it said last."""

    class rank_server(RankServer):
        def _ended(self, rank: Any, connection: Any) -> None:
            self._died(rank, connection)


class SilentAboutTheDead(Mutation):
    class rank_server(RankServer):
        def fail(self, error: Any) -> None:
            self.failure = error


class ReuseMemoryOfVoidSlots(Mutation):
    """Before their rank can know that they are void."""

    class agreement(Agreement):
        def _reject(self, event: NameRejected) -> Any:
            actions = super()._reject(event)
            failed = [slot for slots in self._names[event.name].failed.values() for slot in slots]
            self._names[event.name].failed.clear()
            for slot in failed:
                slot.move_to(SlotState.RELEASED)
            return [*actions, Release(tuple(slot for slot in failed if slot.tensor is None))]


class LastDeclarationCounts(Mutation):
    """A rank that declares a name twice before others do votes with the second declaration only."""

    class agreement(Agreement):
        def _declare(self, event: NameDeclared) -> Any:
            slot = event.slot
            name = self._names.get(slot.spec.name)
            if name is not None and name.proposal is not None and slot.local_rank in name.proposal.slots:
                name.proposal.slots[slot.local_rank] = slot
                name.proposal.votes[slot.local_rank] = slot.spec
                return self._poll(name)
            return super()._declare(event)


class WaitForEverAtBarriers(Mutation):
    class requests(RequestHandler):
        def at_barrier(self) -> tuple[list[int], float]:
            return [], 0.0


class ForgetToWant(Mutation):
    """A server that gets a round once more does not ask those who have its result for their parts."""

    class rounds(Rounds[Any]):
        def tick(self, now: float) -> Any:
            return []


class SupplyAnotherRound(Mutation):
    class agreement(Agreement):
        class tensor_class(Tensor):
            def given(self, round_: int) -> Any:
                return super().given(round_ - 1)


class GiveContributionsBackEarly(Mutation):
    """A machine's sum lies where its next one goes."""

    class agreement(Agreement):
        class tensor_class(Tensor):
            @property
            def contribution(self) -> Any:
                return self.contributions[0] if self.contributions else super().contribution


class ReuseAnswerBlocks(Mutation):
    """Of partitions that have moved, where the server of before may yet write its answer."""

    class network(LedgerNetwork):
        def withdraw(self, part: Part, round_: int, server: int) -> None:
            self._memory.take_answer_block(part)
            super().withdraw(part, round_, server)


class CountWhatIsResentTwice(Mutation):
    class rounds(Rounds[Any]):
        def _collect(self, round_: Round[Any], new: Any, now: float) -> Any:
            others = [m for m in range(self.num_machines) if m not in round_.contributions]
            if new.header.sender in round_.contributions and new.header.is_resent:
                new.header.sender = others[0]
            return super()._collect(round_, new, now)


class PlaceOtherwiseAfterAnEpoch(Mutation):
    """On one machine."""

    class placing(PlacementView):
        def change(self, topology: Topology) -> None:
            if topology.machine_index == 1:
                servers = tuple(reversed(topology.servers))
                topology = dataclasses.replace(topology, servers=servers)
            super().change(topology)


class _StaysInAnEpoch(Roster):
    def _open_epoch(self, reason: str) -> Any:
        membership = super()._open_epoch(reason)
        if self.epoch > 1:
            self.epoch -= 1
            membership.epoch = self.epoch
        return membership


class StayInAnEpoch(Mutation):
    """Other servers, but the epoch's number is that of before."""

    member_links = with_roster(_StaysInAnEpoch)


class _GoesBack(Roster):
    def _open_epoch(self, reason: str) -> Any:
        membership = super()._open_epoch(reason)
        membership.epoch = max(1, 4 - self.epoch)
        return membership


class GoBackAnEpoch(Mutation):
    member_links = with_roster(_GoesBack)


class _Forgets(Roster):
    def _open_epoch(self, reason: str) -> Any:
        self._workers = self.workers()
        return super()._open_epoch(reason)


class ForgetWorkersThatLeft(Mutation):
    """An epoch that opens after a machine has left, its ranks done, has a machine less."""

    member_links = with_roster(_Forgets)


class LeaveWithoutFarewell(Mutation):
    """A machine ends as soon as its ranks have, though others may lack the last results."""

    class service(CommunicationService):
        def _go(self) -> None:
            self._loop.stop()


class LoseWhatWasOnTheWire(Mutation):
    """Nothing is sent again when a connection breaks."""

    class executor(Executor):
        def on_reconnected(self, server: int) -> None:
            pass


class KeepRoundsThatWereAnsweredElsewhere(Mutation):
    """A round that another server has completed waits for ever, and is in the way of those after it."""

    class rounds(Rounds[Any]):
        def _collect(self, round_: Round[Any], new: Any, now: float) -> Any:
            kept = {n: r for n, r in round_.partition.rounds.items() if n < round_.number}
            given = {n: dict(r.contributions) for n, r in kept.items()}
            actions = super()._collect(round_, new, now)
            for number, before in kept.items():
                if number not in round_.partition.rounds:
                    round_.partition.rounds[number] = before
                    before.contributions.update(given[number])
            return actions


class WelcomeToAFailedJob(Mutation):
    """Ranks that wait while the cluster comes together are welcomed, though one of them was found dead."""

    class rank_server(RankServer):
        def _welcome(self, rank: Any) -> None:
            failure, self.failure = self.failure, None
            super()._welcome(rank)
            self.failure = self.failure or failure


class GoOnBeforeTheSchedulerKnows(Mutation):
    """A machine that does without a rank as soon as it has joined, so that others may overtake it and join as well."""

    class joining(JoinHandler):
        def join(self, rank: Any) -> None:
            super().join(rank)
            self._out.add(rank.local_rank)
            self._leave_out({rank.local_rank}, self._agreement.tensors())


class GiveUpBeforeAServerIsReached(Mutation):
    """Though nobody knows yet that the server is dead that has the sum."""

    class network(LedgerNetwork):
        is_whole = True


class BeLateWithADeadline(Mutation):
    """Whoever waits in vain is told, but later than promised."""

    class service(CommunicationService):
        def _waiting(self, age_s: float) -> Any:
            return super()._waiting(age_s + 5 * (age_s > 30))


class KnowAnswersByTheirRounds(Mutation):
    """Not by their places, though a partition may come back to a server in the same round."""

    class memory(SlotMemory):
        def take_abandoned(self, header: Header, server: int) -> bool:
            found = next((key for key in self._abandoned if key[:2] == (server, name_of(header))), None)
            if found is not None:
                self.machine.free(self._abandoned.pop(found))
            return found is not None


class WaitForSumsThatAnotherWasFasterWith(Mutation):
    """Though their partitions are back with the next round."""

    class rounds(Rounds[Any]):
        def _out_of_step(self, partition: Any, new: Any) -> str:
            before = partition.rounds.get(new.header.round - 1)
            is_slow = before is not None and before.state is RoundState.REDUCING and not before.is_resent
            return "the round before is not delivered yet" if is_slow else super()._out_of_step(partition, new)


class SharesStayAsTheyAre(Mutation):
    """On one machine, if only they change, and not the servers."""

    class placing(PlacementView):
        def change(self, topology: Topology) -> None:
            before, after = ([each.member_id for each in of.servers] for of in (self._topology, topology))
            if before != after or topology.machine_index != 1:
                super().change(topology)


class _SharesFollowLater(Roster):
    def set_link_rates(self, link_mbit: Any) -> None:
        """The members of this epoch are told other weights than those of the next one."""
        self.epoch -= 1 if self.epoch > 1 else 0
        super().set_link_rates(link_mbit)


class SharesFollowInAnOldEpoch(Mutation):
    member_links = with_roster(_SharesFollowLater)


class _RatesAreNotKept(MemberLinks):
    def _links_changed(self, event: LinksChanged, now_s: float) -> Any:
        out = self.core.handle(event, now_s)
        return self._number(out)


class RatesAreNotKept(Mutation):
    """In the journal: a scheduler that is started again goes back to earlier shares."""

    member_links = _RatesAreNotKept


class _BelievesWhatItHasSent(MemberLinks):
    def _resume(self, known: Any, newcomer: Any, register: Any, now_s: float) -> Any:
        register.epoch = known.epoch
        return super()._resume(known, newcomer, register, now_s)


class TakeTablesThatWereSentForReceived(Mutation):
    """A table of members that was on its way when the connection broke is sent again as a change of itself."""

    member_links = _BelievesWhatItHasSent


class KeepRoundsWithoutAShare(Mutation):
    """A server that others have taken all partitions from waits for what will never come."""

    class rounds(Rounds[Any]):
        def membership(
            self, epoch: int, num_machines: int, now: float, since_epoch: int = 0, has_share: bool = True
        ) -> Any:
            waiting = [] if has_share else self._rounds(RoundState.COLLECTING)
            for round_ in waiting:
                round_.state = RoundState.REDUCING
            done = super().membership(epoch, num_machines, now, since_epoch, has_share)
            for round_ in waiting:
                round_.state = RoundState.COLLECTING
            return done


#: Of a job whose links change.
LINKS_MUTATIONS: dict[type[Parts], int] = {
    SharesStayAsTheyAre: 12,
    SharesFollowInAnOldEpoch: 29,
    RatesAreNotKept: 57,
    KeepRoundsWithoutAShare: 89,
    TakeTablesThatWereSentForReceived: 355,
}

#: With the seed that shows it first, as `tests/jobs/test_simulator.py` found it last.
MUTATIONS: dict[type[Parts], int] = {
    CountADuplicate: 7,
    DeliverEarly: 3,
    OrderByArrival: 3,
    DivideByOneTooMany: 5,
    DivideByAllRanks: 5,
    DivideByThoseWhoGive: 5,
    OneContributionBuffer: 0,
    ForgetWhoWaits: 12,
    VoteInRoundsOnTheirWay: 18,
    ReuseMemoryOfVoidSlots: 6,
    LastDeclarationCounts: 2,
    WaitForEverAtBarriers: 33,
    WelcomeToAFailedJob: 290,
    DeadWithoutLastWords: 7,
    SilentAboutTheDead: 8,
    ForgetToWant: 66,
    SupplyAnotherRound: 5,
    GiveContributionsBackEarly: 5,
    ReuseAnswerBlocks: 169,
    CountWhatIsResentTwice: 112,
    PlaceOtherwiseAfterAnEpoch: 12,
    StayInAnEpoch: 3,
    GoBackAnEpoch: 9,
    ForgetWorkersThatLeft: 493,
    GoOnBeforeTheSchedulerKnows: 13192,
    LeaveWithoutFarewell: 295,
    LoseWhatWasOnTheWire: 55,
    KeepRoundsThatWereAnsweredElsewhere: 1071,
    GiveUpBeforeAServerIsReached: 10003,
    BeLateWithADeadline: 28,
    KnowAnswersByTheirRounds: 509,
    WaitForSumsThatAnotherWasFasterWith: 2149,
}
