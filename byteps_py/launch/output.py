"""The output of many processes on one terminal, in whole lines, and in a file per process and stream.

``LineTagger`` is pure. An ``OutputStream`` reads one pipe without blocking and writes to its sinks; the launcher's
thread owns it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from byteps_py.failure_notice import FailureNotice

#: A line longer than this is shown in pieces: the launcher does not hoard what a process writes.
MAX_LINE_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
#: More than a pipe holds, so a dead process's last words are read at once; a flood must not starve the others.
_READS_AT_ONCE = 16
# A progress bar ends its line with a carriage return alone.
_TRACEBACK = rb"(Traceback \(most recent call last\):|Exception ignored in|Process \S+:$)"
_MAX_WORDS_BYTES = 256 << 10
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n)")


class LineTagger:
    """Bytes in, whole lines out, each with ``prefix`` before it."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
        text = self._rest + data
        # What a carriage return at the very end means is known when the next byte is there.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, self._rest = _LINE_END.split(text[: len(text) - len(held)])
        self._rest += held
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def flush(self) -> bytes:
        """What is left at the end, as a line."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return self._prefix + rest + b"\n" if rest else b""


class WordsPipe:
    """Through which a process says why it fails. ``writer`` is the process's end, to be closed after its start."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self.name = f"{self.writer}:{os.fstat(self.writer).st_ino}"
        self.is_over = False
        self._rest = b""

    def read(self) -> list[FailureNotice]:
        """The words that have come. ``is_over`` once all ends that write are closed."""
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(self.reader, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.is_over = True
                break
            self._rest += data
            if len(self._rest) > _MAX_WORDS_BYTES:
                self._rest = b""  # nothing of ours
        *lines, self._rest = self._rest.split(b"\n")
        return [words for line in lines if (words := FailureNotice.unpack(line)) is not None]

    def close(self) -> None:
        os.close(self.reader)


class OutputStream:
    """One pipe from a process, shown on ``terminal`` in lines and, unchanged, written to ``file``."""

    def __init__(self, pipe: int, terminal: int, prefix: str, file: Path | None, again: bool) -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self._terminal: int | None = terminal
        self._tagger = LineTagger(prefix.encode())
        self._is_error = terminal == 2
        self._is_interrupted = False
        self._held = b""  # of an interrupted process: from a traceback on
        self._traceback = re.compile(b"^" + re.escape(prefix.encode()) + _TRACEBACK, re.MULTILINE)
        self._file = None if file is None else os.open(file, _CREATE | (os.O_APPEND if again else os.O_TRUNC), 0o666)

    def pump(self) -> bool:
        """Pass on what there is. False when the pipe is at its end."""
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
        """What the process has said in another way belongs into the file, too."""
        if self._is_error and self._file is not None:
            _write_all(self._file, text.encode(errors="replace"))

    def expect_interrupt(self) -> None:
        """The process is told to end. How its Python does so is of no interest: nothing failed."""
        self._is_interrupted = self._is_error

    def _pass_on(self, data: bytes) -> None:
        if self._held:
            self._held = (self._held + data)[-MAX_LINE_BYTES:]
            return
        if self._is_interrupted:
            found = self._traceback.search(data)
            at = len(data) if found is None else found.start()
            data, self._held = data[:at], data[at:]
        self._show(data)

    def close(self) -> None:
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
            self._terminal = None  # nobody reads any more (`| head`); that is no reason to end a training


def open_streams(
    label: str, *, tag: bool, folder: Path | None, again: bool = False
) -> tuple[Sequence[int], list[OutputStream]]:
    """(descriptors for a child's stdout and stderr, to be closed after its start; the streams that read them).
    ``again``: files go on where those of the process before it ended.

    Nothing is returned when neither prefixes nor files are wanted: the child then writes to the terminal itself.
    """
    if not tag and folder is None:
        return (), []
    children, streams = [], []
    for terminal, name in ((1, "stdout"), (2, "stderr")):
        file = None
        if folder is not None:
            own = folder / (f"rank.{label}" if label[0].isdigit() else label)
            own.mkdir(parents=True, exist_ok=True)
            file = own / name
        reader, writer = os.pipe2(os.O_CLOEXEC)
        children.append(writer)
        streams.append(OutputStream(reader, terminal, f"[{label}] " if tag else "", file, again))
    return children, streams


def show(text: str, prefix: str) -> None:
    """Somebody's last words, on stderr, in one piece."""
    tagger = LineTagger(prefix.encode())
    with contextlib.suppress(BrokenPipeError):
        _write_all(2, tagger.feed(text.encode(errors="replace")) + tagger.flush())


def say(text: str) -> None:
    """The launcher's own words, on stderr, in one piece."""
    with contextlib.suppress(BrokenPipeError):  # as in Stream: nobody reads any more
        _write_all(2, "".join(f"bpslaunch: {line}\n" for line in text.splitlines()).encode(errors="replace"))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
