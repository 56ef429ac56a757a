"""From a journal to the state that it tells of, and to a new job in its place. Pure, but for the journal given.

A journal of a job that was configured otherwise is another job's, killed long ago: it is not gone on with.
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
#: What makes two jobs different. Times don't: a job goes on with those it was begun with.
_IDENTITY = ("num_workers", "num_servers", "servers_only", "job", "elastic")


@dataclass(frozen=True, slots=True)
class Restored:
    """``config``: the job's. ``at_s``: the time of the scheduler's clock at which it goes on. ``records``: how many
    were replayed."""

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
        logger.warning("the journal %s is of a job that was configured otherwise: it is given up", journal.path)
        return begin(config, journal, 0, 0.0)
    records = [record for frame in journal.frames for record in frame.records]
    try:
        sessions = Sessions(known)
        at_s = replay(sessions, records, journal.frames[0].snapshot)
    except JournalError as error:
        raise JournalError(f"{error} ({journal.path}; move it away to begin the job anew)") from None
    journal.frames.clear()
    sessions.write = journal.append
    sessions.restart(at_s)
    return Restored(sessions, known, at_s, len(records))


def replay(sessions: Sessions, records: list[JournalRecord], snapshot: bytes = b"") -> float:
    """Bring new sessions to where these records end. Returns the time of the last one. Raises JournalError."""
    at_s = sessions.restore(snapshot) if snapshot else 0.0
    for record in records:
        sessions.replay(record)
    return records[-1].at_s if records else at_s


def compact(config: ClusterConfig, journal: Journal, sessions: Sessions, at_s: float) -> None:
    """Put the state in the place of all records that led to it. Raises OSError; the old journal is good then."""
    journal.replace(JournalFrame(header=_header(config), snapshot=sessions.snapshot(at_s)))


def begin(config: ClusterConfig, journal: Journal | None, last_epoch: int, at_s: float) -> Restored:
    """A new job; its epochs come after ``last_epoch``. Raises OSError."""
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
    """As it was then; None if this version of the package can't go on with it."""
    if header.version != VERSION:
        return None
    stated = json.loads(header.config)
    if stated.pop("protocol") != PROTOCOL_VERSION or set(stated) != {f.name for f in dataclasses.fields(ClusterConfig)}:
        return None
    return ClusterConfig(**stated)
