"""What all commands of `bps` have in common: a help with an example that works, few imports, completion."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from byteps_py.cli.__main__ import build_parser
from byteps_py.cli.completion import SHELLS

#: Modules that take longer to import than all of `bps --help`.
HEAVY = {
    "torch",
    "numpy",
    "numba",
    "grpc",
    "google.protobuf",
    "zmq",
    "cryptography",
    "rich",
    "asyncio",
    "argcomplete",
    "byteps_py.config.settings",
}
REPORT = f"""
import sys
from byteps_py.cli.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
print("heavy:", sorted({HEAVY!r} & sys.modules.keys()))
"""


def commands(parser: argparse.ArgumentParser, words: str = "bps") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """All commands that do something, with their parsers."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not found:
        yield words, parser
    for action in found:
        for name, inner in action.choices.items():
            yield from commands(inner, f"{words} {name}")


COMMANDS = dict(commands(build_parser()))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_an_example_that_works_and_the_exit_codes(name: str) -> None:
    text = COMMANDS[name].format_help()
    after = text.partition("\nexample:\n")[2].splitlines()
    words = shlex.split(after[0])
    assert " ".join(words).startswith(name)
    if ">" in words:
        words = words[: words.index(">")]
    arguments = build_parser().parse_args(words[1:])
    assert arguments.handler is COMMANDS[name].get_default("handler")
    assert after[1:3] == ["", "exit codes:"]
    assert [line.split()[0] for line in after[3:6]] == ["0", "1", "2"]


def test_commands_with_figures_print_json() -> None:
    without = {name for name, parser in COMMANDS.items() if "--json" not in parser.format_help()}
    assert without == {"bps checkpoint", "bps completion", "bps lend"}  # sentences; a script


@pytest.mark.parametrize("words", [["--help"], ["bench", "--help"], ["doctor", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    """The parsers of all commands are made each time."""
    done = subprocess.run([sys.executable, "-c", REPORT, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("\nheavy: []\n"), done.stdout + done.stderr


# ---- completion ------------------------------------------------------------------------------------------------


@pytest.fixture(name="environ")
def _environ(tmp_path: Path) -> dict[str, str]:
    """A program `bps` on the path, and no jobs."""
    (tmp_path / "bps").write_text(
        f"#!{sys.executable}\nfrom byteps_py.cli.__main__ import main\nraise SystemExit(main())"
    )
    (tmp_path / "bps").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bps sta", {"status"}),
        ("bps status --js", {"--json"}),
        (
            "bps plan ",
            {"size", "memory", "calibrate", "predict", "layout", "cluster", "model", "operators", "-h", "--help"},
        ),
        ("bps completion f", {"fish"}),
    ],
)
def test_bash_completes_commands_and_options(environ: dict[str, str], line: str, expected: set[str]) -> None:
    words = [*line.split(), *([""] if line.endswith(" ") else [])]
    script = f"""
    eval "$(bps completion bash)"
    COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_TYPE=9 COMP_KEY=9
    COMP_WORDS=({" ".join(map(shlex.quote, words))}) COMP_CWORD={len(words) - 1}
    $(complete -p bps | sed 's/.*-F \\([^ ]*\\).*/\\1/') bps
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert {word.strip() for word in done.stdout.split()} == expected, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_accepts_its_script(environ: dict[str, str], shell: str, tmp_path: Path) -> None:
    done = subprocess.run(["bps", "completion", shell], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bps" in done.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here: apt-get install {shell}")
    (tmp_path / "script").write_text(done.stdout)
    read = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, timeout=60)
    assert (read.returncode, read.stderr) == (0, "")


def test_an_answer_to_a_shell_imports_nothing_heavy(environ: dict[str, str], tmp_path: Path) -> None:
    program = "import atexit, os, sys\nfrom byteps_py.cli.__main__ import main\nreal = os._exit\n"
    program += f"def leave(code):\n    print(sorted({HEAVY - {'argcomplete'}!r} & sys.modules.keys()), flush=True)\n"
    program += "    real(code)\nos._exit = leave\nmain()\n"
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": "bps sta",
        "COMP_POINT": "7",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
    assert "status" in (tmp_path / "out").read_text()
