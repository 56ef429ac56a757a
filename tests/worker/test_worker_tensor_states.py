"""The states of partitions, tensors and slots: what may follow what, and what their ranks' joining and leaving do."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from support.worker_core import slot, tensor

from byteps_py.errors import MismatchError
from byteps_py.worker.core import IllegalTransitionError
from byteps_py.worker.core.tensor import (
    SLOT_STATES,
    STAGES,
    TENSOR_STATES,
    Part,
    SlotState,
    Stage,
    TensorState,
)

#: What may follow, as one reads it in the module's picture.
STAGES_AFTER = {
    "WAITING": "REDUCING QUEUED IN_FLIGHT DELIVERING",
    "REDUCING": "QUEUED IN_FLIGHT DELIVERING DONE",
    "QUEUED": "IN_FLIGHT DELIVERING DONE",
    "IN_FLIGHT": "QUEUED DELIVERING DONE",
    "DELIVERING": "DONE",
    "DONE": "WAITING",
}
TENSOR_STATES_AFTER = {
    "ACTIVE": "ENDING KEPT RETIRED",
    "ENDING": "ENDING KEPT RETIRED",
    "KEPT": "RETIRED",
    "RETIRED": "",
}
SLOT_STATES_AFTER = {
    "ACTIVE": "LEFT LAST_ROUND JOINED VOID",
    "LEFT": "LEFT_IN_LAST_ROUND JOINED VOID",
    "LAST_ROUND": "LEFT_IN_LAST_ROUND JOINED VOID",
    "LEFT_IN_LAST_ROUND": "JOINED VOID",
    "JOINED": "VOID",
    "VOID": "RELEASED",
    "RELEASED": "",
}


def moving(state: enum.Enum) -> tuple[Any, str]:
    """What stands at this state, and the name of the field."""
    made = tensor([slot(0)])
    if isinstance(state, TensorState):
        made.state = state
        return made, "state"
    if isinstance(state, SlotState):
        made.slots[0].state = state
        return made.slots[0], "state"
    assert isinstance(state, Stage)
    return Part(made, 0, 0, 16, -1, stage=state), "stage"


@pytest.mark.parametrize(
    ("kind", "table", "after"),
    [
        (Stage, STAGES, STAGES_AFTER),
        (TensorState, TENSOR_STATES, TENSOR_STATES_AFTER),
        (SlotState, SLOT_STATES, SLOT_STATES_AFTER),
    ],
)
def test_every_state_after_every_state(kind: type[enum.Enum], table: Any, after: dict[str, str]) -> None:
    assert set(table) == set(kind)
    for state in kind:
        for other in kind:
            it, field = moving(state)
            if other.name in after[state.name].split():
                it.move_to(other)
                assert getattr(it, field) is other
            else:
                with pytest.raises(IllegalTransitionError, match=f"is {state.name} .*: {other.name} can't follow"):
                    it.move_to(other)
                assert getattr(it, field) is state


def test_what_states_say() -> None:
    assert {state for state in TensorState if state.is_void} == {TensorState.KEPT, TensorState.RETIRED}
    assert {state for state in SlotState if state.has_left} == {SlotState.LEFT, SlotState.LEFT_IN_LAST_ROUND}
    joined = {SlotState.LAST_ROUND, SlotState.LEFT_IN_LAST_ROUND, SlotState.JOINED}
    assert {state for state in SlotState if state.has_joined} == joined


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("events", [("joined", "left"), ("left", "joined"), ("joined",), ("left",)])
def test_ranks_join_and_leave_in_any_order(is_ready: bool, events: tuple[str, ...]) -> None:
    it = slot(0)
    it.ready_bytes = 16 if is_ready else -1
    for event in events:
        if event == "joined":
            it.rank_joined()
        else:
            it.rank_left()
            assert not it.waits
    has_joined = "joined" in events
    assert it.state.has_joined == has_joined
    assert (it.state is SlotState.JOINED) == (has_joined and not is_ready)
    assert it.waits == (is_ready and "left" not in events)
    if has_joined and is_ready:
        it.ready_bytes = -1  # the round is over
        it.rank_joined()
        assert it.state is SlotState.JOINED


def test_a_later_verdict_says_which_round_is_the_last() -> None:
    it = tensor([slot(0)])
    it.end_after(3, MismatchError("a"))
    it.end_after(1, MismatchError("b"))
    assert (it.state, it.last_round, str(it.ending)) == (TensorState.ENDING, 1, "b")
    it.move_to(TensorState.KEPT)
    assert it.is_used
    with pytest.raises(IllegalTransitionError):
        it.end_after(4, MismatchError("c"))


def test_the_rank_of_a_void_slot_changes_nothing_when_it_leaves() -> None:
    it = slot(0)
    it.move_to(SlotState.VOID)
    it.rank_left()
    assert it.state is SlotState.VOID
