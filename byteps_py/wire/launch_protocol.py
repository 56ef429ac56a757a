"""The messages of processes to the launcher that started them: exit statuses, and notices of failures.

The launcher gives every process a pipe (``BYTEPS_LAUNCH_WORDS``). A failing rank writes its traceback there instead of
to stderr. So the traceback stays in one piece, and the launcher can tell the cause from its consequences: it shows the
cause of a failure once, and last. Without a launcher nothing changes. Any thread, but for the launcher's end.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

# Exit statuses by which a service instructs its launcher, beyond 0 (it ended in order) and 1 (it failed):

#: The configuration is unusable, for instance because the port is taken.
UNUSABLE_STATUS = 2
#: A summation service that was declared dead by mistake. It can be started again (EX_TEMPFAIL).
GIVEN_UP_STATUS = 75
#: A scheduler that can't write its journal (EX_CONFIG). Starting it again would not help.
NO_JOURNAL_STATUS = 78

#: Holds ``descriptor:inode`` of the pipe. The inode shows whether another file has that descriptor by now.
NOTICE_VARIABLE = "BYTEPS_LAUNCH_WORDS"
_MAX_CHARS = 30_000  # less than a pipe's buffer, so that a sender never waits for the launcher
#: The most different errors that are shown; there may be as many as ranks.
_MOST = 4
#: If a process has not ended so many seconds after its notice, the notice is shown: something keeps the process.
SHOW_AFTER_S = 15.0
_READ_BYTES = 64 << 10
_READS_AT_ONCE = 16  # more than a pipe holds
_MAX_NOTICE_BYTES = 256 << 10


@contextmanager
def handle_signals(signals: Sequence[int], handler: Callable[[int, object], object]) -> Iterator[None]:
    """Call ``handler`` for ``signals`` inside the ``with`` block, and ignore them afterwards. Main thread only.

    For a process that exits after the block: a signal that arrives meanwhile does not replace its status. An
    interpreter that exits restores the default action of a signal that has a Python handler; that action would kill the
    process.
    """
    for number in signals:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)


class Blame(enum.StrEnum):
    """The party whose failure ended the process."""

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
        text: the text that the launcher shows, a traceback for instance.

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


def send_notice(blame: Blame, error: str, text: str) -> bool:
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
    descriptor, _, inode = os.environ.get(NOTICE_VARIABLE, "").partition(":")
    try:
        found = os.fstat(int(descriptor))
    except (ValueError, OSError, OverflowError):
        return None
    return int(descriptor) if stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode else None


class NoticePipe:
    """The pipe through which a process says why it fails. ``writer`` is the process's end; close it after the start."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self.name = f"{self.writer}:{os.fstat(self.writer).st_ino}"
        self.is_over = False
        self._rest = b""

    def read(self) -> list[FailureNotice]:
        """The notices that have arrived. ``is_over`` is set once all writing ends are closed."""
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(self.reader, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.is_over = True
                break
            self._rest += data
            if len(self._rest) > _MAX_NOTICE_BYTES:
                self._rest = b""  # not a message of this package
        *lines, self._rest = self._rest.split(b"\n")
        return [notice for line in lines if (notice := FailureNotice.unpack(line)) is not None]

    def close(self) -> None:
        os.close(self.reader)


@dataclass(slots=True)
class _Said:
    label: str
    notice: FailureNotice
    at_s: float


class FailureReport:
    """Collects the notices of one job's processes: of a job that failed, the cause is shown once, with the ranks that
    reported it. Pure.

    A rank that ended because another rank failed repeats that rank's error; so does a service. Their notices are shown
    only if no process of this launcher reported the error as its own: the cause was on another machine, or a killed
    process said nothing.
    """

    def __init__(self) -> None:
        self._said: list[_Said] = []
        self._shown: set[Blame] = set()

    def add(self, label: str, notice: FailureNotice, now_s: float) -> None:
        """A notice of the process with this label, as in prefixes."""
        if notice.blame is not Blame.NOBODY:
            self._said.append(_Said(label, notice, now_s))

    @property
    def due_s(self) -> float | None:
        """When to show the message of a process that does not end; None if there is none."""
        return min((said.at_s + SHOW_AFTER_S for said in self._said if said.notice.blame is Blame.OWN), default=None)

    def take(self, was_asked_to_end: bool = False) -> list[tuple[str, str]]:
        """The (labels, text) pairs to show now, the first cause last; they are not shown again. ``was_asked_to_end``: a
        user ended the job, so only processes that failed by themselves matter."""
        said, self._said = self._said, []
        for blame in (Blame.OWN,) if was_asked_to_end else (Blame.OWN, Blame.OTHERS, Blame.SERVICE):
            if self._shown and blame is not Blame.OWN:
                break  # the cause has been shown, or one of its consequences
            groups: dict[str, list[_Said]] = {}
            for each in said:
                if each.notice.blame is blame:
                    groups.setdefault(each.notice.error, []).append(each)
            if groups:
                self._shown.add(blame)
                return self._blocks(list(groups.values())[: None if blame is Blame.OWN else 1])
        return []

    def begin_anew(self) -> None:
        """Errors that are reported from now on have another cause than those before."""
        self._shown.clear()

    @staticmethod
    def _blocks(groups: list[list[_Said]]) -> list[tuple[str, str]]:
        # The longest text of equal errors has the exception that caused it, such as that of a pipeline's stage.
        blocks = [
            (_labels([each.label for each in group]), max((each.notice.text for each in group), key=len))
            for group in groups[:_MOST]
        ]
        if len(groups) > _MOST:
            more = len(groups) - _MOST
            blocks.append(
                ("", f"… and {more} other {'errors' if more > 1 else 'error'} of other ranks, which came later")
            )
        return blocks[::-1]


def _labels(labels: list[str]) -> str:
    """
    >>> _labels(["2", "0", "1"]), _labels(["3", "1"]), _labels(["0.1"])
    ('0-2', '1,3', '0.1')
    """
    if not all(label.isdigit() for label in labels):
        return ",".join(sorted(labels))
    numbers = sorted(map(int, labels))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
