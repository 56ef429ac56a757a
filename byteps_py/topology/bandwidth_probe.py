"""Finding the PCIe tree of a machine that hides it, by measuring which devices share a link.

``plan_probes`` says what to measure: copies of one device alone, and of two at the same time. Two that share a link get
less of it together than alone. ``infer`` makes the tree from the rates. Neither copies anything: pure; any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from byteps_py.errors import TopologyError
from byteps_py.topology.machine_topology import MachineTopology, NumaNode, PciDevice

#: Long enough for a rate that start-up costs do not disturb, short enough for any GPU's free memory.
PROBE_BYTES = 256 << 20
#: The fastest of these counts: others were disturbed.
REPEATS = 5
#: Two copies that do not disturb each other have 1, two that share one link have 1/2.
_SHARED_BELOW = 0.75


@dataclass(frozen=True, slots=True)
class BandwidthProbe:
    """Copies of ``nbytes`` bytes from each of ``devices`` to memory, at the same time. A NIC sends from memory to
    another machine instead, and receives."""

    devices: tuple[str, ...]
    nbytes: int = PROBE_BYTES
    repeats: int = REPEATS


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """``probes`` in order; ``expected_s``: how long all take, if links have the rates that they say."""

    probes: tuple[BandwidthProbe, ...]
    expected_s: float

    def lines(self) -> Iterator[str]:
        """The plan for a person."""
        alone = [probe for probe in self.probes if len(probe.devices) == 1]
        pairs = [probe for probe in self.probes if len(probe.devices) == 2]
        size = f"{REPEATS} × {PROBE_BYTES >> 20} MB"
        yield f"copy from each of {len(alone)} devices alone, {size}: {_names(alone)}"
        yield f"copy from {len(pairs)} pairs at once, {size} each: {_names(pairs)}"
        total = sum(len(probe.devices) * probe.nbytes * probe.repeats for probe in self.probes)
        yield f"{total / 1e9:.1f} GB in all, about {self.expected_s:.1f} s; the machine should be idle meanwhile"

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        probes = [
            {"devices": list(each.devices), "bytes": each.nbytes, "repeats": each.repeats} for each in self.probes
        ]
        return {"expected_s": self.expected_s, "probes": probes}


#: Gbit/s of each device, by the devices that copied at the same time, in the order of ``BandwidthProbe.devices``.
ProbeRates = Mapping[tuple[str, ...], tuple[float, ...]]


def plan_probes(topology: MachineTopology) -> ProbePlan:
    """The measurements to make: each GPU and NIC alone, then each pair. NICs are not paired with each other: what they
    share decides nothing."""
    gpus, nics = topology.gpus, topology.nics
    pairs = [*itertools.combinations(gpus, 2), *itertools.product(gpus, nics)]
    probes = [(each,) for each in (*gpus, *nics)] + pairs
    slowest_s = [8e-9 * PROBE_BYTES * REPEATS * len(each) / min(one.gbit for one in each) for each in probes]
    return ProbePlan(tuple(BandwidthProbe(tuple(one.bus_id for one in each)) for each in probes), sum(slowest_s))


def infer(topology: MachineTopology, rates: ProbeRates) -> MachineTopology:
    """The machine with the switches that measured rates imply: devices that get clearly less together than alone are
    below one switch.

    Raises TopologyError that names a probe without a rate, or rates that fit no tree: a shares a link with b, and b
    with c, but a not with c.
    """
    topology.check()
    probes = plan_probes(topology).probes
    for probe in probes:
        measured = rates.get(probe.devices, ())
        if len(measured) != len(probe.devices) or not all(0 < rate < float("inf") for rate in measured):
            raise TopologyError(f"there is no rate for {' with '.join(probe.devices)}")
    shares: dict[str, set[str]] = {probe.devices[0]: {probe.devices[0]} for probe in probes if len(probe.devices) == 1}
    for a, b in (probe.devices for probe in probes if len(probe.devices) == 2):
        left = [rate / rates[(device,)][0] for device, rate in zip((a, b), rates[a, b], strict=True)]
        if min(left) < _SHARED_BELOW:
            shares[a].add(b)
            shares[b].add(a)
    gpus = [gpu.bus_id for gpu in topology.gpus]
    for a, b, c in itertools.permutations(gpus, 3):
        if b in shares[a] and c in shares[b] and c not in shares[a]:
            raise TopologyError(
                f"the rates fit no PCIe tree: {a} shares a link with {b}, and {b} with {c}, but not {a}"
            )
    by_id = {each.bus_id: each for each in topology.devices}
    tops: list[PciDevice] = []
    placed: set[str] = set()
    for device in (*gpus, *(nic.bus_id for nic in topology.nics)):
        if device in placed:
            continue
        group = [each for each in shares if each in shares[device] and each not in placed]
        placed.update(group)
        members = tuple(by_id[each] for each in group)
        tops.append(_switch(len(tops), members) if len(members) > 1 else members[0])
    tops += [each for node in topology.nodes for each in node.devices if each.bus_id not in placed]
    cpus = tuple(sorted(cpu for node in topology.nodes for cpu in node.cpus))
    nodes = (NumaNode(0, cpus, tuple(tops)),)
    notes = tuple(note for note in topology.notes if "hides" not in note)
    return replace(topology, nodes=nodes, is_pcie_hidden=False, notes=(*notes, "switches come from measured rates"))


def _switch(number: int, below: tuple[PciDevice, ...]) -> PciDevice:
    """A switch whose link is as fast as that of the fastest device below it."""
    fastest = max(below, key=lambda device: device.gbit)
    rate = (fastest.gigatransfers_s, fastest.lanes)
    return PciDevice(f"ffff:ff:{number + 1:02x}.0", "0x060400", "", "", *rate, below=below)


def _names(probes: list[BandwidthProbe]) -> str:
    names = [" + ".join(probe.devices) for probe in probes]
    return ", ".join(names[:4]) + (f", … {names[-1]}" if len(names) > 4 else "")
