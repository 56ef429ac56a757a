"""A progress bar and a page in place appear on a terminal alone; colours also not with NO_COLOR."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from byteps_py.system import terminal
terminal._PATIENCE_S = terminal._REDRAW_S = terminal._LINE_EVERY_S = 0.0
with terminal.ProgressBar("writing") as bar:
    for done in range(5):
        bar.update(done, 4, "step 7")
with terminal.LivePage() if terminal.is_terminal(sys.stdout) else open("/dev/null") as page:
    if terminal.is_terminal(sys.stdout):
        page.show("\\n".join(f"line {number}" for number in range(99)))
print(terminal.coloured("fine", "green", sys.stdout))
"""


def on_a_terminal(**variables: str) -> str:
    """What the program writes to a terminal of 24 lines."""
    leader, follower = pty.openpty()
    environ = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "LINES", "COLUMNS")}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=follower, stdout=follower, stderr=follower,
        env={**environ, "TERM": "xterm", **variables},
    ) as process:  # fmt: skip
        os.close(follower)
        text = b""
        while select.select([leader], [], [], 60)[0]:
            try:
                text += os.read(leader, 1 << 16)
            except OSError:  # the program has ended
                break
        assert process.wait(60) == 0, text
    os.close(leader)
    return text.decode()


def test_on_a_terminal() -> None:
    text = on_a_terminal()
    assert "writing " in text
    assert "50%" in text
    assert "step 7" in text
    assert "\x1b[?1049h" in text
    assert "\x1b[?1049l" in text  # as it was
    assert "line 22\x1b[K" in text
    assert "line 23" not in text  # there is no room for it
    assert "\x1b[32mfine\x1b[0m" in text


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours(variables: dict[str, str]) -> None:
    text = on_a_terminal(**variables)
    assert text.endswith("fine\r\n")
    assert ("\x1b[" in text) == (variables.get("TERM") is None)


def test_lines_take_the_place_of_a_bar_where_they_are_wanted() -> None:
    program = PROGRAM.replace('("writing")', '("writing", in_pipes=True)')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[2] == "writing: 50%, 0 s left step 7"
    assert len(done.stderr.splitlines()) == 5


def test_off_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("fine\n", "")
