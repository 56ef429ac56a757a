"""Folders that only this user can change, below /tmp too, where another user may have made one of that name first.

Nothing here follows a symbolic link, or waits for the other end of a FIFO. A folder is checked through its descriptor,
and its files are reached through that descriptor, so nobody can exchange the folder between the check and the use. Any
thread; needs only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def refusal(folder: Path) -> str:
    """Why files of this user can't be kept in ``folder``, as a clause. Empty if they can, or if there is no folder yet.

    >>> refusal(Path("/etc/passwd"))
    'is no folder'
    """
    try:
        with opened(folder):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"can't be opened ({error.strerror})" if error.errno else str(error.strerror)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """The folder's descriptor, during the ``with`` block.

    Raises FileNotFoundError, or PermissionError if the folder is not one that only this user can access.
    """
    try:
        fd = os.open(folder, _LOOK | os.O_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError:
        if fault := _fault(folder.lstat()):
            raise PermissionError(0, fault, str(folder)) from None
        raise
    try:
        if fault := _fault(os.fstat(fd)):
            raise PermissionError(0, fault, str(folder))
        yield fd
    finally:
        os.close(fd)


def _fault(about: os.stat_result) -> str:
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


def others() -> list[Path]:
    """The folders that ``another`` has made and that are still there, by name."""
    found = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found = [Path(entry) for entry in entries if entry.name.startswith(_prefix())]
    return sorted(path for path in found if not refusal(path))


def another() -> Path:
    """A new private folder in the temporary folder, for files that can't be kept in their own folder. Raises
    OSError."""
    return Path(tempfile.mkdtemp(prefix=_prefix()))


def _prefix() -> str:
    return f"byteps-{os.getuid()}-"
