"""Rounds that have begun and wait for some machines, which the server tells so. Pure; time is an argument.

Machines push the most urgent of the partitions that are ready, and gradients never become ready everywhere at the same
moment. So one machine begins with partitions that another one leaves for later, and the other way round. Each such
partition holds memory and credit, and gets no answer. A machine that completes rounds of others sends one message for
each, and all machines get an answer; so those rounds go first (worker/core/credit.py). With four machines, and
computation that takes as long as communication, links carried answers at two thirds of their rate during a backward
pass without this, and at nine tenths with it.
"""

from __future__ import annotations

import itertools
from typing import Generic

from byteps_py.server.round_state import C, Round
from byteps_py.wire.data_link import MAX_NAMES, RoundName, name_of

#: Machines that push in the same order contribute at about the same time. One that is later has another order.
AWAITED_AFTER_S = 0.01


class AwaitedRounds(Generic[C]):
    """Rounds whose missing machines have not been told yet. Each machine is told once per round; one that is not ready
    to contribute remembers it.

    ``after_s``: seconds from the first contribution until the others are told.
    """

    def __init__(self, after_s: float = AWAITED_AFTER_S) -> None:
        self.after_s = after_s
        self._begun: dict[Round[C], None] = {}  # oldest first

    def __bool__(self) -> bool:
        """True if there are rounds whose machines may have to be told."""
        return bool(self._begun)

    def begin(self, round_: Round[C]) -> None:
        """The round has its first contribution."""
        self._begun[round_] = None

    def end(self, round_: Round[C]) -> None:
        """The round waits for no machine any more."""
        self._begun.pop(round_, None)

    def due(self, now: float, machines: int) -> dict[int, list[RoundName]]:
        """By machine, the rounds to tell it about, at most MAX_NAMES. ``machines``: how many the job has; some may take
        no part in a round. Call it every AWAITED_AFTER_S."""
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
