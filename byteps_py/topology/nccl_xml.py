"""NCCL's topology files: what NCCL_TOPO_FILE reads and NCCL_TOPO_DUMP_FILE writes, and clouds publish.

    <system version="1">
      <cpu numaid="0" affinity="0000ffff" …>
        <pci busid="0000:10:00.0" class="0x060400" link_speed="8 GT/s" link_width="16">     a switch
          <pci busid="0000:11:00.0" class="0x030200" …>
            <gpu dev="0" sm="70"> <nvlink target="0000:12:00.0" count="2" tclass="0x030200"/> </gpu>
          </pci>
          <pci busid="0000:13:00.0" class="0x020700" …> <nic> <net name="ens1" speed="100000"/> </nic> </pci>

A file may come from anywhere: its size, depth and numbers are limited, and a document type (with entities) is refused.
Attributes that nothing here needs are kept, and written again. Pure; any thread.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from byteps_py.errors import TopologyError
from byteps_py.topology.machine_topology import (
    NVSWITCH,
    Attributes,
    DeviceKind,
    MachineTopology,
    NetworkPort,
    NumaNode,
    NvLink,
    PciDevice,
)
from byteps_py.wording import shown

MAX_BYTES = 4 << 20
_MAX_DEPTH = 32
_MAX_ELEMENTS = 8192
_MAX_CPUS = 1 << 16
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_CODE = re.compile(r"0x[0-9a-f]{1,8}")
_SPEED = re.compile(r"(\d{1,4}(?:\.\d{1,3})?) ?GT/s(?: PCIe)?")
_NVSWITCH_CLASS = "0x068000"
#: Of one NVLink in each direction, in Gbit/s, by the GPU's compute capability: NVLink 1, 2 to 4, 5.
_NVLINK_GBIT = ((100, 400.0), (70, 200.0), (0, 160.0))
_UNKNOWN_NVLINKS = "the file does not say whether NVLink connects the GPUs"


@dataclass(slots=True)
class _Element:
    name: str
    line: int
    attributes: dict[str, str]
    children: list[_Element] = field(default_factory=list)

    def fail(self, why: str) -> TopologyError:
        return TopologyError(f"line {self.line}: {why}")

    def take(self, name: str, default: str = "") -> str:
        return self.attributes.pop(name, default).strip()

    def all(self, name: str) -> list[_Element]:
        return [each for each in self.children if each.name == name]

    def rest(self) -> Attributes:
        return tuple(self.attributes.items())


def parse(text: bytes, where: str = "the topology file") -> MachineTopology:
    """The machine that a file describes. ``where`` names it in errors.

    Raises TopologyError, one sentence with the line, for what is no topology file, or contradicts itself.

    >>> machine = parse(b'<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200" '
    ...                 b'vendor="0x10de"/></cpu></system>')
    >>> [gpu.bus_id for gpu in machine.gpus]
    ['0000:01:00.0']
    """
    try:
        return _machine(_read(text))
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from None


def write(topology: MachineTopology) -> str:
    """A file that ``parse`` reads as the same machine, and NCCL too.

    >>> print(write(MachineTopology((NumaNode(0, devices=(PciDevice("0000:01:00.0"),)),))), end="")
    <system version="1">
      <cpu numaid="0">
        <pci busid="0000:01:00.0"/>
      </cpu>
    </system>
    """
    lines = ['<system version="1">']
    for node in topology.nodes:
        known = [("numaid", str(node.number))]
        known += [("affinity", _mask_text(node.cpus))] if node.cpus else []
        inside = [line for device in node.devices for line in _pci_lines(device, topology)]
        lines += _tag("cpu", [*known, *node.other], inside)
    return "\n".join([*lines, "</system>", ""])


# ---- reading -----------------------------------------------------------------------------------------------------


def _read(text: bytes) -> _Element:
    if len(text) > MAX_BYTES:
        raise TopologyError(f"it has {len(text):,} bytes, and no machine needs more than {MAX_BYTES:,}")
    root = _Element("", 0, {})
    stack, count = [root], 0
    parser = expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        element = _Element(name, parser.CurrentLineNumber, attributes)
        if len(stack) > _MAX_DEPTH or count > _MAX_ELEMENTS:
            raise element.fail(f"more than {_MAX_DEPTH} levels or {_MAX_ELEMENTS:,} elements: no machine needs as many")
        stack[-1].children.append(element)
        stack.append(element)

    def end(_: str) -> None:
        stack.pop()

    def refuse(*_: object) -> None:
        raise TopologyError(f"line {parser.CurrentLineNumber}: it declares a document type, which NCCL's files do not")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise TopologyError(f"line {error.lineno}: it is no XML ({expat.ErrorString(error.code)})") from None
    except (LookupError, ValueError) as error:  # an encoding that Python does not have
        raise TopologyError(f"it is no XML ({shown(str(error))})") from None
    return root.children[0]


def _machine(system: _Element) -> MachineTopology:
    if system.name != "system":
        raise system.fail(f"the file begins with <{shown(system.name)}>; a topology file of NCCL begins with <system>")
    if (version := system.take("version", "1")) != "1":
        raise system.fail(f"it has version {shown(version)}; only version 1 is known")
    seen: dict[str, int] = {}
    links: list[tuple[_Element, str, int, str]] = []
    nodes = [_node(each, seen, links) for each in system.all("cpu")]
    if not nodes:
        raise system.fail("it has no <cpu>")
    for node, element in zip(nodes, system.all("cpu"), strict=True):
        if sum(other.number == node.number for other in nodes) > 1:
            raise element.fail(f"the NUMA node {node.number} is there twice")
    nodes.sort(key=lambda node: node.number)
    says_nvlinks = any(device.gpu is not None for node in nodes for top in node.devices for device in top.walk())
    machine = MachineTopology(
        tuple(nodes),
        _nvlinks(links, nodes) if says_nvlinks else None,
        "the file" if says_nvlinks else "",
        notes=() if says_nvlinks else (_UNKNOWN_NVLINKS,),
    )
    unknown = sum(each.kind is DeviceKind.UNKNOWN for each in machine.devices)
    if unknown and not machine.gpus:
        note = f"the file does not say what its {unknown} devices are: NCCL reads that from the machine's own /sys"
        machine = replace(machine, notes=(note, *machine.notes))
    is_flat = all(node.number < 0 for node in nodes) and not any(each.below for each in machine.devices)
    if is_flat and len(machine.gpus) > 1:
        note = "all GPUs are beside each other and on no NUMA node: NCCL wrote it in a virtual machine that hides PCIe"
        machine = replace(machine, is_pcie_hidden=True, notes=(*machine.notes, note))
    return machine


_Links = list[tuple[_Element, str, int, str]]


def _node(element: _Element, seen: dict[str, int], links: _Links) -> NumaNode:
    number = _integer(element, "numaid", -1, 4096, required=True)
    cpus = _mask(element, element.take("affinity"))
    devices = tuple(_pci(each, seen, links) for each in element.all("pci"))
    devices += tuple(_bare_nic(each, seen) for each in element.all("nic"))
    return NumaNode(number, cpus, devices, element.rest())


def _pci(element: _Element, seen: dict[str, int], links: _Links) -> PciDevice:
    bus_id = element.take("busid").lower()
    if not _BUS_ID.fullmatch(bus_id):
        raise element.fail(f"busid={shown(bus_id)!r} is no PCI bus id like 0000:10:1c.0")
    if bus_id in seen:
        raise element.fail(f"the device {bus_id} is there twice, first in line {seen[bus_id]}")
    seen[bus_id] = element.line
    codes = {name: element.take(name).lower() for name in ("class", "vendor", "device")}
    for name, code in codes.items():
        if code and not _CODE.fullmatch(code):
            raise element.fail(f"{name}={shown(code)!r} of {bus_id} is no number like 0x030200")
    speed = element.take("link_speed")
    rate = _SPEED.fullmatch(speed)
    if speed and speed.lower() != "unknown" and rate is None:
        raise element.fail(f"link_speed={shown(speed)!r} of {bus_id} is no rate like '8 GT/s'")
    gpus = element.all("gpu")
    gpu = gpus[0].rest() if gpus else None
    for each in gpus:
        capability = _integer(each, "sm", 0, 1000)
        for link in each.all("nvlink"):
            links.append((link, bus_id, capability, link.take("target").lower()))
    ports = tuple(_port(net) for nic in element.all("nic") for net in nic.all("net"))
    return PciDevice(
        bus_id,
        codes["class"],
        codes["vendor"],
        codes["device"],
        float(rate[1]) if rate else 0.0,
        _integer(element, "link_width", 0, 64),
        tuple(_pci(each, seen, links) for each in element.all("pci")),
        ports,
        gpu,
        element.rest(),
    )


def _bare_nic(element: _Element, seen: dict[str, int]) -> PciDevice:
    """Of a virtual machine, a NIC may be no PCI device. Its name stands for it."""
    ports = tuple(_port(net) for net in element.all("net"))
    name = ports[0].name if ports else ""
    if not name or name in seen or _BUS_ID.fullmatch(name):
        raise element.fail(f"a <nic> outside of a <pci> needs a <net> with a name of its own, not {shown(name)!r}")
    seen[name] = element.line
    return PciDevice(name, ports=ports)


def _port(element: _Element) -> NetworkPort:
    mbit = _integer(element, "speed", 0, 1 << 31)
    return NetworkPort(element.take("name"), mbit / 1000, element.rest())


def _nvlinks(links: _Links, nodes: list[NumaNode]) -> tuple[NvLink, ...]:
    known = {each.bus_id for node in nodes for top in node.devices for each in top.walk() if each.gpu is not None}
    found: dict[tuple[str, str], NvLink] = {}
    for element, gpu, capability, target in links:
        count = _integer(element, "count", 1, 64, required=True)
        kind = element.take("tclass").lower()
        peer = NVSWITCH if kind == _NVSWITCH_CLASS else target
        if peer != NVSWITCH and (peer not in known or peer == gpu):
            raise element.fail(f"the NVLink of {gpu} ends at {shown(target)!r}, which is no other GPU of the file")
        before = found[gpu, peer].count if peer == NVSWITCH and (gpu, peer) in found else 0
        found[gpu, peer] = NvLink(gpu, peer, before + count, (before + count) * nvlink_gbit(capability))
    return tuple(found.values())


def nvlink_gbit(compute_capability: int) -> float:
    """The rate of one NVLink in each direction, in Gbit/s. ``compute_capability``: like 80; 0 if it is not known.

    >>> nvlink_gbit(60), nvlink_gbit(80), nvlink_gbit(100)
    (160.0, 200.0, 400.0)
    """
    return next(gbit for least, gbit in _NVLINK_GBIT if (compute_capability or 70) >= least)


def _integer(element: _Element, name: str, low: int, high: int, required: bool = False) -> int:
    """An attribute, which is left out of the rest unless it is a GPU's."""
    text = element.attributes.get(name, "") if name == "sm" else element.take(name)
    if not text and not required:
        return 0
    number = int(text, 0) if re.fullmatch(r"-?(0|[1-9]\d{0,10}|0x[0-9a-fA-F]{1,8})", text) else high + 1
    if not low <= number <= high:
        raise element.fail(f"{name}={shown(text)!r} of <{element.name}> is no whole number from {low} to {high}")
    return number


def _mask(element: _Element, text: str) -> tuple[int, ...]:
    """The CPUs of a mask like ``000000ff,ffff0000``: words of 32, the last CPUs first."""
    words = text.split(",") if text else []
    if len(words) * 32 > _MAX_CPUS or not all(re.fullmatch("[0-9a-fA-F]{1,8}", word) for word in words):
        raise element.fail(f"affinity={shown(text)!r} is no mask of CPUs like 000000ff,ffff0000")
    value = int("".join(word.rjust(8, "0") for word in words) or "0", 16)
    return tuple(cpu for cpu in range(value.bit_length()) if value >> cpu & 1)


# ---- writing -----------------------------------------------------------------------------------------------------


def _mask_text(cpus: tuple[int, ...]) -> str:
    value = sum(1 << cpu for cpu in cpus)
    words = math.ceil(value.bit_length() / 32) or 1
    return ",".join(f"{value >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words)))


def _tag(name: str, attributes: list[tuple[str, str]], inside: list[str]) -> list[str]:
    start = f"<{name}{''.join(f' {key}={quoteattr(value)}' for key, value in attributes)}"
    lines = [start + ">", *inside, f"</{name}>"] if inside else [start + "/>"]
    return ["  " + line for line in lines]


def _pci_lines(device: PciDevice, topology: MachineTopology) -> list[str]:
    if not _BUS_ID.fullmatch(device.bus_id):
        return _tag("nic", [], [line for port in device.ports for line in _port_lines(port)])
    known = [("busid", device.bus_id)]
    codes: tuple[tuple[str, str], ...] = (
        ("class", device.class_code),
        ("vendor", device.vendor),
        ("device", device.device),
        ("link_speed", f"{device.gigatransfers_s:g} GT/s" if device.gigatransfers_s else ""),
        ("link_width", str(device.lanes) if device.lanes else ""),
    )
    known += [(name, text) for name, text in codes if text]
    inside = []
    if device.gpu is not None:
        nvlinks = [_nvlink_line(each) for each in topology.nvlinks or () if each.gpu == device.bus_id]
        inside += _tag("gpu", list(device.gpu), [line for lines in nvlinks for line in lines])
    if device.ports:
        inside += _tag("nic", [], [line for port in device.ports for line in _port_lines(port)])
    inside += [line for each in device.below for line in _pci_lines(each, topology)]
    return _tag("pci", [*known, *device.other], inside)


def _nvlink_line(link: NvLink) -> list[str]:
    is_switch = link.peer == NVSWITCH
    target = "ffff:ff:ff.0" if is_switch else link.peer
    tclass = _NVSWITCH_CLASS if is_switch else "0x030200"
    return _tag("nvlink", [("target", target), ("count", str(link.count)), ("tclass", tclass)], [])


def _port_lines(port: NetworkPort) -> list[str]:
    speed = [("speed", f"{round(port.gbit * 1000)}")] if port.gbit else []
    return _tag("net", [("name", port.name), *speed, *port.other], [])
