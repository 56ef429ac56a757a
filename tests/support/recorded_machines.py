"""The machines of tests/topology/machines: read, and made into trees like /sys."""

from __future__ import annotations

from pathlib import Path

from byteps_py.topology import nccl_xml, sysfs
from byteps_py.topology.machine_topology import MachineTopology

MACHINES = Path(__file__).parents[1] / "topology" / "machines"


def from_xml(name: str) -> MachineTopology:
    """The machine of a topology file, by its name without ``.xml``."""
    return nccl_xml.parse((MACHINES / f"{name}.xml").read_bytes(), name)


def from_sysfs(name: str, folder: Path) -> MachineTopology:
    """The machine of a ``.sysfs`` file, read from a tree that is made below ``folder``."""
    return sysfs.read(make_tree(name, folder))


def make_tree(name: str, folder: Path) -> Path:
    """Make the folders, files and links of a ``.sysfs`` file below ``folder``. An underscore stands for a space."""
    listed = folder / "bus" / "pci" / "devices"
    listed.mkdir(parents=True)
    for line in (MACHINES / f"{name}.sysfs").read_text().splitlines():
        words = line.split()
        if not words or words[0] == "#":
            continue
        if words[0] == "node":
            _write(folder / "devices" / "system" / "node" / f"node{words[1]}" / "cpulist", words[2])
            continue
        device = folder / "devices" / words[0]
        device.mkdir(parents=True, exist_ok=True)
        for name_and_text in words[1:]:
            attribute, _, text = name_and_text.partition("=")
            _write(device / attribute, text.replace("_", " "))
        (listed / device.name).symlink_to(device)
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
