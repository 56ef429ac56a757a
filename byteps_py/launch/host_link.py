"""What ``bpslaunch -H`` and the launchers that it starts on its hosts say to each other, over the streams of ssh.

    bpslaunch -H                              bpslaunch, on a host
      HostTask, one line ────── stdin ──────►   reads its part of the job, with the cluster secret
      numbers of signals ────── stdin ──────►   obeys; the end of stdin: the connection is lost, so it ends the ranks
      lines, and HostReports ◄── stderr ────    why ranks fail; its own exit code as soon as it is decided
      lines ◄────────────────── stdout ─────    output of the ranks

Standard input is the only way on which nobody else can read a secret: arguments of a program are public. One thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from byteps_py.errors import RendezvousError
from byteps_py.wire.launch_protocol import Blame, FailureNotice

#: The first argument of the launcher on a host, before ``answer`` or ``run``.
HOST_OPTION = "--on-host"
#: Begins an answer to a probe: a login shell may print lines of its own before it.
ANSWER_MARK = "byteps-host "
_REPORT_MARK = b"\x1e"
_READ_BYTES = 64 << 10
#: A whole task fits into a pipe of this size, so that writing it waits for nobody.
MAX_TASK_BYTES = 1 << 20
#: Less than process_output.MAX_LINE_BYTES, above which lines are cut.
_MAX_REPORT_BYTES = 60 << 10
_TASK_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class HostTask:
    """What one host is to do: ``arguments`` of bpslaunch in ``folder``, with ``variables`` added to the environment.

    ``label``: the host's name in prefixes. The secret is kept out of ``variables``, and of what repr shows.
    """

    label: str
    folder: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    secret: str

    def pack(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def unpack(cls, line: bytes) -> HostTask:
        """The task that ``pack`` made ``line`` of. Raises RendezvousError for another line."""
        try:
            fields = json.loads(line)
            texts = {name: str(fields[name]) for name in ("label", "folder", "secret")}
            variables = {str(name): str(text) for name, text in fields["variables"].items()}
            return cls(arguments=tuple(map(str, fields["arguments"])), variables=variables, **texts)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RendezvousError("standard input has no task of bpslaunch -H: start bpslaunch without this") from None

    def __repr__(self) -> str:
        return f"HostTask({self.label!r}, {self.folder!r}, {self.arguments!r})"


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """What a host says when it is asked before the job.

    ``address``: under which ssh reached it, ``client``: of the machine that runs ssh, as it sees that; both empty
    without ssh. ``ports``: two that are free. ``problem``: why it can't run its task; empty if it can.
    """

    version: str
    address: str
    client: str
    ports: tuple[int, int]
    gpus: int
    problem: str

    def pack(self) -> str:
        """One line, with its end."""
        return f"{ANSWER_MARK}{json.dumps(asdict(self))}\n"

    @classmethod
    def find(cls, text: str) -> HostAnswer | None:
        """The answer among the lines of ``text``; None if none of them is one."""
        for line in text.splitlines():
            if line.startswith(ANSWER_MARK):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    fields: dict[str, Any] = json.loads(line.removeprefix(ANSWER_MARK))
                    first, second = map(int, fields["ports"])
                    texts = {name: str(fields[name]) for name in ("version", "address", "client", "problem")}
                    return cls(ports=(first, second), gpus=int(fields["gpus"]), **texts)
        return None


@dataclass(frozen=True, slots=True)
class HostReport:
    """One of four facts: a process with ``label`` has failed with ``notice``; the launcher will end with ``code``; all
    its ranks have ``ended``; it was a spare one and has ``taken`` the place of a lost machine."""

    label: str = ""
    notice: FailureNotice | None = None
    code: int = 0
    ended: bool = False
    taken: bool = False

    def pack(self) -> bytes:
        """One line, with its end; a long text is cut at its front."""
        notice = self.notice
        while True:
            said = None if notice is None else [str(notice.blame), notice.error, notice.text]
            record = {**asdict(self), "notice": said}
            data = _REPORT_MARK + json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"
            if len(data) <= _MAX_REPORT_BYTES or notice is None:
                return data
            notice = FailureNotice(
                notice.blame, notice.error[: len(notice.error) // 2], notice.text[len(notice.text) // 2 :]
            )

    @classmethod
    def unpack(cls, line: bytes) -> HostReport | None:
        """The report that ``pack`` made ``line`` of; None for any other line."""
        if not line.startswith(_REPORT_MARK):
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fields = json.loads(line[1:])
            notice = None
            if fields["notice"] is not None:
                blame, error, text = map(str, fields["notice"])
                notice = FailureNotice(Blame(blame), error, text)
            return cls(str(fields["label"]), notice, int(fields["code"]), bool(fields["ended"]), bool(fields["taken"]))
        return None


class LauncherLink:
    """The end of the launcher on a host: ``bpslaunch -H`` is at the other one.

    ``descriptor`` is readable when there is something for ``signals``. ``is_over``: the connection has ended.
    """

    def __init__(self, descriptor: int, report_descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_over = False
        self.label = ""  # of this host, once the task is there
        self._reports = report_descriptor
        self._rest = b""

    def task(self, limit_s: float = _TASK_LIMIT_S) -> HostTask:
        """The first line. Raises RendezvousError if it does not come."""
        end_s = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left_s = max(0.0, end_s - time.monotonic())
            if (
                self.is_over
                or len(self._rest) > MAX_TASK_BYTES
                or not select.select([self.descriptor], [], [], left_s)[0]
            ):
                raise RendezvousError("bpslaunch -H did not say over standard input what this host is to do")
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        task = HostTask.unpack(line)
        self.label = task.label
        return task

    def signals(self) -> list[int]:
        """The numbers of signals that have arrived."""
        self._read()
        *lines, self._rest = self._rest.split(b"\n")
        return [int(line) for line in lines if line.isdigit()]

    def _read(self) -> None:
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except OSError:  # the connection was reset
            data = b""
        self._rest += data
        self.is_over = self.is_over or not data

    def pause(self, seconds: float) -> None:
        """Wait for this time. Raises SystemExit if the job ends meanwhile: a signal arrives, or the connection ends."""
        if not select.select([self.descriptor], [], [], seconds)[0]:
            return
        signals = self.signals()
        if signals or self.is_over:
            raise SystemExit(128 + (signals[0] if signals else signal.SIGHUP))

    def report(self, report: HostReport) -> None:
        """Send a report."""
        data = memoryview(report.pack())
        with contextlib.suppress(OSError):  # the launcher is gone, which ``signals`` sees
            while data:
                data = data[os.write(self._reports, data) :]
