"""The SOAP space of FlexFlow: how each operator is divided (by Samples, Attributes, Parameters), and on which devices
its parts run (each Operator on its own). Pure; any thread.

A part of an operator computes a box of its output. An operator with n parts has n devices that follow each other and
begin at a multiple of n; so the space has no placements that only differ in the order of equal devices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from byteps_py.tools.plan.cluster import Cluster
from byteps_py.tools.plan.operators.operator_graph import Operator, OperatorGraph
from byteps_py.tools.plan.sizing_job import divisors

#: Of a parameter with its gradient and Adam's moments.
STATE_BYTES = 16


@dataclass(frozen=True, slots=True, order=True)
class Division:
    """Of one operator: the number of parts along each axis, and the device of the first part."""

    samples: int = 1
    attribute: int = 1
    channels: int = 1
    first_device: int = 0

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Parts along the three axes."""
        return self.samples, self.attribute, self.channels

    @property
    def parts(self) -> int:
        """All of them."""
        return math.prod(self.degrees)

    def device(self, part: int) -> int:
        """Of a part."""
        return self.first_device + part

    def place(self, part: int) -> tuple[int, int, int]:
        """Of a part, along the three axes. Channels vary fastest."""
        rest, channel = divmod(part, self.channels)
        return *divmod(rest, self.attribute), channel

    def __str__(self) -> str:
        named = zip(("samples", "attribute", "channels"), self.degrees, strict=True)
        how = " x ".join(f"{degree} {name}" for name, degree in named if degree > 1) or "whole"
        last = self.first_device + self.parts - 1
        return f"{how}, device {self.first_device}{f' to {last}' if last > self.first_device else ''}"


#: Of all operators, in their order.
Strategy = tuple[Division, ...]


def divisions_of(operator: Operator, devices: int) -> Iterator[Division]:
    """Each way to divide an operator. Degrees divide their axis, and the parts divide the devices."""
    for parts in divisors(devices):
        for samples in divisors(parts):
            for attribute in divisors(parts // samples):
                degrees = samples, attribute, parts // (samples * attribute)
                sizes = operator.samples, operator.attribute, operator.channels
                if all(size % degree == 0 for size, degree in zip(sizes, degrees, strict=True)):
                    yield from (Division(*degrees, first) for first in range(0, devices, parts))


def data_parallel(graph: OperatorGraph, devices: int) -> Strategy:
    """Samples on all devices, as far as there are samples."""
    return _most(graph, devices, lambda each: (each.attribute == each.channels == 1, each.samples))


def channel_parallel(graph: OperatorGraph, devices: int) -> Strategy:
    """Channels on all devices, as far as there are channels; then the attribute, then samples: Megatron-LM's tensor and
    sequence parallelism."""
    return _most(graph, devices, lambda each: each.degrees[::-1])


def _most(graph: OperatorGraph, devices: int, of: Callable[[Division], tuple[int, ...]]) -> Strategy:
    """The division of each operator for which this is largest; of those, the one on the first devices."""
    return tuple(
        max(divisions_of(one, devices), key=lambda each: (of(each), -each.first_device)) for one in graph.operators
    )


def on_one_device(graph: OperatorGraph) -> Strategy:
    """Nothing is divided."""
    return tuple(Division() for _ in graph.operators)


def overlap(degree: int, part: int, other_degree: int, other_part: int) -> float:
    """The share of an axis that two parts have in common.

    >>> overlap(2, 0, 4, 1), overlap(2, 0, 4, 2)
    (0.25, 0.0)
    """
    first = max(part * other_degree, other_part * degree)
    last = min((part + 1) * other_degree, (other_part + 1) * degree)
    return max(0, last - first) / (degree * other_degree)


@functools.lru_cache(maxsize=1 << 16)
def read_shares(
    source: Division, reader: Division, mixes_attribute: bool, mixes_channels: bool
) -> tuple[tuple[int, int, float], ...]:
    """(part of the source, part of the reader, share of the whole output that the second reads from the first).
    ``mixes_…``: of the reader, as an Operator has them."""
    found = []
    is_whole = (False, mixes_attribute, mixes_channels)
    for part, reading in itertools.product(range(source.parts), range(reader.parts)):
        share = 1.0
        places = zip(source.degrees, source.place(part), reader.degrees, reader.place(reading), is_whole, strict=True)
        for degree, place, other_degree, other_place, whole in places:
            share *= 1 / degree if whole else overlap(degree, place, other_degree, other_place)
        if share:
            found.append((part, reading, share))
    return tuple(found)


def device_bytes(graph: OperatorGraph, strategy: Strategy, devices: int) -> list[float]:
    """Bytes of states and of outputs that each device keeps."""
    held = [0.0] * devices
    for one, division in zip(graph.operators, strategy, strict=True):
        each = STATE_BYTES * one.parameters / division.channels + one.output_bytes / division.parts
        for part in range(division.parts):
            held[division.device(part)] += each
    return held


def space_size(graph: OperatorGraph, devices: int) -> int:
    """The number of strategies."""
    return math.prod(sum(1 for _ in divisions_of(one, devices)) for one in graph.operators)


def replica_groups(division: Division) -> Iterator[Sequence[int]]:
    """The parts of an operator that have the same parameters."""
    for channel in range(division.channels):
        yield range(channel, division.parts, division.channels)


@dataclass(frozen=True, slots=True)
class DeviceTopology:
    """Rates of a cluster, as tasks need them."""

    cluster: Cluster
    #: Of starting a task, and of a transfer.
    launch_s: float = 1e-5
    latency_s: float = 1e-5

    @property
    def devices(self) -> int:
        """Of all machines."""
        return self.cluster.gpus

    def compute_s(self, operator: Operator, parts: int) -> float:
        """Of a part of a forward pass: computing or traffic of memory, whatever takes longer."""
        flops_s = operator.flops / (self.cluster.peak_tflops * 1e12)
        moved_s = operator.moved_bytes / (self.cluster.memory_gb_per_s * 1e9)
        return self.launch_s + max(flops_s, moved_s) / parts

    def link(self, source: int, target: int) -> tuple[int, int]:
        """The link that a transfer occupies: that of two devices; between machines (-1), that of the sender."""
        node = self.cluster.gpus_per_machine
        return (source, target) if source // node == target // node else (-1, source // node)

    def transfer_s(self, source: int, target: int, nbytes: float) -> float:
        """Of a transfer that has the link for itself."""
        is_far = self.link(source, target)[0] < 0
        rate = self.cluster.network_gb_per_s if is_far else self.cluster.machine_gb_per_s
        return self.latency_s + nbytes / ((rate or self.cluster.machine_gb_per_s) * 1e9)
