"""Recovery from a journal: the sessions that it describes, or a new job in its place. Pure, except for the journal.

The journal of a job with another configuration belongs to another job, killed long ago: it is given up.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from byteps_py.errors import JournalError
from byteps_py.log import logger
from byteps_py.proto.journal_pb2 import JournalFrame, JournalHeader, JournalRecord
from byteps_py.scheduler.cluster_config import PROTOCOL_VERSION, ClusterConfig
from byteps_py.scheduler.sessions.journal import Journal
from byteps_py.scheduler.sessions.scheduler_sessions import Sessions

VERSION = 3
#: Settings that make two jobs different. Times do not: a job goes on with the times that it began with.
_IDENTITY = ("num_workers", "num_servers", "servers_only", "job", "elastic")


@dataclass(frozen=True, slots=True)
class Restored:
    """``config``: that of the job. ``at_s``: the time of the scheduler's clock at which the job goes on. ``records``:
    how many records were replayed."""

    sessions: Sessions
    config: ClusterConfig
    at_s: float = 0.0
    records: int = 0


def restore(config: ClusterConfig, journal: Journal | None) -> Restored:
    """The sessions of the journal's job, or those of a new one. Raises JournalError or OSError."""
    if journal is None:
        return Restored(Sessions(config), config)
    if not journal.frames:
        return begin(config, journal, 0, 0.0)
    header = journal.frames[0].header
    known = _config(header)
    if known is None or any(getattr(known, name) != getattr(config, name) for name in _IDENTITY):
        logger.warning("the journal %s belongs to a job with another configuration: a new job begins", journal.path)
        return begin(config, journal, 0, 0.0)
    records = [record for frame in journal.frames for record in frame.records]
    try:
        sessions = Sessions(known)
        at_s = replay(sessions, records, journal.frames[0].snapshot)
    except JournalError as error:
        raise JournalError(f"{error} ({journal.path}; move it away to begin a new job)") from None
    journal.frames.clear()
    sessions.write = journal.append
    sessions.restart(at_s)
    return Restored(sessions, known, at_s, len(records))


def replay(sessions: Sessions, records: list[JournalRecord], snapshot: bytes = b"") -> float:
    """Apply a snapshot and records to new sessions. Returns the time of the last record. Raises JournalError."""
    at_s = sessions.restore(snapshot) if snapshot else 0.0
    for record in records:
        sessions.replay(record)
    return records[-1].at_s if records else at_s


def compact(config: ClusterConfig, journal: Journal, sessions: Sessions, at_s: float) -> None:
    """Replace the journal's records by a snapshot. Raises OSError; then the old journal stays valid."""
    journal.replace(JournalFrame(header=_header(config), snapshot=sessions.snapshot(at_s)))


def begin(config: ClusterConfig, journal: Journal | None, last_epoch: int, at_s: float) -> Restored:
    """A new job, whose epochs come after ``last_epoch``. Raises OSError."""
    sessions = Sessions(config, None if journal is None else journal.append)
    if journal is not None:
        journal.begin(JournalFrame(header=_header(config)))
    if last_epoch:
        sessions.skip_epochs(last_epoch, at_s)
    return Restored(sessions, config, at_s)


def _header(config: ClusterConfig) -> JournalHeader:
    stated = json.dumps(dataclasses.asdict(config) | {"protocol": PROTOCOL_VERSION}, sort_keys=True)
    return JournalHeader(version=VERSION, config=stated)


def _config(header: JournalHeader) -> ClusterConfig | None:
    """The configuration in the header; None if this version of the package can't resume the job."""
    if header.version != VERSION:
        return None
    stated = json.loads(header.config)
    if stated.pop("protocol") != PROTOCOL_VERSION or set(stated) != {f.name for f in dataclasses.fields(ClusterConfig)}:
        return None
    return ClusterConfig(**stated)
