"""Horovod's ways of training on real jobs; the checks are in programs/horovod_training.py."""

from __future__ import annotations

import json
import re

import pytest
from support.clusters import ROOT, bpslaunch

PROGRAM = ROOT / "tests" / "programs" / "horovod_training.py"
LIMITS = {"BYTEPS_STALL_WARN_S": "20", "BYTEPS_STALL_LIMIT_S": "40"}


@pytest.mark.parametrize(
    "options",
    [pytest.param(("-np", "3"), marks=pytest.mark.slow), ("-np", "1", "--machines", "2", "--servers", "1")],
    ids=" ".join,
)
def test_everything(options, tmp_path) -> None:
    timeline = tmp_path / "timeline.json"
    done = bpslaunch(options, [PROGRAM], timeout_s=100, **LIMITS, HOROVOD_TIMELINE=str(timeline))
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = 3 if options[1] == "3" else 2
    assert sorted(re.findall(r"rank \d of \d: all right", done.stdout)) == [
        f"rank {rank} of {ranks}: all right" for rank in range(ranks)
    ]
    for rank in range(ranks):  # of what came after the job was joined for the last time
        events = json.loads((tmp_path / (f"timeline.json.rank{rank}" if rank else timeline.name)).read_text())
        rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"Gradient.elastic", "elastic.hosts_updated"} <= rows
        assert all(event["dur"] > 0 and event["pid"] == rank for event in events if event["ph"] == "X")


@pytest.mark.slow
def test_an_elastic_training_that_loses_a_rank_says_that_this_is_not_possible_yet() -> None:
    done = bpslaunch(("-np", "2"), [PROGRAM, "lost"], timeout_s=100, **LIMITS)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert re.search(
        r"rank False: elastic: the job can't be joined again after PeerLostError: .*rank 1 .*same ranks only", said
    ), said
