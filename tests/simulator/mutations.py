"""Cores that are broken on purpose, each in one way: a simulator that does not find out is of no use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from byteps_py.scheduler.roster import Roster
from byteps_py.server import rounds
from byteps_py.server.actions import Reduce
from byteps_py.server.partition import Round, State
from byteps_py.server.rounds import Rounds
from byteps_py.tensors import TensorSpec
from byteps_py.wire import Header, name_of
from byteps_py.worker.actions import Release
from byteps_py.worker.agreement import Agreement
from byteps_py.worker.desk import Desk
from byteps_py.worker.executor import Executor
from byteps_py.worker.joining import Joining
from byteps_py.worker.memory import Memory
from byteps_py.worker.network import Network
from byteps_py.worker.placing import Placing
from byteps_py.worker.requests import Requests
from byteps_py.worker.service import Service
from byteps_py.worker.tensor import Part, RankSlot, Tensor
from byteps_py.worker.topology import Topology


def count_a_duplicate(core: pytest.MonkeyPatch) -> None:
    """A server that counts contributions, whoever sends them."""
    real = Rounds._collect

    def collect(self: Rounds[Any], round_: Round[Any], new: Any, now: float) -> Any:
        if new.header.sender in round_.contributions:
            others = [m for m in range(self.num_machines) if m not in round_.contributions]
            new.header.sender = others[0]
        return real(self, round_, new, now)

    core.setattr(Rounds, "_collect", collect)


def deliver_early(core: pytest.MonkeyPatch) -> None:
    """A server that answers when all machines but one have given."""
    real = Rounds._collect

    def collect(self: Rounds[Any], round_: Round[Any], new: Any, now: float) -> Any:
        actions = real(self, round_, new, now)
        if not actions and len(round_.contributions) == self.num_machines - 1 and self.num_machines > 2:
            return [Reduce(round_)]
        return actions

    core.setattr(Rounds, "_collect", collect)


def order_by_arrival(core: pytest.MonkeyPatch) -> None:
    core.setattr(Round, "in_order", lambda self: list(self.contributions.values()))


def divide_by_one_too_many(core: pytest.MonkeyPatch) -> None:
    real = TensorSpec.divisor
    core.setattr(TensorSpec, "divisor", lambda self, size: real(self, size) + self.average)


def divide_by_all_ranks(core: pytest.MonkeyPatch) -> None:
    """Also where only a group takes part."""
    core.setattr(TensorSpec, "divisor", lambda self, size: size if self.average else 1)


def divide_by_those_who_give(core: pytest.MonkeyPatch) -> None:
    """As far as a machine knows: without its own ranks that have joined."""
    real = Joining.join

    def join(self: Joining, rank: Any) -> None:
        real(self, rank)
        self._pipeline.size -= 1

    core.setattr(Joining, "join", join)


def one_contribution_buffer(core: pytest.MonkeyPatch) -> None:
    """A rank's contribution lies where its next one goes."""
    core.setattr(RankSlot, "input", property(lambda self: self.inputs[0]))


def forget_who_waits(core: pytest.MonkeyPatch) -> None:
    """Ranks that wait in a round of the old spec are not asked: then those who disagree wait for ever."""
    core.setattr(Agreement, "came", lambda self, slot: [])


def vote_in_rounds_on_their_way(core: pytest.MonkeyPatch) -> None:
    real = Agreement.reopened
    core.setattr(Agreement, "reopened", lambda self, name, generation, rounds: real(self, name, generation, 0))


def dead_without_last_words(core: pytest.MonkeyPatch) -> None:
    """The end of a process is seen before what it said last."""
    core.setattr(Desk, "_ended", Desk._died)


def silent_about_the_dead(core: pytest.MonkeyPatch) -> None:
    core.setattr(Desk, "fail", lambda self, error: setattr(self, "failure", error))


def reuse_memory_of_void_slots(core: pytest.MonkeyPatch) -> None:
    """Before their rank can know that they are void."""
    real = Agreement.rejected

    def rejected(self: Agreement, name: str, generation: int, *more: Any) -> Any:
        actions, old = real(self, name, generation, *more)
        failed = [slot for slots in self._names[name].failed.values() for slot in slots]
        self._names[name].failed.clear()
        for slot in failed:
            slot.is_kept = False
        return [*actions, Release(tuple(slot for slot in failed if slot.tensor is None))], old

    core.setattr(Agreement, "rejected", rejected)


def last_declaration_counts(core: pytest.MonkeyPatch) -> None:
    """A rank that declares a name twice before others do votes with the second declaration only."""
    real = Agreement.declare

    def declare(self: Agreement, slot: RankSlot) -> Any:
        name = self._names.get(slot.spec.name)
        if name is not None and name.proposal is not None and slot.local_rank in name.proposal.slots:
            name.proposal.slots[slot.local_rank] = slot
            name.proposal.votes[slot.local_rank] = slot.spec
            return self._poll(name)
        return real(self, slot)

    core.setattr(Agreement, "declare", declare)


def wait_for_ever_at_barriers(core: pytest.MonkeyPatch) -> None:
    core.setattr(Requests, "at_barrier", lambda self: ([], 0.0))


def forget_to_want(core: pytest.MonkeyPatch) -> None:
    """A server that gets a round once more does not ask those who have its result for their parts."""
    core.setattr(Rounds, "tick", lambda self, now: [])


def supply_another_round(core: pytest.MonkeyPatch) -> None:
    real = Tensor.given
    core.setattr(Tensor, "given", lambda self, round_: real(self, round_ - 1))


def give_contributions_back_early(core: pytest.MonkeyPatch) -> None:
    """A machine's sum lies where its next one goes."""
    real = Tensor.contribution.fget  # type: ignore[attr-defined]
    core.setattr(
        Tensor, "contribution", property(lambda self: self.contributions[0] if self.contributions else real(self))
    )


def reuse_answer_blocks(core: pytest.MonkeyPatch) -> None:
    """Of partitions that have moved, where the server of before may yet write its answer."""
    real = Network.withdraw

    def withdraw(self: Network, part: Part, round_: int, server: int) -> None:
        self._memory.take_answer_block(part)
        real(self, part, round_, server)

    core.setattr(Network, "withdraw", withdraw)


def count_what_is_resent_twice(core: pytest.MonkeyPatch) -> None:
    real = Rounds._collect

    def collect(self: Rounds[Any], round_: Round[Any], new: Any, now: float) -> Any:
        others = [m for m in range(self.num_machines) if m not in round_.contributions]
        if new.header.sender in round_.contributions and new.header.is_resent:
            new.header.sender = others[0]
        return real(self, round_, new, now)

    core.setattr(Rounds, "_collect", collect)


def place_otherwise_after_an_epoch(core: pytest.MonkeyPatch) -> None:
    """On one machine."""
    real = Placing.change

    def change(self: Placing, topology: Topology) -> None:
        if topology.machine_index == 1:
            servers = tuple(reversed(topology.servers))
            topology = dataclasses.replace(topology, servers=servers)
        real(self, topology)

    core.setattr(Placing, "change", change)


def stay_in_an_epoch(core: pytest.MonkeyPatch) -> None:
    """Other servers, but the epoch's number is that of before."""
    real = Roster._open_epoch

    def open_epoch(self: Roster, reason: str) -> Any:
        membership = real(self, reason)
        if self.epoch > 1:
            self.epoch -= 1
            membership.epoch = self.epoch
        return membership

    core.setattr(Roster, "_open_epoch", open_epoch)


def go_back_an_epoch(core: pytest.MonkeyPatch) -> None:
    real = Roster._open_epoch

    def open_epoch(self: Roster, reason: str) -> Any:
        membership = real(self, reason)
        membership.epoch = max(1, 4 - self.epoch)
        return membership

    core.setattr(Roster, "_open_epoch", open_epoch)


def forget_workers_that_left(core: pytest.MonkeyPatch) -> None:
    """An epoch that opens after a machine has left, its ranks done, has a machine less."""
    real = Roster._open_epoch

    def open_epoch(self: Roster, reason: str) -> Any:
        self._workers = self.workers()
        return real(self, reason)

    core.setattr(Roster, "_open_epoch", open_epoch)


def leave_without_farewell(core: pytest.MonkeyPatch) -> None:
    """A machine ends as soon as its ranks have, though others may lack the last results."""
    core.setattr(Service, "_go", lambda self: self._loop.stop())


def lose_what_was_on_the_wire(core: pytest.MonkeyPatch) -> None:
    """Nothing is sent again when a connection breaks."""
    core.setattr(Executor, "again", lambda self, server: None)


def keep_rounds_that_were_answered_elsewhere(core: pytest.MonkeyPatch) -> None:
    """A round that another server has completed waits for ever, and is in the way of those after it."""
    real = Rounds._collect

    def collect(self: Rounds[Any], round_: Round[Any], new: Any, now: float) -> Any:
        kept = {n: r for n, r in round_.partition.rounds.items() if n < round_.number}
        given = {n: dict(r.contributions) for n, r in kept.items()}
        actions = real(self, round_, new, now)
        for number, before in kept.items():
            if number not in round_.partition.rounds:
                round_.partition.rounds[number] = before
                before.contributions.update(given[number])
        return actions

    core.setattr(Rounds, "_collect", collect)


def welcome_to_a_failed_job(core: pytest.MonkeyPatch) -> None:
    """Ranks that wait while the cluster comes together are welcomed, though one of them was found dead."""

    def open_(self: Desk, requests: Requests) -> None:
        self._open = requests
        waiting, self._waiting = self._waiting, []
        for channel, local_rank in waiting:
            self._welcome(channel, local_rank)

    core.setattr(Desk, "open", open_)


def go_on_before_the_scheduler_knows(core: pytest.MonkeyPatch) -> None:
    """A machine that does without a rank as soon as it has joined, so that others may overtake it and join as well."""
    real = Joining.join

    def join(self: Joining, rank: Any) -> None:
        real(self, rank)
        self._out.add(rank.local_rank)
        self._leave_out({rank.local_rank}, self._agreement.tensors())

    core.setattr(Joining, "join", join)


def give_up_before_a_server_is_reached(core: pytest.MonkeyPatch) -> None:
    """Though nobody knows yet that the server is dead that has the sum."""
    core.setattr(Network, "is_whole", True)


def be_late_with_a_deadline(core: pytest.MonkeyPatch) -> None:
    """Whoever waits in vain is told, but later than promised."""
    core.setattr(Service, "_waiting", lambda self, age_s, real=Service._waiting: real(self, age_s + 5 * (age_s > 30)))


def know_answers_by_their_rounds(core: pytest.MonkeyPatch) -> None:
    """Not by their places, though a partition may come back to a server in the same round."""

    def take_abandoned(self: Memory, header: Header, server: int) -> bool:
        found = next((key for key in self._abandoned if key[:2] == (server, name_of(header))), None)
        if found is not None:
            self.machine.free(self._abandoned.pop(found))
        return found is not None

    core.setattr(Memory, "take_abandoned", take_abandoned)


def answer_where_it_was_wanted_first(core: pytest.MonkeyPatch) -> None:
    """Of what comes back while it is being added up."""

    def is_asked_anew(known: Any, new: Any) -> bool:
        return not new.header.is_supply and (known.origin is not new.origin or known.header.is_supply)

    core.setattr(rounds, "_is_asked_anew", is_asked_anew)


def wait_for_sums_that_another_was_faster_with(core: pytest.MonkeyPatch) -> None:
    """Though their partitions are back with the next round."""
    real = Rounds._out_of_step

    def out_of_step(self: Rounds[Any], partition: Any, new: Any) -> str:
        before = partition.rounds.get(new.header.round - 1)
        is_slow = before is not None and before.state is State.REDUCING and not before.is_resent
        return "the round before is not delivered yet" if is_slow else real(self, partition, new)

    core.setattr(Rounds, "_out_of_step", out_of_step)


#: With the seed that shows it first, as `tests/test_simulator.py` found it last.
MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    count_a_duplicate: 7,
    deliver_early: 3,
    order_by_arrival: 3,
    divide_by_one_too_many: 2,
    divide_by_all_ranks: 2,
    divide_by_those_who_give: 5,
    one_contribution_buffer: 0,
    forget_who_waits: 12,
    vote_in_rounds_on_their_way: 18,
    reuse_memory_of_void_slots: 6,
    last_declaration_counts: 2,
    wait_for_ever_at_barriers: 33,
    welcome_to_a_failed_job: 290,
    dead_without_last_words: 0,
    silent_about_the_dead: 8,
    forget_to_want: 66,
    supply_another_round: 5,
    give_contributions_back_early: 5,
    reuse_answer_blocks: 169,
    count_what_is_resent_twice: 112,
    place_otherwise_after_an_epoch: 12,
    stay_in_an_epoch: 3,
    go_back_an_epoch: 9,
    forget_workers_that_left: 534,
    go_on_before_the_scheduler_knows: 13192,
    leave_without_farewell: 295,
    lose_what_was_on_the_wire: 55,
    keep_rounds_that_were_answered_elsewhere: 1071,
    give_up_before_a_server_is_reached: 10003,
    be_late_with_a_deadline: 28,
    know_answers_by_their_rounds: 509,
    answer_where_it_was_wanted_first: 2139,
    wait_for_sums_that_another_was_faster_with: 2149,
}
