"""The order of asynchronous changes, from the logs of the machines."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from byteps_py.arrivals import ArrivalLog, LoggedChange, Order, check, orders_of, read
from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, UsageError

MACHINES = 3


def run(rng: random.Random, rounds: int, losses: int) -> tuple[list[LoggedChange], list[tuple[int, int]]]:
    """The logs of the machines about a partition, and the true order. ``losses``: of servers: the last additions,
    which no machine has a copy of, are made again by the next one, and machines get answers late."""
    clock, order = [0] * MACHINES, list[tuple[int, int]]()
    logs: list[LoggedChange] = []
    waiting: dict[int, int] = {}  # machine: the version that its contribution made, which has no answer
    lose_at = {rng.randrange(1, MACHINES * rounds) for _ in range(losses)}
    newest = 0  # the version of the newest copy
    while sum(clock) < MACHINES * rounds or waiting:
        if len(order) in lose_at:
            lose_at.remove(len(order))
            for machine, _ in order[newest:]:
                clock[machine] -= 1
                waiting.pop(machine)
            del order[newest:]
            waiting = dict.fromkeys(waiting, 0)  # the next server does not know
        able = [machine for machine in range(MACHINES) if clock[machine] < rounds and machine not in waiting]
        if able and rng.random() < 0.6:
            machine = rng.choice(able)
            clock[machine] += 1
            order.append((machine, clock[machine]))
            waiting[machine] = len(order)
        elif waiting:
            machine = rng.choice(list(waiting))
            newest = len(order)
            logs.append(LoggedChange(machine, "w", 1, 0, clock[machine], waiting.pop(machine), tuple(clock)))
    return logs, order


@pytest.mark.parametrize("losses", [0, 1, 3])
def test_the_logs_say_the_order(losses: int) -> None:
    for seed in range(300):
        logs, order = run(random.Random(seed), 6, losses)
        random.Random(seed).shuffle(logs)
        found = orders_of(logs)
        by_turn = found.by_place["w", 1, 0]
        assert found.count == len(order) == 6 * MACHINES
        if not found.unsure:
            said = sorted(by_turn, key=lambda turn: by_turn[turn].added_at)
            assert said == order, seed
        for arrival in logs:
            assert by_turn[arrival.machine, arrival.round].answered_at == sum(arrival.clock)
        assert not found.unsure or losses


def test_what_no_log_tells_is_counted() -> None:
    """Two machines have no answer when the server is lost, and the next one has both changes from a third's copy."""
    logs = [
        LoggedChange(0, "w", 1, 0, 1, 0, (1, 1, 1)),
        LoggedChange(1, "w", 1, 0, 1, 0, (1, 1, 1)),
        LoggedChange(2, "w", 1, 0, 1, 3, (1, 1, 1)),
    ]
    found = orders_of(logs)
    assert found.unsure == 1
    assert found.by_place["w", 1, 0][2, 1] == Order(3, 3)


@pytest.mark.parametrize(
    ("logs", "text"),
    [
        ([LoggedChange(0, "w", 1, 0, 1, 1, (1, 0)), LoggedChange(1, "w", 1, 0, 1, 1, (1, 1))], "made the same version"),
        ([LoggedChange(0, "w", 1, 0, 1, 2, (1, 1))], "contributions are in no log"),
        (
            [LoggedChange(0, "w", 1, 0, 1, 0, (0, 1)), LoggedChange(1, "w", 1, 0, 1, 2, (0, 2))],
            "no log tells what made version 1",
        ),
    ],
)
def test_logs_of_no_whole_run(logs: list[LoggedChange], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        orders_of(logs)


def test_files(tmp_path: Path) -> None:
    logs = [LoggedChange(0, 'a "name"', 1, 0, 1, 1, (1, 0)), LoggedChange(1, 'a "name"', 1, 0, 1, 0, (1, 1))]
    for machine in (0, 1):
        log = ArrivalLog(tmp_path / "new", machine)
        log.add(logs[machine])
        log.close()
    assert read(tmp_path / "new", 2) == logs
    with pytest.raises(UsageError, match="a record of 2 machines, in the logs of 3 machines"):
        read(tmp_path / "new", 3)
    (tmp_path / "new" / "machine-1.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="the log of machine 1 can't be read"):
        read(tmp_path / "new", 2)
    with pytest.raises(UsageError, match=r"a record of 2 machines, in the logs of 1 machine$"):
        read(tmp_path / "new", 1)
    (tmp_path / "new" / "machine-0.jsonl").write_text("nonsense\n")
    with pytest.raises(UsageError, match=r"line 1: no record of an arrival: 'nonsense'"):
        read(tmp_path / "new", 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"record_arrivals": "a", "replay_arrivals": "b"}, "are for two different runs"),
        ({"record_arrivals": "a", "elastic": True}, "BYTEPS_RECORD_ARRIVALS is not for --elastic"),
        ({"replay_arrivals": "a", "elastic": True}, "BYTEPS_REPLAY_ARRIVALS is not for --elastic"),
        ({"record_arrivals": "/proc/nowhere"}, "BYTEPS_RECORD_ARRIVALS: no folder can be made"),
        ({"replay_arrivals": "/proc/nowhere"}, "BYTEPS_REPLAY_ARRIVALS=/proc/nowhere is no folder on this machine"),
    ],
)
def test_settings_that_can_not_be_had(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        check(Settings(**options))
