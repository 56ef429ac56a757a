"""`bps logs`: what the processes of a job have printed, from the files that their launchers have written.

bpslaunch writes them with --log-dir (BYTEPS_LOG_DIR) or --output-filename: a folder per process, with the files stdout
and stderr. Files on other machines can be read only where the folder is on a file system that machines share.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.errors import ConfigurationError, UsageError
from byteps_py.system import log

STREAMS = ("stdout", "stderr")
_READ_BYTES = 1 << 20
_LOOK_S = 0.25


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "logs",
        help="print what the processes of a job have printed",
        description="Print the output of a job's processes, each line with its process, from the files that bpslaunch "
        "writes with --log-dir (BYTEPS_LOG_DIR) or --output-filename. Log lines in JSON become text. It reads files "
        "only: for the processes of other machines, the folder must be on a file system that the machines share.",
        example="bps logs --member 'rank.*' --stderr --lines 20",
        exits={1: "the folder has no output"},
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="default: BYTEPS_LOG_DIR, else that of this machine's job"
    )
    parser.add_argument("--member", metavar="PATTERN", default="*", help="of these only: rank.0, ss-*, worker-1/*")
    parser.add_argument("--stderr", action="store_true", help="without what was printed to stdout")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="the last N lines of each file; default: all")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as more comes, until Ctrl-C")
    add_json(parser)
    parser.set_defaults(handler=run)


@dataclass(slots=True)
class LogFile:
    """A file of the output of one process. ``member``: its folder, below that of the job. ``rest``: of a line that is
    not complete."""

    path: Path
    member: str
    stream: str
    read_bytes: int = 0
    rest: bytes = field(default=b"", repr=False)

    def new_lines(self, is_final: bool) -> list[str]:
        """The lines that have come. ``is_final``: also the last one, if it has no end."""
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.read_bytes:
                self.read_bytes, self.rest = 0, b""  # the job was started again, and has begun a new file
            file.seek(self.read_bytes)
            data = file.read(_READ_BYTES)
            lines = []
            while data:
                self.read_bytes += len(data)
                *complete, self.rest = (self.rest + data).split(b"\n")
                lines += complete
                data = file.read(_READ_BYTES)
        if is_final and self.rest:
            lines.append(self.rest)
            self.rest = b""
        return [line.decode(errors="replace") for line in lines]


def run(arguments: argparse.Namespace) -> int:
    """Print the lines. Returns 1 if there is no output."""
    if arguments.lines is not None and arguments.lines < 0:
        raise UsageError(f"--lines={arguments.lines}: give a number of lines from 0")
    folder = _folder(arguments.folder)
    files = {each.path: each for each in find(folder, arguments.member, arguments.stderr)}
    if not files and not arguments.follow:
        there = sorted({each.member for each in find(folder, "*", False)})
        what = f"no process of these matches --member={arguments.member!r}: {', '.join(there)}" if there else "nothing"
        print(f"bps: {folder} has no output: {what}", file=sys.stderr)
        return 1
    for each in files.values():
        lines = each.new_lines(is_final=not arguments.follow)
        _print(each, lines if arguments.lines is None else lines[len(lines) - min(arguments.lines, len(lines)) :],
               arguments.json)  # fmt: skip
    while arguments.follow:
        sys.stdout.flush()
        time.sleep(_LOOK_S)
        for each in find(folder, arguments.member, arguments.stderr):
            known = files.setdefault(each.path, each)
            _print(known, known.new_lines(is_final=False), arguments.json)
    return 0


def find(folder: Path, pattern: str, only_stderr: bool) -> Iterator[LogFile]:
    """The files of processes whose names match ``pattern``, by name."""
    for path in sorted(folder.rglob("std*")):
        member = str(path.parent.relative_to(folder))
        is_one = path.name in STREAMS and member != "." and path.is_file()
        if is_one and fnmatch.fnmatchcase(member, pattern) and not (only_stderr and path.name == "stdout"):
            yield LogFile(path, member, path.name)


def _folder(given: Path | None) -> Path:
    """The folder of the job. Raises ConfigurationError if it is not there, UsageError if there are several jobs."""
    from byteps_py.config.settings import Settings
    from byteps_py.system import jobs

    if given is None:
        told = Settings.from_env().log_dir
        found = {told} if told else {job.log_dir for job in jobs.find() if job.log_dir}
        if len(found) > 1:
            raise UsageError(f"which job's? Name one of its folders: {', '.join(sorted(found))}")
        if not found:
            raise ConfigurationError(
                "no job of yours on this machine keeps its output. Start it with bpslaunch --log-dir DIR, or with "
                "BYTEPS_LOG_DIR set; for a job that has ended, name the folder: bps logs DIR"
            )
        given = Path(found.pop())
    if not given.is_dir():
        raise ConfigurationError(f"{given} is no folder: name that of bpslaunch --log-dir or --output-filename")
    return given


def _print(file: LogFile, lines: list[str], as_json: bool) -> None:
    for line in lines:
        if as_json:
            print(json.dumps({"member": file.member, "stream": file.stream, "line": line}))
            continue
        shown = log.text_of(line) or line
        print(f"[{file.member}] {shown}" if file.stream == "stdout" else f"[{file.member} stderr] {shown}")
