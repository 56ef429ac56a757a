"""The inside of a machine: processors, PCIe switches, GPUs, NICs, NVLink, and how fast each link is.

The words are those of NCCL's topology files. A link has two directions, each with the whole rate. What a source does
not say is empty, 0 or None; nothing is guessed here. Pure; any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from byteps_py.errors import TopologyError

#: The other end of an NVLink that ends in an NVSwitch, which connects all GPUs of the machine.
NVSWITCH = "NVSwitch"
#: How much of a PCIe link's raw rate copies reach: BytePS's authors measured 105 of 128 Gbit/s.
PCIE_EFFICIENCY = 105 / 128
#: A copy between GPUs of different switches, as a part of one inside a switch: they measured 80 instead of 105 Gbit/s.
CROSS_SWITCH_EFFICIENCY = 80 / 105
#: What a link has whose source says no rate: PCIe 3.0 with 16 lanes.
_USUAL_RAW_GBIT = 8.0 * 16
_MOST_GPUS = 64
_NVIDIA, _AMD = "0x10de", "0x1002"

Attributes = tuple[tuple[str, str], ...]


class DeviceKind(StrEnum):
    """The kind of a device, as far as sums of gradients are concerned."""

    GPU = "GPU"
    NIC = "NIC"
    SWITCH = "PCIe switch"
    NVSWITCH = "NVSwitch"
    OTHER = "other device"
    UNKNOWN = "device without a class"


class Link(NamedTuple):
    """One direction of a connection. The ends are bus ids, ``NUMA node N``, or ``NVSwitch``."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class NetworkPort:
    """A port of a NIC. ``gbit``: its rate in Gbit/s, 0 if it is not known. ``other``: what else a file says."""

    name: str
    gbit: float = 0.0
    other: Attributes = ()


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device or a switch, and its link towards the processor.

    Attributes:
        bus_id: like ``0000:10:1c.0``; of a NIC that is no PCI device its name.
        class_code: like ``0x030200``; empty if the source does not say it.
        vendor: like ``0x10de``.
        device: the number of the model, like ``0x20b0``.
        gigatransfers_s: of each lane of its link, in 10^9 per second; 0 if it is not known.
        lanes: of its link.
        below: the devices that are connected through it.
        ports: of a NIC.
        gpu: of a GPU: what a file says about it (dev, sm, rank, gdr); None if it says nothing.
        other: attributes that nothing here needs.
    """

    bus_id: str
    class_code: str = ""
    vendor: str = ""
    device: str = ""
    gigatransfers_s: float = 0.0
    lanes: int = 0
    below: tuple[PciDevice, ...] = ()
    ports: tuple[NetworkPort, ...] = ()
    gpu: Attributes | None = None
    other: Attributes = ()

    @property
    def kind(self) -> DeviceKind:
        """Its kind, by its parts and by its class. A BMC's display controller is no GPU."""
        group = self.class_code[:6]
        if self.below or group == "0x0604":
            return DeviceKind.SWITCH
        if self.gpu is not None:
            return DeviceKind.GPU
        if self.ports or group in ("0x0200", "0x0207"):
            return DeviceKind.NIC
        if group == "0x0680" and self.vendor == _NVIDIA:
            return DeviceKind.NVSWITCH
        displays = {_NVIDIA: ("0x0300",), _AMD: ("0x0380", "0x1200"), "": ("0x0300", "0x0380", "0x1200")}
        if group == "0x0302" or group in displays.get(self.vendor, ()):
            return DeviceKind.GPU
        return DeviceKind.OTHER if group else DeviceKind.UNKNOWN

    @property
    def is_rate_known(self) -> bool:
        """The source says how fast its link is."""
        return self.gigatransfers_s > 0 and self.lanes > 0

    @property
    def gbit(self) -> float:
        """The rate of copies over its link in each direction, in Gbit/s."""
        raw = self.gigatransfers_s * self.lanes if self.is_rate_known else _USUAL_RAW_GBIT
        if 0 < self.gigatransfers_s < 8:
            raw *= 0.8 * 130 / 128  # PCIe 1 and 2 send 10 bits for 8, later ones 130 for 128
        return raw * PCIE_EFFICIENCY

    @property
    def port_gbit(self) -> float:
        """The rate of a NIC's ports together, in Gbit/s; 0 if it is not known."""
        return sum(port.gbit for port in self.ports)

    def walk(self) -> Iterator[PciDevice]:
        """Itself, and all that is below it."""
        yield self
        for each in self.below:
            yield from each.walk()


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A processor with memory of its own. ``number``: -1 if the machine does not say which it is. ``cpus``: the
    numbers of its hardware threads, empty if they are not known."""

    number: int
    cpus: tuple[int, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    other: Attributes = ()

    @property
    def name(self) -> str:
        """For people, and as the end of a link."""
        return f"NUMA node {max(self.number, 0)}"


@dataclass(frozen=True, slots=True)
class NvLink:
    """All NVLinks of one GPU to another GPU, or to ``NVSWITCH``. ``gbit``: in each direction, together, in Gbit/s."""

    gpu: str
    peer: str
    count: int
    gbit: float


@dataclass(frozen=True, slots=True)
class PcieGroup:
    """Devices that share one link to the processor: a switch with all below it, or a device without a switch."""

    top: PciDevice
    node: NumaNode
    gpus: tuple[PciDevice, ...]
    nics: tuple[PciDevice, ...]

    @property
    def is_switch(self) -> bool:
        """Several devices share the link, or could."""
        return self.top.kind is DeviceKind.SWITCH


@dataclass(frozen=True)
class MachineTopology:
    """The inside of a machine.

    Attributes:
        nodes: in the order of their numbers.
        nvlinks: None if nothing says whether GPUs have NVLink.
        nvlink_source: who says so; empty if nobody does.
        is_pcie_hidden: a virtual machine shows all devices beside each other, wherever they are.
        notes: sentences about what the source does not say.

    >>> gpus = tuple(PciDevice(f"0000:0{n}:00.0", "0x030200", "0x10de") for n in range(2))
    >>> machine = MachineTopology((NumaNode(0, devices=gpus),))
    >>> len(machine.gpus), len(machine.groups), machine.groups[0].is_switch
    (2, 2, False)
    """

    nodes: tuple[NumaNode, ...]
    nvlinks: tuple[NvLink, ...] | None = None
    nvlink_source: str = field(default="", compare=False)
    is_pcie_hidden: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False)

    @functools.cached_property
    def groups(self) -> tuple[PcieGroup, ...]:
        """All that has GPUs or NICs, in the order of the nodes."""
        usable = {nic.bus_id for nic in self.nics}
        found = []
        for node in self.nodes:
            for top in node.devices:
                inside = [each for each in top.walk() if each is top or not each.below]
                gpus = tuple(each for each in inside if each.kind is DeviceKind.GPU)
                nics = tuple(each for each in inside if each.bus_id in usable)
                if gpus or nics:
                    found.append(PcieGroup(top, node, gpus, nics))
        return tuple(found)

    @functools.cached_property
    def devices(self) -> tuple[PciDevice, ...]:
        """All devices and switches, from the processors downwards."""
        return tuple(each for node in self.nodes for top in node.devices for each in top.walk())

    @functools.cached_property
    def gpus(self) -> tuple[PciDevice, ...]:
        """In the order of the file; CUDA's, with CUDA_DEVICE_ORDER=PCI_BUS_ID, is that of the bus ids."""
        return tuple(each for each in self.devices if each.kind is DeviceKind.GPU)

    @functools.cached_property
    def nics(self) -> tuple[PciDevice, ...]:
        """Those that carry gradients: all but those that are known to be slower than others."""
        found = [each for each in self.devices if each.kind is DeviceKind.NIC]
        fastest = max((each.port_gbit for each in found), default=0.0)
        return tuple(each for each in found if not each.port_gbit or each.port_gbit == fastest)

    def check(self) -> None:
        """Raises TopologyError for more GPUs than a machine can have: plans for thousands would take all memory."""
        if len(self.gpus) > _MOST_GPUS:
            raise TopologyError(f"the machine has {len(self.gpus)} GPUs: none that is known has more than {_MOST_GPUS}")

    @property
    def switches_with_nic(self) -> int:
        """Sn: PCIe switches with GPUs and a NIC."""
        return sum(bool(group.gpus and group.nics) for group in self.groups if group.is_switch)

    @property
    def switches_without_nic(self) -> int:
        """Sg: PCIe switches with GPUs only."""
        return sum(bool(group.gpus and not group.nics) for group in self.groups if group.is_switch)

    @functools.cached_property
    def _chains(self) -> Mapping[str, tuple[str, ...]]:
        """The way of each device to its node: bus ids, its own first, and the node's name."""
        found: dict[str, tuple[str, ...]] = {}

        def add(device: PciDevice, above: tuple[str, ...]) -> None:
            found[device.bus_id] = (device.bus_id, *above)
            for each in device.below:
                add(each, found[device.bus_id])

        for node in self.nodes:
            for top in node.devices:
                add(top, (node.name,))
        return found

    def way_to_memory(self, device: str) -> tuple[Link, ...]:
        """The links from a device to the memory of its node."""
        chain = self._chains[device]
        return tuple(map(Link, chain, chain[1:]))

    def way_between(self, source: str, target: str) -> tuple[Link, ...]:
        """The PCIe links from one device to another. Links between processors are wide, and left out."""
        up, down = self.way_to_memory(source), self.way_to_memory(target)
        shared = set(up) & set(down)
        return (*(link for link in up if link not in shared), *reversed_links(e for e in down if e not in shared))

    def is_across_switches(self, source: str, target: str) -> bool:
        """A copy between two devices passes a processor."""
        return self._chains[source][-2] != self._chains[target][-2]

    @functools.cached_property
    def rates(self) -> Mapping[Link, float]:
        """The rate of each direction of each link in Gbit/s."""
        found: dict[Link, float] = {}
        for device in self.devices:
            link = self.way_to_memory(device.bus_id)[0]
            found[link] = found[Link(link.target, link.source)] = device.gbit
        for nvlink in self.nvlinks or ():
            found[Link(nvlink.gpu, nvlink.peer)] = nvlink.gbit
            found.setdefault(Link(nvlink.peer, nvlink.gpu), nvlink.gbit)
        return found


def without(machine: MachineTopology, is_left_out: Callable[[PciDevice], bool]) -> MachineTopology:
    """``machine`` without some of its devices, as a job sees it that does not use them.

    >>> gpus = tuple(PciDevice(f"0000:0{n}:00.0", "0x030200") for n in range(2))
    >>> machine = MachineTopology((NumaNode(0, devices=gpus),))
    >>> [gpu.bus_id for gpu in without(machine, lambda device: device is gpus[0]).gpus]
    ['0000:01:00.0']
    """

    def kept(devices: tuple[PciDevice, ...]) -> tuple[PciDevice, ...]:
        return tuple(replace(each, below=kept(each.below)) for each in devices if not is_left_out(each))

    gone = {each.bus_id for each in machine.devices if is_left_out(each)}
    nvlinks = None if machine.nvlinks is None else tuple(e for e in machine.nvlinks if gone.isdisjoint((e.gpu, e.peer)))
    nodes = tuple(replace(node, devices=kept(node.devices)) for node in machine.nodes)
    return replace(machine, nodes=nodes, nvlinks=nvlinks)


def reversed_links(links: Iterator[Link] | tuple[Link, ...]) -> tuple[Link, ...]:
    """The way back.

    >>> reversed_links((Link("GPU", "switch"), Link("switch", "CPU")))
    (Link(source='CPU', target='switch'), Link(source='switch', target='GPU'))
    """
    return tuple(Link(link.target, link.source) for link in reversed(tuple(links)))
