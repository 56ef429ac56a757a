"""Output for a person at a terminal: a progress bar, a page that is written again in place, colours.

A stream that is no terminal (a pipe, a file, TERM=dumb) gets none of them. NO_COLOR (no-color.org) removes colours. One
thread; needs only the standard library.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

_CODES = {"green": "32", "yellow": "33", "red": "31", "bold": "1"}
_BAR_WIDTH = 30
_REDRAW_S = 0.1
#: Work that is done sooner has no bar.
_PATIENCE_S = 0.5
#: Where lines take the place of a bar, one comes so often.
_LINE_EVERY_S = 5.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, and the cursor
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"


def is_terminal(stream: TextIO) -> bool:
    """True if a person looks at ``stream``, and it can be written in place."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """``text`` for ``stream``, in a colour (green, yellow, red, bold) where colours are wanted."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


class ProgressBar:
    """One line on stderr that shows how much is done; gone at the end of the ``with`` block. ``is_wanted`` False: none.
    ``in_pipes``: where stderr is no terminal, as a rank's under bpslaunch, a plain line every five seconds.

    >>> with ProgressBar("copying") as bar:  # no terminal here: nothing is written
    ...     bar.update(1, 2)
    """

    def __init__(self, title: str, is_wanted: bool = True, in_pipes: bool = False) -> None:
        self._title = title
        self._stream = sys.stderr
        self._is_bar = is_terminal(self._stream)
        self._is_shown = is_wanted and (self._is_bar or in_pipes)
        self._began_s = self._drawn_s = time.monotonic()
        self._has_drawn = False

    def __enter__(self) -> ProgressBar:
        return self

    def update(self, done: float, total: float, text: str = "") -> None:
        """``done`` of ``total`` is done; ``text``: what is under way."""
        now_s = time.monotonic()
        every_s = _REDRAW_S if self._is_bar else _LINE_EVERY_S
        if not self._is_shown or now_s - self._began_s < _PATIENCE_S or now_s - self._drawn_s < every_s:
            return
        self._drawn_s, self._has_drawn = now_s, self._is_bar
        part = min(1.0, max(0.0, done / total)) if total else 0.0
        left = f", {(now_s - self._began_s) * (1 - part) / part:.0f} s left" if part > 0.02 else ""
        if not self._is_bar:
            self._stream.write(f"{self._title}: {part:.0%}{left} {text}".rstrip() + "\n")
            self._stream.flush()
            return
        filled = round(part * _BAR_WIDTH)
        line = f"{self._title} {'█' * filled}{'░' * (_BAR_WIDTH - filled)} {part:>4.0%}{left} {text}"
        self._stream.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}{_TO_LINE_END}")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the bar until the next ``update``, and begin to measure time again."""
        if self._has_drawn:
            self._stream.write(f"\r{_TO_LINE_END}")
            self._stream.flush()
        self._has_drawn = False
        self._began_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.clear()


class LivePage:
    """A page on the terminal that is written again in place. At the end of the ``with`` block, the terminal is as it
    was before."""

    def __enter__(self) -> LivePage:
        sys.stdout.write(_ENTER)
        return self

    def show(self, text: str) -> None:
        """Write ``text`` in place of the page before it: as much of it as the terminal has room for."""
        columns, rows = shutil.get_terminal_size()
        lines = [line[:columns] for line in text.splitlines()[: rows - 1]]
        sys.stdout.write(_HOME + "".join(f"{line}{_TO_LINE_END}\n" for line in lines) + _TO_SCREEN_END)
        sys.stdout.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
