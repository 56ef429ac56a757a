"""Readers of machines: recorded machines are what they are, files come back as they were, hostile ones are refused."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.recorded_machines import MACHINES, from_sysfs, from_xml, make_tree

from byteps_py.errors import ConfigurationError, TopologyError
from byteps_py.topology import nccl_xml, nvlink, sysfs
from byteps_py.topology.machine_topology import NVSWITCH, DeviceKind, MachineTopology, NumaNode, NvLink, PciDevice

FILES = sorted(path.stem for path in MACHINES.glob("*.xml"))
TREES = sorted(path.stem for path in MACHINES.glob("*.sysfs"))


@pytest.mark.parametrize(
    ("name", "gpus", "nics", "with_nic", "without_nic"),
    [
        ("aws-p4d-24xl", 8, 4, 4, 0),
        ("aws-p4de-24xl", 8, 4, 4, 0),
        ("aws-g5-48xl", 0, 0, 0, 0),  # the file says only where devices are
        ("paper-pcie", 8, 1, 0, 2),
        ("paper-nvlink", 8, 1, 1, 3),
    ],
)
def test_topology_files(name: str, gpus: int, nics: int, with_nic: int, without_nic: int) -> None:
    machine = from_xml(name)
    assert (len(machine.gpus), len(machine.nics)) == (gpus, nics)
    assert (machine.switches_with_nic, machine.switches_without_nic) == (with_nic, without_nic)
    assert [node.number for node in machine.nodes] == [0, 1]


def test_what_files_say_of_processors_and_links() -> None:
    cloud = from_xml("aws-p4d-24xl")
    first, second = cloud.nodes
    assert first.cpus == (*range(24), *range(48, 72))
    assert second.cpus == (*range(24, 48), *range(72, 96))
    assert cloud.gpus[0].gbit == pytest.approx(105)  # what copies over PCIe 3.0 with 16 lanes were measured to reach
    assert cloud.nvlinks is None
    paper = from_xml("paper-nvlink")
    per_gpu = {
        gpu.bus_id: sum(each.gbit for each in paper.nvlinks or () if each.gpu == gpu.bus_id) for gpu in paper.gpus
    }
    assert set(per_gpu.values()) == {1200.0}  # Gbit/s, as the paper says
    assert paper.nics[0].port_gbit == 100


@pytest.mark.parametrize("name", FILES)
def test_a_file_comes_back_as_it_was(name: str) -> None:
    machine = from_xml(name)
    text = nccl_xml.write(machine)
    again = nccl_xml.parse(text.encode())
    assert again == machine
    assert nccl_xml.write(again) == text


@pytest.mark.parametrize("name", TREES)
def test_a_tree_can_be_written_as_a_file(name: str, tmp_path: Path) -> None:
    machine = nvlink.implied(from_sysfs(name, tmp_path))
    again = nccl_xml.parse(nccl_xml.write(machine).encode())
    assert [each.bus_id for each in again.devices] == [each.bus_id for each in machine.devices]
    assert [each.kind for each in again.devices] == [each.kind for each in machine.devices]
    assert [each.gbit for each in again.devices] == [each.gbit for each in machine.devices]
    assert [each.cpus for each in again.nodes] == [each.cpus for each in machine.nodes]


@pytest.mark.parametrize(
    ("name", "gpus", "nics", "nodes", "is_hidden"),
    [
        ("workstation", 2, 1, 1, False),  # the sound function of a GPU is no GPU
        ("hidden-vm", 4, 1, 1, True),
        ("no-gpu", 0, 1, 2, False),  # a management display is no GPU; of two NICs the fast one counts
        ("paper-pcie", 8, 1, 2, False),
    ],
)
def test_trees(name: str, gpus: int, nics: int, nodes: int, is_hidden: bool, tmp_path: Path) -> None:
    machine = from_sysfs(name, tmp_path)
    assert (len(machine.gpus), len(machine.nics), len(machine.nodes)) == (gpus, nics, nodes)
    assert machine.is_pcie_hidden == is_hidden


def test_a_tree_and_a_file_of_one_machine_agree(tmp_path: Path) -> None:
    tree, file = from_sysfs("paper-pcie", tmp_path), from_xml("paper-pcie")
    assert tree.rates == file.rates  # also of links that rest
    assert [node.cpus for node in tree.nodes] == [node.cpus for node in file.nodes]
    assert (tree.switches_with_nic, tree.switches_without_nic) == (0, 2)
    assert tree.nics[0].port_gbit == 100


def test_a_slower_slot_limits_a_gpu(tmp_path: Path) -> None:
    first, second = from_sysfs("workstation", tmp_path).gpus
    assert first.gbit == pytest.approx(4 * second.gbit)


def test_a_file_is_completed_from_the_machines_own_tree(tmp_path: Path) -> None:
    """As NCCL does it: this file says only where devices are."""
    machine = sysfs.complete(from_xml("aws-g5-48xl"), from_sysfs("aws-g5", tmp_path))
    assert (len(machine.gpus), len(machine.nics)) == (8, 1)
    assert [len([gpu for gpu in node.devices if gpu in machine.gpus]) for node in machine.nodes] == [4, 4]
    assert not machine.is_pcie_hidden  # the file knows what the tree hides
    assert machine.nodes[0].cpus == (*range(48), *range(96, 144))
    with pytest.raises(TopologyError, match="another machine's file"):
        sysfs.complete(from_xml("paper-pcie"), from_sysfs("hidden-vm", tmp_path / "other"))


def test_this_machine() -> None:
    if not (sysfs.SYSFS / "bus" / "pci" / "devices").is_dir():
        pytest.skip("this machine has no PCI bus")
    machine = sysfs.read()
    assert {cpu for node in machine.nodes for cpu in node.cpus}


PCI = b'<system version="1"><cpu numaid="0">%s</cpu></system>'
GPU = b'<pci busid="0000:01:00.0" class="0x030200">%s</pci>'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "no XML"),
        (b"\x00\xff", "no XML"),
        (b"<system", "no XML"),
        (b'<?xml version="1.0" encoding="nothing"?><system/>', "no XML"),
        (b"<a/>", "begins with <a>"),
        (b"<system/>", "no <cpu>"),
        (b'<system version="2"><cpu/></system>', "version 2"),
        (b"<system><cpu/></system>", "numaid=''"),
        (b'<system><cpu numaid="0"/><cpu numaid="0"/></system>', "node 0 is there twice"),
        (b'<system><cpu numaid="9999999999999999"/></system>', "from -1 to 4096"),
        (b'<system><cpu numaid="0" affinity="0xff"/></system>', "no mask of CPUs"),
        (b'<system><cpu numaid="0" affinity="%s"/></system>' % b",".join([b"ff"] * 5000), "no mask of CPUs"),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><system>&a;</system>', "document type"),
        (PCI % b"<pci/>", "no PCI bus id"),
        (PCI % b'<pci busid="../../etc"/>', "no PCI bus id"),
        (PCI % (GPU % b"" * 2), "is there twice, first in line 1"),
        (PCI % b'<pci busid="0000:01:00.0" class="gpu"/>', "class='gpu'"),
        (PCI % b'<pci busid="0000:01:00.0" link_speed="fast"/>', "link_speed='fast'"),
        (PCI % b'<pci busid="0000:01:00.0" link_width="-4"/>', "from 0 to 64"),
        (PCI % (GPU % b'<gpu sm="80"><nvlink count="1" target="0000:09:00.0"/></gpu>'), "no other GPU of the file"),
        (PCI % (GPU % b'<gpu sm="80"><nvlink count="1" target="0000:01:00.0"/></gpu>'), "no other GPU of the file"),
        (PCI % (GPU % b'<gpu sm="80"><nvlink target="0000:01:00.0"/></gpu>'), "count=''"),
        (PCI % (b"<pci>" * 100), "more than 32 levels|no PCI bus id"),
        (PCI % (b"<x/>" * 9000), "8,192 elements"),
        (PCI % b"<nic/>", "needs a <net> with a name"),
        (PCI % (b'<nic><net name="a"/></nic>' * 2), "of its own, not 'a'"),
        (b'<system><cpu numaid="1_0"/></system>', "numaid='1_0'"),
        (b" " * (nccl_xml.MAX_BYTES + 1), "no machine needs more"),
    ],
)  # fmt: skip
def test_hostile_files(text: bytes, why: str) -> None:
    """One sentence that names the file."""
    with pytest.raises(TopologyError, match=why) as raised:
        nccl_xml.parse(text, "given.xml")
    assert re.fullmatch(r"given\.xml: [^\n]{1,500}", str(raised.value))
    assert isinstance(raised.value, ConfigurationError)


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name: str) -> None:
    """A file of which bytes were changed or lost is read, or refused with the one type of error."""
    text, chance = (MACHINES / f"{name}.xml").read_bytes(), random.Random(name)
    refused = 0
    for _ in range(60):
        damaged = bytearray(text)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(damaged))
            damaged[at : at + chance.randint(0, 4)] = chance.randbytes(chance.randint(0, 3))
        try:
            nccl_xml.parse(bytes(damaged))
        except TopologyError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("path", "text", "why"),
    [
        ("bus/pci/devices/0000:01:00.0/class", "gpu", "class of PCI device 0000:01:00.0 is 'gpu'"),
        ("bus/pci/devices/0000:01:00.0/numa_node", "many", "numa_node of PCI device 0000:01:00.0"),
        ("devices/system/node/node0/cpulist", "3-1", "no list of CPUs"),
        ("devices/system/node/node0/cpulist", "0-99999999999", "no list of CPUs"),
    ],
)
def test_damaged_trees(path: str, text: str, why: str, tmp_path: Path) -> None:
    root = make_tree("workstation", tmp_path)
    (root / path).write_text(text)
    with pytest.raises(TopologyError, match=why):
        sysfs.read(root)


def test_a_tree_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="is not there"):
        sysfs.read(tmp_path)


def test_a_device_that_leads_nowhere(tmp_path: Path) -> None:
    """A device that is removed while it is read says nothing any more."""
    root = make_tree("workstation", tmp_path)
    (root / "bus/pci/devices/0000:09:00.0").symlink_to(tmp_path / "gone")
    (root / "bus/pci/devices/0000:0a:00.0").symlink_to(root / "bus/pci/devices/0000:0a:00.0")
    assert len(sysfs.read(root).gpus) == 2


SHAPES = """
<system version="1">
  <cpu numaid="0" host_hash="0x16fe"><pci busid="0001:00:00.0" class="0x030200" link_speed="" link_width="0">
    <gpu dev="0" sm="80"><nvlink target="0002:00:00.0" count="12" tclass="0x030200"/><c2c bw="1" count="5"/></gpu></pci>
    <nic><net name="eth0" dev="0" speed="100000"/></nic></cpu>
  <cpu numaid="0x1"><pci busid="0002:00:00.0" class="0x030200"><gpu dev="1" sm="80">
    <nvlink target="0001:00:00.0" count="12" tclass="0x030200"/></gpu></pci></cpu>
</system>
"""


def test_shapes_that_files_of_clouds_have() -> None:
    """No rate, a number in base 16, a NIC that is no PCI device, elements and attributes that nothing here needs."""
    machine = nccl_xml.parse(SHAPES.encode())
    assert [gpu.bus_id for gpu in machine.gpus] == ["0001:00:00.0", "0002:00:00.0"]
    assert [link.gbit for link in machine.nvlinks or ()] == [2400.0, 2400.0]
    assert [(nic.bus_id, nic.port_gbit) for nic in machine.nics] == [("eth0", 100.0)]
    assert not machine.gpus[0].is_rate_known
    assert nccl_xml.parse(nccl_xml.write(machine).encode()) == machine
    assert '<cpu numaid="0" host_hash="0x16fe">' in nccl_xml.write(machine)


def test_a_gpu_needs_no_vendor() -> None:
    """As in NCCL's own file of a cloud's machine; but a management display does."""
    kinds = {
        (code, vendor): PciDevice("0000:01:00.0", code, vendor).kind
        for code in ("0x030000", "0x030200", "0x038000", "0x020700", "0x040300", "")
        for vendor in ("", "0x10de", "0x1002", "0x1a03")
    }
    gpus = {pair for pair, kind in kinds.items() if kind is DeviceKind.GPU}
    assert gpus == {
        ("0x030000", ""), ("0x030000", "0x10de"), ("0x030200", ""), ("0x030200", "0x10de"), ("0x030200", "0x1002"),
        ("0x030200", "0x1a03"), ("0x038000", ""), ("0x038000", "0x1002"),
    }  # fmt: skip


def test_a_file_that_nccl_wrote_in_a_virtual_machine() -> None:
    gpus = "".join(f'<pci busid="0000:0{n}:00.0" class="0x030200"><gpu dev="{n}" sm="90"/></pci>' for n in range(2))
    machine = nccl_xml.parse(f'<system version="1"><cpu numaid="-1">{gpus}</cpu></system>'.encode())
    assert machine.is_pcie_hidden
    assert "virtual machine" in machine.notes[-1]
    assert nccl_xml.parse(nccl_xml.write(machine).encode()) == machine


# ---- NVLink ------------------------------------------------------------------------------------------------------


class DriverError(Exception):
    """What a driver answers."""


@dataclass
class PciInfo:
    domain: int
    bus: int
    device: int


@dataclass
class Driver:
    """Answers as pynvml does, for a machine with GPUs at bus 1, 2, … ``links``: of each GPU the buses at their ends."""

    links: list[list[int]]
    init_error: str = ""
    calls: list[str] = field(default_factory=list)
    NVMLError = DriverError
    NVML_NVLINK_MAX_LINKS = 18

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("init")
        if self.init_error:
            raise DriverError(self.init_error)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.links)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> PciInfo:  # noqa: N802
        return PciInfo(0, handle + 1, 0)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return (8, 0)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= len(self.links[handle]):
            raise DriverError("not supported")
        return int(self.links[handle][link] != 0)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> PciInfo:  # noqa: N802
        return PciInfo(0, self.links[handle][link], 0)


def plain(gpus: int) -> MachineTopology:
    devices = tuple(PciDevice(f"0000:{n + 1:02x}:00.0", "0x030200", "0x10de", "0x20b5") for n in range(gpus))
    return MachineTopology(
        (NumaNode(0, devices=devices),), notes=("/sys does not say whether NVLink connects the GPUs",)
    )


def test_the_driver_tells_of_nvlinks() -> None:
    driver = Driver([[2, 2, 0], [1, 1, 0]])
    machine = nvlink.read(plain(2), driver)
    first, second = (gpu.bus_id for gpu in machine.gpus)
    assert machine.nvlinks == (NvLink(first, second, 2, 400.0), NvLink(second, first, 2, 400.0))
    assert (machine.nvlink_source, machine.notes) == ("the driver", ())
    assert nccl_xml.parse(nccl_xml.write(machine).encode()) == machine
    assert driver.calls == ["init", "shutdown"]


def test_the_driver_tells_of_nvswitches() -> None:
    machine = nvlink.read(plain(2), Driver([[0x60] * 6 + [0x61] * 6] * 2))
    assert [(link.peer, link.count, link.gbit) for link in machine.nvlinks or ()] == [(NVSWITCH, 12, 2400.0)] * 2


def test_a_driver_that_does_not_answer() -> None:
    machine = nvlink.read(plain(2), Driver([], "Driver Not Loaded"))
    assert machine.nvlinks is None
    assert machine.notes == ("NVLink is not known: the driver does not answer (Driver Not Loaded)",)


def test_the_real_library_without_a_driver() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py: make install")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        machine = nvlink.read(plain(2))
        assert machine.nvlinks is None
        assert machine.notes[0].startswith("NVLink is not known: the driver does not answer (")
    else:
        pynvml.nvmlShutdown()
        machine = nvlink.read(sysfs.read())
        assert machine.nvlinks is not None or not machine.gpus


def test_models_that_are_only_sold_with_nvlink() -> None:
    machine = nvlink.implied(from_xml("aws-p4d-24xl"))
    assert [link.gbit for link in machine.nvlinks or ()] == [2400.0] * 8
    assert "A100 SXM4" in machine.nvlink_source
    assert nvlink.implied(from_xml("paper-pcie")) == from_xml("paper-pcie")
    assert nccl_xml.parse(nccl_xml.write(machine).encode()) == machine
