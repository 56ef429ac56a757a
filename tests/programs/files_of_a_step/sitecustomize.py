"""Loaded by every Python process of a job whose PYTHONPATH names this folder: notes the product's files whose code runs
while the job counts, and leaves them in $STEP_FILES_FOLDER when the process ends.

A file counts if one of its functions runs, in any thread that Python started: also one that was called earlier and
goes on, as a loop does that waits for messages. Methods that ``dataclass`` writes belong to the file of the class.
Code in C has no frames, so generated messages of protobuf do not count.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from counting import COUNTING, Switch

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = tuple(f"{ROOT / name}{os.sep}" for name in ("byteps_py", "worker", "server", "proto"))

_seen: dict[CodeType, str] = {}  # whose code has run, and the file that it belongs to; in the order of first entry


def _note(frame: FrameType) -> None:
    _seen[frame.f_code] = os.path.realpath(frame.f_globals.get("__file__") or frame.f_code.co_filename)


def _watch(frame: FrameType, event: str, argument: Any) -> None:
    """Python calls it whenever a function is called or returns."""
    if _switch.state != COUNTING:
        return
    caller = frame.f_back
    if event == "call" and caller is not None and caller.f_code not in _seen:
        _note(caller)
    if frame.f_code not in _seen:
        _note(frame)


def _name() -> str:
    words = sys.orig_argv
    for role in ("launch", "scheduler", "server", "worker"):
        if f"byteps_py.{role}" in words:
            machine = os.environ.get("BYTEPS_MACHINE_ID")
            return role if role in ("launch", "scheduler") else f"{role} {machine}"
    return f"rank {os.environ.get('RANK', '?')}"


def _report() -> None:
    sys.setprofile(None)
    files = dict.fromkeys(path for path in list(_seen.values()) if path.startswith(PRODUCT))
    said = {"name": _name(), "files": [str(Path(path).relative_to(ROOT)) for path in files]}
    Path(os.environ["STEP_FILES_FOLDER"], f"{os.getpid()}.json").write_text(json.dumps(said))


if "STEP_FILES_FOLDER" in os.environ:
    _switch = Switch(Path(os.environ["STEP_FILES_FOLDER"]))
    os.register_at_fork(after_in_child=_seen.clear)
    atexit.register(_report)
    threading.setprofile(_watch)
    sys.setprofile(_watch)
