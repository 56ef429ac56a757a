"""Logs as JSON: one object a line, whatever a message has; and back to text."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from byteps_py.cli.__main__ import main as bps
from byteps_py.launch.process_output import LineTagger
from byteps_py.system.log import JsonFormatter, about, text_of

FACTS = {"job": "j", "role": "rank", "machine": "gpu-1", "rank": 3, "step": 7}


def line_of(message: str, *arguments: object, **extra: object) -> str:
    record = logging.getLogger("byteps_py").makeRecord(
        "byteps_py", logging.WARNING, "", 0, message, arguments, None, extra=extra
    )
    record.created, record.msecs = 1.7e9 + 0.25, 250.0
    return JsonFormatter(lambda: FACTS).format(record)


def test_a_line_has_all_that_is_known() -> None:
    line = line_of("rank %d waits\nfor %s", 3, "naïve “w”", **about(tensor="w", step=9))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z", "level": "WARNING", "logger": "byteps_py", "job": "j", "role": "rank",
        "machine": "gpu-1", "rank": 3, "step": 9, "tensor": "w", "message": "rank 3 waits\nfor naïve “w”",
    }  # fmt: skip


def test_an_exception_is_a_part_of_its_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info(), "levelname": "ERROR"})
    line = JsonFormatter(dict).format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: no")
    text = text_of(line)
    assert text is not None
    assert text.endswith("ValueError: no")


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert about() == {}
    assert about(tensor="") == {}
    assert "tensor" not in line_of("hello")


@pytest.mark.parametrize(
    "line", ["hello", "{", '{"a": 1}', '{"time": 1, "level": 2}', "[" * 100_000, "{" * 100_000, ""]
)
def test_what_is_no_line_of_a_log_is_left_as_it_is(line: str) -> None:
    assert text_of(line) is None


def test_a_line_as_text() -> None:
    assert (
        text_of(line_of("hello", **about(tensor="w"))) == "22:13:20 byteps_py rank 3 WARNING: hello [step 7] [tensor w]"
    )


def test_the_launcher_puts_no_prefix_before_an_object() -> None:
    tagger = LineTagger(b"[3] ")
    line = line_of("hello").encode()
    assert tagger.feed(line + b"\nprinted\n") == line + b"\n[3] printed\n"


def test_bps_logs_reads_both_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank.3").mkdir()
    (tmp_path / "rank.3" / "stderr").write_text(f"{line_of('hello')}\n12:00:00 byteps_py rank 3 INFO: as before\n")
    assert bps(["logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[rank.3 stderr] 22:13:20 byteps_py rank 3 WARNING: hello [step 7]",
        "[rank.3 stderr] 12:00:00 byteps_py rank 3 INFO: as before",
    ]
    assert bps(["logs", str(tmp_path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert json.loads(first["line"])["message"] == "hello"
