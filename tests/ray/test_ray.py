"""byteps_py.ray on a real cluster of several raylets, one of which is killed while training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.clusters import ROOT
from support.documents import Page, at_own_places

PROGRAM = ROOT / "tests" / "programs" / "ray_training.py"
PAGE = Page(ROOT / "docs" / "howto" / "ray.md")
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


@pytest.mark.long
@pytest.mark.timeout(400)
@needs_ray
def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    """On the page's cluster of three nodes. A rank asks for other servers in the middle."""
    (program,), (cluster,), (scale,) = map(PAGE.blocks_after, ("train on Ray", "a cluster of Ray", "scale on Ray"))
    meanwhile = textwrap.indent(f"import byteps_py.ray\n{scale}", " " * 12)
    in_the_middle = f"        if step == 50 and bps.rank() == 0:\n{meanwhile}"
    places = {
        "\ntrainer = TorchTrainer(": f"\n{cluster}\ntrainer = TorchTrainer(",
        "\ntrainer.fit()\n": "\ntrainer.fit()\nray.shutdown()\ncluster.shutdown()\n",
        "        loss.backward()\n": f"{in_the_middle}        loss.backward()\n",
    }
    script = tmp_path / "train.py"
    script.write_text(at_own_places(program, places))
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environ, timeout=350)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, loss " in done.stdout
