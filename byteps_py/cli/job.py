"""Commands about a running job: ``bps status``, ``bps stop``, ``bps scale`` and ``bps checkpoint``.

The job is that of ``--scheduler`` or of the environment, else the only one on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, ConfigurationError, RendezvousError, UsageError
from byteps_py.system import jobs
from byteps_py.system.log import configure, logger
from byteps_py.wire.launch_protocol import handle_signals
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.proto import control_pb2 as pb

_COLUMNS = (
    "member", "machine", "process", "address", "state", "heard", "received MB", "sent MB", "local MB", "summed MB",
    "share", "CPU s", "resident MB",
)  # fmt: skip
#: The automatic writer of checkpoints gives way to the server's sums.
_NICENESS = 19


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands. Their handlers raise the errors of ``scheduler.query``."""
    status = subparsers.add_parser("status", help="show the members of a job, their traffic and what they wait for")
    status.add_argument("--json", action="store_true", help="print JSON instead of a table")
    status.set_defaults(handler=run_status)
    stop = subparsers.add_parser("stop", help="end the job in order: every service leaves it")
    stop.add_argument("--reason", default="bps stop", help="the reason that the processes get and log")
    stop.set_defaults(handler=run_stop)
    scale = subparsers.add_parser("scale", help="change the number of CPU machines of a running job")
    scale.add_argument("servers", type=int, nargs="?", default=-1, help="how many CPU machines the job is to have")
    scale.add_argument(
        "--remove", metavar="HOST:PORT", action="append", default=[], help="remove this server (see `bps status`)"
    )
    scale.set_defaults(handler=run_scale)
    for parser in (status, stop, scale):
        _add_scheduler(parser)
        parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="how long to wait for an answer")
    _add_checkpoint(subparsers)


def _add_checkpoint(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "checkpoint",
        help="write a checkpoint from what servers hold, while the training goes on",
        description="Write DIR/step-N in the format of torch.distributed.checkpoint, from the states that summation "
        "servers keep with DistributedOptimizer(…, shadow=True). Needs PyTorch on this machine.",
    )
    parser.add_argument("folder", metavar="DIR", help="one folder for each training; made if it does not exist")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="write one after another until the job ends")
    parser.add_argument("--keep", type=int, metavar="N", help="remove all but the newest N; default: keep all")
    parser.add_argument("--with-parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--normal-priority", action="store_true", help=argparse.SUPPRESS)
    _add_scheduler(parser)
    parser.set_defaults(handler=run_checkpoint)


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scheduler",
        metavar="HOST:PORT",
        default="",
        help="default: DMLC_PS_ROOT_URI and _PORT, else the job of this machine",
    )


def run_status(arguments: argparse.Namespace) -> int:
    """Print the job's state, or those of all jobs of this machine. Returns 0, or 1 if one has failed or does not
    answer."""
    from byteps_py.scheduler import query  # not above: protobuf is slow to load, and `bps` has other commands

    found = [] if _names_scheduler(arguments) else jobs.find()
    if len(found) > 1 and not arguments.json:
        return max([_print_one(job, arguments) for job in found])
    reply = query.status(_chosen_settings(arguments), arguments.timeout)
    print(json.dumps(query.to_dict(reply), indent=2) if arguments.json else to_text(reply))
    return int(reply.state == reply.STATE_FAILED)


def _print_one(job: jobs.JobNote, arguments: argparse.Namespace) -> int:
    """Print one of several jobs."""
    from byteps_py.scheduler import query

    print(f"── {_job_name(job)}")
    if begun := _job_start(job):
        print(begun)
    try:
        reply = query.status(_settings_of(job), arguments.timeout)
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

    settings = _chosen_settings(arguments)
    query.stop(settings, arguments.reason, arguments.timeout)
    print(f"the scheduler at {settings.scheduler_address} has told all members to leave")
    return 0


def run_scale(arguments: argparse.Namespace) -> int:
    """Remove CPU machines, or print how to start more. Returns 1 if there are fewer than wanted."""
    from byteps_py.scheduler import query

    if arguments.servers < 0 and not arguments.remove:
        raise UsageError("bps scale needs the number of CPU machines, or --remove with the address of one")
    settings = _chosen_settings(arguments)
    left = query.scale(settings, max(arguments.servers, -1), arguments.remove, arguments.timeout)
    print(f"{count_text(left, 'CPU machine')} {'lends' if left == 1 else 'lend'} a summation service")
    missing = arguments.servers - left
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
    from byteps_py.scheduler.query import to_dict

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


# ---- bps checkpoint --------------------------------------------------------------------------------------------


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Write checkpoints. Returns 0; raises the errors of CheckpointProgram.run and CheckpointFolder, and
    ConfigurationError without PyTorch."""
    if arguments.every is not None and not 0 < arguments.every < 1e9:
        raise UsageError(f"--every={arguments.every:g}: give the seconds from one checkpoint to the next")
    if arguments.keep is not None and arguments.keep < 1:
        raise UsageError(f"--keep={arguments.keep}: at least the newest checkpoint is kept")
    settings = jobs.with_local_secret(_chosen_settings(arguments))
    say: Callable[[str], None] = _print
    if arguments.with_parent:
        from byteps_py.launch.process_guard import die_with

        die_with(arguments.with_parent)()
        if not arguments.normal_priority:
            os.nice(_NICENESS)
        say = logger.info
    configure(settings.log_level, "checkpoint")
    try:
        from byteps_py.checkpoint.program import CheckpointOptions, CheckpointProgram
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            "bps checkpoint needs PyTorch, and it is not installed here: pip install '.[torch]' (a build for "
            "the CPU is enough)"
        ) from None
    from byteps_py.checkpoint_files import CheckpointFolder

    with handle_signals((signal.SIGTERM, signal.SIGINT), _end), CheckpointFolder(arguments.folder) as folder:
        CheckpointProgram(settings, folder, CheckpointOptions(arguments.every, arguments.keep), say).run()
    return 0


def _print(sentence: str) -> None:
    print(sentence, flush=True)


def _end(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)  # incomplete files are removed


# ---- which job -------------------------------------------------------------------------------------------------


def _names_scheduler(arguments: argparse.Namespace) -> bool:
    """The command line or the environment names a scheduler."""
    return bool(arguments.scheduler or Settings.from_env().scheduler_host)


def _chosen_settings(arguments: argparse.Namespace) -> Settings:
    """The settings of the job that the command line or the environment names, else of the only one on this machine."""
    if not _names_scheduler(arguments):
        found = jobs.find()
        if not found:
            raise RendezvousError(
                "no job of yours runs on this machine. For a job elsewhere, or of another user, name its scheduler: "
                "--scheduler HOST:PORT, or DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
            )
        if len(found) > 1:
            listed = [f"\n  {_job_name(job)}{f': {begun}' if (begun := _job_start(job)) else ''}" for job in found]
            raise UsageError(f"which job? Choose one with --scheduler HOST:PORT:{''.join(listed)}")
        return _settings_of(found[0])
    settings = Settings.from_env()
    if not arguments.scheduler:
        return settings
    # For a job of this machine, its note has the job id, which is part of the authentication.
    if not settings.job_id and (job := next((j for j in jobs.find() if j.address == arguments.scheduler), None)):
        return _settings_of(job)
    host, _, port = arguments.scheduler.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--scheduler={arguments.scheduler!r} is not HOST:PORT")
    return _settings_at(host, int(port), {})


def _settings_of(job: jobs.JobNote) -> Settings:
    """The settings for requests to its scheduler. Raises ConfigurationError if it has none, or if its secret can't be
    read."""
    if not job.address:
        raise ConfigurationError(
            f"{_job_name(job)} has no scheduler that could answer: its communication service does that work"
        )
    own = {"BYTEPS_SECRET_FILE": job.secret_file, "BYTEPS_LOCAL_SECRET": job.local_secret}
    settings = _settings_at(job.scheduler_host, job.scheduler_port, {name: text for name, text in own.items() if text})
    return dataclasses.replace(settings, job_id=job.job_id, local_secret=job.local_secret)


def _settings_at(host: str, port: int, also: Mapping[str, str]) -> Settings:
    """The settings of the job whose scheduler is there. ``also``: variables, where the environment has none."""
    place = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port)}
    return Settings.from_env({**also, **{name: text for name, text in os.environ.items() if text}, **place})


def _job_name(job: jobs.JobNote) -> str:
    """The name of the job in messages."""
    name = f" (BYTEPS_JOB_ID={job.job_id})" if job.job_id else ""
    if not job.address:
        return f"a job of {count_text(job.ranks, 'rank')} on this machine alone, process {job.pid}{name}"
    return f"the job of the scheduler at {job.address}{name}"


def _job_start(job: jobs.JobNote) -> str:
    """The start of the job in messages: the command, the time and the folder; empty if it is not known."""
    if not job.started_s:
        return ""
    ago_s = max(0.0, time.time() - job.started_s)
    ago = f"{ago_s:.0f} s" if ago_s < 120 else f"{ago_s / 60:.0f} min" if ago_s < 7200 else f"{ago_s / 3600:.0f} h"
    here = " (this folder)" if job.folder and job.folder == os.getcwd() else ""
    return f"{job.command or f'process {job.pid}'}, started {ago} ago{f' in {job.folder}' if job.folder else ''}{here}"
