"""Rounds that have begun and wait for some machines, who are told so. Pure; time is an argument.

Machines push what is most urgent of what is ready, and gradients never become ready everywhere at the same moment. So
one machine has begun with partitions that another one leaves for later, and the other way round: each holds memory
and credit, and none has an answer. To complete what others have begun costs a machine one message, and gives all of
them an answer; so that goes first (worker/core/credit.py). With four machines and computation that takes as long as
communication, links that carried answers at two thirds of their rate during a backward pass carry nine tenths.
"""

from __future__ import annotations

import itertools
from typing import Generic

from byteps_py.server.partition import C, Round
from byteps_py.wire import MAX_NAMES, RoundName, name_of

#: Machines that push in the same order give their parts at about the same time; one that has not by then has another.
AWAITED_AFTER_S = 0.01


class Awaited(Generic[C]):
    """Each round's machines are told once. A machine that is not yet ready to give remembers.

    ``after_s``: how long after it has begun.
    """

    def __init__(self, after_s: float = AWAITED_AFTER_S) -> None:
        self.after_s = after_s
        self._begun: dict[Round[C], None] = {}  # of which nobody was told; oldest first

    def __bool__(self) -> bool:
        """There will be somebody to tell, if nothing comes before ``due``."""
        return bool(self._begun)

    def begin(self, round_: Round[C]) -> None:
        """The first contribution has come."""
        self._begun[round_] = None

    def end(self, round_: Round[C]) -> None:
        """It waits for nobody any more."""
        self._begun.pop(round_, None)

    def due(self, now: float, machines: int) -> dict[int, list[RoundName]]:
        """Whom to tell, and of which rounds, at most MAX_NAMES; of ``machines``, some of which may have no part in it.
        Call it every AWAITED_AFTER_S."""
        told: dict[int, list[RoundName]] = {}
        for round_ in list(itertools.islice(self._begun, MAX_NAMES)):
            if now < round_.since_s + self.after_s:
                break
            del self._begun[round_]
            name = name_of(next(iter(round_.contributions.values())).header)
            for machine in range(machines):
                if machine not in round_.contributions:
                    told.setdefault(machine, []).append(name)
        return told
