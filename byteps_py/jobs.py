"""The jobs of this machine, found without being told of them: each service leaves a note for `bps`, and holds it.

A note is a file in the user's runtime folder, its owner's only, without the cluster secret. It is locked as long as its
service lives; the system gives the lock back when that is killed, so who finds a note that nobody holds takes it away.
Any thread; needs the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from byteps_py.log import logger
from byteps_py.settings import Settings

#: All processes that a launcher starts have it in their environment, and so has what they start.
TOKEN_VARIABLE = "BYTEPS_LAUNCH_TOKEN"
_SUFFIX = ".job"
_MAX_BYTES = 1 << 14
_TRIES = 5


@dataclass(frozen=True, slots=True)
class JobNote:
    """As its services know it. ``secret_file``: where they read the secret; empty if they were told it, or have none.
    ``ranks``: of this machine, where nothing but a communication service knows the job."""

    scheduler_host: str
    scheduler_port: int
    job_id: str
    secret_file: str
    pid: int
    ranks: int = 0
    local_secret: str = field(default="", repr=False)  # bpslaunch made it for this job

    @property
    def address(self) -> str:
        """Of its scheduler; empty on a single machine, which has none."""
        return f"{self.scheduler_host}:{self.scheduler_port}" if self.scheduler_host else ""

    @classmethod
    def of(cls, settings: Settings) -> JobNote:
        secret_file = os.path.abspath(settings.secret_file) if settings.secret_file else ""
        ranks = 0 if settings.scheduler_host else settings.local_size
        place = settings.scheduler_host, settings.scheduler_port
        return cls(*place, settings.job_id, secret_file, os.getpid(), ranks, settings.local_secret)


def runtime_folder() -> Path:
    """The user's: it does not outlive the machine's run."""
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(folder) / "byteps"
    return Path(tempfile.gettempdir()) / f"byteps-{os.getuid()}"


@contextlib.contextmanager
def announced(settings: Settings) -> Iterator[None]:
    """While this process serves a job. Where no note can be left, nothing else changes."""
    path, held = None, -1
    try:
        clear()
        path, held = _leave(runtime_folder(), JobNote.of(settings))
    except OSError as error:
        logger.debug("`bps status` can't find this job by itself: %s", error)
    try:
        yield
    finally:
        if path is not None:
            _remove(path)
            os.close(held)


def find() -> list[JobNote]:
    """The jobs of this user on this machine, once each; in the order of their schedulers' addresses."""
    clear()
    found: dict[tuple[str, str], JobNote] = {}
    for path in sorted(runtime_folder().glob(f"*{_SUFFIX}")):
        if (job := _read(path)) is not None:
            found.setdefault((job.address, job.job_id), job)
    return [found[key] for key in sorted(found)]


def with_local_secret(settings: Settings) -> Settings:
    """``settings`` of a process that is to reach a scheduler. If that is of a job which bpslaunch has started on this
    machine for this user, with a secret of its own, the job's note says it."""
    if settings.secret or settings.local_secret or not settings.scheduler_host:
        return settings
    for job in find():
        is_it = job.address == settings.scheduler_address and settings.job_id in ("", job.job_id)
        if is_it and job.local_secret:
            return replace(settings, local_secret=job.local_secret, job_id=job.job_id)
    return settings


def clear(folder: Path | None = None) -> None:
    """Take away the notes of services that were killed."""
    for path in (folder or runtime_folder()).glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # held, or gone
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(fd)


def _leave(folder: Path, job: JobNote) -> tuple[Path, int]:
    """Raises OSError."""
    for _ in range(_TRIES):
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{folder} is not this user's alone")
        path = folder / f"{job.pid}-{secrets.token_hex(4)}{_SUFFIX}"
        # It gets its name when it is complete, and held: who looks earlier does not see it.
        unnamed = path.with_suffix(".new")
        try:
            fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another job has ended, and taken the empty folder with it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, json.dumps(asdict(job)).encode())
            unnamed.rename(path)
        except BaseException:
            unnamed.unlink(missing_ok=True)
            os.close(fd)
            raise
        return path, fd
    raise FileNotFoundError(f"{folder} disappears")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others' notes are there
        path.parent.rmdir()


def _read(path: Path) -> JobNote | None:
    """None if it is gone, or not what it should be."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd) as file:
            about = os.fstat(fd)
            if about.st_uid == os.getuid() and not about.st_mode & 0o077:
                return JobNote(**json.loads(file.read(_MAX_BYTES)))
    return None
