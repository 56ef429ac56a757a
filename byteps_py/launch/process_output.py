"""The output of many processes: in whole lines on one terminal, and in a file per process and stream.

``LineTagger`` is pure. An ``OutputStream`` reads one pipe without blocking, and writes to the terminal and a file; the
launcher's thread owns it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: A longer line is shown in pieces: the launcher's memory is limited.
MAX_LINE_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
#: More than a pipe holds, so that the last output of a dead process is read at once. More would delay other processes.
_READS_AT_ONCE = 16
# A progress bar ends its line with a carriage return alone.
_TRACEBACK = rb"(Traceback \(most recent call last\):|Exception ignored in|Process \S+:$)"
#: How a line of log.JsonFormatter begins.
_JSON_LOG = b'{"time": "'
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n)")


#: Gets a line that is about to be shown, and returns True if it is not to be.
OnLine = Callable[[bytes], bool]


class LineTagger:
    """Bytes in, whole lines out, each with ``prefix`` before it."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes, each with its prefix."""
        text = self._rest + data
        # The next byte decides whether a carriage return at the very end is a line end of its own.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, self._rest = _LINE_END.split(text[: len(text) - len(held)])
        self._rest += held
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._tagged(line) for line in lines)

    def flush(self) -> bytes:
        """The incomplete line at the end of the output, as a line."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return self._tagged(rest) if rest else b""

    def _tagged(self, line: bytes) -> bytes:
        """A line of a JSON log says itself whose it is, and stays an object."""
        return line + b"\n" if line.startswith(_JSON_LOG) else self._prefix + line + b"\n"


class OutputStream:
    """One pipe from a process, shown on ``terminal`` in lines and, unchanged, written to ``file``.

    ``on_line``: gets each line, and returns True for one that is not to be shown."""

    def __init__(
        self, pipe: int, terminal: int, prefix: str, file: Path | None, again: bool, on_line: OnLine | None = None
    ) -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self._terminal: int | None = terminal
        self._on_line = on_line
        self._tagger = LineTagger(prefix.encode())
        self._is_error = terminal == 2
        self._is_interrupted = False
        self._held = b""  # of an interrupted process: from a traceback on
        self._traceback = re.compile(b"^" + re.escape(prefix.encode()) + _TRACEBACK, re.MULTILINE)
        self._file = None if file is None else os.open(file, _CREATE | (os.O_APPEND if again else os.O_TRUNC), 0o666)

    def pump(self) -> bool:
        """Show and store the output that is there. False when the pipe is at its end."""
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(self.pipe, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            if self._file is not None:
                _write_all(self._file, data)
            self._pass_on(self._tagger.feed(data))
        return True

    def keep(self, text: str) -> None:
        """Store a message that the process has sent through its NoticePipe in the file of stderr, too."""
        if self._is_error and self._file is not None:
            _write_all(self._file, text.encode(errors="replace"))

    def expect_interrupt(self) -> None:
        """The process gets a signal to end. From now on, do not show the traceback of its KeyboardInterrupt."""
        self._is_interrupted = self._is_error

    def _pass_on(self, data: bytes) -> None:
        if self._on_line is not None:
            data = b"".join(line for line in data.splitlines(keepends=True) if not self._on_line(line))
        if self._held:
            self._held = (self._held + data)[-MAX_LINE_BYTES:]
            return
        if self._is_interrupted:
            found = self._traceback.search(data)
            at = len(data) if found is None else found.start()
            data, self._held = data[:at], data[at:]
        self._show(data)

    def close(self) -> None:
        """Show and store the rest of the output, and close the pipe."""
        self.pump()
        self._pass_on(self._tagger.flush())
        held, self._held = self._held, b""
        if b"KeyboardInterrupt" not in held:
            self._show(held)
        os.close(self.pipe)
        if self._file is not None:
            os.close(self._file)

    def _show(self, data: bytes) -> None:
        if self._terminal is None or not data:
            return
        try:
            _write_all(self._terminal, data)
        except BrokenPipeError:
            self._terminal = None  # the reader has ended (`| head`), but the training goes on


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """``prefix``: of each line; None: the process writes to the terminal itself, if there is no ``folder``.
    ``folder``: for a file per process and stream. ``on_line``: see OutputStream."""

    prefix: str | None
    folder: Path | None = None
    on_line: OnLine | None = None


def open_streams(label: str, how: OutputOptions, again: bool = False) -> tuple[Sequence[int], list[OutputStream]]:
    """(descriptors for a child's stdout and stderr, to close after its start; the streams that read them). ``again``:
    the process is started again, so its output is appended to the files.

    Both are empty without prefixes and files: then the child writes to the terminal itself.
    """
    if how.prefix is None and how.folder is None:
        return (), []
    children, streams = [], []
    for terminal, name in ((1, "stdout"), (2, "stderr")):
        file = None
        if how.folder is not None:
            own = how.folder / (f"rank.{label}" if label[0].isdigit() else label)
            own.mkdir(parents=True, exist_ok=True)
            file = own / name
        reader, writer = os.pipe2(os.O_CLOEXEC)
        children.append(writer)
        streams.append(OutputStream(reader, terminal, how.prefix or "", file, again, how.on_line))
    return children, streams


def show(text: str, prefix: str) -> None:
    """Write the error of a process to stderr, in one piece."""
    tagger = LineTagger(prefix.encode())
    with contextlib.suppress(BrokenPipeError):
        _write_all(2, tagger.feed(text.encode(errors="replace")) + tagger.flush())


_speaker = ["bpslaunch"]


def speak_as(name: str) -> None:
    """``name`` of this launcher in its messages, where several of them write to one terminal."""
    _speaker[:] = [name]


def print_message(text: str) -> None:
    """Write a message of the launcher to stderr, in one piece."""
    with contextlib.suppress(BrokenPipeError):  # the reader has ended
        _write_all(2, "".join(f"{_speaker[0]}: {line}\n" for line in text.splitlines()).encode(errors="replace"))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
