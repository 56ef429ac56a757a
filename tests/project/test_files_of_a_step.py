"""The tool that lists the files whose code runs in a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.clusters import ROOT
from support.warm import run

HOOK = "byteps_py/torch/gradients/backward_passes.py"
SUMMATION = "server/reducer.py"
HEARTBEAT = "byteps_py/scheduler/health.py"
OF_OTHER_FLOWS = {
    "byteps_py/parallel/pipe/pipeline.py",
    "byteps_py/torch/gradients/hosted/optimizer.py",
    "byteps_py/torch/process_group/byteps_process_group.py",
}


@pytest.mark.long
def test_a_gradient_passes_from_the_hook_to_the_server_and_back(tmp_path: Path) -> None:
    result = tmp_path / "files.json"
    tool = [sys.executable, "-m", "tests.support.files_of_a_step", "--flow", "gradient", "--steps", "3"]
    done = run([*tool, "--json", str(result)], 110, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = json.loads(result.read_text())
    files = said["processes"]
    assert {"scheduler", "server c0", "worker m0", "worker m1", "rank 0", "rank 1"} <= files.keys()
    assert all(HOOK in files[f"rank {rank}"] for rank in range(2))
    assert SUMMATION in files["server c0"]
    assert HEARTBEAT in files["scheduler"]
    everything = {file for of_one in files.values() for file in of_one}
    assert all((ROOT / file).is_file() for file in everything)
    assert not everything & OF_OTHER_FLOWS
    assert said["steps"] >= 3
    assert said["total"] == len(everything)
    assert done.stdout.splitlines()[-1].startswith(f"gradient: {len(everything)} different files in ")
