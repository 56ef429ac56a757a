"""How `bps` finds the jobs on this machine: each service writes a note, and keeps it locked while it runs.

A note is a file in the user's runtime folder that only its owner can read. It does not contain the cluster secret. The
system releases the lock when the service ends, even if it is killed. So a process that finds an unlocked note deletes
it. Any thread; needs only the standard library.
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

#: A launcher sets this variable in the environment of its processes, which inherit it to theirs.
TOKEN_VARIABLE = "BYTEPS_LAUNCH_TOKEN"
_SUFFIX = ".job"
_MAX_BYTES = 1 << 14
_TRIES = 5


@dataclass(frozen=True, slots=True)
class JobNote:
    """A job as one of its services knows it.

    Attributes:
        scheduler_host: empty on a single machine, which has no scheduler.
        scheduler_port: 0 without a scheduler.
        job_id: BYTEPS_JOB_ID; may be empty.
        secret_file: absolute path of the file with the cluster secret; empty if the secret comes from the environment,
            or if there is none.
        pid: process id of the service.
        ranks: ranks on this machine, for a job without a scheduler; otherwise 0.
        local_secret: the secret that bpslaunch made for a job on loopback.
    """

    scheduler_host: str
    scheduler_port: int
    job_id: str
    secret_file: str
    pid: int
    ranks: int = 0
    local_secret: str = field(default="", repr=False)

    @property
    def address(self) -> str:
        """``host:port`` of the scheduler; empty without one."""
        return f"{self.scheduler_host}:{self.scheduler_port}" if self.scheduler_host else ""

    @classmethod
    def of(cls, settings: Settings) -> JobNote:
        """The note that this process writes."""
        secret_file = os.path.abspath(settings.secret_file) if settings.secret_file else ""
        ranks = 0 if settings.scheduler_host else settings.local_size
        place = settings.scheduler_host, settings.scheduler_port
        return cls(*place, settings.job_id, secret_file, os.getpid(), ranks, settings.local_secret)


def runtime_folder() -> Path:
    """The user's folder for notes. It does not survive a restart of the machine."""
    if folder := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(folder) / "byteps"
    return Path(tempfile.gettempdir()) / f"byteps-{os.getuid()}"


@contextlib.contextmanager
def announced(settings: Settings) -> Iterator[None]:
    """Keep a note of this process's job during the ``with`` block. If it can't be written, only `bps` misses it."""
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
    """The jobs of this user on this machine, each once, ordered by their schedulers' addresses."""
    clear()
    found: dict[tuple[str, str], JobNote] = {}
    for path in sorted(runtime_folder().glob(f"*{_SUFFIX}")):
        if (job := _read(path)) is not None:
            found.setdefault((job.address, job.job_id), job)
    return [found[key] for key in sorted(found)]


def with_local_secret(settings: Settings) -> Settings:
    """``settings`` with the local secret of the scheduler's job, if a note has it.

    bpslaunch makes such a secret for a job that this user starts on this machine. Other settings stay as they are.
    """
    if settings.secret or settings.local_secret or not settings.scheduler_host:
        return settings
    for job in find():
        is_it = job.address == settings.scheduler_address and settings.job_id in ("", job.job_id)
        if is_it and job.local_secret:
            return replace(settings, local_secret=job.local_secret, job_id=job.job_id)
    return settings


def clear(folder: Path | None = None) -> None:
    """Delete the notes of services that were killed. ``folder``: by default the user's runtime folder."""
    for path in (folder or runtime_folder()).glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # locked by its service, or gone
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                os.close(fd)


def _leave(folder: Path, job: JobNote) -> tuple[Path, int]:
    """Write the note; returns its path and a descriptor that holds the lock. Raises OSError."""
    for _ in range(_TRIES):
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{folder} must belong to this user, and be accessible to nobody else")
        path = folder / f"{job.pid}-{secrets.token_hex(4)}{_SUFFIX}"
        # The note gets its name once it is complete and locked, so that `clear` and `find` never see a partial one.
        unnamed = path.with_suffix(".new")
        try:
            fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another job has ended meanwhile, and deleted the empty folder
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, json.dumps(asdict(job)).encode())
            unnamed.rename(path)
        except BaseException:
            unnamed.unlink(missing_ok=True)
            os.close(fd)
            raise
        return path, fd
    raise FileNotFoundError(f"{folder} was deleted {_TRIES} times while a note was written")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other notes are there
        path.parent.rmdir()


def _read(path: Path) -> JobNote | None:
    """None if the file is gone, can be accessed by others, or is not a note."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd) as file:
            about = os.fstat(fd)
            if about.st_uid == os.getuid() and not about.st_mode & 0o077:
                return JobNote(**json.loads(file.read(_MAX_BYTES)))
    return None
