"""FSDP2 with gathered parameters kept, on real processes: the same bits as without (programs/fsdp_cache.py)."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from support.breaking import command
from support.clusters import ROOT
from torch.distributed.fsdp import FSDPModule

from byteps_py.errors import UnsupportedError
from byteps_py.parallel.fsdp import CachedAllGather, GatherPlan, are_same_bytes, cache_parameters

PROGRAM = ROOT / "tests" / "programs" / "fsdp_cache.py"
has_custom_gathers = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_all_gather"), reason="torch 2.8 has no custom all-gathers"
)
CASES = re.findall(r"^@case\ndef (\w+)\(", PROGRAM.read_text(), re.MULTILINE)
LAUNCH = (sys.executable, "-m", "byteps_py.launch")


@has_custom_gathers
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("-np 2 --machines 2", marks=pytest.mark.long),
        pytest.param("-np 2", marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 3", marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2 --servers 1", marks=pytest.mark.slow),
    ],
)
def test_beside_plain_fsdp(layout: str) -> None:
    words = layout.split()
    ranks = int(words[1]) * (int(words[3]) if len(words) > 2 else 1)
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM)) as job:
        assert job.end() == 0, job.text
    for case in CASES:
        assert job.text.count(f"{case}: right") == ranks, job.text


@has_custom_gathers
@pytest.mark.slow
def test_through_the_services() -> None:
    """Without connections between ranks."""
    cases = ["equal", "hybrid", "uneven_machines", "changed_by_hand"]
    layout = ["-np", "2", "--machines", "2"]
    with command(*LAUNCH, *layout, sys.executable, str(PROGRAM), *cases, BYTEPS_DIRECT_CONNECTIONS="0") as job:
        assert job.end() == 0, job.text
    assert all(job.text.count(f"{case}: right") == 4 for case in cases), job.text


@has_custom_gathers
@pytest.mark.slow
def test_over_another_backend() -> None:
    with command(*LAUNCH, "-np", "2", sys.executable, str(PROGRAM), "another_backend", TEST_BACKEND="gloo") as job:
        assert job.end() == 0, job.text
    assert job.text.count("another_backend: right") == 2, job.text


@has_custom_gathers
def test_after_the_end_of_the_group() -> None:
    with command(*LAUNCH, "-np", "2", sys.executable, str(PROGRAM), "ended") as job:
        assert job.end() == 0, job.text
    assert job.text.count("ended: right") == 2, job.text


@has_custom_gathers
def test_a_rank_is_killed() -> None:
    """Between its forward and its backward pass: the others end with the usual error, and nothing is left."""
    layout = ["-np", "2", "--machines", "2"]
    with command(*LAUNCH, *layout, sys.executable, str(PROGRAM), "killed") as job:
        assert job.end() != 0
    assert len(re.findall(r"killed: rank [012] got PeerLostError: .*rank 3", job.text)) == 3, job.text


@pytest.mark.parametrize(
    "machines", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 1, 1, 1, 2), (0, 1, 2), (0, 0, 0, 0), (2, 0, 1, 0, 2, 2, 1)]
)
def test_each_piece_comes_to_each_machine_once(machines: tuple[int, ...]) -> None:
    plans = [GatherPlan(machines, position) for position in range(len(machines))]
    for owners in (range(len(machines)), [0], [len(machines) - 1, 1], []):
        sent = {(position, target) for position, plan in enumerate(plans) for target in plan.sends(owners)}
        received = {(owner, position) for position, plan in enumerate(plans) for owner in plan.receives(owners)}
        assert sent == received
        arrived = sorted((owner, machines[target]) for owner, target in sent)
        assert arrived == sorted((o, m) for o in owners for m in set(machines) if m != machines[o])
    even = {len(list(plan.receives(range(len(machines))))) for plan in plans}
    if len({machines.count(machine) for machine in machines}) == 1:
        assert even == {len(set(machines)) - 1}


def test_bytes_are_compared_and_not_numbers() -> None:
    values = torch.tensor([0.0, 1.0, float("nan")])
    assert are_same_bytes(values, values.clone())
    assert not are_same_bytes(values, torch.tensor([-0.0, 1.0, float("nan")]))
    assert not are_same_bytes(values[:2], values[1:])


def test_other_devices_and_an_old_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = CachedAllGather("layers.3", lambda group: pytest.fail("it must not come to that"))
    with pytest.raises(UnsupportedError, match=r"module 'layers.3' is gathered on cuda:1; so far only"):
        gather.allocate((4,), dtype=torch.float32, device=torch.device("cuda:1"))
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather", raising=False)
    with pytest.raises(UnsupportedError, match=r"has no FSDPModule\.set_custom_all_gather; it needs torch 2\.9"):
        cache_parameters(torch.nn.Linear(2, 2))
