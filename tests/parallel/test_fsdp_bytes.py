"""What FSDP2 carries between two machines of two ranks, with and without ``cache_parameters``: see
docs/howto/sharding.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clusters import bpslaunch

PROGRAM = Path(__file__).parents[1] / "programs" / "carry_fsdp.py"
MACHINES, RANKS, LAYERS, WIDTH = 2, 2, 3, 256
#: What a machine sends if each byte goes to each other machine once: the parameters, or the sums of their gradients.
ONCE = LAYERS * WIDTH * WIDTH * 4 * (MACHINES - 1) // MACHINES
#: At most so many bytes beside them in a pass: descriptions of messages, and what ranks say of their pieces.
BESIDE = LAYERS * 2048


def launch(*words: str, **environ: str) -> str:
    arguments = ["-np", str(RANKS), "--machines", str(MACHINES), "--no-tag-output", *words[:-1]]
    run = bpslaunch(arguments, [PROGRAM, words[-1], str(WIDTH)], **environ)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize(
    ("kind", "carried"),
    [
        # Each rank receives all pieces of the other machine: (forward, backward, the same again, after a step).
        pytest.param("plain", (2 * ONCE, 3 * ONCE, 2 * ONCE, 2 * ONCE), marks=pytest.mark.slow),
        # In the backward pass there is the reduce-scatter alone; its sums are taken in the machine first.
        ("kept", (ONCE, ONCE, 0, ONCE)),
    ],
)
def test_bytes_from_rank_to_rank(kind: str, carried: tuple[int, ...]) -> None:
    told = [json.loads(line) for line in launch(kind).splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in told) == [0, 1, 2, 3]
    for machine in range(MACHINES):
        sent = [sum(each["sent"][at] for each in told if each["rank"] // RANKS == machine) for at in range(4)]
        for found, expected in zip(sent, carried, strict=True):
            assert expected <= found <= expected + BESIDE, (machine, sent, carried)


@pytest.mark.parametrize(
    ("kind", "carried"),
    [
        # The services send a piece once to each machine, but for each gather.
        pytest.param("plain", 5 * ONCE, marks=pytest.mark.slow),
        pytest.param("kept", 3 * ONCE, marks=pytest.mark.slow),
    ],
)
def test_bytes_through_the_services(kind: str, carried: int, tmp_path: Path) -> None:
    """In all passes together, by the services' counters."""
    report = tmp_path / "report.json"
    launch("--report", str(report), kind, BYTEPS_DIRECT_CONNECTIONS="0")
    members = json.loads(report.read_text())["members"]
    for each in members:
        if each["kind"] == "worker":
            assert carried <= each["bytes_sent"] <= carried + 4 * BESIDE, (each["bytes_sent"], carried)
