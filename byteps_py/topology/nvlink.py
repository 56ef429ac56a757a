"""NVLink: what the driver says (NVML, by nvidia-ml-py), or what a GPU's model implies.

``read`` imports pynvml only when it is called: it is an optional package, and it needs a driver. Any thread.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from byteps_py.topology.machine_topology import NVSWITCH, MachineTopology, NvLink, PciDevice
from byteps_py.topology.nccl_xml import nvlink_gbit

#: GPUs that are only sold on boards where NVLink connects all of them: number of the model, its name, compute
#: capability and NVLinks of each.
_MODULES = {
    "0x20b0": ("A100 SXM4", 80, 12),
    "0x20b2": ("A100 SXM4", 80, 12),
    "0x2330": ("H100 SXM5", 90, 18),
    "0x2335": ("H200 SXM5", 90, 18),
}
_NVIDIA = "0x10de"
INSTALL = "pip install nvidia-ml-py"


def read(topology: MachineTopology, pynvml: Any = None) -> MachineTopology:
    """``topology`` with the NVLinks that this machine's driver tells of; without a driver with a note why not.

    ``pynvml``: the module, or one that answers like it.
    """
    if not topology.gpus:
        return topology
    try:
        pynvml = importlib.import_module("pynvml") if pynvml is None else pynvml
    except ImportError:
        return _noted(topology, f"NVLink is not known: {INSTALL} lets the driver be asked")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _noted(topology, f"NVLink is not known: the driver does not answer ({error})")
    try:
        return _asked(topology, pynvml)
    except pynvml.NVMLError as error:
        return _noted(topology, f"NVLink is not known: the driver does not tell ({error})")
    finally:
        pynvml.nvmlShutdown()


def implied(topology: MachineTopology) -> MachineTopology:
    """``topology`` with the NVLinks that its GPUs' model implies, if nothing else tells of any.

    >>> from byteps_py.topology.machine_topology import NumaNode
    >>> gpus = tuple(PciDevice(f"0000:0{n}:00.0", "0x030200", "0x10de", "0x20b0") for n in range(2))
    >>> [link.gbit for link in implied(MachineTopology((NumaNode(0, devices=gpus),))).nvlinks]
    [2400.0, 2400.0]
    """
    models = {_MODULES.get(gpu.device) if gpu.vendor == _NVIDIA else None for gpu in topology.gpus}
    if topology.nvlinks is not None or len(models) != 1 or len(topology.gpus) < 2:
        return topology
    [model] = models
    if model is None:
        return topology
    name, capability, count = model
    links = tuple(NvLink(gpu.bus_id, NVSWITCH, count, count * nvlink_gbit(capability)) for gpu in topology.gpus)
    source = f"the GPUs' model ({name}, which is only sold on boards with NVLink)"
    return _with(topology, links, source, {gpu.bus_id: capability for gpu in topology.gpus})


def _asked(topology: MachineTopology, pynvml: Any) -> MachineTopology:
    counts: dict[tuple[str, str], int] = {}
    capabilities = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu = _bus_id(pynvml.nvmlDeviceGetPciInfo(handle))
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capabilities[gpu] = 10 * major + minor
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                is_active = pynvml.nvmlDeviceGetNvLinkState(handle, link)
            except pynvml.NVMLError:
                break  # it has no further link
            if not is_active:
                continue
            peer = _bus_id(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
            if all(peer != other.bus_id for other in topology.gpus):
                peer = NVSWITCH
            counts[gpu, peer] = counts.get((gpu, peer), 0) + 1
    links = tuple(
        NvLink(gpu, peer, count, count * nvlink_gbit(capabilities[gpu])) for (gpu, peer), count in counts.items()
    )
    return _with(topology, links, "the driver", capabilities)


def _bus_id(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _with(
    topology: MachineTopology, links: tuple[NvLink, ...], source: str, capabilities: dict[str, int]
) -> MachineTopology:
    """Each GPU then says its capability, which a topology file needs for the rates of NVLinks."""

    def told(device: PciDevice) -> PciDevice:
        below = tuple(told(each) for each in device.below)
        if device.bus_id not in capabilities:
            return replace(device, below=below)
        return replace(device, gpu=(("sm", str(capabilities[device.bus_id])),))

    nodes = tuple(replace(node, devices=tuple(map(told, node.devices))) for node in topology.nodes)
    notes = tuple(note for note in topology.notes if "NVLink" not in note)
    return MachineTopology(nodes, links, source, topology.is_pcie_hidden, notes)


def _noted(topology: MachineTopology, note: str) -> MachineTopology:
    notes = tuple(each for each in topology.notes if "NVLink" not in each)
    return replace(topology, notes=(*notes, note))
