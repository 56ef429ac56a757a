"""How the gradients of a machine's GPUs are summed before they travel, as data: steps, and who sends what in each.

A plan is carried out for each partition, and partitions follow each other closely: each link is always busy with some
step. So a plan takes as long as its busiest link. ``M`` stands for the bytes of all gradients of one GPU; a plan's
shares are parts of M, and exact. Each function builds one way to sum; ``choice`` chooses. Pure; any thread.

    reduce-scatter ─► copy to memory ─► sum by the processor ─► network ─► copy to GPUs ─► all-gather
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from byteps_py.errors import UsageError
from byteps_py.topology.machine_topology import (
    CROSS_SWITCH_EFFICIENCY,
    NVSWITCH,
    Link,
    MachineTopology,
    reversed_links,
)

#: The source or target of a copy that is no device.
MEMORY = "memory"
_WIRE = "network"
_WHOLE = Fraction(1)


class LocalStrategy(StrEnum):
    """The ways to sum inside a machine."""

    NO_GPU = "no-gpu"  # gradients are in memory: the processor sums them
    HOST_SUM = "host-sum"  # each GPU copies all to memory, and the processor sums
    CPU_ASSISTED = "cpu-assisted"  # reduce-scatter in each switch, and the processor sums across switches
    ONE_SWITCH = "one-switch"  # reduce-scatter in the only switch
    NVLINK = "nvlink"  # reduce-scatter over NVLink, and the processor sums across groups, if there are several
    REDUCE_BROADCAST = "reduce-broadcast"  # over NVLink to one GPU away from the NIC, and from it
    RING = "ring"  # an all-reduce over all GPUs as if they were alike: for comparison only


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """``source`` sends ``share`` of M to ``target`` (bus ids, or MEMORY) over ``links``. ``is_across_switches``: a copy
    from GPU to GPU that passes a processor, and is slower."""

    source: str
    target: str
    share: Fraction
    links: tuple[Link, ...]
    is_across_switches: bool = False


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Transfers that go on at the same time; none where the processor sums what is in memory."""

    name: str
    transfers: tuple[LinkTransfer, ...] = ()


@dataclass(frozen=True)
class LocalPlan:
    """One way to sum on one machine.

    Attributes:
        gpu_groups: the GPUs that sum among themselves before the processor does.
        root: for REDUCE_BROADCAST the bus id of the GPU that has the sum; else empty.
    """

    strategy: LocalStrategy
    topology: MachineTopology
    steps: tuple[PlanStep, ...]
    gpu_groups: tuple[tuple[str, ...], ...] = ()
    root: str = ""

    @functools.cached_property
    def loads(self) -> Mapping[Link, Fraction]:
        """The bytes that each direction of each link carries in all steps, as a part of M."""
        found: dict[Link, Fraction] = {}
        for transfer in self._transfers():
            for link in transfer.links:
                found[link] = found.get(link, Fraction()) + transfer.share
        return found

    @property
    def copied(self) -> Fraction:
        """The bytes that GPUs write to memory and read from it, as a multiple of M."""
        ends = [transfer for step in self.steps if step.name != _WIRE for transfer in step.transfers]
        return sum((each.share for each in ends if MEMORY in (each.source, each.target)), Fraction())

    def seconds(self, nbytes: float) -> float:
        """The time of a sum of ``nbytes`` bytes in each GPU, inside the machine: that of the busiest link. 0 if nothing
        is copied."""
        return max((seconds for seconds, _ in self._busy(nbytes)), default=0.0)

    def busiest(self) -> Link | None:
        """The link that decides; None if nothing is copied."""
        return max(self._busy(1.0), default=(0.0, None), key=lambda pair: pair[0])[1]

    @functools.cached_property
    def counted_loads(self) -> Mapping[Link, Fraction]:
        """``loads`` without the links of NICs, which have the same to carry in every plan."""
        nics = {nic.bus_id for nic in self.topology.nics}
        return {link: share for link, share in self.loads.items() if nics.isdisjoint(link)}

    def _transfers(self) -> Iterator[LinkTransfer]:
        for step in self.steps:
            yield from step.transfers

    def _busy(self, nbytes: float) -> Iterator[tuple[float, Link]]:
        gigabits, rates = 8e-9 * nbytes, self.topology.rates
        for link, share in self.counted_loads.items():
            yield float(share) * gigabits / rates[link], link
        across: dict[tuple[str, str], list[LinkTransfer]] = {}
        for each in self._transfers():
            if each.is_across_switches:
                across.setdefault((each.source, each.target), []).append(each)
        for transfers in across.values():
            slowest = min(transfers[0].links, key=lambda link: rates[link])
            share = sum((each.share for each in transfers), Fraction())
            yield float(share) * gigabits / (rates[slowest] * CROSS_SWITCH_EFFICIENCY), slowest


# ---- the ways to sum ---------------------------------------------------------------------------------------------


def no_gpu(topology: MachineTopology) -> LocalPlan:
    """The ranks' gradients lie in shared memory, and each slice is summed once."""
    return LocalPlan(LocalStrategy.NO_GPU, topology, (PlanStep("sum by the processor"), _network(topology)))


def host_sum(topology: MachineTopology) -> LocalPlan:
    """The plan that the communication service follows on every machine today."""
    gpus = [gpu.bus_id for gpu in topology.gpus]
    plan = _through_memory(topology, [(gpu,) for gpu in gpus], (), ())
    return LocalPlan(LocalStrategy.HOST_SUM, topology, plan, tuple((gpu,) for gpu in gpus))


def cpu_assisted(topology: MachineTopology, brute_force: Fraction = Fraction()) -> LocalPlan:
    """Reduce-scatter and all-gather inside each switch; the processor sums across switches.

    ``brute_force``: x, the share of M that each GPU copies to memory as a whole instead, from 0 to 1. The rest is
    summed in the switch first. Raises UsageError for any other x.
    """
    if not 0 <= brute_force <= 1:
        raise UsageError(f"the share that GPUs copy as a whole is from 0 to 1, got {brute_force}")
    groups = [tuple(gpu.bus_id for gpu in group.gpus) for group in topology.groups if group.gpus]
    scattered = [each for group in groups for each in _all_to_all(topology, group, 1 - brute_force)]
    steps = _through_memory(topology, groups, scattered, scattered, brute_force)
    strategy = LocalStrategy.CPU_ASSISTED if len(groups) > 1 else LocalStrategy.ONE_SWITCH
    return LocalPlan(strategy, topology, steps, tuple(groups))


def nvlink(topology: MachineTopology) -> LocalPlan | None:
    """Reduce-scatter and all-gather over NVLink, inside each group of GPUs that it connects. None if there is no way
    over NVLink that all GPUs of a group can go round."""
    groups = nvlink_groups(topology)
    if max(map(len, groups), default=0) < 2:
        return None
    scattered: list[LinkTransfer] = []
    for group in groups:
        transfers = _over_nvlink(topology, group)
        if transfers is None:
            return None
        scattered += transfers
    steps = _through_memory(topology, groups, scattered, scattered)
    return LocalPlan(LocalStrategy.NVLINK, topology, steps, tuple(groups))


def reduce_broadcast(topology: MachineTopology, root: str) -> LocalPlan | None:
    """All GPUs reduce to ``root`` over NVLink, each towards the GPU from which it gets the sum back. None if NVLink
    does not connect them all."""
    if len(nvlink_groups(topology)) != 1:
        return None
    sent = [LinkTransfer(child, parent, _WHOLE, way) for child, parent, way in _tree(topology, root)]
    returned = [LinkTransfer(each.target, each.source, _WHOLE, reversed_links(each.links)) for each in sent]
    down = topology.way_to_memory(root)
    steps = (
        PlanStep("reduce to one GPU", tuple(sent)),
        PlanStep("copy to memory", (LinkTransfer(root, MEMORY, _WHOLE, down),)),
        _network(topology),
        PlanStep("copy to the GPU", (LinkTransfer(MEMORY, root, _WHOLE, reversed_links(down)),)),
        PlanStep("broadcast from it", tuple(returned)),
    )
    return LocalPlan(
        LocalStrategy.REDUCE_BROADCAST, topology, steps, (tuple(gpu.bus_id for gpu in topology.gpus),), root
    )


def ring(topology: MachineTopology) -> LocalPlan:
    """An all-reduce over PCIe by a ring through all GPUs, without memory and network."""
    gpus = [gpu.bus_id for gpu in topology.gpus]
    share = Fraction(len(gpus) - 1, len(gpus)) if gpus else Fraction()
    pairs = list(zip(gpus, [*gpus[1:], *gpus[:1]], strict=True)) if len(gpus) > 1 else []
    around = tuple(_over_pcie(topology, source, target, share) for source, target in pairs)
    return LocalPlan(LocalStrategy.RING, topology, (PlanStep("reduce-scatter", around), PlanStep("all-gather", around)))


def best_brute_force(topology: MachineTopology) -> Fraction:
    """x for which ``cpu_assisted`` takes the shortest time, from 0 to 1: the lowest point of the loads of all links,
    which are linear in x."""
    start, end = cpu_assisted(topology), cpu_assisted(topology, _WHOLE)
    lines = {
        (share / rate, (end.loads.get(link, Fraction()) - share) / rate)
        for link, share in start.counted_loads.items()
        for rate in [Fraction(topology.rates[link]).limit_denominator(10**9)]
    }
    crossings = {(b - a) / (slope_a - slope_b) for a, slope_a in lines for b, slope_b in lines if slope_a != slope_b}
    shares = sorted({Fraction(), _WHOLE, *(x for x in crossings if 0 < x < 1)})
    return min(shares, key=lambda x: max((at + slope * x for at, slope in lines), default=Fraction()))


def nvlink_groups(topology: MachineTopology) -> list[tuple[str, ...]]:
    """The GPUs that NVLink connects with each other, directly or over others; a GPU without NVLink is alone."""
    neighbours: dict[str, set[str]] = {gpu.bus_id: set() for gpu in topology.gpus}
    for link in topology.nvlinks or ():
        neighbours.setdefault(link.gpu, set()).add(link.peer)
        neighbours.setdefault(link.peer, set()).add(link.gpu)
    groups: list[tuple[str, ...]] = []
    left = {gpu.bus_id: None for gpu in topology.gpus}
    while left:
        reached, waiting = {next(iter(left))}, [next(iter(left))]
        while waiting:
            new = neighbours[waiting.pop()] - reached
            reached |= new
            waiting += new
        groups.append(tuple(gpu for gpu in left if gpu in reached))
        left = {gpu: None for gpu in left if gpu not in reached}
    return groups


# ---- what they are made of ---------------------------------------------------------------------------------------


def _through_memory(
    topology: MachineTopology,
    groups: Sequence[tuple[str, ...]],
    scattered: Iterable[LinkTransfer],
    gathered: Iterable[LinkTransfer],
    brute_force: Fraction = Fraction(),
) -> tuple[PlanStep, ...]:
    """Each GPU of a group copies its slice to memory, and gets the sum of that slice back."""
    down = [
        LinkTransfer(gpu, MEMORY, brute_force + (1 - brute_force) / len(group), topology.way_to_memory(gpu))
        for group in groups
        for gpu in group
    ]
    up = [LinkTransfer(MEMORY, each.source, each.share, reversed_links(each.links)) for each in down]
    first, last = tuple(scattered), tuple(gathered)
    steps = (
        PlanStep("reduce-scatter", first),
        PlanStep("copy to memory", tuple(down)),
        PlanStep("sum by the processor") if len(groups) > 1 else PlanStep(""),
        _network(topology),
        PlanStep("copy to the GPUs", tuple(up)),
        PlanStep("all-gather", last),
    )
    return tuple(step for step in steps if step.transfers or step.name == "sum by the processor")


def _network(topology: MachineTopology) -> PlanStep:
    """The NICs read M from memory, and write as much: what a machine sends and receives whose service sums nothing."""
    transfers = []
    for nic in topology.nics:
        way, share = topology.way_to_memory(nic.bus_id), Fraction(1, len(topology.nics))
        transfers += [
            LinkTransfer(nic.bus_id, MEMORY, share, way),
            LinkTransfer(MEMORY, nic.bus_id, share, reversed_links(way)),
        ]
    return PlanStep(_WIRE, tuple(transfers))


def _all_to_all(topology: MachineTopology, group: tuple[str, ...], share: Fraction) -> Iterator[LinkTransfer]:
    """Each GPU sends each other one its slice, over PCIe: (l - 1)/l of M."""
    part = share / len(group)
    if part:
        yield from (_over_pcie(topology, a, b, part) for a in group for b in group if a != b)


def _over_pcie(topology: MachineTopology, source: str, target: str, share: Fraction) -> LinkTransfer:
    across = topology.is_across_switches(source, target)
    return LinkTransfer(source, target, share, topology.way_between(source, target), across)


def _nvlink_way(topology: MachineTopology, source: str, target: str) -> tuple[Link, ...]:
    """Empty if NVLink does not connect two GPUs directly or by a switch."""
    if Link(source, target) in topology.rates and target != NVSWITCH:
        return (Link(source, target),)
    way = (Link(source, NVSWITCH), Link(NVSWITCH, target))
    return way if all(link in topology.rates for link in way) else ()


def _over_nvlink(topology: MachineTopology, group: tuple[str, ...]) -> list[LinkTransfer] | None:
    """A reduce-scatter or an all-gather: each to each where all are connected, else around a ring."""
    ways = {(a, b): way for a in group for b in group if a != b and (way := _nvlink_way(topology, a, b))}
    size = len(group)
    if len(ways) == size * (size - 1):
        return [LinkTransfer(a, b, Fraction(1, size), way) for (a, b), way in ways.items()]
    order = _ring_order(group, ways)
    if order is None:
        return None
    pairs = zip(order, [*order[1:], order[0]], strict=True)
    return [LinkTransfer(a, b, Fraction(size - 1, size), ways[a, b]) for a, b in pairs]


def _ring_order(group: tuple[str, ...], ways: Mapping[tuple[str, str], tuple[Link, ...]]) -> list[str] | None:
    """An order in which each GPU has an NVLink to the next, and the last to the first."""
    tries = 0

    def extend(order: list[str]) -> list[str] | None:
        nonlocal tries
        tries += 1
        if len(order) == len(group):
            return order if (order[-1], order[0]) in ways else None
        for gpu in group:
            if tries < 10_000 and gpu not in order and (order[-1], gpu) in ways and (found := extend([*order, gpu])):
                return found
        return None

    return extend([group[0]])


def _tree(topology: MachineTopology, root: str) -> Iterator[tuple[str, str, tuple[Link, ...]]]:
    """(GPU, the next GPU towards the root, the way): of all NVLinks always the widest that reaches another GPU, from a
    GPU as near to the root as possible."""
    left = {gpu.bus_id: index for index, gpu in enumerate(topology.gpus) if gpu.bus_id != root}
    depths, last = {root: 0}, root
    nearest: dict[str, tuple[float, int, int, str, tuple[Link, ...]]] = {}
    while left:
        for child, index in left.items():
            if way := _nvlink_way(topology, child, last):
                found = (-min(topology.rates[link] for link in way), depths[last], index, last, way)
                nearest[child] = min(found, nearest.get(child, found))
        child = min(nearest, key=nearest.__getitem__)
        _, depth, _, parent, way = nearest.pop(child)
        depths[child], last = depth + 1, child
        del left[child]
        yield child, parent, way
