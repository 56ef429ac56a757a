"""Which stages exchange values: neighbours, and those that a skip connection joins. Pure, except for the channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.stage_runner import MAIN


class Connection(NamedTuple):
    """``source`` gives the value ``name`` to the stage ``target``, and gets its gradient back."""

    source: int
    target: int
    name: str


@dataclass(frozen=True, slots=True)
class SkipNames:
    """The names that the modules of one stage declare (skips.py)."""

    stashes: frozenset[str] = frozenset()
    pops: frozenset[str] = frozenset()


def connections_of(skips: Sequence[SkipNames]) -> list[Connection]:
    """The connections of a pipe, in an order that is the same on all workers. ``skips``: of each stage. Raises
    UsageError if a name is popped by no stage or by several, or by an earlier one."""
    found = [Connection(stage, stage + 1, MAIN) for stage in range(len(skips) - 1)]
    names = sorted({name for each in skips for name in each.stashes | each.pops})
    for name in names:
        sources = [stage for stage, each in enumerate(skips) if name in each.stashes]
        targets = [stage for stage, each in enumerate(skips) if name in each.pops]
        if len(sources) != 1 or len(targets) != 1 or targets[0] < sources[0]:
            raise UsageError(
                f"the skip connection {name!r} is stashed at stages {sources} and popped at stages {targets}; it needs "
                "one of each, the first not after the second"
            )
        if sources[0] < targets[0]:
            found.append(Connection(sources[0], targets[0], name))
    return found
