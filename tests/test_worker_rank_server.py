"""What a rank says that its communication service can't do, or pass on: the job ends with a sentence, and not by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from fuzz.machine import Machine

from byteps_py import rank_protocol as protocol
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.tensors import DType, TensorSpec

_NO_LETTER = "data\udcff"  # of a file, say


@pytest.fixture(name="machine")
def of_two_ranks() -> Iterator[Machine]:
    with contextlib.closing(Machine(is_elastic=False)) as machine:
        yield machine


def test_more_memory_than_there_is(machine: Machine) -> None:
    spec = TensorSpec("vast", DType.FLOAT32, (1 << 46,))
    machine.say(0, protocol.pack(RankMessageKind.DECLARE, request=1, specs=[protocol.spec_to_json(spec)]))
    (sentence,) = machine.deaths
    assert "rank 0 " in sentence
    assert "asked for what can't be had: [Errno 12] Cannot allocate memory" in sentence


@pytest.mark.parametrize(
    "wrong",
    [{"round": -1}, {"round": 1 << 64}, {"age_s": float("inf")}, {"age_s": float("nan")}, {"group": [-1]},
     {"name": _NO_LETTER}, {"name": 7}],
)  # fmt: skip
def test_a_wait_that_the_scheduler_can_not_be_told_of(machine: Machine, wrong: dict[str, object]) -> None:
    fields = {"id": 1, "name": "w", "round": 3, "age_s": 2.5, "group": [0, 1], **wrong}
    machine.say(1, protocol.pack(RankMessageKind.WAITS, **fields))
    assert len(machine.deaths) == 1
    machine.go_on()


@pytest.mark.parametrize(
    "begun", [7, [["w", 1]], [["w", -1, 1]], [["w", 1, 1 << 64]], [[_NO_LETTER, 1, 1]], [[7, 1, 1]]]
)
def test_steps_that_the_scheduler_can_not_be_told_of(machine: Machine, begun: object) -> None:
    machine.say(1, protocol.pack(RankMessageKind.STEPS, begun=begun))
    assert len(machine.deaths) == 1
    machine.go_on()


def test_a_note_of_what_is_no_letter(machine: Machine) -> None:
    machine.say(0, protocol.pack(RankMessageKind.NOTE, text=_NO_LETTER))
    machine.go_on()
    assert machine.deaths == []
    assert any(r"data\udcff" in message.sight.text for message in machine.sent)


def test_an_error_of_what_is_no_letter_is_told(machine: Machine) -> None:
    machine.say(0, protocol.pack(RankMessageKind.LEAVE, error=f"FileNotFoundError: {_NO_LETTER}"))
    (sentence,) = machine.deaths
    assert sentence.endswith(r"was ended by an exception: FileNotFoundError: data\udcff")


@pytest.mark.parametrize("fields", [{}, {"unfinished": True}])
def test_a_rank_that_has_not_finished_is_known(machine: Machine, fields: dict[str, bool]) -> None:
    machine.say(0, protocol.pack(RankMessageKind.LEAVE, **fields))
    assert machine.rank_server.has_unfinished is bool(fields)
    assert machine.deaths == []
