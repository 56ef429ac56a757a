"""The loops of other libraries on the backend "byteps": our examples of them, under torchrun."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import sys

import pytest
from support.breaking import Job, command
from support.clusters import ROOT
from support.documents import Page, commands_of

#: The library of each example, and what installs it.
EXAMPLES = {
    "lightning_ddp": ("lightning", "lightning"),
    "accelerate_ddp": ("accelerate", "accelerate"),
    "transformers_trainer": ("transformers", "'transformers[torch]'"),
    "torchtitan_llama": ("torchtitan", "torchtitan==0.2.2 triton"),
}


def torchrun(*arguments: str) -> contextlib.AbstractContextManager[Job]:
    return command(sys.executable, "-m", "torch.distributed.run", *arguments, PYTHONWARNINGS="ignore")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_library_trains_on_our_backend(name: str) -> None:
    library, package = EXAMPLES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library} here: pip install {package}")
    page = Page(ROOT / "docs" / "howto" / "trainers.md")
    [(line, _)] = commands_of(page.blocks_after("trainers of other libraries")[0])
    first, *options, program = shlex.split(line)
    assert (first, program) == ("torchrun", "examples/lightning_ddp.py")
    with torchrun(*options, str(ROOT / "examples" / f"{name}.py")) as job:
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


ANOTHER_MACHINE = """
import json
from datetime import timedelta
from torch.distributed import TCPStore
from byteps_py.torchft import ProcessGroupBytePS

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("quorum/1/byteps/1", json.dumps(["another machine", 0, 0]))  # what replica 1 says of itself
group = ProcessGroupBytePS(timeout=timedelta(seconds=30))
group.configure(f"127.0.0.1:{store.port}/quorum/1", "replica 0", 0, 2)
"""


@pytest.mark.slow
def test_replicas_of_torchft_on_several_machines_are_refused() -> None:
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("no torchft here: pip install torchft")
    with command(sys.executable, "-c", ANOTHER_MACHINE) as job:
        assert job.end() == 1
    assert "UnsupportedError: torchft's replicas are on 2 machines" in job.text
    assert "use ProcessGroupGloo there" in job.text
