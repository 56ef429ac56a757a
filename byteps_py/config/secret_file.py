"""Reads the file with the cluster secret (BYTEPS_SECRET_FILE). Any thread; needs only the standard library."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from byteps_py.errors import ConfigurationError
from byteps_py.wording import shown

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
