"""The scheduler's journal: an append-only log on disk, and the job that a restarted scheduler resumes from it.

Owns the file from the scheduler's start until the job ends in order; then the file is deleted. One thread at a time may
call; ``flush`` waits for the disk.

    file   the magic line, then frames
    frame  length and CRC-32 of what follows (4 bytes each, little-endian), then a JournalFrame

A crash may leave the last frame incomplete, and nothing else. No message that follows from that frame was sent, so it
is dropped. Damage elsewhere is an error. Only the file's owner may read it.

A long journal is replaced by a snapshot: the whole state, pickled as it is. It is read only from the scheduler's own
file, by the same version of the package, and only into classes of the scheduler and of the modules in ``_PACKAGES``.

The journal of a job with another configuration belongs to another job, killed long ago: it is given up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import stat
import struct
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from byteps_py import __version__
from byteps_py.config.settings import Settings
from byteps_py.errors import JournalError
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto.journal_pb2 import JournalFrame, JournalHeader, JournalRecord
from byteps_py.scheduler.core import EpochSeen
from byteps_py.scheduler.member_links.links import MemberLinks, Restarted
from byteps_py.scheduler.roster import PROTOCOL_VERSION, ClusterConfig
from byteps_py.system.log import logger

VERSION = 5
NO_JOURNAL = "none"
#: A hundred thousand records, which take about a second to replay.
COMPACT_BYTES = 4 << 20
_STALE_S = 7 * 86400.0
_MAGIC = b"byteps journal 1\n"
_HEAD = struct.Struct("<II")
_PACKAGES = ("byteps_py.scheduler.", "byteps_py.failure_detector", "byteps_py.tensors", "byteps_py.placement.")
_PLAIN = {("builtins", "set"), ("builtins", "frozenset"), ("builtins", "range"), ("collections", "deque")}
#: Settings that make two jobs different. Times do not: a job goes on with the times that it began with.
_IDENTITY = ("num_workers", "num_servers", "servers_only", "job", "elastic")


def encode(frame: JournalFrame) -> bytes:
    """The bytes of a frame, with its head."""
    body = frame.SerializeToString()
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode(data: bytes) -> tuple[list[JournalFrame], int]:
    """The frames of a whole file, and the length of the valid part in bytes. Raises JournalError."""
    if len(data) < len(_MAGIC) and _MAGIC.startswith(data):
        return [], 0  # a crash while the file was begun
    if not data.startswith(_MAGIC):
        raise JournalError("it does not begin with the header of a journal")
    frames: list[JournalFrame] = []
    at = len(_MAGIC)
    while at < len(data):
        body = data[at + _HEAD.size :]
        length, crc = _HEAD.unpack(data[at : at + _HEAD.size]) if len(data) - at >= _HEAD.size else (0, 0)
        is_last = len(body) <= length or not any(data[at:])  # zeros: the file's length was on disk before its content
        frame = _parse(body[:length], crc) if 0 < length <= len(body) else None
        if frame is None and not is_last:
            raise JournalError(f"frame {len(frames) + 1}, at byte {at} of {len(data)}, is damaged")
        if frame is None:
            break
        frames.append(frame)
        at += _HEAD.size + length
    return frames, at


def _parse(body: bytes, crc: int) -> JournalFrame | None:
    if zlib.crc32(body) != crc:
        return None
    try:
        return JournalFrame.FromString(body)
    except DecodeError:
        return None


def journal_path(settings: Settings) -> Path | None:
    """The path of this job's journal; None if there is to be none, or no folder can be used. Makes the folder, and
    deletes old journals of killed jobs from it. Raises JournalError if BYTEPS_JOURNAL_DIR can't be used.
    """
    if settings.journal_dir == NO_JOURNAL:
        return None
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", settings.job)[:60]
    exact = hashlib.blake2b(f"{settings.job}\0{settings.scheduler_address}".encode(), digest_size=6).hexdigest()
    name = f"{readable}-{settings.scheduler_port}-{exact}.journal"
    if settings.journal_dir:
        return _folder(Path(settings.journal_dir)) / name
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    for folder, is_shared in (
        (Path(state) / "byteps", False),
        (Path(tempfile.gettempdir()) / f"byteps-{os.getuid()}", True),
    ):
        try:
            _folder(folder, is_shared)
        except JournalError as error:
            why = error
            continue
        _clear(folder)
        return folder / name
    logger.warning("no journal: a killed scheduler can't be resumed (%s)", why)
    return None


def _clear(folder: Path) -> None:
    """Delete journals that have not been written to for a week and that no scheduler has open."""
    for path in folder.glob("*.journal"):
        with contextlib.suppress(OSError):  # in use, or deleted by another process
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                about = os.fstat(fd)
                is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
                if is_own and time.time() - about.st_mtime > _STALE_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _folder(path: Path, is_shared: bool = False) -> Path:
    """Make the folder if it does not exist. ``is_shared``: another user may have made it first. Raises JournalError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat() if is_shared else path.stat()
    except OSError as error:
        raise _unusable(path, error) from error
    if not stat.S_ISDIR(found.st_mode) or not os.access(path, os.W_OK | os.X_OK):
        raise JournalError(f"the scheduler's journal can't be kept in {path}: set BYTEPS_JOURNAL_DIR to another folder")
    if is_shared and (found.st_uid != os.getuid() or found.st_mode & 0o077):
        raise JournalError(f"the scheduler's journal can't be kept in {path}: others may write there")
    return path


def _unusable(path: Path, error: OSError) -> JournalError:
    return JournalError(
        f"the scheduler's journal {path} can't be used: {error.strerror}; set BYTEPS_JOURNAL_DIR to another folder, or "
        f"to {NO_JOURNAL}"
    )


class Journal:
    """One journal file, locked. ``frames``: those that it had when it was opened; ``unwritten``: the records that
    ``flush`` has to write. ``compact_bytes``: the length from which it may be replaced by a snapshot."""

    def __init__(self, path: Path, compact_bytes: int = COMPACT_BYTES) -> None:
        """Open or create it. Raises JournalError if it is damaged, another user's, or in use by another scheduler."""
        self.path = path
        self._compact_bytes = compact_bytes
        self.unwritten: list[JournalRecord] = []
        self._size = self._first_size = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self.frames = self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def _read(self) -> list[JournalFrame]:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise JournalError(
                f"the scheduler's journal {self.path} must be a file that only its owner can read (mode 0600)"
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = os.pread(self._fd, found.st_size, 0)
            try:
                frames, good = decode(data)
            except JournalError as error:
                raise JournalError(
                    f"the scheduler's journal {self.path} is damaged: {error}. Move it away to begin a new job; the "
                    "processes of the old one go on without a scheduler"
                ) from None
            os.ftruncate(self._fd, good)
            os.lseek(self._fd, good, os.SEEK_SET)
            self._size = good
            self._first_size = frames[0].ByteSize() if frames else 0
        except BlockingIOError:
            raise JournalError(
                f"the scheduler's journal {self.path} is in use: another scheduler of this job runs; end it, or give "
                "this one another BYTEPS_JOB_ID"
            ) from None
        except OSError as error:
            raise _unusable(self.path, error) from error
        return frames

    @property
    def is_long(self) -> bool:
        """True when it is time for ``replace``: the journal is much longer than a snapshot."""
        return self._size > max(self._compact_bytes, 4 * self._first_size)

    def replace(self, first: JournalFrame) -> None:
        """Replace the journal atomically by one that begins with ``first``: a crash leaves the old one or the new one.

        Call it after ``flush``. Raises OSError; then the journal is unchanged.
        """
        path = self.path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # left by a crash
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = _MAGIC + encode(first)
            _write(fd, data)
            os.rename(path, self.path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._size, self._first_size = fd, len(data), len(data)
        self._sync_folder()

    def begin(self, first: JournalFrame) -> None:
        """Empty the journal and begin it with ``first``. Raises OSError."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.unwritten.clear()
        data = _MAGIC + encode(first)
        _write(self._fd, data)
        self._size = self._first_size = len(data)
        self._sync_folder()

    def _sync_folder(self) -> None:
        """Make the file's name as durable as its content."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def append(self, record: JournalRecord) -> None:
        """Keep a record until ``flush``."""
        self.unwritten.append(record)

    def flush(self) -> None:
        """Write all appended records to the disk, and wait for it. Raises OSError."""
        if self.unwritten:
            data = encode(JournalFrame(records=self.unwritten))
            _write(self._fd, data)
            self._size += len(data)
            self.unwritten.clear()

    def delete(self) -> None:
        """The job is over: delete the file. It still has to be closed."""
        with contextlib.suppress(OSError):  # the folder was deleted, and the file with it
            os.unlink(self.path)

    def close(self) -> None:
        os.close(self._fd)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fdatasync(fd)


# ---- snapshots -------------------------------------------------------------------------------------------------


def freeze(state: dict[str, Any]) -> bytes:
    """The bytes from which ``thaw`` makes an equal state. References to one object stay references to one object."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump({**state, "version": __version__})
    return file.getvalue()


def thaw(data: bytes) -> dict[str, Any]:
    """The state of these bytes. Raises JournalError if another version wrote them, or if they are not a snapshot."""
    try:
        state = _Unpickler(io.BytesIO(data)).load()
        version = state.pop("version")
    except JournalError:
        raise
    except Exception as error:
        raise JournalError(f"the snapshot in the scheduler's journal can't be read: {error!r}") from error
    if version != __version__:
        raise JournalError(f"byteps_py {version} wrote the scheduler's journal, and this is {__version__}")
    return state  # type: ignore[no-any-return]


def message(name: str, data: bytes) -> Message:
    """A message of the control plane."""
    found: Message = getattr(pb, name).FromString(data)
    return found


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Message):
            return message, (type(obj).DESCRIPTOR.name, obj.SerializeToString())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(_PACKAGES):
            found = super().find_class(module, name)
            # Only classes that the module defines: its namespace also holds its imports.
            if found is message or (isinstance(found, type) and found.__module__ == module):
                return found
        raise JournalError(
            f"the snapshot in the scheduler's journal names {module}.{name}, which is not allowed in a snapshot"
        )


# ---- recovery --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Restored:
    """``config``: that of the job. ``at_s``: the time of the scheduler's clock at which the job goes on. ``records``:
    how many records were replayed."""

    links: MemberLinks
    config: ClusterConfig
    at_s: float = 0.0
    records: int = 0


def restore(config: ClusterConfig, journal: Journal | None) -> Restored:
    """The links of the journal's job, or those of a new one. Raises JournalError or OSError."""
    if journal is None:
        return Restored(MemberLinks(config), config)
    if not journal.frames:
        return begin(config, journal, 0, 0.0)
    header = journal.frames[0].header
    known = _config(header)
    if known is None or any(getattr(known, name) != getattr(config, name) for name in _IDENTITY):
        logger.warning("the journal %s belongs to a job with another configuration: a new job begins", journal.path)
        return begin(config, journal, 0, 0.0)
    records = [record for frame in journal.frames for record in frame.records]
    try:
        links = MemberLinks(known)
        at_s = replay(links, records, journal.frames[0].snapshot)
    except JournalError as error:
        raise JournalError(f"{error} ({journal.path}; move it away to begin a new job)") from None
    journal.frames.clear()
    links.write = journal.append
    links.handle(Restarted(), at_s)
    return Restored(links, known, at_s, len(records))


def replay(links: MemberLinks, records: list[JournalRecord], snapshot: bytes = b"") -> float:
    """Apply a snapshot and records to new links. Returns the time of the last record. Raises JournalError."""
    at_s = links.adopt(thaw(snapshot)) if snapshot else 0.0
    for record in records:
        links.replay(record)
    return records[-1].at_s if records else at_s


def compact(config: ClusterConfig, journal: Journal, links: MemberLinks, at_s: float) -> None:
    """Replace the journal's records by a snapshot. Raises OSError; then the old journal stays valid."""
    journal.replace(JournalFrame(header=_header(config), snapshot=freeze(links.state(at_s))))


def begin(config: ClusterConfig, journal: Journal | None, last_epoch: int, at_s: float) -> Restored:
    """A new job, whose epochs come after ``last_epoch``. Raises OSError."""
    links = MemberLinks(config, None if journal is None else journal.append)
    if journal is not None:
        journal.begin(JournalFrame(header=_header(config)))
    if last_epoch:
        links.handle(EpochSeen(last_epoch), at_s)
    return Restored(links, config, at_s)


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
