"""The loops of other libraries on the backend "byteps": our examples of them, under torchrun."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys

import pytest
from support.breaking import Job, command
from support.clusters import ROOT

#: The library of each example, and what installs it.
EXAMPLES = {
    "lightning_ddp": ("lightning", "lightning"),
    "accelerate_ddp": ("accelerate", "accelerate"),
    "transformers_trainer": ("transformers", "'transformers[torch]'"),
}


def torchrun(*arguments: str) -> contextlib.AbstractContextManager[Job]:
    return command(sys.executable, "-m", "torch.distributed.run", *arguments, PYTHONWARNINGS="ignore")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_library_trains_on_our_backend(name: str) -> None:
    library, package = EXAMPLES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library} here: pip install {package}")
    with torchrun("--nproc-per-node=2", str(ROOT / "examples" / f"{name}.py")) as job:
        assert job.end() == 0, job.text
    found = re.findall(r"^step \d+: mean loss ([\d.]+) on 2 ranks, byteps$", job.text, re.MULTILINE)
    assert len(found) >= 2, job.text
    assert float(found[-1]) < float(found[0]) / 2, job.text


@pytest.mark.slow
def test_torchft_goes_on_without_a_replica_and_with_it_again() -> None:
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("no torchft here: pip install torchft")
    with command(sys.executable, str(ROOT / "tests" / "programs" / "torchft_replicas.py")) as job:
        assert job.end() == 0, job.text
    found = re.findall(r"^(\d+) (\d)$", job.text, re.MULTILINE)
    assert [participants for _, participants in found] == ["1", "2", "1", "2"], job.text
    steps = [int(step) for step, _ in found]
    assert steps == sorted(steps)
