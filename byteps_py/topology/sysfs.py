"""The inside of a machine, as Linux shows it below /sys: PCI devices, their switches, NUMA nodes, NICs.

The path of a device names what is above it: ``pci0000:00/PORT/UPSTREAM/DOWNSTREAM/DEVICE``. A switch has one upstream
port, which stands for it, and a downstream port for each device. A device without any port above it is one that a
virtual machine shows. The folder is an argument, so that recorded trees can be read. Reads files only; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from byteps_py.errors import TopologyError
from byteps_py.topology.machine_topology import DeviceKind, MachineTopology, NetworkPort, NumaNode, PciDevice
from byteps_py.wording import shown

SYSFS = Path("/sys")
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_CODE = re.compile(r"0x[0-9a-f]{1,8}")
_MOST_BYTES = 4096
_MOST_CPUS = 1 << 16
#: What may be of use: displays, network controllers, bridges and NVSwitches, processing accelerators.
_CLASSES = ("0x03", "0x02", "0x0680", "0x12")


@dataclass(frozen=True, slots=True)
class _FoundDevice:
    """A device with its way down: bus ids of switches, the outermost first."""

    device: PciDevice
    switches: tuple[str, ...]
    has_port: bool
    numa_node: int


def read(root: Path = SYSFS) -> MachineTopology:
    """The machine that the files below ``root`` describe. NVLink is not among them.

    Raises TopologyError if there are no such files, or a device's are damaged.
    """
    folder = root / "bus" / "pci" / "devices"
    if not folder.is_dir():
        raise TopologyError(f"{shown(str(folder))} is not there: a machine with a PCI bus has it below /sys")
    own = {path.name: path for path in folder.iterdir()}
    found = [each for path in sorted(own.values()) if (each := _device(path, own)) is not None]
    cpus = _nodes(root)
    only = next(iter(cpus)) if len(cpus) == 1 else -1  # a machine of one node may leave it out
    by_node: dict[int, list[_FoundDevice]] = {number: [] for number in cpus}
    for each in found:
        by_node.setdefault(each.numa_node if each.numa_node >= 0 else only, []).append(each)
    nodes = [NumaNode(number, cpus.get(number, ()), _tree(by_node[number], (), own)) for number in sorted(by_node)]
    gpus = [each for each in found if each.device.kind is DeviceKind.GPU]
    is_hidden = any(not each.has_port for each in gpus)
    notes = ["/sys does not say whether NVLink connects the GPUs"] if gpus else []
    if is_hidden:
        notes.append("GPUs have no PCIe port above them: this is a virtual machine that hides where they are")
    return MachineTopology(tuple(nodes), None, "", is_hidden, tuple(notes))


def complete(file: MachineTopology, system: MachineTopology) -> MachineTopology:
    """``file``, with what the machine's own /sys says about devices that the file only names, as NCCL does it.

    Raises TopologyError if none of the file's devices is there: it is of another machine.
    """
    known = {each.bus_id: each for each in system.devices}
    if file.devices and not any(each.bus_id in known for each in file.devices):
        raise TopologyError("none of the devices of the topology file is on this machine: it is another machine's file")

    def filled(device: PciDevice) -> PciDevice:
        own = known.get(device.bus_id)
        below = tuple(filled(each) for each in device.below)
        if own is None or device.class_code:
            return replace(device, below=below)
        return replace(own, below=below or own.below, gpu=device.gpu, other=device.other)

    cpus = {node.number: node.cpus for node in system.nodes}
    nodes = tuple(
        replace(node, cpus=node.cpus or cpus.get(node.number, ()), devices=tuple(filled(each) for each in node.devices))
        for node in file.nodes
    )
    notes = tuple(note for note in file.notes if "does not say what" not in note)
    missing = sum(each.kind is DeviceKind.UNKNOWN for node in nodes for top in node.devices for each in top.walk())
    if missing:
        notes += (f"neither the file nor /sys says what {missing} of the devices are",)
    return MachineTopology(nodes, file.nvlinks, file.nvlink_source, file.is_pcie_hidden, notes)


def _device(path: Path, own: Mapping[str, Path]) -> _FoundDevice | None:
    """None for what is of no use, and for further functions of a device."""
    code = _code(path, "class")
    if not _BUS_ID.fullmatch(path.name) or not code.startswith(_CLASSES):
        return None
    try:
        way = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise TopologyError(f"the path of PCI device {path.name} can't be followed: {error}") from None
    above = [name for name in way.parts[:-1] if _BUS_ID.fullmatch(name)]
    device = PciDevice(
        path.name,
        code,
        _code(path, "vendor"),
        _code(path, "device"),
        *_link(path, own.get(above[-1]) if above else None),
        ports=_ports(path) if code.startswith("0x02") else (),
    )
    if device.kind not in (DeviceKind.GPU, DeviceKind.NIC):
        return None
    text = _text(path / "numa_node")
    if text and not re.fullmatch(r"-1|\d{1,4}", text):
        raise TopologyError(f"numa_node of PCI device {path.name} is {shown(text)!r}, which is no number of a node")
    return _FoundDevice(device, tuple(above[1::2]), bool(above), int(text or -1))


def _tree(found: list[_FoundDevice], above: tuple[str, ...], own: Mapping[str, Path]) -> tuple[PciDevice, ...]:
    """The devices directly below ``above``. A switch with one device is left out: nothing shares its link."""
    depth = len(above)
    here = [(each.device.bus_id, each.device) for each in found if each.switches == above]
    switches: dict[str, list[_FoundDevice]] = {}
    for each in found:
        if each.switches[:depth] == above and len(each.switches) > depth:
            switches.setdefault(each.switches[depth], []).append(each)
    for bus_id, inside in switches.items():
        below = _tree(inside, (*above, bus_id), own)
        if len(below) == 1:
            here.append((bus_id, below[0]))
            continue
        path = own.get(bus_id)
        rate = _link(path, None) if path is not None else (0.0, 0)
        here.append((bus_id, PciDevice(bus_id, "0x060400", "", "", *rate, below=below)))
    return tuple(device for _, device in sorted(here, key=lambda pair: pair[0]))


def _link(path: Path, port: Path | None) -> tuple[float, int]:
    """(10^9 transfers per second of a lane, lanes) of a device's link: what both of its ends can. A link that rests
    runs slower than that."""
    ends = [end for end in (path, port) if end is not None]
    rates = [
        float(found[1]) for end in ends if (found := re.match(r"(\d+(?:\.\d+)?) GT/s", _text(end / "max_link_speed")))
    ]
    widths = [int(text) for end in ends if (text := _text(end / "max_link_width")).isdecimal()]
    lanes = min((width for width in widths if 0 < width <= 64), default=0)
    return (min(rates, default=0.0), lanes)


def _ports(path: Path) -> tuple[NetworkPort, ...]:
    """A NIC's ports: of InfiniBand and RoCE their own names, else those of its network interfaces."""
    found = []
    for device in sorted(path.glob("infiniband/*")):
        for port in sorted(device.glob("ports/*")):
            rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", _text(port / "rate"))
            found.append(NetworkPort(device.name, float(rate[1]) if rate else 0.0, (("port", port.name),)))
    if found:
        return tuple(found)
    interfaces = sorted([*path.glob("net/*"), *path.glob("virtio*/net/*")])
    speeds = [(interface.name, _text(interface / "speed")) for interface in interfaces]
    return tuple(NetworkPort(name, int(speed) / 1000 if speed.isdecimal() else 0.0) for name, speed in speeds)


def _nodes(root: Path) -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node."""
    found = {}
    for path in (root / "devices" / "system" / "node").glob("node[0-9]*"):
        if path.name[4:].isdecimal():
            found[int(path.name[4:])] = cpu_list(_text(path / "cpulist"))
    return found


def cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a list of the kernel's. Raises TopologyError if it is none.

    >>> cpu_list("0-2,8")
    (0, 1, 2, 8)
    """
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        ends = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        if ends is None or not int(ends[1]) <= int(ends[2] or ends[1]) < _MOST_CPUS:
            raise TopologyError(f"{shown(text)!r} is no list of CPUs like 0-3,8")
        found.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return tuple(sorted(found))


def _code(path: Path, name: str) -> str:
    text = _text(path / name).lower()
    if text and not _CODE.fullmatch(text):
        raise TopologyError(
            f"{name} of PCI device {shown(path.name)} is {shown(text)!r}, which is no number like 0x030200"
        )
    return text


def _text(path: Path) -> str:
    """The content of a file of the kernel; empty if there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES).strip()
    except OSError:
        return ""
