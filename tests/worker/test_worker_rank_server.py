"""What a rank says that its communication service can't do, or pass on: the job ends with a sentence, and not by it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
from fuzz.machine import Machine

from byteps_py.errors import ProtocolError
from byteps_py.tensors import DType, TensorSpec
from byteps_py.wire import rank_link as protocol

_MOST = (1 << 64) - 1
_NO_LETTER = "data\udcff"  # of a file, say


@pytest.fixture(name="machine")
def of_two_ranks() -> Iterator[Machine]:
    with contextlib.closing(Machine(is_elastic=False)) as machine:
        yield machine


def test_more_memory_than_there_is(machine: Machine) -> None:
    spec = TensorSpec("vast", DType.FLOAT32, (1 << 46,))
    machine.say(0, protocol.Declare.of(1, [spec]))
    (sentence,) = machine.deaths
    assert "rank 0 " in sentence
    assert "asked for what can't be had: [Errno 12] Cannot allocate memory" in sentence


@pytest.mark.parametrize("age_s", [-1.0, float("inf"), float("nan")])
def test_a_wait_that_the_scheduler_can_not_be_told_of(machine: Machine, age_s: float) -> None:
    machine.say(1, protocol.WaitBegun(1, 3, age_s, "w", (0, 1)))
    assert len(machine.deaths) == 1
    machine.go_on()


@pytest.mark.parametrize(
    "message",
    [
        protocol.Note(_NO_LETTER),
        protocol.WaitBegun(1, (1 << 64) - 1, 2.5, _NO_LETTER, (0, (1 << 32) - 1)),
        protocol.StepsBegun((protocol.StepCount((1 << 64) - 1, (1 << 64) - 1, _NO_LETTER),)),
        protocol.ProgressMade(_MOST, math.nan, math.inf, _MOST, _MOST, math.nan, _MOST, _MOST, math.inf, -1.0),
    ],
)
def test_all_that_a_rank_can_say_can_be_passed_on(machine: Machine, message: object) -> None:
    machine.say(0, message)
    machine.go_on()
    assert machine.deaths == []


@pytest.mark.parametrize(
    "message",
    [protocol.WaitBegun(1, 3, 2.5, "w", (0, 1)), protocol.Declare.of(1, [TensorSpec("w", DType.FLOAT32, (4,))])],
)
def test_a_message_that_is_cut_off(machine: Machine, message: object) -> None:
    data = protocol.encode(message)
    for end in range(1, len(data)):
        with pytest.raises(ProtocolError, match=f"malformed local message {type(message).__name__}"):
            protocol.decode(data[:end])
    machine.say(1, data[:-1])
    (sentence,) = machine.deaths
    assert "rank 1 " in sentence
    assert "broke the protocol" in sentence


def test_a_note_of_what_is_no_letter(machine: Machine) -> None:
    machine.say(0, protocol.Note(_NO_LETTER))
    machine.go_on()
    assert machine.deaths == []
    assert any(r"data\udcff" in message.stack_report.text for message in machine.sent)


def test_an_error_of_what_is_no_letter_is_told(machine: Machine) -> None:
    machine.say(0, protocol.Leave(error=f"FileNotFoundError: {_NO_LETTER}"))
    (sentence,) = machine.deaths
    assert sentence.endswith(r"was ended by an exception: FileNotFoundError: data\udcff")


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_rank_that_has_not_finished_is_known(machine: Machine, unfinished: bool) -> None:
    machine.say(0, protocol.Leave(unfinished=unfinished))
    assert machine.rank_server.has_unfinished is unfinished
    assert machine.deaths == []
