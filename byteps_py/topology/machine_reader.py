"""Reads a machine from all that tells of it: a topology file, /sys, the driver, the GPUs' model. Any thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from byteps_py.errors import TopologyError
from byteps_py.topology import nccl_xml, nvlink, sysfs
from byteps_py.topology.machine_topology import DeviceKind, MachineTopology, without
from byteps_py.wording import shown


def read_machine(file: Path | None = None, root: Path | None = None) -> MachineTopology:
    """This machine; or with ``file`` that of an NCCL topology file, with ``root`` that of a recorded /sys. With both,
    the file says where devices are and ``root`` what they are.

    Raises TopologyError.
    """
    if file is not None:
        machine = nccl_xml.parse(_content(file), str(file))
        if root is not None:
            machine = sysfs.complete(machine, sysfs.read(root))
    else:
        machine = sysfs.read(root or sysfs.SYSFS)
        if root is None:
            machine = nvlink.read(machine)
    return nvlink.implied(machine)


def read_used(environ: Mapping[str, str], interface: str = "") -> MachineTopology:
    """This machine with what a job uses: the GPUs of CUDA_VISIBLE_DEVICES, if that has numbers, and the NIC of
    ``interface``, if one is named and known. Raises TopologyError."""
    return used(read_machine(), environ.get("CUDA_VISIBLE_DEVICES"), interface)


def used(machine: MachineTopology, visible: str | None, interface: str = "") -> MachineTopology:
    """``machine`` without GPUs that are not in ``visible`` (numbers in the order of bus ids, with commas between them;
    None, and names of GPUs: all), and without NICs that have no port ``interface``, if one has (empty: all).

    >>> from byteps_py.topology.machine_topology import NumaNode, PciDevice
    >>> gpus = tuple(PciDevice(f"0000:0{n}:00.0", "0x030200") for n in range(4))
    >>> machine = MachineTopology((NumaNode(0, devices=gpus),))
    >>> len(used(machine, "2,3").gpus), len(used(machine, None).gpus), len(used(machine, "GPU-8932f937").gpus)
    (2, 4, 4)
    """
    hidden: set[str] = set()
    numbers = [word.strip() for word in (visible or "").split(",") if word.strip()]
    if numbers and all(number.isdecimal() for number in numbers):
        kept = {int(number) for number in numbers if len(number) < 6}
        ordered = sorted(gpu.bus_id for gpu in machine.gpus)
        hidden = {bus_id for number, bus_id in enumerate(ordered) if number not in kept}
    nics = [each for each in machine.devices if each.kind is DeviceKind.NIC]
    named = {nic.bus_id for nic in nics if any(port.name == interface for port in nic.ports)}
    hidden |= {nic.bus_id for nic in nics if named and nic.bus_id not in named}
    return without(machine, lambda device: device.bus_id in hidden) if hidden else machine


def _content(file: Path) -> bytes:
    """Of a file; one byte too much of one that is too long."""
    try:
        with file.open("rb") as opened:
            return opened.read(nccl_xml.MAX_BYTES + 1)
    except OSError as error:
        raise TopologyError(f"{shown(str(file))} can't be read: {error.strerror}") from None
