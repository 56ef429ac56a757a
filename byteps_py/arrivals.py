"""In which order servers added what machines gave in asynchronous training: the logs of the machines, and what they say
together. Pure, but for ``read`` and ``ArrivalLog``; any thread.

Every contribution to a partition of an ACCUMULATE raises the *version* of its values by one, so the version counts what
was added. A machine logs a change for each of its rounds: the version that its own contribution made, and what the copy
contains that it got. All logs together say the order of all additions, and at which version each machine got its copy;
with the same contributions, the same order gives the same bits.

A server that is lost may have added what its machine got no answer to, and another machine did. Then the version that
this contribution made is in no log. It is one of those that no other contribution made, before the first copy that has
it and after the last one that does not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.wording import count_text

#: Tensor, generation, index of the partition.
Place = tuple[str, int, int]
#: Machine, its round.
Turn = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LoggedChange:
    """One machine's round of a partition. ``added_at``: the version that its contribution made; 0: unknown. ``clock``:
    by machine, the last round that the copy contains."""

    machine: int
    tensor: str
    generation: int
    index: int
    round: int
    added_at: int
    clock: tuple[int, ...]

    @property
    def answered_at(self) -> int:
        """The version of the copy."""
        return sum(self.clock)


@dataclass(frozen=True, slots=True)
class Order:
    """When a contribution is added, and answered: versions."""

    added_at: int
    answered_at: int


@dataclass(frozen=True, slots=True)
class Orders:
    """The order of all additions of a run. ``unsure``: how many of them may have come in another order, which no log
    tells; it would give other last bits."""

    by_place: Mapping[Place, Mapping[Turn, Order]]
    unsure: int

    @property
    def count(self) -> int:
        """Of contributions."""
        return sum(map(len, self.by_place.values()))


class ArrivalLog:
    """The log of one machine, a line of JSON for each of its rounds of a partition."""

    def __init__(self, folder: Path, machine: int) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.machine = machine
        self._file: TextIO = _path(folder, machine).open("w")

    def add(self, arrival: LoggedChange) -> None:
        """Raises OSError."""
        fields = [arrival.tensor, arrival.generation, arrival.index, arrival.round, arrival.added_at, *arrival.clock]
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._file.close()


def check(settings: Settings) -> None:
    """Raise ConfigurationError if the folders of a process's settings can't be used."""
    if settings.record_arrivals:
        try:
            Path(settings.record_arrivals).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"BYTEPS_RECORD_ARRIVALS: no folder can be made: {error}") from None
    if settings.replay_arrivals and not Path(settings.replay_arrivals).is_dir():
        raise ConfigurationError(f"BYTEPS_REPLAY_ARRIVALS={settings.replay_arrivals} is no folder on this machine")


def _path(folder: Path, machine: int) -> Path:
    return folder / f"machine-{machine}.jsonl"


def read(folder: Path, machines: int) -> list[LoggedChange]:
    """The logs of all machines of a run. Raises UsageError if one is missing or can't be understood."""
    found: list[LoggedChange] = []
    for machine in range(machines):
        path = _path(folder, machine)
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise UsageError(
                f"the log of machine {machine} can't be read: {error}: gather the logs of all {machines} machines "
                f"(BYTEPS_RECORD_ARRIVALS) in {folder}"
            ) from None
        for number, line in enumerate(lines, 1):
            try:
                tensor, generation, index, round_, added_at, *clock = json.loads(line)
                found.append(LoggedChange(machine, tensor, generation, index, round_, added_at, tuple(clock)))
            except (ValueError, TypeError):
                raise UsageError(f"{path}, line {number}: no record of an arrival: {line[:80]!r}") from None
            if len(clock) != machines:
                raise UsageError(
                    f"{path}, line {number}: a record of {count_text(len(clock), 'machine')}, in the logs of "
                    f"{count_text(machines, 'machine')}"
                )
    return found


def orders_of(arrivals: Iterable[LoggedChange]) -> Orders:
    """The orders that the logs say together. Raises UsageError if they are not those of one whole run.

    >>> logs = [LoggedChange(0, "w", 1, 0, 1, 1, (1, 0)), LoggedChange(1, "w", 1, 0, 1, 2, (1, 1))]
    >>> orders_of(logs).by_place["w", 1, 0]
    {(0, 1): Order(added_at=1, answered_at=1), (1, 1): Order(added_at=2, answered_at=2)}
    """
    by_place: dict[Place, list[LoggedChange]] = defaultdict(list)
    for arrival in arrivals:
        by_place[arrival.tensor, arrival.generation, arrival.index].append(arrival)
    unsure, found = 0, {}
    for place, mine in by_place.items():
        orders, some = _of_place(place, mine)
        found[place] = orders
        unsure += some
    return Orders(found, unsure)


def _of_place(place: Place, arrivals: list[LoggedChange]) -> tuple[dict[Turn, Order], int]:
    what = f"partition {place[2]} of tensor {place[0]!r}"
    made = {arrival.added_at: arrival for arrival in arrivals if arrival.added_at}
    lost = [arrival for arrival in arrivals if not arrival.added_at]
    if len(made) + len(lost) != len(arrivals):
        raise UsageError(f"{what}: two contributions made the same version: these are logs of several runs")
    gaps = [version for version in range(1, len(arrivals) + 1) if version not in made]
    if len(gaps) != len(lost):
        raise UsageError(f"{what}: contributions are in no log: not all of the run was logged")
    added = {(arrival.machine, arrival.round): version for version, arrival in made.items()}
    unsure = 0
    for version in gaps:
        # Of those that may have made it, the one that the earliest copy has.
        able = [each for each in lost if _range(each, arrivals)[0] < version]
        if not able:
            raise UsageError(f"{what}: no log tells what made version {version}: these are not the logs of one run")
        chosen = min(able, key=lambda each: (_range(each, arrivals)[1], each.machine))
        unsure += len(able) > 1 and sum(_range(each, arrivals)[1] > version for each in able) > 0
        added[chosen.machine, chosen.round] = version
        lost.remove(chosen)
    orders = {
        (arrival.machine, arrival.round): Order(added[arrival.machine, arrival.round], arrival.answered_at)
        for arrival in arrivals
    }
    return orders, unsure


def _range(lost: LoggedChange, arrivals: Iterable[LoggedChange]) -> tuple[int, int]:
    """(the latest copy without its contribution, the earliest one with it): versions."""
    without, having = 0, lost.answered_at
    for each in arrivals:
        version = each.answered_at
        if each.clock[lost.machine] >= lost.round:
            having = min(having, version)
        else:
            without = max(without, version)
    return without, having
