"""The tasks of a training step for a strategy, as FlexFlow makes them: each part of an operator computes forward and
backward, what it reads travels from the parts that have it, and the gradients of copies travel around a ring. A device
runs one task at a time, and so does a link. Pure; any thread.

    forward of a part ─► transfers to readers' parts ─► … ─► backward of a part ─► transfers back; gradients of copies
"""

from __future__ import annotations

from collections.abc import Iterator
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
