"""Files with secrets: that of BYTEPS_SECRET_FILE, this user's own, and those in memory.

A batch system's jobs need no secret from their user, because their machines share a home folder. The first process
that needs this user's own secret makes it, in a file that only this user can read; processes that come at the same time
agree on one. A job's secret is derived from it and the job's name. So it is neither in an environment nor in a file,
and who learns one job's secret knows no other's. Any thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from byteps_py.errors import ConfigurationError
from byteps_py.wording import shown

_BYTES = 32


def user_secret_path(environ: Mapping[str, str]) -> Path | None:
    """The file with the secret; None if ``environ`` does not say where the user's files are."""
    if folder := environ.get("XDG_CONFIG_HOME"):
        return Path(folder) / "byteps" / "secret"
    return Path(environ["HOME"]) / ".config" / "byteps" / "secret" if environ.get("HOME") else None


def user_secret(path: Path) -> str:
    """The secret in this file, which is made unless it is there. Raises ConfigurationError."""
    if not path.exists():
        _make(path)
    return read_secret(str(path))


def _make(path: Path) -> None:
    # The file gets its name once it is complete. A link fails if another process was first, also over NFS.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{secrets.token_hex(_BYTES)}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, path)
        finally:
            os.unlink(unfinished)
    except OSError as error:
        raise ConfigurationError(
            f"{path}, from which the secrets of this user's jobs are derived, can't be made: {error.strerror}. Set "
            "BYTEPS_SECRET_FILE to a file with a secret that all machines of the job can read"
        ) from error


def memory_file(secret: str) -> str:
    """The path of a file in memory with this secret, which only this user can read. It ends with this process."""
    descriptor = os.memfd_create("byteps-secret", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode(errors="surrogateescape"))
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def job_secret(of_user: str, name: str) -> str:
    """The secret of the job with this name.

    >>> job_secret("a", "slurm/7") == job_secret("a", "slurm/7") != job_secret("a", "slurm/8")
    True
    """
    return hashlib.blake2b(f"{of_user}\0{name}".encode(errors="surrogateescape"), digest_size=_BYTES).hexdigest()


_MAX_SECRET = 1 << 20  # characters to read; the file may be a device that has no end
_MOUNTS = Path("/proc/self/mountinfo")
#: The folder where Docker and Podman put secrets, readable by every user of the container.
_CONTAINER_SECRETS = Path("/run/secrets")


def read_secret(path: str) -> str:
    """The secret, without the white space around it.

    Raises ConfigurationError if the file can't be read, has no secret, or if others than its owner can read it. A
    container's secret is an exception: its users are the container's, and its mode is the host's decision. So is a file
    of another user that this process reads as a member of the file's group.
    """
    said = f"BYTEPS_SECRET_FILE={shown(path)}"
    try:
        # A FIFO is not waited for.
        with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            why = _exposure(os.fstat(file.fileno()), path)
            secret = "" if why else file.read(_MAX_SECRET + 1)
    except OSError as error:
        raise ConfigurationError(f"{said} can't be read: {error.strerror}") from error
    except ValueError:
        raise ConfigurationError(f"{said} is not a text file in UTF-8, or its path is not valid") from None
    if why:
        raise ConfigurationError(f"{said} {why}")
    if len(secret) > _MAX_SECRET:
        raise ConfigurationError(f"{said} has more than {_MAX_SECRET} characters, which is too long for a secret")
    if not secret.strip():
        raise ConfigurationError(f"{said} is empty")
    return secret.strip()


def _exposure(about: os.stat_result, path: str) -> str:
    """A clause that says which other users can read or change the file; empty if none can."""
    if not stat.S_ISREG(about.st_mode):
        return ""
    mode = stat.S_IMODE(about.st_mode)
    can_write = mode & 0o022
    can_read = mode & 0o004 or (mode & 0o040 and about.st_uid == os.getuid())
    if not can_write and (not can_read or _is_of_a_container(path)):
        return ""
    does = "change" if can_write else "read"
    return (
        f"has mode {mode:04o}, so other users of this machine can {does} the cluster secret, and join its jobs: run "
        f"chmod 600 {shown(path)} as its owner, and make a new secret if others may have read this one"
    )


def _is_of_a_container(path: str) -> bool:
    """True for a file that was mounted by itself, or is among the secrets of a container."""
    real = Path(path).resolve()
    if _CONTAINER_SECRETS in real.parents:
        return True
    with contextlib.suppress(OSError):
        return any(line.split()[4] == str(real) for line in _MOUNTS.read_text().splitlines())
    return False
