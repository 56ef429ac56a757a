"""`bps dump`: the latest operations of all ranks of a job, in files that torch's analyser reads."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.job_choice import add_job_choice, chosen_settings
from byteps_py.errors import UsageError
from byteps_py.wording import count_text, ranks_text

if TYPE_CHECKING:
    from byteps_py.config.settings import Settings
    from byteps_py.proto import control_pb2 as pb
    from byteps_py.system.flight_recorder import Recording

#: A recording holds at most so many bytes, whatever a packed one claims.
_MAX_BYTES = 1 << 28


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "dump",
        help="write the latest operations of all ranks of a job to files that torch's analyser reads",
        description="Collect what the flight recorders of all ranks hold, from all machines of a running job, and "
        "write a file of each rank. The ranks take no part: they may hang. torch's analyser then says which rank "
        "has not called a collective, or has called another one.",
        example="bps dump --output dumps",
        exits={0: "the files of all ranks are there", 1: "some are missing, and which; or the job does not answer"},
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="a new folder; default: byteps-dump-TIME")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="how long members have to answer")
    add_job_choice(parser)
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files, and say how to read them. Returns 1 if some are missing."""
    from byteps_py.system.flight_dump import PREFIX, write_dump

    folder: Path = arguments.output or Path(f"byteps-dump-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output={folder} is not empty: the analyser reads all files of a folder; name a new one")
    of_ranks, missing = collect_recordings(chosen_settings(arguments), arguments.timeout)
    try:
        for each in of_ranks:
            write_dump(each, folder, first_id=0)
    except OSError as error:
        raise UsageError(f"--output={folder} can't be written: {error.strerror}") from error
    found = sorted(int(each.about["rank"]) for each in of_ranks)
    if arguments.json:
        print(json.dumps({"folder": str(folder), "ranks": found, "missing": missing}))
        return int(bool(missing))
    for who, why in missing.items():
        print(f"bps: {who}: {why}", file=sys.stderr)
    if found:
        partly = " --allow-incomplete-ranks" if missing else ""
        print(f"{count_text(len(found), 'rank')} ({ranks_text(found).removeprefix('ranks ').removeprefix('rank ')}): "
              f"{folder}/{PREFIX}N")  # fmt: skip
        print(f"  python -m torch.distributed.flight_recorder.fr_trace {shlex.quote(str(folder))}{partly}")
    else:
        print("bps: no rank has anything recorded", file=sys.stderr)
    return int(bool(missing) or not found)


def collect_recordings(settings: Settings, timeout_s: float) -> tuple[list[Recording], dict[str, str]]:
    """The contents of the flight recorders of a job's ranks, each group from the same operation on; and who is missing,
    with the reason. Raises like ``query.status``."""
    from byteps_py.scheduler import query
    from byteps_py.system.flight_dump import aligned

    recordings: list[Recording] = []
    missing: dict[str, str] = {}
    for answer in query.collect(settings, timeout_s):
        if answer.recording:
            try:
                recordings.append(recording_of(answer))
                continue
            except UsageError as error:
                answer.error = str(error)
        if answer.error and (answer.who or answer.ranks):
            missing[answer.who or f"{ranks_text(answer.ranks)} of {answer.member}"] = answer.error
    return [each for each in aligned(recordings) if "rank" in each.about], missing


def recording_of(answer: pb.Answer) -> Recording:
    """The recording of an answer. Raises UsageError."""
    from byteps_py.system.flight_recorder import parse_recording

    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(answer.recording, _MAX_BYTES)
    except zlib.error as error:
        raise UsageError(f"what came of {answer.who} can't be read: {error}") from None
    found = parse_recording(data)
    if (rank := re.fullmatch(r"rank (\d+)", answer.who)) is not None:
        found.about["rank"] = int(rank[1])
    else:
        found.about.pop("rank", None)
    return found
