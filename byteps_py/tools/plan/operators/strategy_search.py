"""The fastest strategy for an operator graph on a cluster: all of a small space, or FlexFlow's random walk (MCMC).
Pure; any thread."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from byteps_py.errors import UsageError
from byteps_py.tools.plan.operators.operator_graph import OperatorGraph
from byteps_py.tools.plan.operators.strategy import (
    DeviceTopology,
    Division,
    Strategy,
    channel_parallel,
    data_parallel,
    device_bytes,
    divisions_of,
    on_one_device,
    space_size,
)
from byteps_py.tools.plan.operators.timeline import StepTimeline, TaskGraph
from byteps_py.tools.plan.sizing_job import gigabytes

MOST_TRANSFERS = 100_000


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Raises UsageError for a value that is not above 0."""

    #: Changes that the random walk tries, from each beginning.
    proposals: int = 2000
    #: How much a slower strategy is disliked, for each operator of the graph: with n operators, one that is slower by
    #: a share of 1/(beta · n) is taken in 37 % of the cases.
    beta: float = 1.5
    seed: int = 0
    #: Tasks at which a walk looks, at most: some ten seconds. With large graphs it ends after fewer proposals.
    most_looks: int = 1_000_000
    #: Spaces of at most so many strategies are tried whole.
    exact_up_to: int = 5000

    def __post_init__(self) -> None:
        if min(self.proposals, self.most_looks) < 1 or not 0 < self.beta < math.inf:
            given = f"proposals={self.proposals}, beta={self.beta:g}, most_looks={self.most_looks}"
            raise UsageError(f"{given}: numbers above 0 are needed")


@dataclass(frozen=True, slots=True)
class FoundStrategy:
    """The answer. ``is_optimal``: all strategies were tried. ``tried``: how many were simulated."""

    graph: OperatorGraph
    strategy: Strategy
    step_s: float
    is_optimal: bool
    tried: int
    #: Of well-known strategies, by name: the time of a step, or None if it does not fit in memory.
    others: dict[str, float | None]
    #: Of the fullest device.
    most_bytes: float


class StrategyWalk:
    """A strategy, its timeline, and its cost, while operators are divided anew one by one."""

    def __init__(self, tasks: TaskGraph, strategy: Strategy) -> None:
        self._tasks = tasks
        self.strategy = strategy
        self.timeline = StepTimeline(tasks.tasks(strategy))

    def divide(self, number: int, division: Division) -> None:
        """Change one operator: a delta simulation."""
        old = self._tasks.tasks_around(self.strategy, number)
        self.strategy = (*self.strategy[:number], division, *self.strategy[number + 1 :])
        self.timeline.change(old, self._tasks.tasks_around(self.strategy, number))

    @property
    def lacking_bytes(self) -> float:
        """Of the fullest device; 0 if all fits."""
        topology = self._tasks.topology
        held = device_bytes(self._tasks.graph, self.strategy, topology.devices)
        return max(0.0, max(held) - topology.cluster.memory_gb * 1e9)

    @property
    def cost_s(self) -> float:
        """The time of a step; a strategy that does not fit costs more, the more it lacks."""
        lacking = self.lacking_bytes / (self._tasks.topology.cluster.memory_gb * 1e9)
        return self.timeline.makespan_s * (1 + 10 * lacking) * (10 if lacking else 1)


def search_strategy(graph: OperatorGraph, topology: DeviceTopology, options: SearchOptions) -> FoundStrategy:
    """The fastest strategy that fits in memory. Raises UsageError if none was found that does."""
    tasks = TaskGraph(graph, topology)
    _check_size(graph, topology.devices)
    known = {
        "data parallelism": data_parallel(graph, topology.devices),
        "channels divided": channel_parallel(graph, topology.devices),
        "one device": on_one_device(graph),
    }
    walks = {name: StrategyWalk(tasks, strategy) for name, strategy in known.items()}
    others = {name: None if walk.lacking_bytes else walk.timeline.makespan_s for name, walk in walks.items()}
    choices = [list(divisions_of(one, topology.devices)) for one in graph.operators]
    is_small = space_size(graph, topology.devices) <= options.exact_up_to
    if is_small:
        found = list(_all(walks["one device"], choices))
    else:
        generator = random.Random(options.seed)
        drawn = StrategyWalk(tasks, tuple(generator.choice(each) for each in choices))
        found = [each for walk in (*walks.values(), drawn) for each in _random_walk(walk, choices, options, generator)]
    _, best = min(found, key=lambda pair: pair[0])
    walk = StrategyWalk(tasks, best)
    if not is_small:
        _align(walk, tasks)
    if walk.lacking_bytes:
        raise UsageError(
            f"no strategy that was found fits in memory: the best one lacks {gigabytes(walk.lacking_bytes)} on a "
            "device. Take more devices, or fewer samples"
        )
    most = max(device_bytes(graph, walk.strategy, topology.devices))
    return FoundStrategy(graph, walk.strategy, walk.timeline.makespan_s, is_small, len(found), others, most)


def _check_size(graph: OperatorGraph, devices: int) -> None:
    transfers = len(graph.edges) * devices**2
    if transfers > MOST_TRANSFERS:
        raise UsageError(
            f"{len(graph.operators)} operators on {devices} devices have up to {transfers:,} transfers, and at most "
            f"{MOST_TRANSFERS:,} are simulated: plan some of the model's blocks, since they repeat, or fewer devices"
        )


def _all(walk: StrategyWalk, choices: Sequence[Sequence[Division]], place: int = 0) -> Iterator[tuple[float, Strategy]]:
    """Each strategy. From one to the next, mostly the last operator alone is divided anew."""
    if place == len(choices):
        yield walk.cost_s, walk.strategy
        return
    for division in choices[place]:
        if division != walk.strategy[place]:
            walk.divide(place, division)
        yield from _all(walk, choices, place + 1)


def _random_walk(
    walk: StrategyWalk, choices: Sequence[Sequence[Division]], options: SearchOptions, generator: random.Random
) -> Iterator[tuple[float, Strategy]]:
    """Metropolis and Hastings: an operator is chosen, and a division of it, each as likely as any other. The change is
    kept if it is no slower; otherwise with the probability e^(beta · n · (C - C') / C). Half of the proposals without a
    better strategy end the walk."""
    cost = best = walk.cost_s
    yield cost, walk.strategy
    since, beta = 0, options.beta * len(choices)
    for _ in range(options.proposals):
        number = generator.randrange(len(choices))
        before, division = walk.strategy[number], generator.choice(choices[number])
        since += 1
        if division != before:
            walk.divide(number, division)
            new = walk.cost_s
            yield new, walk.strategy
            if new <= cost or generator.random() < math.exp(beta * (cost - new) / cost):
                cost = new
            else:
                walk.divide(number, before)
        if cost < best:
            best, since = cost, 0
        if since > options.proposals // 2 or walk.timeline.looks > options.most_looks:
            return


def _align(walk: StrategyWalk, tasks: TaskGraph) -> None:
    """Divide operators as their neighbours are where that is no slower: the walk leaves many that do not matter."""
    for number, sources in enumerate(tasks.sources):
        possible = set(divisions_of(tasks.graph.operators[number], tasks.topology.devices))
        for neighbour in (*sources, *tasks.readers[number]):
            before, cost = walk.strategy[number], walk.cost_s
            division = walk.strategy[neighbour]
            if division != before and division in possible:
                walk.divide(number, division)
                if walk.cost_s > cost:
                    walk.divide(number, before)
