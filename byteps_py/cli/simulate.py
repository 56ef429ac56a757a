"""`bps simulate`: what jobs of many machines cost the scheduler, and their goodput over weeks. Starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.system.terminal import ProgressBar

if TYPE_CHECKING:
    from byteps_py.scheduler.simulation import SimulatedJob, SimulationReport

_PHASES = {
    "register": "all members register",
    "start": "all members are ready",
    "declare": "all machines declare the tensors",
    "beats": "one second of heartbeats",
    "reports": "one second of reports on links and ranks",
    "waits": "one second in which all machines wait for one rank",
    "epoch": "a summation service is lost, and all learn of the new shares",
}


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "simulate",
        help="show what a job of many machines costs the scheduler",
        description="Drive the scheduler's own state machines with the messages of so many machines, and print the "
        "processor time, messages and bytes of each phase of a job. gRPC's own time for each message comes on top. "
        "With --days, print the job's goodput instead, while machines are lost and links and processors slow down, "
        "beside that of a job that goes back to its last checkpoint (docs/explanation/scale.md).",
        example="bps simulate --machines 10,100,1000",
    )
    parser.add_argument(
        "--machines", required=True, metavar="N,N,…", help="GPU machines, one simulation for each number"
    )
    parser.add_argument("--cpu-machines", metavar="K,K,…", help="CPU machines, as many numbers; default: none")
    parser.add_argument("--ranks-per-machine", type=int, default=8, metavar="R", help="default 8")
    parser.add_argument("--tensors", type=int, default=500, metavar="T", help="tensors of the model; default 500")
    parser.add_argument("--days", type=float, metavar="D", help="show the goodput of so many days instead")
    parser.add_argument(
        "--restart-s", type=float, default=600.0, metavar="S",
        help="with --days: until a job that goes back to a checkpoint computes again; default 600",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="with --days: of the events; default 0")
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Raises UsageError for numbers that make no job."""
    from byteps_py.errors import UsageError
    from byteps_py.scheduler.simulation import ControlPlane, SimulatedJob

    machines = _numbers("--machines", arguments.machines)
    cpu_machines = _numbers("--cpu-machines", arguments.cpu_machines) if arguments.cpu_machines else [0] * len(machines)
    if len(machines) != len(cpu_machines):
        raise UsageError(f"--machines has {len(machines)} numbers, --cpu-machines {len(cpu_machines)}")
    if arguments.days is not None:
        return _goodput(arguments, list(zip(machines, cpu_machines, strict=True)))
    rest = arguments.ranks_per_machine, arguments.tensors
    jobs = [SimulatedJob(n, k, *rest) for n, k in zip(machines, cpu_machines, strict=True)]
    reports = []
    with ProgressBar("simulating") as bar:
        for number, job in enumerate(jobs):
            reports.append(ControlPlane(job).run(partial(_show, bar, job, number / len(jobs), 1 / len(jobs))))
    print(json.dumps([asdict(report) for report in reports]) if arguments.json else _as_text(reports))
    return 0


def _goodput(arguments: argparse.Namespace, sizes: Sequence[tuple[int, int]]) -> int:
    from byteps_py.scheduler.simulation import MonthOptions, month_goodput

    lines, found = [], []
    for n, k in sizes:
        options = MonthOptions(n, k, arguments.days, arguments.seed, restart_s=arguments.restart_s)
        ours, other = month_goodput(options)
        found.append({"options": asdict(options), "byteps": asdict(ours), "checkpoints": asdict(other)})
        lines += [f"{n:,} GPU machines, {k:,} CPU machines: {ours.losses:,} losses in {arguments.days:g} days"]
        for name, one in (("in place", ours), ("back to checkpoints", other)):
            parts = ", ".join(f"{what} {share:.1%}" for what, share in one.lost.items() if share >= 0.0005)
            lines.append(f"  {name:<20} goodput {one.share:6.1%}   {parts}")
    print(json.dumps(found) if arguments.json else "\n".join(lines))
    return 0


def _show(bar: ProgressBar, job: SimulatedJob, before: float, part: float, phase: str) -> None:
    done = before + part * list(_PHASES).index(phase) / len(_PHASES)
    bar.update(done, 1.0, f"{job.machines:,} machines: {_PHASES[phase]}")


def _numbers(option: str, text: str) -> list[int]:
    from byteps_py.errors import UsageError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}={text}: numbers with commas between them are needed, such as 10,100") from None


def _as_text(reports: Sequence[SimulationReport]) -> str:
    lines = []
    for report in reports:
        job = report.job
        lines += [
            f"{job.machines:,} GPU machines, {job.cpu_machines:,} CPU machines: {report.members:,} members, "
            f"{job.machines * job.ranks_per_machine:,} ranks, {job.tensors:,} tensors",
            f"  {'':<62}{'CPU':>11}{'received':>22}{'sent':>22}",
        ]
        for cost in report.costs:
            received = f"{cost.received:,} ({cost.received_bytes / 1e6:,.1f} MB)"
            sent = f"{cost.sent:,} ({cost.sent_bytes / 1e6:,.1f} MB)"
            lines.append(f"  {_PHASES[cost.name]:<62}{cost.cpu_s:>9.3f} s{received:>22}{sent:>22}")
        lines.append("")
    return "\n".join(lines[:-1])
