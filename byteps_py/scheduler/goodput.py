"""The goodput of a job over weeks in which machines are lost and links and processors slow down, beside one that goes
back to its last checkpoint (`bps simulate --days`). Pure; any thread.

    losses of machines, slow links, slow processors ─► what each of them stops, repeats and slows down ─► goodput

An event model: the times of events are drawn, and what each costs was measured (benchmarks/results: recovery, goodput,
heal) or follows from the scheduler's own constants for a job of this size. Unlike the control messages of
simulation.py, it doesn't drive the state machines: a month of 10,000 machines has too many messages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from byteps_py.config.tuning import control_pace, report_pace, silence_s
from byteps_py.errors import UsageError

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class MonthOptions:
    """A job and its troubles. Raises UsageError for a value that is not above 0, or a share of more than 1."""

    machines: int
    cpu_machines: int = 0
    days: float = 30.0
    seed: int = 0
    step_s: float = 10.0
    #: The share of a step in which nothing but the network works.
    exposed: float = 0.2
    #: Days in which one machine is lost once: Llama 3 (Grattafiori et al., 2024, 3.3.4), 419 unexpected interruptions
    #: of 2,048 machines in 54 days.
    lost_days: float = 264.0
    #: Greyhound (Wu et al., 2025): 40 % of jobs on four machines had a slow link, for 24 minutes; 2 % of those on one
    #: had a slow processor, for 10. That these jobs ran for a day is our assumption.
    slow_link_days: float = 7.8
    slow_link_s: float = 1440.0
    slow_processor_days: float = 50.0
    slow_processor_s: float = 600.0
    #: What a slow link or processor takes, in units of the usual time.
    slower: float = 2.0
    #: From the moment in which a loss is known until the next step (benchmarks/results/goodput.md).
    recover_s: float = 7.0
    #: The same of a job that starts again as a whole, and what it stops for each checkpoint.
    restart_s: float = 600.0
    checkpoint_s: float = 10.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name not in ("cpu_machines", "seed") and not 0 < getattr(self, one.name) < math.inf:
                raise UsageError(f"{one.name.replace('_', ' ')}: {getattr(self, one.name)}: a number above 0 is needed")
        if self.exposed > 1 or self.slower < 1:
            raise UsageError(f"exposed={self.exposed:g} is a share of a step, slower={self.slower:g} at least 1")


@dataclass(slots=True)
class Goodput:
    """``lost``: shares of the time, by what took them; with ``share`` they add up to 1."""

    share: float = 0.0
    losses: int = 0
    lost: dict[str, float] = field(default_factory=dict)


#: After its shares have followed, a sum over one link at half of its rate takes so much longer, and they follow so many
#: seconds after it became slow (benchmarks/results/heal.md: eight machines, of which one is slow).
_HEALED, _HEALED_AFTER_S = 1.15, 4.0


def month_goodput(options: MonthOptions) -> tuple[Goodput, Goodput]:
    """Of this package, whose spare machines take the place of lost ones, and of a job that goes back to checkpoints.

    >>> ours, other = month_goodput(MonthOptions(1000))
    >>> ours.losses == other.losses, ours.share > other.share
    (True, True)
    """
    numbers = options.machines, options.cpu_machines
    noticed_s = silence_s(0.2, 1.0, control_pace(*numbers))
    stops = _drawn(options, "losses", options.lost_days)
    slow = [*_slow(options, "link", options.slow_link_days, options.slow_link_s)]
    slow += _slow(options, "processor", options.slow_processor_days, options.slow_processor_s)
    heals_s = _HEALED_AFTER_S * report_pace(*numbers)
    healed = [part for each in slow for part in _with_healing(each, heals_s, options.slower)]
    ours = _walk(options, stops, healed, noticed_s + options.recover_s, options.step_s)
    # Young's interval between checkpoints; a machine's loss ends the job at once.
    every_s = math.sqrt(2 * options.checkpoint_s * options.lost_days * DAY_S / options.machines)
    other = _walk(options, stops, slow, noticed_s + options.restart_s, every_s, options.checkpoint_s)
    return ours, other


@dataclass(frozen=True, slots=True)
class _Slow:
    """From ``begin_s`` to ``end_s``, links or processors take ``times`` as long."""

    kind: str
    begin_s: float
    end_s: float
    times: float


def _drawn(options: MonthOptions, name: str, days: float) -> list[float]:
    """When the events of all machines come."""
    chance, found, at_s = random.Random(f"{options.seed} {name}"), [], 0.0
    while (at_s := at_s + chance.expovariate(options.machines / (days * DAY_S))) < options.days * DAY_S:
        found.append(at_s)
    return found


def _slow(options: MonthOptions, kind: str, days: float, mean_s: float) -> Iterator[_Slow]:
    lasts = random.Random(f"{options.seed} {kind} lasts")
    for at_s in _drawn(options, kind, days):
        yield _Slow(kind, at_s, at_s + lasts.expovariate(1 / mean_s), options.slower)


def _with_healing(slow: _Slow, after_s: float, slower: float) -> Iterator[_Slow]:
    """Shares follow a slow link; a slow processor is named, and stays."""
    if slow.kind != "link" or slow.end_s - slow.begin_s <= after_s:
        yield slow
        return
    yield _Slow(slow.kind, slow.begin_s, slow.begin_s + after_s, slower)
    yield _Slow(slow.kind, slow.begin_s + after_s, slow.end_s, min(slower, _HEALED))


def _walk(
    options: MonthOptions, stops: list[float], slow: list[_Slow], pause_s: float, kept_s: float, saving_s: float = 0.0
) -> Goodput:
    """``pause_s``: after each loss; ``kept_s``: of computing, after which nothing is lost any more; ``saving_s``: what
    that takes each time."""
    marks: list[tuple[float, int, _Slow | None]] = [(at_s, 0, None) for at_s in stops]
    for each in slow:
        marks += [(each.begin_s, 1, each), (each.end_s, -1, each)]
    marks.sort(key=lambda mark: mark[0])
    end_s, now_s, paused_until_s = options.days * DAY_S, 0.0, 0.0
    under_way: dict[str, dict[float, int]] = {"link": {}, "processor": {}}
    done_s = since_s = 0.0  # useful seconds, and those of them that would be lost now
    stopped_s = repeated_s = slow_s = saved_s = 0.0
    rate = kept_s / (kept_s + saving_s)
    for at_s, number, change in [*marks, (end_s, 0, None)]:
        at_s = min(at_s, end_s)
        began_s = min(max(now_s, paused_until_s), at_s)
        stopped_s += began_s - now_s
        worked_s = at_s - began_s
        times = {kind: max(which, default=1.0) for kind, which in under_way.items()}
        took = options.exposed * times["link"] + (1 - options.exposed) * times["processor"]
        useful_s = worked_s / took * rate
        saved_s += worked_s * (1 - rate)
        slow_s += worked_s * rate * (1 - 1 / took)
        done_s += useful_s
        since_s = (since_s + useful_s) % kept_s
        now_s = at_s
        if change is not None:
            counts = under_way[change.kind]
            counts[change.times] = counts.get(change.times, 0) + number
            if not counts[change.times]:
                del counts[change.times]
        elif at_s < end_s:
            repeated_s, done_s, since_s = repeated_s + since_s, done_s - since_s, 0.0
            paused_until_s = at_s + pause_s
    parts = {"stopped": stopped_s, "repeated": repeated_s, "slowed down": slow_s, "checkpoints": saved_s}
    return Goodput(done_s / end_s, len(stops), {name: part / end_s for name, part in parts.items()})
