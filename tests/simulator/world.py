"""Virtual time, and everything that happens in it: one seed, one order of events.

Owns the clock, the queue of events, the one source of randomness, the log and the processes. Knows nothing of
what its processes do. Messages on one wire keep their order; all else happens in an order that the seed decides.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

#: Nothing but timers for so long, and processes still there: they hang. Longer than the deadlines that turn a
#: silence, or a departure, into an error.
HANG_S = 8.0
#: What a slow wire takes at most: nobody is lost by that.
_SLOWEST_S = 0.3


Way = tuple[str, str]


class InvariantError(AssertionError):
    """An invariant is broken."""


class Process:
    """``check`` runs after each of the process's events, ``broke`` when one of its callbacks raises."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.host = name  # what its network is of
        self.pid = 1000 + len(world.processes)
        self.is_alive = True
        self.is_gone = False  # not alive, and not frozen
        self.is_paused = False
        self.paused_s = 0.0  # so far
        self.backlog: list[tuple[str | None, Callable[[], None]]] = []  # what happens to it once it wakes
        self.exit_code: int | None = None  # None: killed, or still there
        self.group = 0  # of ranks, that it works for: in an elastic job one follows another
        self.on_end: list[Callable[[], None]] = []  # what others notice when it is gone, however it went
        world.processes.append(self)

    def check(self) -> None:
        """Invariants of this process."""

    def broke(self, error: Exception) -> None:
        raise error

    def freeze(self) -> None:
        """Do nothing any more, and nobody is told."""
        self.is_alive = False

    def freeze_for(self, for_s: float) -> None:
        """Do nothing for so long. What comes meanwhile is waiting then."""
        self.is_paused = True
        self.paused_s += for_s
        self.world.after(for_s, None, None, self._wake)
        self.world.expect_quiet(for_s)

    def _wake(self) -> None:
        self.is_paused = False
        backlog, self.backlog = self.backlog, []
        if self.is_alive:
            self.world.note(self.name, "wakes")
        for label, act in backlog:
            self.world.after(0.0, self, label, act)

    def die(self) -> None:
        """End at once, without a word."""
        if self.is_alive:
            self.is_alive, self.is_gone = False, True
            for notice in self.on_end:
                notice()


class Wire:
    """One direction of a connection: what is sent later never arrives earlier. ``way``: from which host to which."""

    def __init__(self, way: Way = ("", ""), slowness: float = 1.0) -> None:
        self.way = way
        self.last_arrival_s = 0.0
        self.slowness = slowness


class Outage(NamedTuple):
    """Nothing comes to this host, or from it."""

    host: str
    to_it: bool
    from_it: bool
    until_s: float

    def affects(self, way: Way) -> bool:
        return way[0] != way[1] and ((self.to_it and way[1] == self.host) or (self.from_it and way[0] == self.host))


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.events = 0
        self.processes: list[Process] = []
        self.active: Process | None = None  # whose event this is
        self.faults: list[str] = []  # that have ended the job, as they may
        self.trials: list[str] = []  # that it has to survive
        self.outages: list[Outage] = []
        self.hang_s = HANG_S
        self._pace_s = self.random.choice((0.0002, 0.001, 0.005))
        self._last_work_s = 0.0
        self._slow_wires = self.random.choice((0.0, 0.0, 0.2))
        self._queue: list[tuple[float, int, Process | None, str | None, Callable[[], None]]] = []
        self._order = itertools.count()
        self._log: list[tuple[float, str, str]] = []

    def monotonic(self) -> float:
        return self.now_s

    def delay(self) -> float:
        """How long something takes: usually about the pace of this run, now and then far longer."""
        mean_s = self._pace_s * (15 if self.random.random() < 0.02 else 1)
        return self.random.expovariate(1 / mean_s)

    def new_wire(self, way: Way) -> Wire:
        """Between machines: some are slow in some runs."""
        return Wire(way, 30.0 if self.random.random() < self._slow_wires else 1.0)

    def is_interrupted(self, way: Way) -> bool:
        """What is sent now that way, or back, arrives only when an outage is over."""
        return max(self._clear_s(way), self._clear_s(way[::-1])) > self.now_s

    def notice_s(self) -> float:
        """Until a connection on which nothing comes is given up."""
        return self.random.uniform(2.5, 6.0)

    def _clear_s(self, way: Way) -> float:
        return max((outage.until_s for outage in self.outages if outage.affects(way)), default=0.0)

    def expect_quiet(self, for_s: float) -> None:
        """It may be that nothing but timers happens for so long."""
        self._last_work_s = max(self._last_work_s, self.now_s + for_s)

    def after(self, delay_s: float, process: Process | None, label: str | None, act: Callable[[], None]) -> None:
        """``act`` as an event of ``process``, unless that is dead by then. No label: a timer, which is no work."""
        self._at(self.now_s + delay_s, process, label, act)

    def _at(self, at_s: float, process: Process | None, label: str | None, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), process, label, act))

    def carry(self, wire: Wire, process: Process | None, label: str | None, act: Callable[[], None]) -> None:
        """``act`` in ``process`` when a message sent now on ``wire`` arrives."""
        delay_s = self.delay()
        if wire.slowness > 1.0:
            delay_s = min(delay_s * wire.slowness, _SLOWEST_S)
        leaves_s = max(self.now_s, self._clear_s(wire.way)) if self.outages else self.now_s
        wire.last_arrival_s = max(wire.last_arrival_s, leaves_s + delay_s)
        self._at(wire.last_arrival_s, process, label, act)

    def note(self, who: str, what: str) -> None:
        self._log.append((self.now_s, who, what))

    def log(self) -> str:
        return "".join(f"{at_s:.6f} {who}: {what}\n" for at_s, who, what in self._log)

    def step(self) -> bool:
        """One event. False when there is none, or nothing but timers for ``hang_s``."""
        if not self._queue:
            return False
        self.now_s, _, process, label, act = heapq.heappop(self._queue)
        if label is not None:
            self._last_work_s = max(self._last_work_s, self.now_s)
        elif self.now_s - self._last_work_s > self.hang_s:
            return False
        if process is not None and not process.is_alive:
            return True
        if process is not None and process.is_paused:
            process.backlog.append((label, act))
            return True
        self.events += 1
        if label:
            self._log.append((self.now_s, process.name if process else "world", label))
        self.active = process
        try:
            act()
        except InvariantError:
            raise
        except Exception as error:
            if process is None:
                raise
            process.broke(error)
        if process is not None:
            process.check()
        return True
