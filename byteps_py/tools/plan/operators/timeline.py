"""When each task of a step runs. A device or a link takes its tasks in the order in which they become ready, and of
those that become ready at the same time, the one with the smaller key. Pure; any thread.

Each task lasts longer than no time, so exactly one timeline fits:

    ready = the latest end of the tasks before it
    start = the later one of: ready, the end of the task before it on its resource
    order of a resource = (ready, key)

``simulate`` finds it whole: ready tasks in the order of time. ``change`` begins with the timeline of other tasks, and
looks again at what a change touches, in the order of time, until all three lines hold everywhere: FlexFlow's delta
simulation. Both compute the same sums of the same numbers, and so the same bits.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Mapping

from byteps_py.tools.plan.operators.task_graph import Task, TaskKey


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
