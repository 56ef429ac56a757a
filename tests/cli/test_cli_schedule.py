"""`bps schedule`, as a user runs it."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.documents import commands_of

from byteps_py.cli.__main__ import main
from byteps_py.cli.schedule import NAMES
from byteps_py.parallel.pipe.schedules import SCHEDULES

KEYS = [
    "schedule",
    "p",
    "m",
    "makespan",
    "idle",
    "peak_in_flight",
    "weight_versions",
    "bubble_ratio",
    "warmup",
    "order",
]
ENTRY_KEYS = ["op", "pipe", "stage", "micro_batch", "start", "end"]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> dict[str, Any]:
        assert main(["schedule", *arguments, "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return run


def test_every_schedule_has_a_name() -> None:
    assert tuple(SCHEDULES) == NAMES


# ---- JSON ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        *([name] for name in NAMES),
        ["chimera", "--pipes", "4"],
        ["interleaved", "--chunks", "3", "--consecutive", "6"],
        ["dapple", "--warmup", "B", "--p2p", "0.5"],
        ["gpipe", "--forward", "0.1", "--backward", "0.3"],
    ],
    ids=" ".join,
)
def test_json_has_what_is_promised(answer: Any, arguments: list[str]) -> None:
    result = answer(*arguments, "-p", "4", "-m", "8")
    assert list(result) == KEYS
    assert (result["schedule"], result["p"], result["m"]) == (arguments[0], 4, 8)
    assert all(len(result[key]) == 4 for key in ("idle", "peak_in_flight", "weight_versions", "warmup", "order"))
    entries = [entry for order in result["order"] for entry in order]
    assert all(list(entry) == ENTRY_KEYS for entry in entries)
    assert max(entry["end"] for entry in entries) == result["makespan"]
    for order, idle in zip(result["order"], result["idle"], strict=True):
        assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(order))
        assert idle == pytest.approx(result["makespan"] - sum(entry["end"] - entry["start"] for entry in order))
    passes = [(entry["op"], entry["stage"], entry["micro_batch"]) for entry in entries]
    stages = 4 * {"interleaved": 3 if "--chunks" in arguments else 2}.get(arguments[0], 1)
    assert sorted(passes) == [(op, stage, part) for op in "BF" for stage in range(stages) for part in range(8)]


def test_json_of_one_case(answer: Any) -> None:
    def entry(op: str, stage: int, micro_batch: int, start: float, end: float) -> dict[str, Any]:
        return {"op": op, "pipe": 0, "stage": stage, "micro_batch": micro_batch, "start": start, "end": end}

    assert answer("dapple", "-p", "2", "-m", "2") == {
        "schedule": "dapple",
        "p": 2,
        "m": 2,
        "makespan": 9,
        "idle": [3, 3],
        "peak_in_flight": [2, 1],
        "weight_versions": [1, 1],
        "bubble_ratio": 1 / 3,
        "warmup": [2, 1],
        "order": [
            [entry("F", 0, 0, 0, 1), entry("F", 0, 1, 1, 2), entry("B", 0, 0, 4, 6), entry("B", 0, 1, 7, 9)],
            [entry("F", 1, 0, 1, 2), entry("B", 1, 0, 2, 4), entry("F", 1, 1, 4, 5), entry("B", 1, 1, 5, 7)],
        ],
    }


def test_a_doubled_forward_pass_names_both_micro_batches(answer: Any) -> None:
    order = answer("chimera", "-p", "2", "-m", "4", "--more", "doubling")["order"][0]
    assert [(entry["op"], entry["micro_batch"], entry.get("micro_batches")) for entry in order] == [
        ("F", 0, [0, 1]),
        ("F", 2, [2, 3]),
        ("B", 2, None),
        ("B", 0, None),
        ("B", 3, None),
        ("B", 1, None),
    ]


def test_a_halved_backward_pass_says_which_half(answer: Any) -> None:
    order = answer("chimera", "-p", "2", "-m", "2", "--more", "halving")["order"][0]
    assert [(entry["op"], entry["micro_batch"], entry.get("half")) for entry in order] == [
        ("F", 0, None),
        ("F", 1, None),
        ("B", 1, 0),
        ("B", 0, 0),
        ("B", 1, 1),
        ("B", 0, 1),
    ]


# ---- charts ----------------------------------------------------------------------------------------------------


def chart(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of the chart without their labels."""
    assert main(["schedule", *arguments]) == 0
    return [line.partition("   ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]


def test_chart_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "chimera", "-p", "4", "-m", "4"]) == 0
    assert (
        capsys.readouterr().out
        == """\
chimera: 4 workers, 4 micro-batches
worker 0   F0 F1 .. F2 B2 == F3 B3 == .. B0 == .. .. B1 ==
worker 1   .. F0 F2 F1 F3 .. B2 == B0 == B3 == B1 == .. ..
worker 2   .. F2 F0 F3 F1 .. B0 == B2 == B1 == B3 == .. ..
worker 3   F2 F3 .. F0 B0 == F1 B1 == .. B2 == .. .. B3 ==

makespan:                                       16
bubble ratio:                                   25.00 % of the makespan
idle:                                           4 4 4 4
peak of micro-batches in flight:                3 4 4 3
forward passes before the first backward pass:  3 4 4 3
weight versions:                                1 1 1 1
"""
    )


def test_letters_tell_the_stages_of_a_worker_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert chart(capsys, "interleaved", "-p", "2", "-m", "2") == [
        "F0a F1a F0b F1b ..  ..  B0b ==  ..  B1b ==  B0a ==  B1a ==",
        "..  F0a F1a F0b B0b ==  F1b B1b ==  B0a ==  B1a ==  ..  ..",
    ]


def test_doubled_and_halved_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert chart(capsys, "chimera", "-p", "2", "-m", "4", "--more", "doubling") == [
        "F0+1 F2+3 B2   B0   B3   B1",
        "F2+3 F0+1 B0   B2   B1   B3",
    ]
    assert chart(capsys, "chimera", "-p", "2", "-m", "2", "--more", "halving") == [
        "F0  F1  B1  B0  B1' B0'",
        "F1  F0  B0  B1  B0' B1'",
    ]


def test_actions_that_begin_between_columns_stay_visible(capsys: pytest.CaptureFixture[str]) -> None:
    assert chart(capsys, "gpipe", "-p", "2", "-m", "3", "--p2p", "0.5") == [
        "F0 F1 F2 .. .. .. .. B0 == B1 == B2 ==",
        ".. .. F0 F1 F2 B0 == B1 == B2 == .. ..",
    ]


def test_a_chart_of_very_different_times_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert max(map(len, chart(capsys, "gpipe", "-p", "2", "-m", "2", "--forward", "1e-12"))) < 100_000


@pytest.mark.parametrize(
    "arguments", [["gpipe"], ["chimera", "--pipes=4"], ["interleaved"], ["chimera", "--more=halving"]]
)
def test_svg(answer: Any, tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "chart.svg"
    result = answer(*arguments, "-p", "4", "-m", "8", "--svg", str(path))
    name = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == f"{name}svg"
    boxes = [(float(box.get("x", "")), float(box.get("width", ""))) for box in root.iter(f"{name}rect")]
    assert len(boxes) == sum(map(len, result["order"]))
    assert all(x >= 0 and x + width <= float(root.get("width", "")) for x, width in boxes)
    titles = [title.text for title in root.iter(f"{name}title")]
    assert "backward of part 0 at stage 0 of pipe 0: " in "".join(filter(None, titles))
    texts = [text.text for text in root.iter(f"{name}text")]
    assert texts[0] == f"{arguments[0]}, makespan {result['makespan']:g}"


# ---- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("chimera -p 3 -m 4", "Chimera has pipes in both directions: it needs an even number of workers, not 3"),
        (
            "chimera -p 8 -m 8 --pipes 6",
            "Chimera with 8 workers can't have 6 pipes: their number is 2f, and f divides 4",
        ),
        ("chimera -p 4 -m 5", "Chimera with 2 pipes (direct) needs a multiple of 2 micro-batches, not 5"),
        ("gpipe -p 4 -m 4 --chunks 2", "the schedule gpipe has no option chunks; its options: none"),
        ("dapple -p 4 -m 4 --more direct", "the schedule dapple has no option more; its options: warmup"),
        ("gpipe -p 0 -m 4", "workers: 0 is not possible; at least 1 is needed"),
        ("gpipe -p 4 -m 0", "micro-batches: 0 is not possible; at least 1 is needed"),
        ("gpipe -p 4 -m -2", "micro-batches: -2 is not possible; at least 1 is needed"),
        ("interleaved -p 4 -m 4 --chunks 0", "chunks: 0 is not possible; at least 1 is needed"),
        ("interleaved -p 4 -m 4 --consecutive 0", "consecutive: 0 is not possible; at least 1 is needed"),
        ("interleaved -p 4 -m 4 --consecutive 5", "5 consecutive micro-batches are not possible: a step has 4"),
        ("gpipe -p 4 -m 4 --forward 0", "--forward=0: a time above 0 is needed"),
        ("gpipe -p 4 -m 4 --backward nan", "--backward=nan: a time above 0 is needed"),
        ("gpipe -p 4 -m 4 --p2p=-1", "--p2p=-1: a time of at least 0 is needed"),
        ("gpipe -p 4 -m 4 --backward 1e308", "the makespan is too large a number: give smaller times"),
        (
            "gpipe -p 4 -m 4 --svg /no/such/folder/chart.svg",
            "--svg=/no/such/folder/chart.svg: No such file or directory",
        ),
    ],
)
def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(["schedule", *arguments.split()]) == 2
    assert capsys.readouterr() == ("", f"bps: {message}\n")


@pytest.mark.parametrize("arguments", ["", "gpipe -p 4", "gpipe -m 4", "gpipe -p four -m 4"])
def test_wrong_command_lines_exit_with_2(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["schedule", *arguments.split()])
    assert exit_.value.code == 2
    assert "usage: bps schedule" in capsys.readouterr().err


def test_the_warning_goes_to_stderr_and_torch_is_not_imported() -> None:
    program = (
        "import sys\n"
        "from byteps_py.cli.__main__ import main\n"
        "code = main('schedule interleaved -p 4 -m 8 --consecutive 3 --json'.split())\n"
        "heavy = {'torch', 'grpc', 'zmq', 'numba', 'numpy', 'google.protobuf'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stderr) == (
        0,
        "interleaved schedule: 3 consecutive micro-batches are fewer than 4 workers, so all forward passes come before "
        "all backward passes\n",
    )
    assert json.loads(done.stdout)["warmup"] == [16] * 4


# ---- the page --------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "pipeline-schedules.md").read_text()
SHOWN = [step for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for step in commands_of(block)]


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command.strip() for command, _ in SHOWN])
def test_charts_of_the_page(capsys: pytest.CaptureFixture[str], command: str, shown: str) -> None:
    assert main(command.removeprefix("bps ").split()) == 0
    chart_, _, figures = capsys.readouterr().out.partition("\n\n")
    assert shown in (f"{chart_}\n", f"{chart_}\n\n{figures}")


def test_the_page_shows_every_schedule() -> None:
    assert {command.split()[2] for command, _ in SHOWN} | {"pipedream-2bw"} == {*NAMES, "search"}


#: The rows of the page's table of times: the command, and the part of a model that a stage is.
TIMES = {
    "GPipe": ("gpipe", 1),
    "DAPPLE, warm-up A": ("dapple", 1),
    "DAPPLE, warm-up B": ("dapple --warmup B", 1),
    "interleaved, k = 4": ("interleaved --consecutive 4", 2),
    "interleaved, k = m": ("interleaved --consecutive {m}", 2),
    "Chimera, direct": ("chimera", 1),
    "Chimera, doubling, without recomputation": ("chimera --more doubling", 1),
    "Chimera, halving": ("chimera --more halving", 1),
    "Chimera, 4 pipes": ("chimera --pipes 4", 1),
    "GEMS": ("gems", 1),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_of_the_page(answer: Any, name: str) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    ((_, *times, in_flight),) = [row for row in rows if row[0] == name and len(row) == 7]
    command, chunks = TIMES[name]
    for shown, (m, p2p) in zip(times, [(4, 0), (8, 0), (8, 0.25), (8, 0.5), (16, 0)], strict=True):
        arguments = f"{command} -p 4 -m {m} --forward {1 / chunks} --backward {2 / chunks} --p2p {p2p}".format(m=m)
        result = answer(*arguments.split())
        assert float(shown) == result["makespan"], (m, p2p)
        if m == 8:
            assert in_flight.split(",")[0] == " ".join(map(str, result["peak_in_flight"]))


@pytest.mark.parametrize(
    "words", ["gpipe -p 100000 -m 100000", "chimera -p 100000 -m 1", "interleaved -p 4 -m 4 --chunks 999999"]
)
def test_a_chart_has_a_limit(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *words.split()]) == 2
    assert "too many to simulate: at most 500 workers, and 100,000 forward passes" in capsys.readouterr().err


def test_the_command_names_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", "-p", "2", "-m", "2"]) == 0
    assert main(["schedule", "zb-v", "-p", "4", "-m", "4"]) == 2
    assert main(["schedule", "waterfall", "-p", "4", "-m", "4"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("dapple: 2 workers")
    assert "does not draw it; it draws gpipe, dapple" in err
    assert "there is no schedule 'waterfall'" in err
