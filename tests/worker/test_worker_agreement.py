"""How names become tensors on one machine: votes in, ballots out; verdicts in, tensors and errors out."""

from __future__ import annotations

import pytest
from support.worker_core import slot, spec

from byteps_py.errors import MismatchError
from byteps_py.tensors import TensorSpec
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.events import (
    Action,
    BeginTensor,
    BytesReady,
    Fail,
    NameAccepted,
    NameDeclared,
    NameRejected,
    NameReopened,
    RankLeft,
    Release,
    SendBallot,
    TensorVoid,
    VerdictApplied,
)
from byteps_py.worker.core.tensor import RankSlot, SlotState, Tensor, TensorState

OLD, NEW = spec(4), spec(5)
ERROR = MismatchError("tensor 'w': …")


def ballot(generation: int, rounds: int, *votes: tuple[TensorSpec, tuple[int, ...]]) -> list[Action]:
    return [SendBallot("w", generation, rounds, votes)]


def declare(agreement: Agreement, local_rank: int, what: TensorSpec = OLD) -> tuple[RankSlot, list[Action]]:
    made = slot(local_rank, what)
    return made, agreement.handle(NameDeclared(made))


def accept(agreement: Agreement, generation: int, what: TensorSpec) -> tuple[Tensor, Tensor | None]:
    """The new tensor, and the one that it replaces."""
    actions = agreement.handle(NameAccepted("w", generation, what))
    (made,) = [action.tensor for action in actions if isinstance(action, BeginTensor)]
    old = next((action.tensor for action in actions if isinstance(action, TensorVoid)), None)
    if old is not None:
        old.move_to(TensorState.RETIRED)  # as the service does, by the pipeline
    return made, old


def agreed(ranks: int, rounds: int = 0) -> tuple[Agreement, Tensor]:
    """A machine whose ranks agree on OLD, and have got ``rounds`` rounds."""
    agreement = Agreement(ranks)
    for rank in range(ranks):
        declare(agreement, rank)
    made, _ = accept(agreement, 1, OLD)
    made.round = rounds + 1
    return agreement, made


def waits(agreement: Agreement, what: RankSlot) -> list[Action]:
    what.ready_bytes = what.spec.nbytes
    return agreement.handle(BytesReady(what, 1, what.ready_bytes))


# ---- voting ------------------------------------------------------------------------------------------------------

# (what local ranks declare, in the order in which they come), the ballot's votes
BALLOTS = [
    ([(0, OLD)], [(OLD, (0,))]),
    ([(0, OLD), (1, OLD), (2, OLD)], [(OLD, (0, 1, 2))]),
    ([(2, OLD), (0, OLD), (1, OLD)], [(OLD, (0, 1, 2))]),
    ([(1, NEW), (0, OLD)], [(OLD, (0,)), (NEW, (1,))]),
    ([(2, OLD), (1, NEW), (0, OLD)], [(OLD, (0, 2)), (NEW, (1,))]),
]


@pytest.mark.parametrize(("declared", "votes"), BALLOTS)
def test_the_ballot_goes_when_all_local_ranks_have_voted(
    declared: list[tuple[int, TensorSpec]], votes: list[tuple[TensorSpec, tuple[int, ...]]]
) -> None:
    agreement = Agreement(len(declared))
    for rank, what in declared[:-1]:
        assert declare(agreement, rank, what)[1] == []
    assert declare(agreement, *declared[-1])[1] == ballot(1, 0, *votes)


def test_priorities_may_differ() -> None:
    agreement = Agreement(2)
    declare(agreement, 0, OLD)
    hasty = TensorSpec("w", OLD.dtype, OLD.shape, priority=7)
    assert declare(agreement, 1, hasty)[1] == ballot(1, 0, (OLD, (0, 1)))


def test_a_verdict_makes_a_tensor_of_the_slots() -> None:
    agreement = Agreement(2)
    slots = [declare(agreement, rank)[0] for rank in range(2)]
    made, old = accept(agreement, 1, OLD)
    assert (made.slots, made.generation, old) == (tuple(slots), 1, None)
    assert all(each.tensor is made for each in slots)
    assert agreement.tensors() == [made]


def test_a_verdict_that_nobody_asked_for_changes_nothing() -> None:
    agreement, made = agreed(1)
    assert agreement.handle(NameAccepted("w", 1, NEW)) == []
    assert agreement.handle(NameAccepted("w", 2, NEW)) == []
    assert agreement.handle(NameRejected("w", 1, ERROR)) == []
    assert agreement.tensors() == [made]


# ---- declaring anew ----------------------------------------------------------------------------------------------


def test_a_rank_that_waits_in_the_old_generation_votes_by_that() -> None:
    agreement, made = agreed(2, rounds=3)
    waits(agreement, made.slots[0])
    assert declare(agreement, 1, NEW)[1] == ballot(2, 3, (OLD, (0,)), (NEW, (1,)))


def test_it_votes_also_if_it_comes_later() -> None:
    agreement, made = agreed(2, rounds=3)
    assert declare(agreement, 1, NEW)[1] == []
    assert waits(agreement, made.slots[0]) == ballot(2, 3, (OLD, (0,)), (NEW, (1,)))
    assert waits(agreement, made.slots[0]) == []  # one ballot


def test_another_machine_reopens_the_name() -> None:
    agreement, made = agreed(1, rounds=3)
    assert agreement.handle(NameReopened("w", 2, 3)) == []  # the rank has not said anything yet
    assert waits(agreement, made.slots[0]) == ballot(2, 3, (OLD, (0,)))


def test_a_rank_that_waits_for_a_round_on_its_way_has_not_voted() -> None:
    """The other machine has got round 3, of which this one only waits for the answer: no reason to disagree."""
    agreement, made = agreed(1, rounds=2)
    waits(agreement, made.slots[0])
    assert agreement.handle(NameReopened("w", 2, 3)) == []
    made.round, made.slots[0].ready_bytes = 4, -1
    assert declare(agreement, 0, NEW)[1] == ballot(2, 3, (NEW, (0,)))


def test_a_reopening_of_what_is_decided_already_is_old_news() -> None:
    agreement, made = agreed(1)
    waits(agreement, made.slots[0])
    assert agreement.handle(NameReopened("w", 1, 0)) == []


def test_a_new_generation_replaces_the_tensor() -> None:
    agreement, made = agreed(2)
    slots = [declare(agreement, rank, NEW)[0] for rank in range(2)]
    renewed, old = accept(agreement, 2, NEW)
    assert (renewed.slots, old) == (tuple(slots), made)
    assert agreement.tensors() == [renewed]


def test_who_waits_keeps_its_slot_if_all_agree_with_it_after_all() -> None:
    """A rank that came back after it had left, say."""
    agreement, made = agreed(2)
    waits(agreement, made.slots[0])
    newcomer, actions = declare(agreement, 1, OLD)
    assert actions == ballot(2, 0, (OLD, (0, 1)))
    renewed, old = accept(agreement, 2, OLD)
    assert (renewed.slots, old) == ((made.slots[0], newcomer), made)
    assert made.slots[0].tensor is renewed


def test_declarations_that_come_too_early_wait_for_their_generation() -> None:
    """The nth declaration of a rank is a vote on the nth generation, however fast the rank is."""
    agreement = Agreement(2)
    declare(agreement, 0, OLD)
    early, actions = declare(agreement, 0, NEW)
    assert actions == []
    assert declare(agreement, 1, OLD)[1] == ballot(1, 0, (OLD, (0, 1)))
    late, actions = declare(agreement, 1, NEW)
    assert actions == []
    accept(agreement, 1, OLD)
    assert agreement.handle(VerdictApplied("w")) == ballot(2, 0, (NEW, (0, 1)))
    renewed, _ = accept(agreement, 2, NEW)
    assert renewed.slots == (early, late)
    assert agreement.handle(VerdictApplied("w")) == []


# ---- disagreeing -------------------------------------------------------------------------------------------------


def test_a_mismatch_fails_all_slots_and_the_name_may_be_used_again() -> None:
    agreement = Agreement(2)
    slots = (declare(agreement, 0, OLD)[0], declare(agreement, 1, NEW)[0])
    assert agreement.handle(NameRejected("w", 1, ERROR)) == [Fail(slots, ERROR)]
    assert agreement.tensors() == []
    _, actions = declare(agreement, 0, NEW)
    assert actions == [Release((slots[0],))]  # only now does its rank know for certain
    _, actions = declare(agreement, 1, NEW)
    assert actions == [Release((slots[1],)), *ballot(2, 0, (NEW, (0, 1)))]


def test_a_mismatch_fails_also_those_that_voted_by_waiting() -> None:
    agreement, made = agreed(2)
    waits(agreement, made.slots[0])
    newcomer, _ = declare(agreement, 1, NEW)
    actions = agreement.handle(NameRejected("w", 2, ERROR))
    assert actions == [Fail((newcomer, made.slots[0]), ERROR), TensorVoid(made, is_kept=True)]
    assert [each.state is SlotState.VOID for each in (newcomer, *made.slots)] == [True, True, False]


@pytest.mark.parametrize("running", [0, 1])
def test_memory_of_a_void_slot_stays_while_a_kernel_runs_there(running: int) -> None:
    agreement, made = agreed(2)
    waits(agreement, made.slots[0])
    declare(agreement, 1, NEW)
    agreement.handle(NameRejected("w", 2, ERROR))
    made.state, made.running = TensorState.RETIRED, running
    _, actions = declare(agreement, 0, NEW)
    assert actions == ([] if running else [Release((made.slots[0],))])
    assert made.slots[0].state is SlotState.RELEASED  # the last kernel's end releases it


# ---- leaving -----------------------------------------------------------------------------------------------------


def test_a_rank_that_leaves_takes_its_votes_back() -> None:
    agreement = Agreement(2)
    first, _ = declare(agreement, 0, OLD)
    second, _ = declare(agreement, 0, NEW)
    assert agreement.handle(RankLeft(0)) == [Release((second,)), Release((first,))]
    assert declare(agreement, 1, OLD)[1] == []
    assert declare(agreement, 0, OLD)[1] == ballot(1, 0, (OLD, (0, 1)))


def test_a_ballot_on_its_way_is_not_taken_back() -> None:
    agreement = Agreement(1)
    made, _ = declare(agreement, 0)
    assert agreement.handle(RankLeft(0)) == []
    assert accept(agreement, 1, OLD)[0].slots == (made,)


def test_what_another_machine_asked_for_stays_asked() -> None:
    agreement, made = agreed(2)
    agreement.handle(NameReopened("w", 2, 0))
    agreement.handle(RankLeft(1))
    waits(agreement, made.slots[0])
    assert declare(agreement, 1, NEW)[1] == ballot(2, 0, (OLD, (0,)), (NEW, (1,)))


def test_a_rank_that_left_waits_for_nothing() -> None:
    """What it had handed over still counts for the others."""
    agreement, made = agreed(2)
    waits(agreement, made.slots[0])
    agreement.handle(RankLeft(0))
    assert (made.slots[0].waits, made.slots[0].ready_bytes) == (False, OLD.nbytes)
    assert declare(agreement, 1, NEW)[1] == []  # it does not vote for the old spec, either
    assert declare(agreement, 0, NEW)[1] == ballot(2, 0, (NEW, (0, 1)))


def test_void_slots_of_a_rank_that_leaves_are_released() -> None:
    agreement = Agreement(2)
    slots = (declare(agreement, 0, OLD)[0], declare(agreement, 1, NEW)[0])
    agreement.handle(NameRejected("w", 1, ERROR))
    assert agreement.handle(RankLeft(1)) == [Release((slots[1],))]


def test_who_waits_for_what_is_undecided() -> None:
    agreement = Agreement(2)
    assert agreement.undecided() == []
    first, _ = declare(agreement, 0, OLD)
    assert agreement.undecided() == []  # declared, but nobody waits
    waits(agreement, first)
    assert agreement.undecided() == [("w", [first])]
    second, _ = declare(agreement, 0, NEW)
    waits(agreement, second)
    assert agreement.undecided() == [("w", [second, first])]
    declare(agreement, 1, OLD)
    accept(agreement, 1, OLD)
    assert agreement.undecided() == [("w", [second])]
