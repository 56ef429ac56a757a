"""The contents of a flight recorder, as a file in the format of torch's flight recorder: at an error, and on SIGUSR1.

torch's analyser reads a folder with a file of each rank (``python -m torch.distributed.flight_recorder.fr_trace DIR``).
It knows the backends that torch has, and their operations, so operations are named like those of gloo; it compares
sequence numbers within a group. Sums by name may come in any order, so each name counts as a group of its own; so does
each pair of a sender and a receiver, with each tag.

``open_flight_dump`` opens the recorder of a rank with all that belongs to it. One thread opens and closes; any thread
may dump. Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pickle
import re
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from byteps_py.config.settings import Settings
from byteps_py.system.flight_recorder import FlightGroup, FlightRecorder, FlightSpan, Recording
from byteps_py.system.log import logger
from byteps_py.system.stage_recorder import TRACED_OPERATIONS

#: Of the format that is written: that of torch 2.13.
VERSION = "2.10"
BACKEND = "gloo"
PREFIX = "rank_"
_KEPT_FOLDERS = 20
_STATES = ("enqueued", "started", "completed")


# ---- torch's format ------------------------------------------------------------------------------------------


def to_torch(recording: Recording, first_id: int | None = None) -> dict[str, Any]:
    """``recording`` as torch's flight recorder writes it. Times are in ns since the epoch. Beside torch's, the keys are
    "byteps" (Recording.about, the two clocks, how many operations were overwritten) and, of entries, "nbytes", "step",
    "mesh_dim" and "error". ``first_id``: of the first record; by default, how many are lost.

    >>> to_torch(Recording({"rank": 3}, 0, 0, [], []))["version"]
    '2.10'
    """
    spans = [span for span in recording.spans if span.group.kind not in ("wait", "stage")]  # torch's has none of these
    recording = dataclasses.replace(recording, spans=spans)
    used = {span.group.id: span.group for span in recording.spans}
    first_id = recording.lost if first_id is None else first_id
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            _name(group): {"name": _name(group), "desc": _description(group), "ranks": str(list(group.ranks))}
            for group in used.values()
        },
        "pg_status": _status(recording.spans),
        "entries": [_entry(recording, first_id + at, span) for at, span in enumerate(recording.spans)],
        "rank": recording.about.get("rank", 0),
        "byteps": {
            **recording.about,
            "wall_ns": recording.wall_ns,
            "monotonic_ns": recording.monotonic_ns,
            "lost": recording.lost,
        },
    }


def _name(group: FlightGroup) -> str:
    return group.name or "0"


def _description(group: FlightGroup) -> str:
    return group.description or "undefined"


def _status(spans: list[FlightSpan]) -> dict[str, dict[str, int]]:
    """By group. In one pass: there may be thousands of tensors."""
    found: dict[str, dict[str, int]] = {}
    for span in spans:
        status = found.setdefault(str(span.group.id), {f"last_{what}_collective": -1 for what in _STATES})
        is_there = (True, bool(span.started_ns), span.state == "completed")
        for what, holds in zip(_STATES, is_there, strict=True):
            if holds:
                name = f"last_{what}_collective"
                status[name] = max(status[name], span.sequence)
    return found


def _entry(recording: Recording, at: int, span: FlightSpan) -> dict[str, Any]:
    group, is_pair = span.group, span.group.kind == "pair"
    has_tensors = span.operation != "barrier"
    entry: dict[str, Any] = {
        "record_id": at,
        "pg_id": group.id,
        "process_group": (_name(group), _description(group)),
        "collective_seq_id": span.sequence,
        "p2p_seq_id": span.sequence if is_pair else 0,
        "op_id": span.number,
        "profiling_name": f"{BACKEND}:{span.operation}{_way(span)}",
        "time_created_ns": recording.wall_of(span.enqueued_ns),
        "input_sizes": [list(span.input_shape or ())] if has_tensors else [],
        "input_dtypes": [span.input_dtype] if has_tensors else [],
        "output_sizes": [list(span.output_shape or ())] if has_tensors else [],
        "output_dtypes": [span.output_dtype] if has_tensors else [],
        # torch's recorder has no state for a failure: such an operation was never completed.
        "state": "started" if span.state == "failed" else span.state,
        "time_discovered_started_ns": recording.wall_of(span.started_ns) or None,
        "time_discovered_completed_ns": recording.wall_of(span.ended_ns) or None if span.state == "completed" else None,
        "retired": span.state in ("completed", "failed"),
        "timeout_ms": 0,
        "is_p2p": is_pair,
        "nbytes": span.nbytes,
        "step": span.step,
        "mesh_dim": group.dimension,
    }
    if span.state == "failed":
        entry["error"] = True
    return entry


def _way(span: FlightSpan) -> str:
    """The text behind the name of a message's operation: the places of both ranks in their group of two."""
    if span.group.kind != "pair":
        return ""
    # The name of such a group ends with "SOURCE->TARGET", or with these and a tag: see torch/collectives/recording.py.
    found = re.search(r"(\d+)->(\d+)(?: tag \d+)?$", span.group.name)
    if found is None:
        return " 0->0" if span.operation == "send" else " 0<-0"
    source, target = (span.group.ranks.index(int(rank)) for rank in found.groups())
    return f" {source}->{target}" if span.operation == "send" else f" {target}<-{source}"


# ---- files ---------------------------------------------------------------------------------------------------


def aligned(recordings: Sequence[Recording]) -> list[Recording]:
    """``recordings`` of several ranks without the operations that some of them have overwritten already, which torch's
    analyser would take for missing: of each group, all begin with the same one."""
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for recording in recordings:
        if recording.lost:
            oldest: dict[tuple[str, tuple[int, ...]], int] = {}
            for span in recording.spans:
                oldest.setdefault((span.group.name, span.group.ranks), span.sequence)
            for key, sequence in oldest.items():
                first[key] = max(first.get(key, 0), sequence)
    return [
        dataclasses.replace(
            recording,
            spans=[
                span for span in recording.spans if span.sequence >= first.get((span.group.name, span.group.ranks), 0)
            ],
        )
        for recording in recordings
    ]


def write_dump(recording: Recording, folder: Path, first_id: int | None = None) -> Path:
    """Write ``recording`` as ``folder/rank_N``, whole or not at all; makes the folder. Returns the path. Raises
    OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{PREFIX}{recording.about.get('rank', 0)}"
    unfinished = folder / f".new-{os.getpid()}-{threading.get_ident()}"
    try:
        unfinished.write_bytes(pickle.dumps(to_torch(recording, first_id), protocol=2))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def dump_folder(settings: Settings) -> Path:
    """The folder for the dumps of this job: below BYTEPS_FLIGHT_RECORDER_DIR, or the user's folder of state."""
    job = re.sub(r"[^A-Za-z0-9.-]+", "_", settings.job)[:100]
    if settings.flight_recorder_dir:
        return Path(settings.flight_recorder_dir) / job
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "byteps" / "flight-recorder" / job


def _forget_old(folder: Path) -> None:
    """Delete the oldest dumps of other jobs beside ``folder``, beyond some."""
    with contextlib.suppress(OSError):
        beside = [each for each in folder.parent.iterdir() if each.is_dir()]
        for each in sorted(beside, key=lambda each: each.stat().st_mtime)[:-_KEPT_FOLDERS]:
            if each != folder and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)


# ---- a rank's recorder ---------------------------------------------------------------------------------------


class FlightDump:
    """The recorder of this process as a rank, and the files that it writes: once for the first error, and for each
    SIGUSR1."""

    def __init__(self, recorder: FlightRecorder, settings: Settings) -> None:
        self.recorder = recorder
        self.folder = dump_folder(settings)
        self._is_default_folder = not settings.flight_recorder_dir
        self._is_elastic = settings.elastic
        self._has_dumped = False

    def dump(self) -> Path:
        """Write a file. Raises OSError, and UsageError after ``close``."""
        return write_dump(self.recorder.read(), self.folder)

    def dump_at(self, error: BaseException, is_end: bool = True) -> None:
        """``error`` has ended this rank's part in the job, or (not ``is_end``) the session. Writes a file unless one
        was written for an earlier error. Raises nothing.

        A session of an elastic job that ends is no failure: the rank is about to join the next one.
        """
        if self._has_dumped or self.recorder.is_closed or (self._is_elastic and not is_end):
            return
        self._has_dumped = True
        try:
            path = self.dump()
            if self._is_default_folder:
                _forget_old(self.folder)
        except Exception as failure:  # the rank is failing: its own error matters more
            logger.warning("the flight recorder could not be written to %s: %s", self.folder, failure)
            return
        logger.info("the latest operations of this rank are in %s (bps dump --help says how to read them)", path)

    def close(self) -> None:
        """Stop recording."""
        _SIGNAL.remove(self)
        self.recorder.close()


def open_flight_dump(settings: Settings, about: dict[str, Any]) -> FlightDump | None:
    """A recorder for this rank, which SIGUSR1 dumps. None if BYTEPS_FLIGHT_RECORDER_SIZE is 0, or if there is no memory
    for it."""
    if not settings.flight_recorder_size and not settings.trace_on:
        return None
    try:
        size = settings.flight_recorder_size
        recorder = FlightRecorder(max(size, TRACED_OPERATIONS) if settings.trace_on else size, about)
    except OSError as error:
        logger.warning("there is no flight recorder: %s", error)
        return None
    found = FlightDump(recorder, settings)
    _SIGNAL.add(found)
    return found


# ---- the signal ----------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.restype = ctypes.c_void_p
_DEFAULT, _IGNORE = 0, 1
_C_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


class DumpSignal:
    """SIGUSR1 in this process: dumps all recorders, then calls the handler that was there before, also one of C (as
    that of ``faulthandler.register``)."""

    def __init__(self) -> None:
        self._dumps: list[FlightDump] = []
        self._is_installed = False
        self._previous: Any = None  # Python's handler before this one
        self._previous_in_c = 0  # the address of that of C, if Python has set none

    def add(self, dump: FlightDump) -> None:
        """Dump it, too. Without effect outside of the main thread, where Python sets no handlers."""
        self._dumps.append(dump)
        if not self._is_installed and threading.current_thread() is threading.main_thread():
            self._install()

    def remove(self, dump: FlightDump) -> None:
        """Dump it no more. The last one brings the previous handler back, unless another one was set since."""
        if dump in self._dumps:
            self._dumps.remove(dump)
        is_main = threading.current_thread() is threading.main_thread()
        if not self._dumps and self._is_installed and is_main and signal.getsignal(signal.SIGUSR1) == self._handle:
            signal.signal(signal.SIGUSR1, self._previous)
            if self._previous_in_c:
                _libc.signal(int(signal.SIGUSR1), ctypes.c_void_p(self._previous_in_c))
            self._is_installed = False

    def _install(self) -> None:
        self._previous, self._previous_in_c = signal.getsignal(signal.SIGUSR1), 0
        if self._previous in (signal.SIG_DFL, None):
            self._previous = signal.SIG_DFL
            found = _libc.signal(int(signal.SIGUSR1), ctypes.c_void_p(_DEFAULT)) or _DEFAULT
            self._previous_in_c = found if found > _IGNORE else 0
        signal.signal(signal.SIGUSR1, self._handle)
        self._is_installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for dump in list(self._dumps):
            if not dump.recorder.is_closed:
                try:
                    text = f"byteps_py: the latest operations of this rank are in {dump.dump()}\n"
                except Exception as error:
                    text = f"byteps_py: the flight recorder could not be written to {dump.folder}: {error}\n"
                with contextlib.suppress(OSError):  # not the logger: the signal may have interrupted it
                    os.write(2, text.encode())
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous_in_c:
            _C_HANDLER(self._previous_in_c)(number)


_SIGNAL = DumpSignal()
