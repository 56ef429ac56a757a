"""byteps_py.ray on a real cluster of several raylets, one of which is killed while training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "ray_training.py"
HAS_RAY = subprocess.run([sys.executable, "-c", "import ray.train.torch"], capture_output=True).returncode == 0
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="no Ray here: pip install 'ray[train]'")


def test_without_ray_the_import_says_what_to_install() -> None:
    code = "import importlib.util as util; util.find_spec = lambda *_: None; import byteps_py.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "byteps_py.ray needs Ray Train, and it is not installed here: run pip install" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_ray
def test_lost_nodes_do_not_change_the_weights(tmp_path: Path) -> None:
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, env=environ, timeout=850
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^weights (\S+) rank (\d) of 2 from step (\d+): (\w+)$", done.stdout, re.MULTILINE)
    assert [(kind, rank) for kind, rank, _, _ in found] == [
        (kind, rank) for kind in ("calm", "server-lost", "trainer-lost") for rank in "01"
    ]
    assert len({digest for _, _, _, digest in found}) == 1, found
    begins_at = {kind: int(step) for kind, _, step, _ in found}
    assert begins_at["calm"] == begins_at["server-lost"] == 0
    assert begins_at["trainer-lost"] > 0
