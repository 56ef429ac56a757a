"""What a process of a launch says when it fails: to its launcher, which shows the cause once, and last.

The launcher hands every process a pipe of its own (``BYTEPS_LAUNCH_WORDS``). A failing rank's traceback goes there
instead of its stderr, so that it is in one piece, and the launcher can tell the cause from its consequences. Without a
launcher nothing changes. Any thread.
"""

from __future__ import annotations

import enum
import json
import os
import stat
from dataclasses import asdict, dataclass

#: ``descriptor:inode`` of the pipe, so that nobody writes to another file that has this descriptor.
VARIABLE = "BYTEPS_LAUNCH_WORDS"
_MAX_CHARS = 30_000  # less than a pipe holds: nobody waits for the launcher


class Blame(enum.StrEnum):
    OWN = "own"  # this process failed, or all ranks did in the same operation
    OTHERS = "others"  # it ended because another process failed
    SERVICE = "service"  # a service was told that the job has failed
    NOBODY = "nobody"  # somebody asked it to end, as by Ctrl-C


@dataclass(frozen=True, slots=True)
class LastWords:
    """``error``: type and message; equal on ranks that failed in the same way. ``text``: to be shown."""

    blame: Blame
    error: str
    text: str

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def unpack(cls, line: bytes) -> LastWords | None:
        """None: the line is not one that ``pack`` has made."""
        try:
            fields = json.loads(line)
            return cls(Blame(fields["blame"]), str(fields["error"]), str(fields["text"]))
        except (ValueError, KeyError, TypeError):
            return None


def say(blame: Blame, error: str, text: str) -> bool:
    """Tell the launcher. False: there is none, and the caller says it itself."""
    pipe = _pipe()
    if pipe is None:
        return False
    kept = text if len(text) <= _MAX_CHARS else f"…{text[-_MAX_CHARS:]}"
    data = memoryview(LastWords(blame, error[:_MAX_CHARS], kept).pack())
    try:
        while data:
            data = data[os.write(pipe, data) :]
    except OSError:  # the launcher is gone
        return False
    return True


def is_heard() -> bool:
    """There is a launcher."""
    return _pipe() is not None


def _pipe() -> int | None:
    descriptor, _, inode = os.environ.get(VARIABLE, "").partition(":")
    try:
        found = os.fstat(int(descriptor))
    except (ValueError, OSError, OverflowError):
        return None
    return int(descriptor) if stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode else None
