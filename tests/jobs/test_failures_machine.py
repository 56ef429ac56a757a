"""What else may happen on a machine: other jobs, clocks that jump, coming and going without end. Real processes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.breaking import launch
from support.clusters import ROOT

SHIM = ROOT / "tests" / "programs" / "jumping_clock.c"


@pytest.mark.parametrize("options", ["-np 2", pytest.param("-np 1 --machines 2 --servers 1", marks=pytest.mark.slow)])
def test_a_hundred_times_init_and_shutdown_leave_nothing(options: str) -> None:
    """In no process: of services, all; see rank.py."""
    with launch(options, "repeat", "100", PS_HEARTBEAT_TIMEOUT="30") as job:
        assert job.end() == 0, job.text
    assert sorted(job.of_ranks) == ["0: 100 turns", "1: 100 turns"]


@pytest.mark.parametrize(("options", "turns"), [("-np 2", 150), ("-np 1 --machines 2", 50)])
def test_ranks_that_come_again_while_others_have_yet_to_leave_meet_those_that_come_again(
    options: str, turns: int
) -> None:
    """One may be two turns ahead. On two machines, ranks also connect to each other, on a thread of their own, and one
    that leaves at once must not leave that half done."""
    with launch(options, "7", str(turns), program=ROOT / "tests" / "programs" / "comes_again.py") as job:
        assert job.end() == 0, job.text
    assert sorted(job.of_ranks) == [f"0: {turns} turns", f"1: {turns} turns"]


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library to be preloaded."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("clock") / "jumping_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SHIM), "-ldl"], check=True, timeout=60)
    return str(library)


@pytest.mark.slow
def test_two_jobs_do_not_meet_and_a_clock_that_jumps_ends_nothing(jumping_clock: str) -> None:
    """Each reduces tensors of the same names, and checks every sum. Silence and stalls would soon be errors here."""
    limits = {"PS_HEARTBEAT_TIMEOUT": "30", "BYTEPS_STALL_WARN_S": "20", "BYTEPS_STALL_LIMIT_S": "40"}
    limits["BYTEPS_STRAGGLER"] = "1e6"  # where cores are few, one job slows ranks of the other down, and they say so
    with (
        launch("-np 1 --machines 2 --servers 1", "told", LD_PRELOAD=jumping_clock, **limits) as jumping,
        launch("-np 2", "told", **limits) as other,
    ):
        jumping.until("0: training", "1: training")
        other.until("0: training", "1: training")
        assert (other.end(), jumping.end()) == (0, 0), jumping.text
    assert (
        sorted(jumping.of_ranks) == sorted(other.of_ranks) == ["0: closed", "0: training", "1: closed", "1: training"]
    )


def test_no_deadline_reads_the_wall_clock() -> None:
    wall = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(datetime\.)?(now|today|utcnow)\(|CLOCK_REALTIME")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("byteps_py", "worker", "server")
        for path in sorted(Path(ROOT, folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if wall.search(line)
    ]
    # Two say when it was, two when a record of operations began, one how old a file is, two when a job was started, one
    # when progress was told, for people.
    allowed = (
        "byteps_py/session/base.py: return int(time.time() * 1e3), ",
        "byteps_py/torch/timeline.py: ",
        "byteps_py/scheduler/recording_collector.py: self._began = ",
        "byteps_py/system/flight_recorder.py: self._wall_ns, ",
        "byteps_py/scheduler/member_links/journal.py: if is_own and time.time() - about.st_mtime",
        "byteps_py/cli/job_choice.py: ago_s = ",
        "byteps_py/system/jobs.py: return replace(note, ",
        'byteps_py/torch/run/trainjob_progress.py: told = {**status, "lastUpdatedTime": ',
    )
    assert all(line.startswith(allowed) for line in found), found
