"""Finds the order of forward and backward passes for stages of different speed: the shortest step that the memory of
each worker allows. ``Pipeline(schedule=search(…).program)`` trains with it.

Micro-batches are alike, so each worker takes them in their order, forward and backward; what is to be found is when it
changes between the two. A worker that holds at most K activations makes forward pass k after backward pass k - K. That
makes the step a job shop, in which some *active* order is optimal: one in which no pass could begin earlier without
another one being later. Giffler and Thompson's rule (1960) branches over all of these; a bound of the rest of the work,
and states that an earlier one dominates, cut the tree. Where the tree is too large, the best of some greedy orders is
improved as far as the states go. Pure; any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Action, Program, backward, forward, one_pipe
from byteps_py.parallel.pipe.schedules import dapple, gpipe
from byteps_py.parallel.pipe.simulator import Durations, simulate

#: States of the tree that are looked at, by default: some seconds.
MOST_STATES = 50_000


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The stages of a pipeline, one on each worker. Raises UsageError if the numbers do not go together.

    Attributes:
        forward: the time of a micro-batch's forward pass on each stage, in any unit.
        backward: of its backward pass.
        hops: from the end of a pass on a stage until its result is on the next one, or back; one fewer than stages.
        held: the activations of micro-batches that each worker can hold; empty: any number.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hops: tuple[float, ...] = ()
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if not stages:
            raise UsageError("a pipeline has at least one stage: give the time of each one's forward pass")
        if not self.hops:
            object.__setattr__(self, "hops", (0.0,) * (stages - 1))
        expected = {"forward": stages, "backward": stages, "hops": stages - 1, "held": stages}
        for name, number in expected.items():
            values = getattr(self, name)
            if len(values) != number and not (name == "held" and not values):
                raise UsageError(f"{name} has {len(values)} numbers, and {stages} stages need {number} of them")
            least = 1 if name == "held" else 0
            if bad := [value for value in values if not least <= value < math.inf]:
                raise UsageError(f"{name} has {bad[0]!r}: a number of at least {least} is needed")
        if not sum(self.forward) + sum(self.backward) > 0:
            raise UsageError("all passes take no time: every order is as long as any other")

    @property
    def durations(self) -> Durations:
        """For the simulator."""
        return Durations(stage_forward=self.forward, stage_backward=self.backward, hops=self.hops)


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """An order, and how good it is."""

    program: Program
    makespan: float
    #: No order is shorter than this.
    bound: float
    #: The states that were looked at.
    states: int
    #: Whether the whole tree was looked at: no order is shorter than ``makespan``.
    is_optimal: bool


def search(times: StageTimes, micro_batches: int, most_states: int = MOST_STATES) -> FoundSchedule:
    """The shortest order for ``micro_batches`` of a step that was found. Raises UsageError if a number is below 1.

    >>> found = search(StageTimes((1, 1), (2, 2)), 4)
    >>> found.makespan, found.is_optimal
    (15.0, True)
    """
    if micro_batches < 1 or most_states < 1:
        raise UsageError(f"{min(micro_batches, most_states)}: at least one micro-batch and one state are needed")
    tree = _Tree(times, micro_batches, most_states)
    for orders in _greedy_orders(times, micro_batches):
        tree.offer(orders, simulate(_program(orders, micro_batches), times.durations).makespan)
    tree.look()
    program = _program(tree.best, micro_batches)
    makespan = simulate(program, times.durations).makespan
    is_optimal = tree.is_complete or makespan <= tree.lowest * (1 + 1e-12)
    return FoundSchedule(program, makespan, makespan if is_optimal else tree.lowest, tree.states, is_optimal)


#: For each worker, its passes: 0 forward, 1 backward.
_Orders = tuple[tuple[int, ...], ...]


def _program(orders: _Orders, micro_batches: int) -> Program:
    workers = tuple(tuple(_actions(stage, order)) for stage, order in enumerate(orders))
    return Program("search", workers, one_pipe(len(orders)), micro_batches)


def _actions(stage: int, order: tuple[int, ...]) -> list[Action]:
    made = [0, 0]
    actions = []
    for kind in order:
        actions.append((backward if kind else forward)(stage, made[kind]))
        made[kind] += 1
    return actions


# ---- greedy orders ---------------------------------------------------------------------------------------------------


def _greedy_orders(times: StageTimes, micro_batches: int) -> list[_Orders]:
    """The known schedules, if there is memory for them, and list schedules: whoever can begin first does, with its
    backward pass or its forward pass first."""
    stages = len(times.forward)
    held = times.held or (micro_batches,) * stages
    found: list[_Orders] = []
    for program in (dapple(stages, micro_batches), gpipe(stages, micro_batches)):
        if all(peak <= most for peak, most in zip(program.peak_in_flight(), held, strict=True)):
            kinds = ((int(action.kind.value == "B") for action in actions) for actions in program.workers)
            found.append(tuple(map(tuple, kinds)))
    for first in (1, 0):
        state = _State.first(stages, micro_batches)
        while passes := state.possible(times, held):
            _, _, stage, kind = min((start, kind != first, stage, kind) for start, stage, kind in passes)
            state = state.after(times, stage, kind)
        found.append(tuple(state.orders))
    return found


# ---- the tree --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """Passes made so far. ``made``: for each stage, of each kind. ``ends``: for each stage, of each kind, the times of
    these. ``free``: when each worker is."""

    micro_batches: int
    orders: list[tuple[int, ...]]
    made: list[tuple[int, int]]
    ends: list[tuple[tuple[float, ...], tuple[float, ...]]]
    free: list[float]

    @staticmethod
    def first(stages: int, micro_batches: int) -> _State:
        """Nothing made."""
        return _State(micro_batches, [()] * stages, [(0, 0)] * stages, [((), ())] * stages, [0.0] * stages)

    def possible(self, times: StageTimes, held: tuple[int, ...]) -> list[tuple[float, int, int]]:
        """(when it can begin, stage, kind) of each worker's next passes whose inputs are there."""
        found: list[tuple[float, int, int]] = []
        for stage, (forwards, backwards) in enumerate(self.made):
            if forwards < self.micro_batches and forwards - backwards < held[stage]:
                if not stage:
                    found.append((self.free[stage], stage, 0))
                elif self.made[stage - 1][0] > forwards:
                    ready = self.ends[stage - 1][0][forwards] + times.hops[stage - 1]
                    found.append((max(ready, self.free[stage]), stage, 0))
            if backwards < forwards:
                if stage == len(self.made) - 1:
                    found.append((self.free[stage], stage, 1))
                elif self.made[stage + 1][1] > backwards:
                    ready = self.ends[stage + 1][1][backwards] + times.hops[stage]
                    found.append((max(ready, self.free[stage]), stage, 1))
        return found

    def after(self, times: StageTimes, stage: int, kind: int) -> _State:
        """One more pass, as early as possible."""
        start = next(
            start
            for start, where, what in self.possible(times, (self.micro_batches,) * len(self.made))
            if (where, what) == (stage, kind)
        )
        end = start + (times.backward if kind else times.forward)[stage]
        orders, made, ends, free = self.orders.copy(), self.made.copy(), self.ends.copy(), self.free.copy()
        orders[stage] = (*orders[stage], kind)
        forwards, backwards = made[stage]
        made[stage] = (forwards + (kind == 0), backwards + kind)
        of_stage = ends[stage]
        ends[stage] = (of_stage[0], (*of_stage[1], end)) if kind else ((*of_stage[0], end), of_stage[1])
        free[stage] = end
        return _State(self.micro_batches, orders, made, ends, free)

    def frontier(self) -> tuple[float, ...]:
        """All times on which the rest of the step depends."""
        times = list(self.free)
        for stage, (forwards, backwards) in enumerate(self.ends):
            if stage + 1 < len(self.ends):
                times += forwards[self.made[stage + 1][0] :]
            if stage:
                times += backwards[self.made[stage - 1][1] :]
        return tuple(times)


class _Tree:
    """Depth first, the most promising branch first."""

    def __init__(self, times: StageTimes, micro_batches: int, most_states: int) -> None:
        self._times, self._micro_batches, self._most = times, micro_batches, most_states
        self._held = times.held or (micro_batches,) * len(times.forward)
        self._seen: dict[tuple[tuple[int, int], ...], list[tuple[float, ...]]] = {}
        stages = range(len(times.forward))
        #: From the last backward pass of a stage to the end of the step; from the step's begin to its first forward.
        self._tails = [sum(times.backward[:stage]) + sum(times.hops[:stage]) for stage in stages]
        self._heads = [sum(times.forward[:stage]) + sum(times.hops[:stage]) for stage in stages]
        self.best: _Orders = ()
        self.makespan = math.inf
        self.states, self.is_complete = 0, True
        self.lowest = self._bound(_State.first(len(times.forward), micro_batches))

    def offer(self, orders: _Orders, makespan: float) -> None:
        """Take it if it is the shortest so far."""
        if makespan < self.makespan:
            self.best, self.makespan = orders, makespan

    def look(self) -> None:
        """At the whole tree, or at as much of it as states are allowed."""
        stack = [_State.first(len(self._times.forward), self._micro_batches)]
        while stack and self.makespan > self.lowest * (1 + 1e-12):
            state = stack.pop()
            if self._bound(state) >= self.makespan * (1 - 1e-12) or self._is_dominated(state):
                continue
            self.states += 1
            if self.states > self._most:
                self.is_complete = False
                return
            passes = state.possible(self._times, self._held)
            if not passes:
                self.offer(tuple(state.orders), max(state.free))
                continue
            ends = [(start + self._of(kind)[stage], stage) for start, stage, kind in passes]
            earliest, busiest = min(ends)
            branches = [
                state.after(self._times, stage, kind)
                for start, stage, kind in passes
                if stage == busiest and (start < earliest or start + self._of(kind)[stage] <= earliest)
            ]
            stack.extend(sorted(branches, key=self._bound, reverse=True))

    def _of(self, kind: int) -> tuple[float, ...]:
        return self._times.backward if kind else self._times.forward

    def _bound(self, state: _State) -> float:
        """No order that begins like this is shorter."""
        times, count, least = self._times, self._micro_batches, max(state.free)
        for stage, (forwards, backwards) in enumerate(state.made):
            work = (count - forwards) * times.forward[stage] + (count - backwards) * times.backward[stage]
            if work:
                begin = max(state.free[stage], self._heads[stage]) if not forwards else state.free[stage]
                if not backwards:  # the first one comes back from the last stage
                    least = max(least, self._first_back(stage) + count * times.backward[stage] + self._tails[stage])
                least = max(least, begin + work + self._tails[stage])
        return least

    def _first_back(self, stage: int) -> float:
        times = self._times
        after = sum(times.forward[stage:]) + 2 * sum(times.hops[stage:]) + sum(times.backward[stage + 1 :])
        return self._heads[stage] + after

    def _is_dominated(self, state: _State) -> bool:
        """Whether another state with the same passes was as early everywhere. Otherwise this one is remembered."""
        key, times = tuple(state.made), state.frontier()
        others = self._seen.setdefault(key, [])
        if any(all(one <= mine for one, mine in zip(other, times, strict=True)) for other in others):
            return True
        others[:] = [other for other in others if not all(mine <= one for one, mine in zip(other, times, strict=True))]
        others.append(times)
        return False
