"""The output of many processes on one terminal, in whole lines, and in a file per process and stream.

``LineTagger`` is pure. A ``Stream`` reads one pipe without blocking and writes to its sinks; the launcher's
thread owns it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

#: A line longer than this is shown in pieces: the launcher does not hoard what a process writes.
MAX_LINE_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
#: More than a pipe holds, so a dead process's last words are read at once; a flood must not starve the others.
_READS_AT_ONCE = 16
# A progress bar ends its line with a carriage return alone.
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


class Stream:
    """One pipe from a process, shown on ``terminal`` in lines and, unchanged, written to ``file``."""

    def __init__(self, pipe: int, terminal: int, prefix: str, file: Path | None, again: bool) -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self._terminal: int | None = terminal
        self._tagger = LineTagger(prefix.encode())
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
            self._show(self._tagger.feed(data))
        return True

    def close(self) -> None:
        self.pump()
        self._show(self._tagger.flush())
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
) -> tuple[Sequence[int], list[Stream]]:
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
        streams.append(Stream(reader, terminal, f"[{label}] " if tag else "", file, again))
    return children, streams


def say(text: str) -> None:
    """The launcher's own words, on stderr, in one piece."""
    with contextlib.suppress(BrokenPipeError):  # as in Stream: nobody reads any more
        _write_all(2, "".join(f"bpslaunch: {line}\n" for line in text.splitlines()).encode(errors="replace"))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
