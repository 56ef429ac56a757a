"""The rounds of a summation server: events in, actions out; each contribution counts exactly once, in order."""

from __future__ import annotations

import random

import pytest

from byteps_py.server.round_state import Action, Answer, Contribution, Reduce, RefuseContributions, Round
from byteps_py.server.rounds import HELD_COUNT, Rounds
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Op
from byteps_py.wire.data_link import Header, Kind

PARTITION_BYTES = 4096
#: A block of it is larger than a partition.
TOPK = Codec.topk(0.9)
Actions = list[Action[Contribution]]
ORIGINS = [f"connection of machine {i}" for i in range(8)]


def given(sender: int, *, nbytes: int | None = None, origin: object = None, **facts: object) -> Contribution:
    """A PUSH of a float32 sum of 64 bytes in round 1, epoch 1, unless the test says otherwise."""
    values: dict[str, object] = {
        "epoch": 1, "dtype": DType.FLOAT32, "key": 7, "generation": 1, "round": 1, "length": 64, **facts
    }  # fmt: skip
    kind = values.pop("kind", Kind.PUSH)
    header = Header(kind, sender, **values)  # type: ignore[arg-type]
    if nbytes is None:
        nbytes = 0 if kind in (Kind.PULL, Kind.PASS) else header.length
    return Contribution(header, origin or ORIGINS[sender % 8], nbytes)


def started(num_machines: int, epoch: int = 1) -> Rounds[Contribution]:
    rounds: Rounds[Contribution] = Rounds(PARTITION_BYTES)
    assert rounds.membership(epoch, num_machines, now=0.0, since_epoch=epoch) == []
    return rounds


def refusal(actions: Actions) -> tuple[list[int], str]:
    """(machines that are refused, why) of the only action."""
    (action,) = actions
    assert isinstance(action, RefuseContributions)
    return [c.header.sender for c in action.contributions], action.text


def reduction(actions: Actions) -> Round[Contribution]:
    (action,) = actions
    assert isinstance(action, Reduce)
    return action.round


def answered(actions: Actions) -> list[Contribution]:
    (action,) = actions
    assert isinstance(action, Answer)
    return action.contributions


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_round_is_reduced_once_in_machine_order_whatever_the_order_of_arrival(order: tuple[int, ...]) -> None:
    rounds = started(3)
    contributions = [given(i) for i in range(3)]
    for sender in order[:-1]:
        assert rounds.contribution(contributions[sender], 0.0) == []
    round_ = reduction(rounds.contribution(contributions[order[-1]], 0.0))
    assert round_.in_order() == contributions
    assert rounds.counters.bytes_in_flight == 3 * 64
    assert answered(rounds.reduced(round_)) == contributions
    assert (round_.partition.last_round, round_.partition.rounds, round_.contributions) == (1, {}, {})
    assert (rounds.counters.rounds, rounds.counters.bytes_summed, rounds.counters.bytes_in_flight) == (1, 64, 0)


def test_of_a_group_as_many_machines_as_it_says_contribute_and_they_alone_are_answered() -> None:
    rounds = started(4)
    contributions = [given(3, machines=2), given(1, machines=2)]
    assert rounds.contribution(contributions[0], 0.0) == []
    (stall,) = rounds.stalled(1.0)
    assert (stall.machines, stall.missing) == (2, (0, 1, 2))
    round_ = reduction(rounds.contribution(contributions[1], 0.0))
    assert answered(rounds.reduced(round_)) == contributions[::-1]


def test_machines_that_pass_contribute_nothing_and_resend_their_pass_when_asked() -> None:
    rounds = started(3)
    contributions = [given(0, kind=Kind.PASS, nbytes=0), given(1), given(2, kind=Kind.PASS, nbytes=0)]
    assert rounds.contribution(contributions[0], 0.0) == []
    assert rounds.contribution(contributions[2], 0.0) == []
    round_ = reduction(rounds.contribution(contributions[1], 0.0))
    assert rounds.counters.bytes_in_flight == 64
    assert answered(rounds.reduced(round_)) == contributions
    for machine in range(3):  # all have joined: there is nothing to sum, now or later
        assert rounds.contribution(given(machine, kind=Kind.PASS, nbytes=0, round=2), 0.0) == []


def test_a_machine_outside_a_group_adds_nothing_where_all_of_it_pass() -> None:
    rounds = started(3)
    for machine in (0, 1):
        assert rounds.contribution(given(machine, machines=2, kind=Kind.PASS), 0.0) == []
    machines, text = refusal(rounds.contribution(given(2, machines=2), 0.0))
    assert machines == [2]
    assert "machine 2 is not among the machines that take part in round 1" in text
    assert rounds.counters.bytes_in_flight == 0


def test_a_machine_that_passes_may_be_behind() -> None:
    """The others agreed on another spec without it."""
    rounds = started(2)
    rounds.contribution(given(0, generation=2), 0.0)
    assert rounds.contribution(given(1, kind=Kind.PASS, nbytes=0, generation=1), 0.0) == []


def test_a_broadcast_takes_one_push_and_the_others_pulls() -> None:
    rounds = started(3)
    facts = {"op": Op.BROADCAST, "root": 1}
    assert rounds.contribution(given(0, kind=Kind.PULL, **facts), 0.0) == []
    assert rounds.contribution(given(1, **facts), 0.0) == []
    round_ = reduction(rounds.contribution(given(2, kind=Kind.PULL, **facts), 0.0))
    assert [c.nbytes for c in round_.in_order()] == [0, 64, 0]
    assert len(answered(rounds.reduced(round_))) == 3


def test_a_broadcast_among_machines_of_which_none_is_its_root_is_refused() -> None:
    """There is nothing that they could get."""
    rounds = started(3)
    facts = {"op": Op.BROADCAST, "root": 0, "machines": 2, "kind": Kind.PULL}
    assert rounds.contribution(given(2, **facts), 0.0) == []
    machines, text = refusal(rounds.contribution(given(1, **facts), 0.0))
    assert machines == [2, 1]
    assert (
        "machine 0, the root of the broadcast in round 1, is not among the machines that take part, which are 1, 2"
        in text
    )
    assert refusal(rounds.contribution(given(0, **{**facts, "kind": Kind.PUSH}), 0.0)) == ([0], text)
    assert rounds.counters.bytes_in_flight == 0


REFUSED_ALONE = [
    ({"sender": 2}, "from machine 2: machines of this job are numbered 0 to 1"),
    ({"epoch": 2}, "its contribution is of epoch 2, and the job's machines have changed in epoch 3"),
    ({"length": 0}, "its length is 0 bytes, but a partition has 1 to 4096"),
    ({"length": PARTITION_BYTES + 4}, "its length is 4100 bytes, but a partition has 1 to 4096"),
    ({"length": 2 * TOPK.item_bytes, "codec": TOPK.code}, "but a partition has 1 to 15724"),
    ({"length": 62}, "its length, 62, and its offset, 0, must be multiples of 4, the size of float32"),
    ({"offset": 2}, "its length, 64, and its offset, 2, must be multiples of 4, the size of float32"),
    ({"kind": Kind.PASS, "op": Op.BROADCAST, "root": 1}, "every machine takes part in a broadcast, so none can pass"),
    ({"kind": Kind.PASS, "nbytes": 4}, "announces 0 bytes of payload, but 4 arrived"),
    ({"machines": 1}, "its header says that only one machine contributes"),
    ({"machines": 3}, "its header says that 3 machines contribute, but the job has 2"),
    ({"nbytes": 60}, "its header announces 64 bytes of payload, but 60 arrived"),
    ({"nbytes": 1 << 40}, "its header announces 64 bytes of payload, but 1099511627776 arrived"),
    ({"kind": Kind.PULL}, "only the result of a broadcast can be pulled, not that of a sum"),
    ({"op": Op.BROADCAST, "root": 2}, "root is machine 2, but the last machine is 1"),
    ({"op": Op.BROADCAST, "root": 1}, "machine 1, the root, pushes and the others pull"),
    ({"op": Op.BROADCAST, "root": 0, "kind": Kind.PULL}, "machine 0, the root, pushes and the others pull"),
    ({"op": Op.BROADCAST, "root": 1, "kind": Kind.PULL, "nbytes": 4}, "announces 0 bytes of payload, but 4 arrived"),
]


@pytest.mark.parametrize(("facts", "reason"), REFUSED_ALONE)
def test_unusable_contributions_are_refused_and_leave_no_trace(facts: dict[str, object], reason: str) -> None:
    rounds = started(2, epoch=3)
    sender, text = refusal(rounds.contribution(given(**{"sender": 0, "epoch": 3, **facts}), 0.0))  # type: ignore[arg-type]
    assert reason in text
    assert sender == [facts.get("sender", 0)]
    assert rounds.counters.bytes_in_flight == 0
    assert rounds.stalled(1.0) == []


DISAGREEMENTS = [
    ({"dtype": DType.INT32}, "disagree about dtype: machine 0 gave round 1, sum of float32"),
    ({"op": Op.MAX}, "disagree about op: "),
    ({"length": 128}, "disagree about length: "),
    ({"machines": 2}, "disagree about machines: "),
    ({"offset": 64}, "disagree about offset: "),
    ({"root": 0}, "disagree about root: "),
    ({"round": 2}, "disagree about round: "),
    ({"dtype": DType.FLOAT64, "length": 128}, "disagree about dtype and length: "),
]


@pytest.mark.parametrize(("facts", "reason"), DISAGREEMENTS)
def test_disagreement_is_refused_to_all_and_to_later_ones(facts: dict[str, object], reason: str) -> None:
    rounds = started(4)
    rounds.contribution(given(0), 0.0)
    rounds.contribution(given(2), 0.0)
    senders, text = refusal(rounds.contribution(given(1, **facts), 0.0))  # type: ignore[arg-type]
    assert senders == [0, 2, 1]
    assert text.startswith("partition 0 of tensor key 0x0000000000000007: machines disagree about ")
    assert reason.split(":")[0] in text
    assert "machine 1 gave" in text
    assert refusal(rounds.contribution(given(3), 0.0)) == ([3], text)
    assert rounds.counters.bytes_in_flight == 0
    # A newer round of the same tensor starts afresh.
    for sender in range(3):
        assert rounds.contribution(given(sender, round=3), 0.0) == []
    assert answered(rounds.reduced(reduction(rounds.contribution(given(3, round=3), 0.0))))


def test_a_repetition_is_counted_and_dropped_while_collecting_and_while_reducing() -> None:
    rounds = started(2)
    first = given(0)
    rounds.contribution(first, 0.0)
    assert rounds.contribution(given(0), 0.0) == []
    round_ = reduction(rounds.contribution(given(1), 0.0))
    assert rounds.contribution(given(1), 0.0) == []
    assert round_.contributions[0] is first
    assert (rounds.counters.duplicates, rounds.counters.bytes_in_flight) == (2, 128)
    assert len(answered(rounds.reduced(round_))) == 2


def test_a_repetition_on_a_new_connection_takes_the_place_of_the_first() -> None:
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    again = given(0, origin="a new connection")
    rounds.contribution(again, 0.0)
    rounds.on_origin_lost(ORIGINS[0])  # the old connection's end takes nothing with it
    round_ = reduction(rounds.contribution(given(1), 0.0))
    assert round_.in_order()[0] is again
    assert rounds.counters.bytes_in_flight == 128


def test_a_completed_round_is_stale_and_an_early_one_is_refused() -> None:
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    round_ = reduction(rounds.contribution(given(1), 0.0))
    senders, text = refusal(rounds.contribution(given(0, round=2), 0.0))
    assert senders == [0]
    assert text.endswith("round 1 is not delivered yet")
    rounds.reduced(round_)
    assert refusal(rounds.contribution(given(0), 0.0))[1].endswith("round 1 is complete")
    assert rounds.contribution(given(0, round=2), 0.0) == []


def test_a_newer_generation_drops_the_older_one() -> None:
    rounds = started(2)
    rounds.contribution(given(0, index=0), 0.0)
    rounds.contribution(given(0, index=1), 0.0)
    being_reduced = reduction(rounds.contribution(given(1, index=1), 0.0))
    assert rounds.contribution(given(0, generation=2), 0.0) == []
    assert "was declared again" in refusal(rounds.contribution(given(1, index=0), 0.0))[1]
    assert "was declared again" in refusal(rounds.contribution(given(1, index=5), 0.0))[1]
    assert rounds.counters.bytes_in_flight == 3 * 64  # the thread pool still works in two of them
    assert rounds.reduced(being_reduced) == []
    assert rounds.counters.bytes_in_flight == 64
    assert len(answered(rounds.reduced(reduction(rounds.contribution(given(1, generation=2), 0.0))))) == 2


def test_a_failed_reduction_is_refused_to_all() -> None:
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    round_ = reduction(rounds.contribution(given(1), 0.0))
    senders, text = refusal(rounds.reduced(round_, RuntimeError("no such kernel")))
    assert senders == [0, 1]
    assert "could not be reduced: no such kernel" in text
    assert refusal(rounds.contribution(given(0), 0.0)) == ([0], text)


def test_contributions_of_a_newer_epoch_wait_for_its_membership() -> None:
    rounds: Rounds[Contribution] = Rounds(PARTITION_BYTES)
    assert rounds.contribution(given(0), 0.0) == []
    assert rounds.contribution(given(1), 0.0) == []
    assert rounds.counters.bytes_in_flight == 128
    round_ = reduction(rounds.membership(1, 2, now=0.0))
    assert rounds.counters.bytes_in_flight == 128
    assert len(answered(rounds.reduced(round_))) == 2
    assert rounds.membership(1, 5, now=0.0) == []
    assert rounds.num_machines == 2


def test_contributions_that_wait_for_an_epoch_are_bounded() -> None:
    rounds: Rounds[Contribution] = Rounds(PARTITION_BYTES)
    for index in range(HELD_COUNT):
        assert rounds.contribution(given(0, index=index), 0.0) == []
    assert "too much waits for it" in refusal(rounds.contribution(given(0, index=HELD_COUNT), 0.0))[1]
    rounds.on_origin_lost(ORIGINS[0])
    assert rounds.counters.bytes_in_flight == 0
    assert "too much waits for it" in refusal(rounds.contribution(given(0, nbytes=1 << 40), 0.0))[1]


def test_keys_that_one_machine_alone_gives_to_are_bounded() -> None:
    rounds = started(2)
    rounds.admission_limit.most_keys = 3

    def give(sender: int, key: int, **facts: object) -> Actions:
        return rounds.contribution(given(sender, key=key, **facts), 0.0)

    for key in range(3):
        assert give(0, key) == []
    assert "key 0x0000000000000003: this server already holds 3 other tensors" in refusal(give(0, 3))[1]
    assert give(0, 2, index=1) == []  # of one that has begun
    reduced = rounds.reduced(reduction(give(1, 0)))
    assert len(answered(reduced)) == 2
    assert give(0, 3) == []
    assert "already holds 3 other tensors" in refusal(give(1, 4))[1]
    assert give(0, 0, round=2) == []  # one that is known
    rounds.withdraw(given(0, key=3, epoch=2).header)
    assert give(0, 4) == []
    assert give(0, 4, generation=2) == []  # in the place of the first
    assert "already holds 3 other tensors" in refusal(give(0, 5))[1]
    rounds.on_origin_lost(ORIGINS[0])
    for key in (5, 6, 7):
        assert give(0, key) == []
    assert rounds.membership(2, 3, now=0.0, since_epoch=2) == []
    for key in range(3):
        assert give(0, key, epoch=2) == []
    assert rounds.counters.bytes_in_flight == 3 * 64


def test_partitions_that_one_machine_alone_gives_to_are_bounded() -> None:
    rounds = started(2)
    rounds.admission_limit.most_partitions = 3
    for index in range(3):
        assert rounds.contribution(given(0, index=index), 0.0) == []
    assert "already holds 3 partitions" in refusal(rounds.contribution(given(0, index=3), 0.0))[1]


def test_rounds_outlive_an_epoch_of_the_same_machines_and_no_other() -> None:
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    assert rounds.membership(2, 2, now=0.0, since_epoch=1) == []
    round_ = reduction(rounds.contribution(given(1, epoch=2), 0.0))
    rounds.reduced(round_)
    rounds.contribution(given(0, epoch=2, round=2), 0.0)
    assert rounds.membership(3, 3, now=0.0, since_epoch=3) == []
    assert (rounds.counters.bytes_in_flight, rounds.stalled(9.0)) == (0, [])
    assert rounds.contribution(given(0, epoch=3, round=1), 0.0) == []  # new machines, new count


def test_a_machine_that_goes_takes_its_part_along() -> None:
    rounds = started(2)
    rounds.contribution(given(0), 0.0)
    rounds.on_origin_lost(ORIGINS[0])
    assert (rounds.counters.bytes_in_flight, rounds.stalled(9.0)) == (0, [])
    rounds.contribution(given(1), 0.0)
    round_ = reduction(rounds.contribution(given(0, origin="back again"), 0.0))
    rounds.on_origin_lost(ORIGINS[1])  # too late: the others get their answer
    assert len(answered(rounds.reduced(round_))) == 2


def test_stalled_rounds_name_the_missing_machines() -> None:
    rounds = started(3)
    rounds.contribution(given(1, index=4), 10.0)
    rounds.contribution(given(0), 12.0)
    rounds.contribution(given(2), 13.0)
    assert [(s.index, s.age_s, s.missing) for s in rounds.stalled(14.0)] == [(4, 4.0, (0, 2)), (0, 2.0, (1,))]
    assert [s.index for s in rounds.stalled(14.0, older_than_s=3.0)] == [4]


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_count_every_contribution_exactly_once(seed: int) -> None:
    """Machines push rounds of several partitions, in any order, repeat themselves and send old rounds again;
    reductions end late. Every answer is the sum of exactly one contribution per machine, in machine order."""
    chance = random.Random(seed)
    machines, partitions, last_round = chance.randint(1, 4), chance.randint(1, 4), 5
    rounds = started(machines)
    next_round = {(m, p): 1 for m in range(machines) for p in range(partitions)}  # what each machine sends next
    waits = dict.fromkeys(next_round, False)
    being_reduced: list[Round[Contribution]] = []
    answers: dict[tuple[int, int], list[int]] = {}
    stale = repeated = 0

    def handle(actions: Actions) -> None:
        nonlocal stale
        for action in actions:
            if isinstance(action, Reduce):
                assert action.round not in being_reduced
                being_reduced.append(action.round)
            elif isinstance(action, RefuseContributions):
                assert action.text.startswith("stale")
                stale += 1
            else:
                assert isinstance(action, Answer)
                headers = [c.header for c in action.contributions]
                index, round_ = headers[0].index, headers[0].round
                assert {(h.index, h.round) for h in headers} == {(index, round_)}
                assert (index, round_) not in answers
                answers[index, round_] = [h.sender for h in headers]
                for machine in range(machines):
                    assert waits[machine, index]
                    waits[machine, index] = False
                    next_round[machine, index] += 1

    expected_stale = 0
    while len(answers) < partitions * last_round:
        machine, index = chance.randrange(machines), chance.randrange(partitions)
        round_ = next_round[machine, index]
        dice = chance.random()
        if dice < 0.2 and being_reduced:
            handle(rounds.reduced(being_reduced.pop(chance.randrange(len(being_reduced)))))
        elif dice < 0.3 and round_ > 1:
            expected_stale += 1
            handle(rounds.contribution(given(machine, index=index, round=chance.randrange(1, round_)), 0.0))
        elif round_ <= last_round:
            repeated += waits[machine, index]
            waits[machine, index] = True
            handle(rounds.contribution(given(machine, index=index, round=round_), 0.0))
    assert all(senders == list(range(machines)) for senders in answers.values())
    assert (stale, rounds.counters.duplicates) == (expected_stale, repeated)
    assert (rounds.counters.rounds, rounds.counters.bytes_in_flight) == (len(answers), 0)
