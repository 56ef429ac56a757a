"""`bps pool` and `bps lend`: spare cores of machines without a cluster manager, for jobs that run."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
from typing import Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.errors import UsageError

_UNITS = {"M": 10**6, "G": 10**9, "T": 10**12}


def add_parser(subparsers: Any) -> None:
    """Add the commands to `bps`."""
    pool = add_command(
        subparsers,
        "pool",
        help="run a pool, which brings lenders and jobs together, or show one",
        description="Run the registry of lenders (bps lend) and of jobs (bpslaunch --pool), or show it. It holds no "
        "tensors, and nothing that is lost with it: jobs and lenders go on without it, and register again. Set "
        "BYTEPS_SECRET or BYTEPS_SECRET_FILE as for lenders and jobs.",
        example="bps pool --listen 10.0.0.1:9100",
        exits={0: "it got SIGTERM or Ctrl-C; with --show: it answers", 1: "no pool answers"},
    )
    what = pool.add_mutually_exclusive_group(required=True)
    what.add_argument("--listen", metavar="HOST:PORT", help="run a pool at this address of this machine")
    what.add_argument("--show", metavar="HOST:PORT", help="print who lends to whom, and why a job lacks servers")
    add_json(pool)
    pool.set_defaults(handler=run_pool)
    lend = add_command(
        subparsers,
        "lend",
        help="lend spare cores of this machine to jobs of a pool",
        description="Start summation services for jobs of a pool, within limits, while the owner of this machine does "
        "not need it; drain them when the owner does, or on SIGTERM, and come back later. No training loses anything "
        "by that, and no weight changes.",
        example="bps lend --pool 10.0.0.1:9100 --cores 4 --memory 8G --mbit 2000",
        exits={0: "it got SIGTERM or Ctrl-C, and all services have left their jobs"},
    )
    lend.add_argument("--pool", metavar="HOST:PORT", required=True, help="the address of `bps pool --listen`")
    lend.add_argument("--cores", type=int, required=True, metavar="N", help="services run on so many cores at most")
    lend.add_argument(
        "--memory",
        type=_bytes,
        required=True,
        metavar="B",
        help="jobs that may need more are refused; M, G: 10^6, 10^9",
    )
    lend.add_argument(
        "--mbit",
        type=float,
        required=True,
        metavar="R",
        help="rate of the link that is lent, in each direction, Mbit/s",
    )
    lend.add_argument(
        "--slots",
        type=int,
        default=1,
        metavar="N",
        help="jobs at a time, each with an equal part of all this; default 1",
    )
    lend.add_argument("--name", metavar="NAME", help="default: the name of this host")
    lend.add_argument(
        "--owner-cores", type=float, metavar="N",
        help="the owner needs the machine when other processes keep more cores busy; default: all but --cores",
    )  # fmt: skip
    lend.add_argument(
        "--busy-when", default="", metavar="COMMAND", help="and while this shell command, run each second, exits with 0"
    )
    lend.set_defaults(handler=run_lend)


def run_pool(arguments: argparse.Namespace) -> int:
    """Run the pool until a signal, or show another one."""
    import asyncio

    from byteps_py.system.log import configure, silence_grpc

    silence_grpc()
    from byteps_py.lending.pool_service import PoolService, ask, pool_settings

    if arguments.listen:
        settings = pool_settings(arguments.listen)
        configure(settings.log_level, "pool", settings.log_format, lambda: {"role": "pool"})
        asyncio.run(PoolService(settings).run())
        return 0
    found = ask(pool_settings(arguments.show), "Status", {})
    print(json.dumps(found, indent=2) if arguments.json else to_text(found))
    return 0


def to_text(found: dict[str, Any]) -> str:
    """A pool's status for people, without a final newline."""
    lines = []
    for lender in found["lenders"]:
        serves = f"serves {', '.join(lender['serves'])}" if lender["serves"] else "serves nobody"
        lines.append(f"lender {lender['name']}: {serves if lender['slots'] else 'its owner needs it'}")
    for job in found["jobs"]:
        lenders = ", ".join(job["lenders"]) or "nobody"
        lines.append(f"job {job['scheduler']}: wants {job['wants']}, has {lenders}; {job['reason']}")
    return "\n".join(lines) or "no lenders, no jobs"


def run_lend(arguments: argparse.Namespace) -> int:
    """Lend until a signal."""
    from byteps_py.system.log import configure, silence_grpc

    silence_grpc()
    from byteps_py.lending.lend import LenderProcess, OwnerWatch, parse_command, usable_cores
    from byteps_py.lending.lender import Limits
    from byteps_py.lending.pool_service import pool_settings

    usable = usable_cores()
    if not 1 <= arguments.cores <= usable:
        raise UsageError(f"--cores={arguments.cores}: this machine lends 1 to {usable} cores")
    if not 1 <= arguments.slots <= 64:
        raise UsageError(f"--slots={arguments.slots}: give 1 to 64 jobs at a time")
    if not 1 <= arguments.mbit <= 1e7:
        raise UsageError(f"--mbit={arguments.mbit:g}: give a rate from 1 to 10000000 Mbit/s")
    settings = pool_settings(arguments.pool)
    configure(settings.log_level, "lender", settings.log_format, lambda: {"role": "lender"})
    name = arguments.name or socket.gethostname()
    limits = Limits(name, arguments.slots, arguments.cores, arguments.memory, arguments.mbit)
    free = (os.cpu_count() or usable) - arguments.cores if arguments.owner_cores is None else arguments.owner_cores
    LenderProcess(settings, limits, OwnerWatch(max(free, 0.5), parse_command(arguments.busy_when))).run()
    return 0


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])", text.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"takes a size such as 800M or 8G, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])
