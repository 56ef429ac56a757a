"""How fast every machine's link is, before the first tensor: who sends to whom, turn by turn, and what came out.

In a turn a communication service sends to one summation service of another machine, which sends everything back;
no machine is in two such pairs at once. What a pair reaches is the slower of its two links, so a machine's rate is
the best that any of its pairs has reached. Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

from byteps_py.placement.links import classes
from byteps_py.tuning import LOOPBACK_MBIT

#: (index of the GPU machine that sends, position of the other: CPU machines 0..k−1, then GPU machines k..k+n−1)
Pair = tuple[int, int]

TURNS = 4
#: A turn lasts a fraction of a second; what has not been reported by then is not waited for.
TURN_LIMIT_S = 5.0


def pairs_of(turn: int, n: int, k: int, gpu_machines_sum: bool) -> list[Pair]:
    """The pairs of one turn; every turn has others, as far as there are others. In every second turn GPU machines
    are among themselves: a single slow CPU machine must not be the only partner they have.

    >>> [pairs_of(turn, 4, 2, True) for turn in range(3)]
    [[(0, 0), (1, 1), (2, 5)], [(0, 3), (2, 5)], [(1, 0), (2, 1), (0, 5)]]
    """
    count = 0 if gpu_machines_sum and turn % 2 else min(n, k)
    shift = turn // 2 if gpu_machines_sum else turn
    pairs = [((shift + place) % n, (shift * count + place) % k) for place in range(count)]
    busy = {worker for worker, _ in pairs}
    free = [worker for worker in range(n) if worker not in busy]
    if gpu_machines_sum:
        pairs += [(one, k + other) for one, other in _tournament(free, turn)]
    return pairs


def _tournament(players: Sequence[int], turn: int) -> list[tuple[int, int]]:
    """A round in which each plays at most once: the first stays where it is, the others go on by one place."""
    rest: list[int | None] = [*players[1:]]
    if len(players) % 2:
        rest.append(None)  # whoever meets it has a break
    ring = [*players[:1], *rest[turn % len(rest) :], *rest[: turn % len(rest)]] if rest else []
    met = [(ring[place], ring[-1 - place]) for place in range(len(ring) // 2)]
    return [(one, other) for one, other in met if one is not None and other is not None]


class Survey:
    """``n`` GPU and ``k`` CPU machines. ``rates``: Mbit/s of all, CPU machines first; 0: not known."""

    def __init__(self, n: int, k: int, gpu_machines_sum: bool) -> None:
        self._n, self._k, self._gpu_machines_sum = n, k, gpu_machines_sum
        self._turns = TURNS * max(1, -(-k // n))
        self._waiting: dict[int, Pair] = {}  # by the GPU machine that reports
        self._turn_began_s = 0.0
        self.turn = -1
        self.rates = [0.0] * (k + n)

    @property
    def is_over(self) -> bool:
        return self.turn >= self._turns

    @property
    def sentence(self) -> str:
        return f"all are there: measuring their links, turn {self.turn + 1} of {self._turns}"

    def next_turn(self, now_s: float) -> Sequence[Pair]:
        """Begin the next turn, if there is one: who sends to whom."""
        self.turn += 1
        self._turn_began_s = now_s
        pairs = [] if self.is_over else pairs_of(self.turn, self._n, self._k, self._gpu_machines_sum)
        self._waiting = {pair[0]: pair for pair in pairs}
        return pairs

    def measured(self, worker: int, turn: int, mbit: float) -> None:
        """GPU machine ``worker`` reports (0: its partner did not answer)."""
        if turn != self.turn or worker not in self._waiting:
            return  # too late
        _, partner = self._waiting.pop(worker)
        for machine in (self._k + worker, partner):
            self.rates[machine] = max(self.rates[machine], mbit)

    def is_turn_over(self, now_s: float) -> bool:
        """All have reported, or had their time to."""
        return not self._waiting or now_s - self._turn_began_s >= TURN_LIMIT_S

    def settle(self, configured: Sequence[float]) -> list[float]:
        """The rates to go by: as configured; else as measured, those that hardly differ made equal; else, as no
        partner answered, the fastest known."""
        measured = [0.0 if told else rate for told, rate in zip(configured, self.rates, strict=True)]
        evened = iter(classes([rate for rate in measured if rate]))
        rates = [told or (next(evened) if rate else 0.0) for told, rate in zip(configured, measured, strict=True)]
        return [rate or max(rates) or LOOPBACK_MBIT for rate in rates]
