"""Reads spans from what ranks leave behind: dumps of the flight recorder, and traces of torch.profiler; and from the
flight recorders of a running job.

One file for each rank, in one directory. A dump is torch's pickle or JSON; pickles may hold plain data only, and
nothing in them is called. A trace is Kineto's JSON, also with gzip. Steps are told apart by how operations repeat, if
the files do not number them. Parts that can't be used become notes; it is an error if nothing is left.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import pickle
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.tools.spans import DIMENSIONS, SpanGroup, Spans, dimension_of
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.system.flight_recorder import Recording

_BYTES = {
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Double": 8,
    "Int": 4,
    "Long": 8,
    "Byte": 1,
    "Char": 1,
    "Short": 2,
    "Bool": 1,
}
_MESSAGE = re.compile(r"(send|recv)\D*(\d+)(?:->|<-)(\d+)")
_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_GZIP = b"\x1f\x8b"
#: Longer periods are not looked for.
_MOST_A_STEP = 5000
_ALIKE = 0.9
_STEP = re.compile(r"ProfilerStep#(\d+)")
_OPERATIONS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "all_gather",
    "reducescatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter", "alltoall": "all_to_all",
}  # fmt: skip


class _Row(NamedTuple):
    """One operation of one rank. ``step`` and ``sequence``: -1 if they are not known."""

    group: tuple[str, tuple[int, ...], str]  # description, ranks, and the name, where others have the same of both
    operation: str
    peer: int | None  # of a message
    step: int
    sequence: int
    bytes: int
    enqueued_s: float
    started_s: float
    ended_s: float


class _RankFile(NamedTuple):
    rank: int
    host: str
    rows: list[_Row]
    notes: list[str]
    has_own_times: bool


def read_spans(path: Path) -> Spans:
    """Those of the file, or of all files of the directory.

    Raises UsageError if there are none, naming what was wrong with each file.
    """
    try:
        files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        found, wrong = [], []
        for file in files:
            try:
                found.append(_read(file))
            except UsageError as error:
                wrong.append(str(error))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from None
    if not files:
        raise UsageError(f"{path} has no files: give the directory of the dumps or traces of all ranks")
    if not found:
        more = f"; {count_text(len(wrong) - 1, 'more file')} can't be used either" if len(wrong) > 1 else ""
        raise UsageError(wrong[0] + more)
    by_rank: dict[int, _RankFile] = {}
    notes = [f"{text}; left out" for text in wrong]
    for each in found:
        if each.rank in by_rank:
            notes.append(f"rank {each.rank} has more than one file: the one with most operations was used")
            if len(by_rank[each.rank].rows) >= len(each.rows):
                continue
        by_rank[each.rank] = each
    return _joined([by_rank[rank] for rank in sorted(by_rank)], notes)


def spans_of_recordings(recordings: Sequence[Recording], missing: Mapping[str, str]) -> Spans:
    """Those of a running job, of its whole steps. ``missing``: of whom there is no recording, and why. Raises
    UsageError if there are none."""
    from byteps_py.system.flight_dump import to_torch

    found = []
    notes = [f"{who}: {why}" for who, why in missing.items()]
    for recording in sorted(recordings, key=lambda each: int(each.about["rank"])):
        try:
            ended = dataclasses.replace(recording, spans=[span for span in recording.spans if span.ended_ns])
            found.append(_from_recorder(f"rank {recording.about['rank']}", to_torch(ended)))
        except UsageError as error:
            notes.append(f"{error}; left out")
    if not found:
        raise UsageError(
            f"no rank of the job has operations that can be compared{': ' if notes else ''}{'; '.join(notes)}"
        )
    # All ranks are in the midst of their latest steps, each at another place.
    until = min(max((row.step for row in each.rows), default=-1) for each in found)
    since = min(row.step for each in found for row in each.rows)
    if until > since:
        found = [each._replace(rows=[row for row in each.rows if row.step < until]) for each in found]
    return _joined(found, notes)


# ---- one file ------------------------------------------------------------------------------------------------


def _read(path: Path) -> _RankFile:
    data = path.read_bytes()
    if not data:
        raise UsageError(f"{path.name} is empty")
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(f"{path.name} is cut off, or no gzip file: {error}") from None
    content = _unpickled(path.name, data) if data[:1] == b"\x80" else _from_json(path.name, data)
    try:
        if isinstance(content, list):
            content = {"traceEvents": content}
        if isinstance(content, dict) and "byteps_trace" in (content.get("otherData") or {}):
            raise UsageError(
                f"{path.name} is the trace of a whole job: bps trace summary reads it. Here, give what bps dump "
                "writes, or the address of the job's scheduler"
            )
        if isinstance(content, dict) and "traceEvents" in content:
            return _from_profiler(path.name, content)
        if isinstance(content, dict) and "entries" in content:
            return _from_recorder(path.name, content)
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{path.name} is not as torch writes it ({type(error).__name__}: {error}): of another version, or damaged"
        ) from None
    raise UsageError(
        f"{path.name} is neither a dump of a flight recorder (it has no entries) nor a trace of torch.profiler (no "
        "traceEvents)"
    )


class _DumpUnpickler(pickle.Unpickler):
    """Numbers, texts and containers only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would call {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def _unpickled(name: str, data: bytes) -> Any:
    try:
        return _DumpUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError, MemoryError,
            OverflowError, UnicodeDecodeError) as error:  # fmt: skip
        raise UsageError(f"{name} is no pickle of plain data, or is cut off: {error}") from None


def _from_json(name: str, data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{name} is neither a pickle nor JSON") from None
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply") from None
    except json.JSONDecodeError as error:
        events = _events_so_far(text)
        if events is None:
            raise UsageError(f"{name} is no JSON, or is cut off: {error}") from None
        return {**events, "cut_off": True}


def _events_so_far(text: str) -> dict[str, Any] | None:
    """The whole events of a trace that was cut off."""
    begin = text.find('"traceEvents"')
    if begin < 0:
        return None
    head = re.search(r'"distributedInfo"\s*:', text[:begin])
    decoder = json.JSONDecoder()
    found: dict[str, Any] = {"traceEvents": []}
    if head:
        try:
            found["distributedInfo"] = decoder.raw_decode(text, _skip(text, head.end()))[0]
        except json.JSONDecodeError:
            return None
    at = text.find("[", begin) + 1
    while at:
        at = _skip(text, at)
        try:
            event, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return found
        found["traceEvents"].append(event)
    return found


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


# ---- flight recorder -----------------------------------------------------------------------------------------


def _from_recorder(name: str, dump: Mapping[str, Any]) -> _RankFile:
    config = {str(key): value for key, value in (dump.get("pg_config") or {}).items()}
    by_name = {str(value.get("name", key)): value for key, value in config.items()}
    rank = _rank_of(name, dump)
    own = dump.get("byteps") or {}  # of this package's recorder
    has_steps = len({entry.get("step", -1) for entry in dump["entries"]}) > 1
    notes: list[str] = []
    rows: list[_Row] = []
    reasons: Counter[str] = Counter()
    exact = True
    for entry in dump["entries"]:
        group_name, description = (str(part) for part in (*entry["process_group"], "")[:2])
        created_s = entry["time_created_ns"] / 1e9
        if own:
            entry = {
                **entry,
                "time_discovered_started_ns": None,
            }  # that of the call's return: the rank was there before
        started_ns, ended_ns = entry.get("time_discovered_started_ns"), entry.get("time_discovered_completed_ns")
        took_ms = entry.get("duration_ms")
        if took_ms is not None:
            # What the device measured; when it began is known only roughly.
            exact = False
            started_s = (started_ns or entry["time_created_ns"]) / 1e9
            ended_s = started_s + took_ms / 1e3
        elif ended_ns:
            started_s, ended_s = (started_ns or entry["time_created_ns"]) / 1e9, ended_ns / 1e9
        elif entry.get("state") == "completed" or entry.get("retired"):
            reasons["when they ended is not recorded"] += 1
            continue
        else:
            reasons["they have not ended"] += 1
            continue
        ranks = _ranks(by_name.get(group_name, {}).get("ranks"))
        if not ranks:
            reasons[f"the ranks of group {description or group_name} are not in it"] += 1
            continue
        operation = str(entry["profiling_name"]).rpartition(":")[2]
        message = _MESSAGE.match(operation)
        peer = int(message[3]) if message else None
        number = int(entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", -1))
        size = int(entry.get("nbytes") or _size(entry.get("input_sizes"), entry.get("input_dtypes")))
        rows.append(
            _Row((description or group_name, ranks, group_name if own else ""),
                 message[1] if message else operation.split(" ")[0],
                 ranks[peer] if peer is not None and peer < len(ranks) else peer,
                 int(entry.get("step", -1)) if has_steps else -1, number, size, created_s, started_s, ended_s)
        )  # fmt: skip
    notes += _reasons(rank, reasons)
    if not rows:
        why = "; ".join(notes) or "it has no operations"
        remedy = ""
        if reasons["when they ended is not recorded"]:
            remedy = (
                " (torch's own gloo recorder has no times; for nccl set TORCH_NCCL_ENABLE_TIMING=1; otherwise take a "
                "trace of torch.profiler, or train with the backend byteps)"
            )
        raise UsageError(f"{name} has no operation that can be compared: {why}{remedy}")
    return _RankFile(rank, str(own.get("host") or dump.get("host_name", "")), rows, notes, exact)


def _reasons(rank: int, reasons: Mapping[str, int]) -> list[str]:
    return [f"{count_text(count, 'operation')} of rank {rank} left out: {why}" for why, count in reasons.items()]


def _rank_of(name: str, content: Mapping[str, Any]) -> int:
    if isinstance(content.get("rank"), int):
        return int(content["rank"])
    found = _NUMBER.search(name.split(".")[0]) or _NUMBER.search(name)
    if not found:
        raise UsageError(f"{name} does not say of which rank it is: its name must end with the number of the rank")
    return int(found[1])


def _ranks(given: Any) -> tuple[int, ...]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            return ()  # torch shortens long lists
    return tuple(int(rank) for rank in given or ())


def _size(sizes: Any, dtypes: Any) -> int:
    total = 0
    for size, dtype in zip(sizes or (), dtypes or (), strict=False):
        total += int(np.prod(size, dtype=np.int64)) * _BYTES.get(str(dtype), 4)
    return total


# ---- torch.profiler ------------------------------------------------------------------------------------------


def _from_profiler(name: str, trace: Mapping[str, Any]) -> _RankFile:
    info = trace.get("distributedInfo") or {}
    rank = int(info["rank"]) if "rank" in info else _rank_of(name, {})
    groups = {str(each["pg_name"]): each for each in info.get("pg_config") or ()}
    notes = [f"the trace of rank {rank} was cut off: what is there of it was used"] if trace.get("cut_off") else []
    events = [
        each for each in trace["traceEvents"] if isinstance(each, dict) and each.get("ph") == "X" and "dur" in each
    ]
    steps = sorted(
        (float(each["ts"]), int(found[1]))
        for each in events
        if (found := _STEP.match(str(each.get("name", "")))) and each.get("cat") != "gpu_user_annotation"
    )
    named = [each for each in events if "Process Group Name" in (each.get("args") or {})]
    kernels = [each for each in named if each.get("cat") == "kernel"]
    reasons: Counter[str] = Counter()
    rows = []
    counts: Counter[object] = Counter()
    chosen = kernels or named or [each for each in events if str(each.get("name", "")).startswith("gloo:")]
    for event in sorted(chosen, key=lambda each: float(each["ts"])):
        arguments = event.get("args") or {}
        group = _profiled_group(arguments, groups, bool(named))
        if not group[1]:
            reasons[
                f"the ranks of group {group[0]} are not in it"
                if named
                else "the trace does not name their groups (with gloo, torch.profiler does not, and there are several)"
            ] += 1
            continue
        text = str(arguments.get("Collective name") or str(event["name"]).rpartition(":")[2]).lower()
        operation = _OPERATIONS.get(text, text)
        peer = None
        if operation in ("send", "recv"):
            other = arguments.get("Dst Rank" if operation == "send" else "Src Rank")
            if other is None and len(group[1]) != 2:
                reasons["the other end of messages is not in it"] += 1
                continue
            peer = int(other) if other is not None else group[1][group[1][0] == rank]
        key = (group, operation, peer) if peer is not None else group
        number = int(arguments.get("Seq", counts[key]))
        counts[key] += 1
        start_s = float(event["ts"]) / 1e6
        step = next((at for since, at in reversed(steps) if since <= float(event["ts"])), -1) if steps else -1
        size = int(arguments.get("In msg nelems", 0)) * _BYTES.get(str(arguments.get("dtype")), 4)
        end_s = start_s + float(event["dur"]) / 1e6
        rows.append(_Row(group, operation, peer, step, number, size, start_s, start_s, end_s))
    notes += _reasons(rank, reasons)
    if not rows:
        raise UsageError(
            f"{name} has no communication that can be compared: "
            f"{'; '.join(notes) or 'no event has a process group (Process Group Name)'}"
        )
    return _RankFile(rank, str(trace.get("host_name", "")), rows, notes, True)


def _profiled_group(
    arguments: Mapping[str, Any], groups: Mapping[str, Any], is_named: bool
) -> tuple[str, tuple[int, ...], str]:
    if not is_named:  # all there is: if there is one, it is that
        several = {tuple(each["ranks"]) for each in groups.values()}
        return ("world", several.pop(), "") if len(several) == 1 else ("", (), "")
    name = str(arguments["Process Group Name"])
    description = str(arguments.get("Process Group Description") or name)
    ranks = _ranks(arguments.get("Process Group Ranks"))
    return description, ranks or tuple(groups.get(name, {}).get("ranks", ())), ""


# ---- all ranks -----------------------------------------------------------------------------------------------


def _joined(ranks: Sequence[_RankFile], notes: list[str]) -> Spans:
    if any(row.step < 0 for each in ranks for row in each.rows):
        ranks = _with_steps(ranks)
        notes.append("the files do not number steps: they were told apart by how operations repeat")
    has_messages = any(row.peer is not None for each in ranks for row in each.rows)
    groups: dict[tuple[str, tuple[int, ...], str], int] = {}
    operations: dict[str, int] = {}
    columns: list[tuple[int, int, int, int, int, int]] = []
    times: list[tuple[float, float, float]] = []
    for each in ranks:
        for row in each.rows:
            key = row.group
            if row.peer is not None:
                key = (row.group[0], (min(each.rank, row.peer), max(each.rank, row.peer)), row.group[2])
            place = groups.setdefault(key, len(groups))
            what = operations.setdefault(row.operation, len(operations))
            columns.append((row.step, place, each.rank, row.sequence, what, row.bytes))
            times.append((row.enqueued_s, row.started_s, row.ended_s))
        notes += each.notes
    if not columns:
        raise UsageError("the files have no whole step")
    step, group, rank, sequence, operation, size = (np.array(column, np.int64) for column in zip(*columns, strict=True))
    enqueued_s, started_s, ended_s = (np.array(column) for column in zip(*times, strict=True))
    hosts = {each.rank: each.host for each in ranks if each.host}
    return Spans(
        [SpanGroup(name, dimension_of(name) or ("pp" if has_messages and len(its) == 2 else ""), its)
         for name, its, _ in groups],
        list(operations), step, group, rank, sequence, operation, size, enqueued_s, started_s, ended_s, hosts, notes,
        all(each.has_own_times for each in ranks),
    )  # fmt: skip


def _with_steps(ranks: Sequence[_RankFile]) -> list[_RankFile]:
    """A step ends with a collective of the outermost dimension. How many it has is seen from how they repeat; which is
    the last, from the time until the next operation."""
    names = {dimension_of(row.group[0]) for each in ranks for row in each.rows if row.peer is None}
    outermost = next((name for name in DIMENSIONS if name in names), "")
    periods: Counter[int] = Counter()
    after: dict[int, Counter[int]] = defaultdict(Counter)
    ordered = [each._replace(rows=sorted(each.rows, key=lambda row: row.started_s)) for each in ranks]
    leading = [_leading(each.rows, outermost) for each in ordered]
    for each, at in zip(ordered, leading, strict=True):
        period = _period([(each.rows[place].operation, each.rows[place].bytes) for place in at])
        periods[period] += 1
        after[period][_last_of_step(each.rows, at, period)] += 1
    if not periods:
        return []
    period = periods.most_common(1)[0][0]
    last = after[period].most_common(1)[0][0]
    return [
        each._replace(rows=_numbered(each.rows, at, period, last)) for each, at in zip(ordered, leading, strict=True)
    ]


def _leading(rows: Sequence[_Row], dimension: str) -> list[int]:
    """Places of the collectives of the dimension's group: the one with most of them."""
    by_group: dict[object, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.peer is None and dimension_of(row.group[0]) == dimension:
            by_group[row.group].append(place)
    return max(by_group.values(), key=len, default=[])


def _period(kinds: Sequence[object]) -> int:
    """After so many they repeat."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    codes = np.array([numbers[kind] for kind in kinds])
    for length in range(1, min(len(codes) // 2, _MOST_A_STEP) + 1):
        if (codes[length:] == codes[:-length]).mean() >= _ALIKE:
            return length
    return max(len(codes), 1)


def _last_of_step(rows: Sequence[_Row], places: Sequence[int], period: int) -> int:
    """The collective after which a rank is longest by itself: the remainder of its sequence number by the period."""
    waits: dict[int, list[float]] = defaultdict(list)
    for place in places:
        if place + 1 < len(rows):
            waits[rows[place].sequence % period].append(rows[place + 1].started_s - rows[place].ended_s)
    return max(waits, key=lambda number: float(np.median(waits[number])), default=0)


def _numbered(rows: Sequence[_Row], places: Sequence[int], period: int, last: int) -> list[_Row]:
    found: list[_Row] = []
    begin = 0
    for place in places:
        step = (rows[place].sequence - last - 1) // period + 1
        found += [row._replace(step=step) for row in rows[begin : place + 1]]
        begin = place + 1
    return found
