"""The tasks of a training step for a strategy, as FlexFlow makes them, and when each of them runs.

Each part of an operator computes forward and backward, what it reads travels from the parts that have it, and the
gradients of copies travel around a ring:

    forward of a part ─► transfers to readers' parts ─► … ─► backward of a part ─► transfers back; gradients of copies

A device or a link runs one task at a time. It takes its tasks in the order in which they become ready, and of those
that become ready at the same time, the one with the smaller key. Each task lasts longer than no time, so exactly one
timeline fits:

    ready = the latest end of the tasks before it
    start = the later one of: ready, the end of the task before it on its resource
    order of a resource = (ready, key)

``simulate`` finds it whole: ready tasks in the order of time. ``change`` begins with the timeline of other
tasks, and looks again at what a change touches, in the order of time, until all three lines hold everywhere: FlexFlow's
delta simulation. Both compute the same sums of the same numbers, and so the same bits. Pure; any thread.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from byteps_py.tools.plan.model_costs import BACKWARD_RATIO
from byteps_py.tools.plan.operators.operator_graph import OperatorGraph
from byteps_py.tools.plan.operators.strategy import DeviceTopology, Strategy, read_shares, replica_groups

#: (kind, operator, part, other operator, other part); its order decides between tasks that are ready at the same time.
TaskKey = tuple[int, int, int, int, int]
FORWARD, FORWARD_TRANSFER, BACKWARD, BACKWARD_TRANSFER, GRADIENT = range(5)
_GRADIENT_BYTES = 4


class Task(NamedTuple):
    """``resource``: a device (-2, its number) or a link. ``after``: the tasks that must have ended."""

    resource: tuple[int, int]
    duration_s: float
    after: tuple[TaskKey, ...]


class TaskGraph:
    """Makes tasks for an operator graph on a cluster."""

    def __init__(self, graph: OperatorGraph, topology: DeviceTopology) -> None:
        self.graph, self.topology = graph, topology
        count = len(graph.operators)
        self.sources: list[list[int]] = [[] for _ in range(count)]
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for source, reader in graph.edges:
            self.sources[reader].append(source)
            self.readers[source].append(reader)

    def tasks(self, strategy: Strategy) -> dict[TaskKey, Task]:
        """All of a step."""
        found: dict[TaskKey, Task] = {}
        for number in range(len(self.graph.operators)):
            found.update(self._of_operator(strategy, number))
            for reader in self.readers[number]:
                found.update(self._of_edge(strategy, number, reader))
        return found

    def tasks_around(self, strategy: Strategy, changed: int) -> dict[TaskKey, Task]:
        """Those that may be others with another division of one operator: its own, those of its neighbours, and the
        transfers between it and them."""
        sources, readers = self.sources[changed], self.readers[changed]
        found = {key: task for one in (changed, *sources, *readers) for key, task in self._of_operator(strategy, one)}
        for edge in (*((source, changed) for source in sources), *((changed, reader) for reader in readers)):
            found.update(self._of_edge(strategy, *edge))
        return found

    def _of_operator(self, strategy: Strategy, number: int) -> Iterator[tuple[TaskKey, Task]]:
        operator, division, topology = self.graph.operators[number], strategy[number], self.topology
        forward_s = topology.compute_s(operator, division.parts)
        for part in range(division.parts):
            device = (-2, division.device(part))
            read = [key for source in self.sources[number] for key in self._read(strategy, source, number, part)]
            own = (FORWARD, number, part, -1, -1)
            yield own, Task(device, forward_s, tuple(read))
            told = [key for reader in self.readers[number] for key in self._told(strategy, number, reader, part)]
            yield (BACKWARD, number, part, -1, -1), Task(device, BACKWARD_RATIO * forward_s, (own, *told))
        if operator.parameters:
            nbytes = _GRADIENT_BYTES * operator.parameters / division.channels
            for copies in replica_groups(division):
                if (size := len(copies)) > 1:
                    after = tuple((BACKWARD, number, part, -1, -1) for part in copies)
                    for place, part in enumerate(copies):
                        ends = division.device(part), division.device(copies[(place + 1) % size])
                        duration = topology.transfer_s(*ends, 2 * (size - 1) / size * nbytes)
                        yield (GRADIENT, number, part, -1, -1), Task(topology.link(*ends), duration, after)

    def _of_edge(self, strategy: Strategy, source: int, reader: int) -> Iterator[tuple[TaskKey, Task]]:
        """The transfers of an output, and of its gradient back."""
        output = self.graph.operators[source].output_bytes
        for part, reading, share in self._shares(strategy, source, reader):
            ends = strategy[source].device(part), strategy[reader].device(reading)
            if ends[0] == ends[1]:
                continue
            there, back = self.topology.link(*ends), self.topology.link(ends[1], ends[0])
            duration = self.topology.transfer_s(*ends, share * output)
            forward, backward = (FORWARD, source, part, -1, -1), (BACKWARD, reader, reading, -1, -1)
            yield (FORWARD_TRANSFER, source, part, reader, reading), Task(there, duration, (forward,))
            yield (BACKWARD_TRANSFER, source, part, reader, reading), Task(back, duration, (backward,))

    def _shares(self, strategy: Strategy, source: int, reader: int) -> tuple[tuple[int, int, float], ...]:
        operator = self.graph.operators[reader]
        return read_shares(strategy[source], strategy[reader], operator.mixes_attribute, operator.mixes_channels)

    def _read(self, strategy: Strategy, source: int, reader: int, reading: int) -> Iterator[TaskKey]:
        """The tasks that the forward pass of a part of the reader waits for."""
        for part, one, _ in self._shares(strategy, source, reader):
            if one == reading:
                is_here = strategy[source].device(part) == strategy[reader].device(one)
                yield (FORWARD, source, part, -1, -1) if is_here else (FORWARD_TRANSFER, source, part, reader, one)

    def _told(self, strategy: Strategy, source: int, reader: int, part: int) -> Iterator[TaskKey]:
        """The tasks that the backward pass of a part of the source waits for."""
        for one, reading, _ in self._shares(strategy, source, reader):
            if one == part:
                is_here = strategy[source].device(part) == strategy[reader].device(reading)
                transfer = (BACKWARD_TRANSFER, source, part, reader, reading)
                yield (BACKWARD, reader, reading, -1, -1) if is_here else transfer


class StepTimeline:
    """``tasks``: all of a step. ``ready_s``, ``end_s``: of each."""

    def __init__(self, tasks: Mapping[TaskKey, Task]) -> None:
        self.tasks: dict[TaskKey, Task] = {}
        self.ready_s: dict[TaskKey, float] = {}
        self.end_s: dict[TaskKey, float] = {}
        #: How many tasks were looked at, since the timeline was made.
        self.looks = 0
        self._orders: dict[tuple[int, int], list[tuple[float, TaskKey]]] = {}
        self._followers: dict[TaskKey, set[TaskKey]] = {}
        self._simulate(tasks)

    @property
    def makespan_s(self) -> float:
        """The end of the last task."""
        return max((self.end_s[order[-1][1]] for order in self._orders.values() if order), default=0.0)

    def _simulate(self, tasks: Mapping[TaskKey, Task]) -> None:
        self._add(tasks)
        waiting = {key: len(set(task.after)) for key, task in tasks.items()}
        agenda = [(0.0, key) for key, count in waiting.items() if not count]
        heapq.heapify(agenda)
        while agenda:
            ready, key = heapq.heappop(agenda)
            self.looks += 1
            task = self.tasks[key]
            order = self._orders.setdefault(task.resource, [])
            start = max(ready, self.end_s[order[-1][1]]) if order else ready
            order.append((ready, key))
            self.ready_s[key], self.end_s[key] = ready, start + task.duration_s
            for follower in self._followers.get(key, ()):
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(agenda, (self._ready(follower), follower))

    def _ready(self, key: TaskKey) -> float:
        return max((self.end_s[before] for before in self.tasks[key].after), default=0.0)

    def _add(self, tasks: Mapping[TaskKey, Task]) -> None:
        self.tasks.update(tasks)
        for key, task in tasks.items():
            for before in task.after:
                self._followers.setdefault(before, set()).add(key)

    def change(self, old: Mapping[TaskKey, Task], new: Mapping[TaskKey, Task]) -> None:
        """Replace the tasks ``old`` by ``new``. A task that is in both, and is the same, stays as it is. Tasks that are
        in neither must not wait for those of ``old`` that are not in ``new``."""
        agenda = _Agenda()
        gone = [key for key, task in old.items() if new.get(key) != task]
        come = {key: task for key, task in new.items() if old.get(key) != task}
        for key in gone:
            self._push_next(agenda, key)
        for key in gone:
            self._remove(key)
        self._add(come)
        for key, task in come.items():
            if all(before in self.end_s for before in task.after):
                agenda.push(self._ready(key), key)
        for key in agenda:
            if key in self.tasks:
                self._look(agenda, key)

    def _remove(self, key: TaskKey) -> None:
        task = self.tasks.pop(key)
        for before in task.after:
            self._followers[before].discard(key)
        self._take_out(task.resource, key)
        del self.end_s[key], self.ready_s[key]

    def _take_out(self, resource: tuple[int, int], key: TaskKey) -> None:
        order = self._orders[resource]
        del order[bisect.bisect_left(order, (self.ready_s[key], key))]

    def _push_next(self, agenda: _Agenda, key: TaskKey) -> None:
        """The task after this one on its resource may begin at another time."""
        order = self._orders[self.tasks[key].resource]
        place = bisect.bisect_right(order, (self.ready_s[key], key))
        if place < len(order):
            agenda.push(*order[place])

    def _look(self, agenda: _Agenda, key: TaskKey) -> None:
        """Make the three lines hold for a task. Those for which they hold no more are put on the agenda."""
        task, ends = self.tasks[key], self.end_s
        ready = 0.0
        for before in task.after:
            end = ends.get(before)
            if end is None:
                return  # a new task, which will put this one on the agenda
            ready = max(ready, end)
        self.looks += 1
        old_ready, old_end = self.ready_s.get(key), ends.get(key)
        order = self._orders.setdefault(task.resource, [])
        if ready != old_ready:
            if old_ready is not None:
                self._push_next(agenda, key)
                self._take_out(task.resource, key)
            self.ready_s[key] = ready
            bisect.insort(order, (ready, key))
        place = bisect.bisect_left(order, (ready, key))
        start = max(ready, ends[order[place - 1][1]]) if place else ready
        end = ends[key] = start + task.duration_s
        if place + 1 < len(order) and (
            ready != old_ready or old_end is None or max(old_end, end) > order[place + 1][0]
        ):
            agenda.push(*order[place + 1])
        if end == old_end:
            return
        for follower in self._followers.get(key, ()):
            was = self.ready_s.get(follower)
            if was is None or old_end is None:
                agenda.push(end, follower)
            elif end > was:
                agenda.push(was, follower)  # it becomes ready later
            elif old_end == was:
                agenda.push(end, follower)  # it becomes ready earlier, perhaps


class _Agenda:
    """Tasks to look at, in the order of time; each is there once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, TaskKey]] = []
        self._time_of: dict[TaskKey, float] = {}

    def push(self, time_s: float, key: TaskKey) -> None:
        """Look at a task at this time, or earlier."""
        if self._time_of.get(key, math.inf) > time_s:
            self._time_of[key] = time_s
            heapq.heappush(self._heap, (time_s, key))

    def __iter__(self) -> Iterator[TaskKey]:
        """Until none is left, also of those that are pushed meanwhile."""
        while self._heap:
            time_s, key = heapq.heappop(self._heap)
            if self._time_of.get(key) == time_s:
                del self._time_of[key]
                yield key
