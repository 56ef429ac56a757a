"""`bps replay`: repeat an asynchronous run, with its changes added in the order of its logs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from byteps_py.cli.command import add_command, add_json


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "replay",
        help="repeat an asynchronous run bit for bit",
        description="Check the logs that the machines of an asynchronous run wrote (BYTEPS_RECORD_ARRIVALS=FOLDER). "
        "Then run COMMAND, which starts the same job, with the changes of all machines added in the same order. Exit "
        "code: that of COMMAND; 2 if the logs are not those of one whole run.",
        example="bps replay logs bpslaunch -np 1 --machines 2 --servers 1 python train.py",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="with the logs of all machines")
    parser.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER, help="none: only check the logs")
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the logs, and become COMMAND. Raises UsageError."""
    from byteps_py.arrivals import orders_of, read
    from byteps_py.errors import UsageError
    from byteps_py.wording import count_text

    machines = len(list(arguments.folder.glob("machine-*.jsonl")))
    if not machines:
        raise UsageError(f"{arguments.folder} has no logs (machine-0.jsonl, …) of BYTEPS_RECORD_ARRIVALS")
    orders = orders_of(read(arguments.folder, machines))
    partitions = len(orders.by_place)
    if arguments.json:
        found = {"machines": machines, "partitions": partitions, "changes": orders.count, "unsure": orders.unsure}
        print(json.dumps(found), flush=True)
    else:
        counts = (
            count_text(machines, "machine"),
            count_text(partitions, "partition"),
            count_text(orders.count, "change"),
        )
        print(", ".join(counts), flush=True)
    if orders.unsure and not arguments.json:
        print(
            f"{count_text(orders.unsure, 'change')} came when a server was lost, and no log tells in which order: the "
            "last bits may differ from there on",
            flush=True,
        )
    if not arguments.command:
        return 0
    environ = {**os.environ, "BYTEPS_REPLAY_ARRIVALS": str(arguments.folder.resolve())}
    environ.pop("BYTEPS_RECORD_ARRIVALS", None)
    try:
        os.execvpe(arguments.command[0], arguments.command, environ)
    except OSError as error:
        raise UsageError(f"{arguments.command[0]}: {error}") from None
