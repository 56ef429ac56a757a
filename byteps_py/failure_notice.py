"""The notice that a failing process sends to its launcher, which shows the cause of a failure once, and last.

The launcher gives every process a pipe (``BYTEPS_LAUNCH_WORDS``). A failing rank writes its traceback there instead of
to stderr. So the traceback stays in one piece, and the launcher can tell the cause from its consequences. Without a
launcher nothing changes. Any thread.
"""

from __future__ import annotations

import enum
import json
import os
import stat
from dataclasses import asdict, dataclass

#: Holds ``descriptor:inode`` of the pipe. The inode shows whether another file has that descriptor by now.
VARIABLE = "BYTEPS_LAUNCH_WORDS"
_MAX_CHARS = 30_000  # less than a pipe's buffer, so that a sender never waits for the launcher


class Blame(enum.StrEnum):
    """Whose failure ended the process."""

    OWN = "own"  # its own, or all ranks failed in the same operation
    OTHERS = "others"  # another process's
    SERVICE = "service"  # a service was told that the job has failed
    NOBODY = "nobody"  # somebody asked it to end, as with Ctrl-C


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """One failed process.

    Attributes:
        blame: whose failure it was.
        error: type and message; equal on ranks that failed in the same way.
        text: what the launcher shows, a traceback for instance.

    >>> notice = FailureNotice(Blame.OWN, "ValueError: 3", "Traceback …")
    >>> FailureNotice.unpack(notice.pack()) == notice
    True
    """

    blame: Blame
    error: str
    text: str

    def pack(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def unpack(cls, line: bytes) -> FailureNotice | None:
        """The notice that ``pack`` made ``line`` of; None if it made no such line."""
        try:
            fields = json.loads(line)
            return cls(Blame(fields["blame"]), str(fields["error"]), str(fields["text"]))
        except (ValueError, KeyError, TypeError):
            return None


def send(blame: Blame, error: str, text: str) -> bool:
    """Send a notice to the launcher. False if there is no launcher; the caller then prints ``text`` itself."""
    pipe = _pipe()
    if pipe is None:
        return False
    kept = text if len(text) <= _MAX_CHARS else f"…{text[-_MAX_CHARS:]}"
    data = memoryview(FailureNotice(blame, error[:_MAX_CHARS], kept).pack())
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except OSError:  # the launcher is gone
        return False
    return True


def has_launcher() -> bool:
    """True if a launcher reads this process's notices."""
    return _pipe() is not None


def _pipe() -> int | None:
    descriptor, _, inode = os.environ.get(VARIABLE, "").partition(":")
    try:
        found = os.fstat(int(descriptor))
    except (ValueError, OSError, OverflowError):
        return None
    return int(descriptor) if stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode else None
