"""The scheduler's journal on disk: an append-only log of frames with checksums, which only its owner may read.

Owns the file from the scheduler's start until the job ends in order; then the file is deleted. Knows nothing of the
contents of the records. One thread at a time may call; ``flush`` waits for the disk.

    file   the magic line, then frames
    frame  length and CRC-32 of what follows (4 bytes each, little-endian), then a JournalFrame

A crash may leave the last frame incomplete, and nothing else. No message that follows from that frame was sent, so it
is dropped. Damage elsewhere is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import struct
import tempfile
import time
import zlib
from pathlib import Path

from google.protobuf.message import DecodeError

from byteps_py.errors import JournalError
from byteps_py.log import logger
from byteps_py.proto.journal_pb2 import JournalFrame, JournalRecord
from byteps_py.settings import Settings

NO_JOURNAL = "none"
#: A hundred thousand records, which take about a second to replay.
COMPACT_BYTES = 4 << 20
_STALE_S = 7 * 86400.0
_MAGIC = b"byteps journal 1\n"
_HEAD = struct.Struct("<II")


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
    """One journal file, locked. ``frames``: those that it had when it was opened. ``compact_bytes``: the length from
    which it may be replaced by a snapshot."""

    def __init__(self, path: Path, compact_bytes: int = COMPACT_BYTES) -> None:
        """Open or create it. Raises JournalError if it is damaged, another user's, or in use by another scheduler."""
        self.path = path
        self._compact_bytes = compact_bytes
        self._waiting: list[JournalRecord] = []
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

    @property
    def is_behind(self) -> bool:
        """True if there are records that ``flush`` has to write."""
        return bool(self._waiting)

    def begin(self, first: JournalFrame) -> None:
        """Empty the journal and begin it with ``first``. Raises OSError."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._waiting.clear()
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
        self._waiting.append(record)

    def flush(self) -> None:
        """Write all appended records to the disk, and wait for it. Raises OSError."""
        if self._waiting:
            data = encode(JournalFrame(records=self._waiting))
            _write(self._fd, data)
            self._size += len(data)
            self._waiting.clear()

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
