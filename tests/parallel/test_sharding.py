"""Sharded states on real processes (programs/sharding.py), and offloaded states with a stand-in for a CUDA stream."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.breaking import command
from support.clusters import ROOT
from torch import nn

from byteps_py.parallel.sharding.offload import OffloadedStates
from byteps_py.parallel.sharding.segments import NamedParameter

PROGRAM = ROOT / "tests" / "programs" / "sharding.py"
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
#: Cheap ones, for all layouts.
QUICK = ["clips", "tied", "exact", "scales", "frees", "divides_saved_inputs", "refused"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "backend", "cases"),
    [
        ("-np 2", "byteps", [*QUICK, "equal"]),
        pytest.param("-np 2", "byteps", CASES, marks=pytest.mark.slow),
        pytest.param("-np 4", "byteps", CASES, marks=pytest.mark.long),
        pytest.param("-np 2", "gloo", CASES, marks=pytest.mark.long),
        pytest.param("-np 4", "gloo", QUICK, marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2 --servers 1", "byteps", [*QUICK, "equal", "saves"], marks=pytest.mark.long),
    ],
)
def test_beside_one_process(layout: str, backend: str, cases: list[str]) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if len(words) > 2 else 1)
    arguments = [sys.executable, "-m", "byteps_py.launch", *words, sys.executable, str(PROGRAM), *cases]
    with command(*arguments, OMP_NUM_THREADS="1", TEST_BACKEND=backend) as job:
        assert job.end() == 0, job.text
    for case in cases:
        assert job.text.count(f"{case}: right") == ranks, job.text


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_block_of_the_page_runs(tmp_path: Path, ranks: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "sharding.md").read_text(), re.DOTALL)
    (block,) = [one for one in blocks if "bps.sharding" in one]
    script = tmp_path / "train.py"
    script.write_text(block)
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", str(ranks), sys.executable, str(script)]
    with command(*launch, OMP_NUM_THREADS="1") as job:
        assert job.end() == 0, job.text


# ---- offloaded states --------------------------------------------------------------------------------------------


class DeferredStream:
    """Copies as late as a stream may make them: when somebody waits for them."""

    def __init__(self) -> None:
        self._copies: list[Callable[[], None]] = []
        self._done = 0
        self.most_under_way = 0

    def submit(self, copies: Callable[[], None]) -> int:
        self._copies.append(copies)
        self.most_under_way = max(self.most_under_way, len(self._copies) - self._done)
        return len(self._copies)

    def wait(self, mark: int) -> None:
        for copies in self._copies[self._done : mark]:
            copies()
        self._done = max(self._done, mark)

    def finish(self) -> None:
        self.wait(len(self._copies))


class IgnoringStream(DeferredStream):
    """Does not wait: what a missing wait would do."""

    def wait(self, mark: int) -> None:
        pass


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator("cpu").manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator, device="cpu")) for size in (5, 3, 9, 1, 7)]


def train(offloads: bool, stream: DeferredStream) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    members = [NamedParameter(str(place), one, 0) for place, one in enumerate(params)]
    states = OffloadedStates(optimizer, [members[:2], members[2:3], members[3:]], torch.device("cpu"), stream)

    def compute(chosen: object) -> None:
        whole = optimizer.param_groups
        ids = {id(one) for one in chosen}  # type: ignore[attr-defined]
        optimizer.param_groups = [{**whole[0], "params": [one for one in params if id(one) in ids]}]
        optimizer.step()
        optimizer.param_groups = whole

    for step in range(4):
        for place, one in enumerate(params):
            one.grad = torch.full_like(one, 0.5 + step - place)
        if offloads:
            states.step(compute)
        else:
            optimizer.step()
    if offloads:
        states.finish()
        # 4 bytes for each of two moments
        assert states.host_bytes == 2 * 4 * sum(one.numel() for one in params)
    return params, optimizer


def test_offloaded_states_on_a_late_stream() -> None:
    """The same bits, and the next segment's copies are under way while one computes."""
    stream = DeferredStream()
    mine, offloaded = train(True, stream)
    theirs, optimizer = train(False, DeferredStream())
    assert stream.most_under_way >= 2
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
        for name, value in optimizer.state[other].items():
            assert torch.equal(offloaded.state[one][name], value), name


def test_a_missing_wait_is_found() -> None:
    mine, _ = train(True, IgnoringStream())
    theirs, _ = train(False, DeferredStream())
    assert not all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
