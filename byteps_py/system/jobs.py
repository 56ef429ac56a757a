"""Finds the jobs on this machine, for `bps`: each service writes a note, and keeps it locked while it runs.

A note is a file in the user's runtime folder that only its owner can read. It does not contain the cluster secret. The
system releases the lock when the service ends, even if it is killed. So a process that finds an unlocked note deletes
it. If another user has taken the runtime folder's name, notes are in a folder made instead.

Only this user can change the folder, although it may lie below /tmp, where another user may have made one of that name
first. Nothing here follows a symbolic link, or waits for the other end of a FIFO. A folder is checked through its
descriptor, and its files are reached through that descriptor, so nobody can exchange the folder between the check and
the use. Any thread; needs only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from byteps_py.config.addresses import joined
from byteps_py.config.settings import Settings
from byteps_py.system.log import logger

_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def folder_refusal(folder: Path) -> str:
    """Why files of this user can't be kept in ``folder``, as a clause. Empty if they can, or if there is no folder yet.

    >>> folder_refusal(Path("/etc/passwd"))
    'is no folder'
    """
    try:
        with opened_folder(folder):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"can't be opened ({error.strerror})" if error.errno else str(error.strerror)


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """The folder's descriptor, during the ``with`` block.

    Raises FileNotFoundError, or PermissionError if the folder is not one that only this user can access.
    """
    try:
        fd = os.open(folder, _LOOK | os.O_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError:
        if fault := _folder_fault(folder.lstat()):
            raise PermissionError(0, fault, str(folder)) from None
        raise
    try:
        if fault := _folder_fault(os.fstat(fd)):
            raise PermissionError(0, fault, str(folder))
        yield fd
    finally:
        os.close(fd)


def _folder_fault(about: os.stat_result) -> str:
    if stat.S_ISLNK(about.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(about.st_mode):
        return "is no folder"
    if about.st_uid != os.getuid():
        return f"belongs to another user (uid {about.st_uid})"
    if about.st_mode & 0o077:
        return f"can be accessed by others (mode {stat.S_IMODE(about.st_mode):04o}; chmod 700 makes it private)"
    return ""


def open_own_file(name: str, folder: int) -> int:
    """A descriptor, to read, of a regular file in the folder with the descriptor ``folder``.

    Raises OSError; PermissionError if the file is something else, or not one that only this user can access.
    """
    fd = os.open(name, _LOOK, dir_fd=folder)
    about = os.fstat(fd)
    if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077:
        return fd
    os.close(fd)
    raise PermissionError(0, "is not a file that only this user can access", name)


def other_folders() -> list[Path]:
    """The folders that ``another`` has made and that are still there, by name."""
    found = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found = [Path(entry) for entry in entries if entry.name.startswith(_folder_prefix())]
    return sorted(path for path in found if not folder_refusal(path))


def another_folder() -> Path:
    """A new private folder in the temporary folder, for files that can't be kept in their own folder. Raises
    OSError."""
    return Path(tempfile.mkdtemp(prefix=_folder_prefix()))


def _folder_prefix() -> str:
    return f"byteps-{os.getuid()}-"


#: A launcher sets this variable in the environment of its processes, which inherit it to theirs.
TOKEN_VARIABLE = "BYTEPS_LAUNCH_TOKEN"
#: The same: the launcher's own command line.
COMMAND_VARIABLE = "BYTEPS_LAUNCH_COMMAND"
_MAX_COMMAND = 300  # characters of it in a note
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
        command: the launcher's command line; empty without a launcher.
        folder: where it was started.
        started_s: when, in seconds since the epoch; 0 if it is not known.
        log_dir: the folder in which its launchers write what processes print; empty without one.
    """

    scheduler_host: str
    scheduler_port: int
    job_id: str
    secret_file: str
    pid: int
    ranks: int = 0
    local_secret: str = field(default="", repr=False)
    command: str = ""
    folder: str = ""
    started_s: float = 0.0
    log_dir: str = ""

    @property
    def address(self) -> str:
        """``host:port`` of the scheduler; empty without one."""
        return joined(self.scheduler_host, self.scheduler_port) if self.scheduler_host else ""

    @classmethod
    def of(cls, settings: Settings) -> JobNote:
        """The note that this process writes."""
        secret_file = os.path.abspath(settings.secret_file) if settings.secret_file else ""
        ranks = 0 if settings.scheduler_host else settings.local_size
        place = settings.scheduler_host, settings.scheduler_port
        command = os.environ.get(COMMAND_VARIABLE, "")[:_MAX_COMMAND]
        note = cls(*place, settings.job_id, secret_file, os.getpid(), ranks, settings.local_secret)
        return replace(note, command=command, folder=_current_folder(), started_s=time.time(), log_dir=settings.log_dir)


def _current_folder() -> str:
    try:
        return os.getcwd()[:_MAX_COMMAND]
    except OSError:  # it was deleted
        return ""


def runtime_folder() -> Path:
    """The user's folder for notes. It does not survive a restart of the machine."""
    if (folder := os.environ.get("XDG_RUNTIME_DIR")) and os.path.isdir(folder):
        return Path(folder) / "byteps"
    return Path(tempfile.gettempdir()) / f"byteps-{os.getuid()}"


@contextlib.contextmanager
def announced(settings: Settings) -> Iterator[None]:
    """Keep a note of this process's job during the ``with`` block. If it can't be written, only `bps` misses it."""
    path, held = None, -1
    try:
        clear()
        path, held = _leave(JobNote.of(settings))
    except OSError as error:
        logger.debug("`bps status` can't find this job by itself: %s", error)
    try:
        yield
    finally:
        if path is not None:
            _remove(path)
            os.close(held)


def prepare() -> None:
    """Make the folder for the notes of a job that is about to start, so that a warning about it comes once, and not
    from each of its services."""
    with contextlib.suppress(OSError):  # the services will say so
        _usable_folder()


def find() -> list[JobNote]:
    """The jobs of this user on this machine, each once, ordered by their schedulers' addresses."""
    clear()
    folders = other_folders()
    if not (why := folder_refusal(runtime_folder())):
        folders.append(runtime_folder())
    elif not folders:
        _warn_once(f"{runtime_folder()} {why}: notes of jobs are not looked for there")
    found: dict[tuple[str, str], JobNote] = {}
    for folder in folders:
        with contextlib.suppress(OSError), opened_folder(folder) as fd:
            for name in sorted(_notes(fd)):
                if (job := _read(name, fd)) is not None:
                    found.setdefault((job.address, job.job_id), job)
    return [found[key] for key in sorted(found)]


def with_local_secret(settings: Settings) -> Settings:
    """``settings`` with the local secret of the scheduler's job, if a note has it.

    bpslaunch makes such a secret for a job that this user starts on this machine. Other settings stay as they are.
    """
    if settings.secret or settings.local_secret or not settings.scheduler_host:
        return settings
    for job in find():
        is_it = job.address == settings.scheduler_address and settings.job_id in ("", job.job_id or job.address)
        if is_it and job.local_secret:
            return replace(settings, local_secret=job.local_secret, job_id=job.job_id)
    return settings


def clear(folder: Path | None = None) -> None:
    """Delete the notes of services that were killed. ``folder``: by default all that have notes of this user."""
    for each in (runtime_folder(), *other_folders()) if folder is None else (folder,):
        with contextlib.suppress(OSError):  # there is none, or it is another user's
            with opened_folder(each) as fd:
                cleared = [name for name in _notes(fd) if _clear(name, fd)]
            if cleared:
                each.rmdir()  # unless notes are left


def _notes(folder: int) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(_SUFFIX)]


def _clear(name: str, folder: int) -> bool:
    with contextlib.suppress(OSError):  # locked by its service, or gone, or not a note
        fd = open_own_file(name, folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder)
            return True
        finally:
            os.close(fd)
    return False


def _usable_folder() -> Path:
    """The folder for new notes; makes it if it does not exist. Raises OSError."""
    folder = runtime_folder()
    try:
        folder.mkdir(mode=0o700)
        why = ""
    except FileExistsError:
        why = folder_refusal(folder)
    except OSError as error:
        why = f"can't be made ({error.strerror})"
    if not why:
        return folder
    if made := other_folders():
        return made[0]
    instead = another_folder()
    _warn_once(f"{folder} {why}: the notes by which `bps` finds this job are in {instead}")
    return instead


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _leave(job: JobNote) -> tuple[Path, int]:
    """Write the note; returns its path and a descriptor that holds the lock. Raises OSError."""
    for _ in range(_TRIES):
        folder = _usable_folder()
        name = f"{job.pid}-{secrets.token_hex(4)}{_SUFFIX}"
        try:
            with opened_folder(folder) as there:
                return folder / name, _write(name, there, job)
        except FileNotFoundError:
            continue  # another job has ended meanwhile, and deleted the empty folder
    raise FileNotFoundError(f"{folder} was deleted {_TRIES} times while a note was written")


def _write(name: str, folder: int, job: JobNote) -> int:
    # The note gets its name once it is complete and locked, so that `clear` and `find` never see a partial one.
    unnamed = f"{name}.new"
    fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps(asdict(job)).encode())
        os.rename(unnamed, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unnamed, dir_fd=folder)
        os.close(fd)
        raise
    return fd


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # other notes are there, or the folder is gone
        with opened_folder(path.parent) as folder:
            os.unlink(path.name, dir_fd=folder)
        path.parent.rmdir()


def _read(name: str, folder: int) -> JobNote | None:
    """Read a note. None if the file does not exist, can be accessed by others, or is not a note."""
    with contextlib.suppress(OSError, ValueError, TypeError), open(open_own_file(name, folder)) as file:
        return JobNote(**json.loads(file.read(_MAX_BYTES)))
    return None
