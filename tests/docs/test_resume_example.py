"""examples/resume.py: a training that is stopped and resumed ends as one that never stopped, bit for bit."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from support.breaking import command
from support.clusters import ROOT
from support.shadowed_cluster import LAUNCH, ShadowedCluster

PROGRAM = ROOT / "examples" / "resume.py"


def run(*words: str) -> str:
    with command(*LAUNCH, "-np", "2", sys.executable, str(PROGRAM), *words) as job:
        assert job.end() == 0, job.text
        return job.text


def end_of(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("ends with"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "hosted"])
def test_it_goes_on_from_a_file(way: str, tmp_path: Path) -> None:
    words = ["--hosted"] if way == "hosted" else []
    expected = end_of(run(*words, "--file", str(tmp_path / "none.pt")))
    again = [*words, "--file", str(tmp_path / "resume.pt")]
    run(*again, "--stop-after", "5")
    text = run(*again)
    assert "begins with step 5" in text
    assert end_of(text) == expected


@pytest.mark.slow
def test_it_goes_on_from_what_servers_hold() -> None:
    """The first steps overflow: calls of step() that make none use up their batches. The body in which it ends is made
    again."""
    scale = ["--init-scale", str(2.0**127)]
    with contextlib.ExitStack() as stack:
        words = ["-np", "1", "--machines", "2", "--servers", "1"]
        with command(*LAUNCH, *words, sys.executable, str(PROGRAM), "--shadow", *scale) as job:
            assert job.end() == 0, job.text
            expected = end_of(job.text)
        assert float(expected.split()[5].rstrip(",")) <= 2.0**125, "no step was skipped"
        cluster = ShadowedCluster(stack, 2, 1)
        cluster.program = PROGRAM
        for started in cluster.start("--shadow", *scale, "--stop-after", "8")[1:]:
            assert started.end() == 0, started.text
        cluster.servers[0].until("are kept for 600 s for a restarted job")
        _, first, second = cluster.start("--shadow", *scale)
        assert (first.end(), second.end()) == (0, 0), first.text + second.text
        assert any(f"begins with step {step}" in first.text for step in (6, 7)), first.text
        assert end_of(first.text) == expected
        assert cluster.servers[0].end() == 0
