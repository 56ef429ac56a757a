"""`bps topology`: the inside of a machine, and how its GPUs' gradients are best summed before they travel. Starts
nothing, copies nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command

if TYPE_CHECKING:
    from byteps_py.topology.bandwidth_probe import ProbeRates
    from byteps_py.topology.choice import LocalChoice
    from byteps_py.topology.local_plan import LocalPlan
    from byteps_py.topology.local_sums import LocalSumPlan
    from byteps_py.topology.machine_topology import MachineTopology, PciDevice
    from byteps_py.topology.numa_pinning import PinningPlan

_MOST_RATES_BYTES = 4 << 20
_MOST_RANKS = 1024


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "topology",
        help="show the inside of a machine, and how its GPUs sum best",
        description="Read which GPUs and network cards share a PCIe link, and which GPUs NVLink connects: of this "
        "machine, or of a topology file of NCCL. Then choose how the gradients of its GPUs are best summed before they "
        "travel, with reasons and times. BYTEPS_LOCAL_SUM says whether byteps_py does so, or as host-sum says.",
        example="bps topology --file p4d-24xl.xml",
    )
    parser.add_argument("--file", type=Path, metavar="XML", help="another machine: a topology file, as NCCL writes it")
    parser.add_argument(
        "--sysfs", type=Path, metavar="DIR", help="a copy of another machine's /sys; with --file, what its devices are"
    )
    parser.add_argument("--gpus", metavar="N,N,…", help="numbers of the GPUs that a job uses, by bus id; default: all")
    parser.add_argument("--rates", type=Path, metavar="JSON", help="measured rates of a machine that hides PCIe")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of this machine, for the CPUs of each; default: GPUs"
    )
    parser.add_argument("--bytes", type=float, default=1e9, metavar="B", help="gradients in each GPU; default 1e9")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--xml", action="store_true", help="print the machine as a topology file of NCCL")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the machine and the choice. Raises TopologyError, or UsageError for a number of bytes that can't be."""
    from byteps_py.errors import UsageError
    from byteps_py.topology.choice import choose
    from byteps_py.topology.local_sums import MODES, plan_local_sums
    from byteps_py.topology.machine_reader import read_machine
    from byteps_py.topology.nccl_xml import write
    from byteps_py.topology.numa_pinning import MOST_DEFAULT_THREADS, plan_pinning

    if not 0 < arguments.bytes < float("inf"):
        raise UsageError(f"--bytes takes a number above 0, got {arguments.bytes:g}")
    if arguments.ranks is not None and not 0 < arguments.ranks <= _MOST_RANKS:
        raise UsageError(f"--ranks takes a number from 1 to {_MOST_RANKS}, got {arguments.ranks}")
    machine = read_machine(arguments.file, arguments.sysfs)
    if arguments.gpus is not None:
        machine = _with_gpus(machine, arguments.gpus)
    if arguments.rates is not None:
        from byteps_py.topology.bandwidth_probe import infer

        machine = infer(machine, _rates(arguments.rates))
    if arguments.xml:
        print(write(machine), end="")
        return 0
    chosen = choose(machine)
    cpus = [cpu for node in machine.nodes for cpu in node.cpus]
    ranks = arguments.ranks or len(machine.gpus) or 1
    pinning = plan_pinning(machine, ranks, MOST_DEFAULT_THREADS, cpus)
    if arguments.json:
        sums = {mode: plan_local_sums(chosen, ranks, mode) for mode in MODES}
        print(json.dumps(_as_json(machine, chosen, pinning, arguments.bytes, sums), indent=2))
    else:
        choice_lines = _choice_lines(chosen, arguments.bytes, ranks)
        lines = [*_machine_lines(machine), "", *choice_lines, "", *_pinning_lines(pinning)]
        print("\n".join(lines))
    return 0


def _with_gpus(machine: MachineTopology, numbers: str) -> MachineTopology:
    from byteps_py.errors import UsageError
    from byteps_py.topology.machine_reader import used

    words = [word.strip() for word in numbers.split(",")]
    if not all(word.isdecimal() and len(word) < 6 and int(word) < len(machine.gpus) for word in words):
        raise UsageError(f"--gpus takes numbers below {len(machine.gpus)} with commas between them, got {numbers!r}")
    return used(machine, numbers)


def _rates(file: Path) -> ProbeRates:
    """Raises TopologyError."""
    from byteps_py.errors import TopologyError
    from byteps_py.wording import shown

    try:
        with file.open("rb") as opened:
            rows = json.loads(opened.read(_MOST_RATES_BYTES))
        return {tuple(map(str, row["devices"])): tuple(map(float, row["gbit"])) for row in rows}
    except OSError as error:
        raise TopologyError(f"{shown(str(file))} can't be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        form = '[{"devices": ["0000:00:04.0"], "gbit": [96.0]}, …]'
        raise TopologyError(f"{shown(str(file))} is no list of rates like {form}") from None


def _as_json(
    machine: MachineTopology,
    chosen: LocalChoice,
    pinning: PinningPlan,
    nbytes: float,
    sums: Mapping[str, LocalSumPlan],
) -> dict[str, Any]:
    return {
        "numa_nodes": [{"number": node.number, "cpus": list(node.cpus)} for node in machine.nodes],
        "groups": [
            {
                "top": group.top.bus_id,
                "is_switch": group.is_switch,
                "numa_node": group.node.number,
                "gbit": group.top.gbit,
                "gpus": [gpu.bus_id for gpu in group.gpus],
                "nics": [nic.bus_id for nic in group.nics],
            }
            for group in machine.groups
        ],
        "nvlinks": None if machine.nvlinks is None else [[e.gpu, e.peer, e.gbit] for e in machine.nvlinks],
        "is_pcie_hidden": machine.is_pcie_hidden,
        "notes": list(machine.notes),
        "applied": "no-gpu" if not machine.gpus else "host-sum",
        "local_sums": {
            mode: {
                "strategy": str(plan.strategy),
                "groups": [list(group) for group in plan.groups],
                "root": plan.root,
                "keeps_order": plan.keeps_order,
                "reason": plan.reason,
            }
            for mode, plan in sums.items()
        },
        "choice": chosen.as_json(nbytes),
        "pinning": {
            "reason": pinning.reason,
            "ranks": [sorted(cpus) for cpus in pinning.ranks],
            "services": sorted(pinning.services),
            "slot_node": pinning.slot_node,
        },
    }


def _machine_lines(machine: MachineTopology) -> Iterator[str]:
    from byteps_py.wording import count_text

    counts = (
        count_text(len(machine.nodes), "NUMA node"),
        count_text(len(machine.gpus), "GPU"),
        count_text(len(machine.nics), "NIC"),
    )
    yield f"machine  {', '.join(counts)}"
    for node in machine.nodes:
        cpus = f", CPUs {_ranges(node.cpus)}" if node.cpus else ""
        yield f"  {node.name if node.number >= 0 else 'NUMA node not known'}{cpus}"
        for device in node.devices:
            yield from _device_lines(device, machine, 4)
    if machine.nvlinks:
        per_gpu = sum(link.gbit for link in machine.nvlinks) / len(machine.gpus)
        yield f"  NVLink: {per_gpu:,.0f} Gbit/s in each direction of a GPU, as {machine.nvlink_source} says"
    elif machine.nvlinks is not None:
        yield f"  NVLink: none, as {machine.nvlink_source} says"
    for note in machine.notes:
        yield f"  note: {note}"


def _device_lines(device: PciDevice, machine: MachineTopology, indent: int) -> Iterator[str]:
    from byteps_py.topology.machine_topology import DeviceKind

    number = f" {machine.gpus.index(device)}" if device.kind is DeviceKind.GPU else ""
    rate = f"{device.gbit:.0f} Gbit/s{'' if device.is_rate_known else ' (not known: as PCIe 3.0, 16 lanes)'}"
    ports = "".join(f", {port.name}{f' {port.gbit:g} Gbit/s' if port.gbit else ''}" for port in device.ports)
    unused = ", slower than others: not counted" if device.kind is DeviceKind.NIC and device not in machine.nics else ""
    yield f"{'':{indent}}{device.kind}{number} {device.bus_id}, {rate}{ports}{unused}"
    for each in device.below:
        yield from _device_lines(each, machine, indent + 2)


def _choice_lines(chosen: LocalChoice, nbytes: float, ranks: int) -> Iterator[str]:
    from byteps_py.topology.local_sums import lines_of
    from byteps_py.wording import bytes_text

    plan = chosen.plan
    at_least = "at least " if plan.topology.is_pcie_hidden else ""
    about = (
        f": {at_least}{_time(plan, nbytes)} for {bytes_text(round(nbytes))} in each GPU" if plan.topology.gpus else ""
    )
    yield f"best     {plan.strategy}{about}"
    for number, reason in enumerate(chosen.reasons):
        yield f"{'why' if not number else '':<9}{reason}"
    for number, step in enumerate(plan.steps):
        sent = {round(each.share * round(nbytes)) for each in step.transfers}
        sizes = " to ".join(bytes_text(size) for size in sorted({min(sent), max(sent)})) if sent else ""
        counted = f": {len(step.transfers)} × {sizes}" if sent else ""
        yield f"{'steps' if not number else '':<9}{step.name}{counted}"
    if (busiest := plan.busiest()) is not None:
        yield f"limit    {busiest.source} → {busiest.target}: {float(plan.loads[busiest]):g} × the gradients of a GPU"
    for number, other in enumerate(chosen.others):
        yield f"{'others' if not number else '':<9}{other.strategy}: {_time(other, nbytes)}"
    for number, line in enumerate(lines_of(chosen, ranks)):
        yield f"{'applied' if not number else '':<9}{line}"
    if chosen.probes is not None:
        for number, line in enumerate(chosen.probes.lines()):
            yield f"{'measure' if not number else '':<9}{line}"


def _pinning_lines(pinning: PinningPlan) -> Iterator[str]:
    from byteps_py.wording import ranks_text

    yield f"pinning  {pinning.reason}"
    if pinning.ranks:
        for cpus in sorted(set(pinning.ranks), key=min):
            ranks = [rank for rank, own in enumerate(pinning.ranks) if own == cpus]
            yield f"{'':<9}local {ranks_text(ranks)}: CPUs {_ranges(tuple(sorted(cpus)))}"
        services = f"CPUs {_ranges(tuple(sorted(pinning.services)))}" if pinning.services else "all CPUs"
        yield f"{'':<9}services: {services}"
        yield f"{'':<9}only with BYTEPS_NUMA_ON=1"


def _time(plan: LocalPlan, nbytes: float) -> str:
    return f"{plan.seconds(nbytes) * 1e3:,.1f} ms"


def _ranges(cpus: tuple[int, ...]) -> str:
    from byteps_py.wording import ranks_text

    return ranks_text(cpus).partition(" ")[2]
