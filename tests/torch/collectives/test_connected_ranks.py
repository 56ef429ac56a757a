"""Process groups whose ranks are on different machines, in real processes: how operations between them end."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
from support.breaking import command
from support.clusters import ROOT
from support.connected import SECRET

PROGRAM = str(ROOT / "tests" / "programs" / "connected_ends.py")


def launch(operation: str, *arguments: str, ranks: int = 1) -> list[str]:
    return [
        sys.executable, "-m", "byteps_py.launch", "-np", str(ranks), "--machines", "2", sys.executable, PROGRAM,
        operation, *arguments,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "killed"),
    [
        ("all_reduce", 0),
        ("push_pull", 1),
        ("shares", 1),
        ("send_recv", 1),
        pytest.param("all_gather", 0, marks=pytest.mark.slow),
    ],
)
def test_who_waits_for_a_killed_rank_of_another_machine_is_told(operation: str, killed: int) -> None:
    with command(*launch(operation)) as job:
        job.until("0: going", "1: going")
        os.kill(job.pid(PROGRAM, RANK=str(killed)), signal.SIGKILL)
        said = job.until("PeerLostError")
        assert job.end() != 0
    assert f"rank {killed} " in said, said
    assert "the connection to rank" not in said, said  # the service knows more


@pytest.mark.parametrize(
    "operation", ["all_reduce", *(pytest.param(each, marks=pytest.mark.long) for each in ("push_pull", "shares"))]
)
@pytest.mark.slow
def test_a_connection_that_can_not_be_made_again_is_an_error(operation: str) -> None:
    with command(*launch(operation, "broken"), PS_HEARTBEAT_TIMEOUT="2", BYTEPS_HEARTBEAT_TIMEOUT_MAX_S="2") as job:
        said = job.until("PeerLostError")
        assert job.end() != 0
    assert "the connection from rank" in said, said
    assert "could not be made again within 4 s" in said, said


@pytest.mark.parametrize(
    "operation", ["all_reduce", "push_pull", "send_recv", pytest.param("shares", marks=pytest.mark.slow)]
)
def test_a_connection_that_breaks_is_made_again(operation: str) -> None:
    with command(*launch(operation, "cut")) as job:
        said = job.until("was made again after it had broken")
        assert job.end() == 0, said


@pytest.mark.parametrize(
    ("layout", "variables"),
    [
        pytest.param("-np 1 --machines 3", {}, marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2", {"BYTEPS_SECRET": SECRET}, marks=pytest.mark.long),
        pytest.param("-np 2 --machines 2 --servers 1", {}, marks=pytest.mark.slow),
        pytest.param("-np 1 --machines 2", {"BYTEPS_SECRET": SECRET, "BYTEPS_ENCRYPT": "1"}, marks=pytest.mark.slow),
    ],
)
def test_results_have_the_same_bits_with_and_without_connections(layout: str, variables: dict[str, str]) -> None:
    digests = []
    for is_on in "01":
        program = [sys.executable, str(ROOT / "tests" / "programs" / "connected_sums.py")]
        launch = [sys.executable, "-m", "byteps_py.launch", *layout.split(), *program]
        with command(*launch, BYTEPS_DIRECT_CONNECTIONS=is_on, PYTHONWARNINGS="ignore", **variables) as job:
            assert job.end() == 0, job.text
        digests.append(sorted(re.findall(r"\d: [0-9a-f]{16}$", job.text, re.MULTILINE)))
    assert len(digests[0]) >= 2
    assert digests[0] == digests[1]


@pytest.mark.parametrize("killed", [0, 3])
def test_ranks_that_add_in_two_levels_are_told_of_a_killed_one(killed: int) -> None:
    with command(*launch("shares", ranks=2)) as job:
        job.until(*(f"{rank}: going" for rank in range(4)))
        os.kill(job.pid(PROGRAM, RANK=str(killed)), signal.SIGKILL)
        said = job.until("PeerLostError")
        assert job.end() != 0
    assert f"rank {killed} " in said, said


@pytest.mark.parametrize("layout", ["-np 2 --machines 2", "-np 1 --machines 3"])
def test_large_sums_go_on_without_a_rank_that_has_joined(layout: str) -> None:
    program = (
        "import torch, byteps_py as bps, torch.distributed as dist; bps.init(); dist.init_process_group('byteps')\n"
        "rank, size = dist.get_rank(), dist.get_world_size(); x = torch.full((300_003,), rank + 1.0)\n"
        "def total(ranks):\n"
        "    y = x.clone(); dist.all_reduce(y)\n"
        "    assert torch.equal(y, torch.full_like(y, sum(r + 1 for r in ranks))), y\n"
        "for _ in range(3): total(range(size))\n"
        "if rank != 1:\n"
        "    for _ in range(3): total(r for r in range(size) if r != 1)\n"
        "bps.join()\n"
        "for _ in range(3): total(range(size))\n"
        "print('all sums are right', flush=True); dist.destroy_process_group()"
    )
    launch = [sys.executable, "-m", "byteps_py.launch", *layout.split(), sys.executable, "-c", program]
    with command(*launch) as job:
        assert job.end() == 0, job.text
    assert job.text.count("all sums are right") == (4 if "-np 2" in layout else 3), job.text


@pytest.mark.parametrize("late", [0, 2, 3])
def test_ranks_that_learn_of_a_join_at_different_times_go_the_same_way(late: int) -> None:
    """Rank ``late`` knows of the join before it begins, the others begin before it."""
    program = (
        "import torch, byteps_py as bps, torch.distributed as dist; bps.init(); dist.init_process_group('byteps')\n"
        "from byteps_py.torch.collectives import context as contexts\n"
        f"rank, late, store = dist.get_rank(), {late}, dist.distributed_c10d._get_default_store()\n"
        "x = torch.full((300_003,), rank + 1.0)\n"
        "for _ in range(2): dist.all_reduce(x.clone())\n"
        "others = [f'{other} begins' for other in range(4) if other not in (1, late)]\n"
        "if rank == 1: store.wait(others)\n"
        "elif rank == late:\n"
        "    session = contexts.current().session; peers = session.peers\n"
        "    session.wait_until(lambda: bool(peers.joined_among([1])), 60.0, lambda: 'rank 1 has not joined')\n"
        "else: store.set(f'{rank} begins', '')\n"
        "if rank != 1: y = x.clone(); dist.all_reduce(y); assert torch.equal(y, torch.full_like(y, 8.0)), y\n"
        "bps.join(); dist.all_reduce(x); assert torch.equal(x, torch.full_like(x, 10.0)), x\n"
        "print('all sums are right', flush=True); dist.destroy_process_group()"
    )
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "2", "--machines", "2", sys.executable, "-c", program]
    with command(*launch) as job:
        assert job.end() == 0, job.text
    assert job.text.count("all sums are right") == 4, job.text


def test_one_rank_without_connections_is_enough_to_go_without() -> None:
    program = (
        "import os; os.environ['BYTEPS_DIRECT_CONNECTIONS'] = os.environ['RANK']; import torch, byteps_py as bps; "
        "import torch.distributed as dist; dist.init_process_group('byteps'); x = torch.ones(5); "
        "[dist.all_reduce(x) for _ in range(3)]; print('sum', x[0].item(), flush=True); dist.destroy_process_group()"
    )
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "1", "--machines", "2", sys.executable, "-c", program]
    with command(*launch) as job:
        assert job.end() == 0, job.text
    assert job.text.count("sum 8.0") == 2


def test_why_sums_by_name_use_no_connections_is_said_with_the_first_of_them() -> None:
    """A job that adds nothing by name needs no warning."""
    program = (
        "import torch, byteps_py as bps; from byteps_py.errors import RendezvousError\n"
        "from byteps_py.session.peers.peer_connector import PeerConnector\n"
        "def refuse(*_): raise RendezvousError('nobody answers')\n"
        "PeerConnector.connect = refuse\n"
        "bps.init(); bps.shutdown(); print('nothing was added', flush=True)\n"
        "bps.init(); [bps.push_pull(torch.ones(5), name='x') for _ in range(3)]; bps.shutdown()"
    )
    launch = [sys.executable, "-m", "byteps_py.launch", "-np", "1", "--machines", "2", sys.executable, "-c", program]
    with command(*launch) as job:
        assert job.end() == 0, job.text
    before, warning, _ = job.text.partition("sums by name go through the services: nobody answers")
    assert before.count("nothing was added") >= 1
    assert warning
    assert job.text.count(warning) == 2, job.text
