"""Commands about a running job: ``bps status``, ``bps stop`` and ``bps scale``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.job_choice import (
    add_job_choice,
    add_timeout,
    chosen_settings,
    job_name,
    job_start,
    names_scheduler,
    settings_of,
)
from byteps_py.errors import BytePSError, UsageError
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.proto import control_pb2 as pb
    from byteps_py.system.jobs import JobNote

_COLUMNS = (
    "member", "machine", "process", "address", "state", "heard", "received MB", "sent MB", "local MB", "summed MB",
    "share", "CPU s", "resident MB",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    """Add the commands. Their handlers raise the errors of ``scheduler.query``."""
    status = add_command(
        subparsers,
        "status",
        help="show the members of a job, their traffic and what they wait for",
        example="bps status --scheduler 10.0.0.1:9000",
        exits={0: "the job forms, runs or has ended well", 1: "it has failed, or does not answer"},
    )
    status.set_defaults(handler=run_status)
    stop = add_command(
        subparsers,
        "stop",
        help="end the job in order: every service leaves it",
        example="bps stop --reason 'the disk is full'",
        exits={0: "its members have been told to leave", 1: "its scheduler does not answer"},
    )
    stop.add_argument("--reason", default="bps stop", help="the reason that the processes get and log")
    stop.set_defaults(handler=run_stop)
    scale = add_command(
        subparsers,
        "scale",
        help="change the number of CPU machines of a running job",
        example="bps scale 2",
        exits={
            0: "the job has so many CPU machines, or those to remove are leaving",
            1: "it has fewer, and what it prints starts more; or its scheduler does not answer",
        },
    )
    scale.add_argument("servers", type=int, nargs="?", default=-1, help="how many CPU machines the job is to have")
    scale.add_argument(
        "--remove", metavar="HOST:PORT", action="append", default=[], help="remove this server (see `bps status`)"
    )
    scale.add_argument(
        "--pool", metavar="HOST:PORT", default="", help="let the pool of the job give it so many; default: BYTEPS_POOL"
    )
    scale.set_defaults(handler=run_scale)
    for parser in (status, stop, scale):
        add_job_choice(parser)
        add_timeout(parser)
        add_json(parser)


def run_status(arguments: argparse.Namespace) -> int:
    """Print the job's state, or those of all jobs of this machine. Returns 0, or 1 if one has failed or does not
    answer."""
    from byteps_py.scheduler import query  # not above: protobuf is slow to load, and `bps` has other commands
    from byteps_py.system import jobs

    found = [] if names_scheduler(arguments) else jobs.find()
    if len(found) > 1 and not arguments.json:
        return max([_print_one(job, arguments) for job in found])
    reply = query.status(chosen_settings(arguments), arguments.timeout)
    print(json.dumps(query.to_dict(reply), indent=2) if arguments.json else to_text(reply))
    return int(reply.state == reply.STATE_FAILED)


def _print_one(job: JobNote, arguments: argparse.Namespace) -> int:
    """Print one of several jobs."""
    from byteps_py.scheduler import query

    print(f"── {job_name(job)}")
    if begun := job_start(job):
        print(begun)
    try:
        reply = query.status(settings_of(job), arguments.timeout)
    except BytePSError as error:
        print(
            f"it can't be reached from here, and may run in another network namespace, such as a container's: {error}\n"
        )
        return 1
    print(f"{to_text(reply)}\n")
    return int(reply.state == reply.STATE_FAILED)


def run_stop(arguments: argparse.Namespace) -> int:
    """End the job."""
    from byteps_py.scheduler import query

    settings = chosen_settings(arguments)
    query.stop(settings, arguments.reason, arguments.timeout)
    if arguments.json:
        print(json.dumps({"scheduler": settings.scheduler_address}))
        return 0
    print(f"the scheduler at {settings.scheduler_address} has told all members to leave")
    return 0


def run_scale(arguments: argparse.Namespace) -> int:
    """Remove CPU machines, or print how to start more. Returns 1 if there are fewer than wanted."""
    from byteps_py.scheduler import query

    if arguments.servers < 0 and not arguments.remove:
        raise UsageError("bps scale needs the number of CPU machines, or --remove with the address of one")
    settings = chosen_settings(arguments)
    pool = arguments.pool or settings.pool
    if pool and not arguments.remove:
        from byteps_py.lending.pool_service import ask, pool_settings

        values = {"scheduler": settings.scheduler_address, "servers": arguments.servers}
        answer = ask(pool_settings(pool), "Scale", values, arguments.timeout)
        missing = max(0, arguments.servers - len(answer["lenders"]))
        if arguments.json:
            print(json.dumps({"servers": len(answer["lenders"]), "missing": missing}))
        else:
            print(f"servers from {', '.join(answer['lenders']) or 'nobody'}: {answer['reason']}")
        return int(missing > 0)
    left = query.scale(settings, max(arguments.servers, -1), arguments.remove, arguments.timeout)
    missing = arguments.servers - left
    if arguments.json:
        print(json.dumps({"servers": left, "missing": max(0, missing)}))
        return int(missing > 0)
    print(f"{count_text(left, 'CPU machine')} {'lends' if left == 1 else 'lend'} a summation service")
    if missing <= 0:
        return 0
    where = "a spare machine" if missing == 1 else count_text(missing, "spare machine")
    print(
        f"To have {missing} more, run on {where}, with the "
        "job's BYTEPS_JOB_ID and secret if it has them:\n"
        f"  DMLC_ROLE=server DMLC_NUM_WORKER={query.status(settings, arguments.timeout).num_workers} "
        f"DMLC_NUM_SERVER={arguments.servers} DMLC_PS_ROOT_URI={settings.scheduler_host} "
        f"DMLC_PS_ROOT_PORT={settings.scheduler_port} bpslaunch"
    )
    return 1


def to_text(reply: pb.StatusReply) -> str:
    """The reply as a table for people, without a final newline."""
    from byteps_py.scheduler.query import to_dict, training_text

    facts = to_dict(reply)
    lines = [f"{facts['state']}: {facts['reason']}"]
    lines.append(
        f"{count_text(facts['num_workers'], 'worker')}, {count_text(facts['num_servers'], 'server')} configured, "
        f"epoch {facts['epoch']}; {count_text(facts['tensors'], 'tensor')}, "
        f"{_mb(facts['tensor_bytes'])} MB, in partitions of at most {_mb(facts['partition_bytes'])} MB"
    )
    if facts["restarts"]:
        times = "once" if facts["restarts"] == 1 else f"{facts['restarts']} times"
        lines.append(f"the scheduler was started again {times}")
    if facts["training"]:
        lines.append(training_text(facts["training"]))
    lines += [f"stalled: {sentence}" for sentence in facts["stalled"]]
    lines += [f"slow: {sentence}" for sentence in facts["slow"]]
    for where, nbytes in (
        ("on each machine", facts["replicated_bytes"]), ("sharded over all ranks", facts["sharded_bytes"]),
    ):  # fmt: skip
        if nbytes:
            lines.append(f"hosted optimizers: states {where}, of {_mb(nbytes)} MB of gradients")
    lines += [f"hosted=True has chosen: {sentence}" for sentence in facts["hosted_remarks"]]
    if shadow := facts["shadow"]:
        is_alone = sum(member["kind"] == "worker" and member["alive"] for member in facts["members"]) == 1
        has_server = not is_alone or shadow["survives"] != "nothing"
        why = "states are being copied" if has_server else "no server of another machine is left"
        held = f"step {shadow['step']} held" if shadow["step"] else f"no step held: {why}"
        lines.append(f"shadow: {held}, survives {shadow['survives']}")
    rows = [_COLUMNS, *(_row(member) for member in facts["members"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    if len(rows) > 1:
        lines.append("")
    for row in rows if len(rows) > 1 else ():
        cells = [c.ljust(w) if i < 5 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(member: dict[str, Any]) -> tuple[str, ...]:
    is_worker = member["kind"] == "worker"
    return (
        member["kind"],
        member["machine"],
        f"{member['host']}:{member['pid']}",
        "–" if is_worker else member["address"].removeprefix("tcp://"),
        member["doubt"] or ("alive" if member["alive"] else "left" if member["left"] else "lost"),
        f"{member['heartbeat_age_s']:.1f} s ago",
        _mb(member["bytes_received"]),
        _mb(member["bytes_sent"]),
        _mb(member["bytes_local"]),
        "–" if is_worker else _mb(member["bytes_summed"]),
        "–" if is_worker else f"{member['share']:.1%}",
        f"{member['cpu_s']:.1f}",
        _mb(member["resident_bytes"]),
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"
