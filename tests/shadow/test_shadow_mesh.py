"""A job on a mesh whose machines all die, and that goes on from its last step (programs/shadowed_mesh.py): every rank
has the bits of a job without faults."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator

import pytest
from support.breaking import Job, command
from support.clusters import ROOT
from support.shadowed_cluster import LAUNCH, ShadowedCluster

PROGRAM = ROOT / "tests" / "programs" / "shadowed_mesh.py"
STEPS = 16


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


def digests(*jobs: Job) -> dict[tuple[int, int], str]:
    """By rank and step."""
    said = re.findall(r"^rank (\d+): step (\d+): (\w+)", "\n".join(job.text for job in jobs), re.MULTILINE)
    return {(int(rank), int(step)): found for rank, step, found in said}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "machines", "servers"),
    [
        pytest.param("2x1x1x2:sharded", 2, 1, marks=pytest.mark.long),
        pytest.param("2x1x1x2:sharded:by_hand", 2, 1, marks=pytest.mark.long),
        pytest.param("2x1x1x2:machine", 2, 1, marks=pytest.mark.long),
        pytest.param("2x1x1x2:sharded:int8", 2, 1, marks=pytest.mark.long),
        pytest.param("1x1x2x2:sharded:tied", 2, 2, marks=pytest.mark.slow),
        pytest.param("2x1x2x1", 2, 1, marks=pytest.mark.long),  # no rank has a copy
        pytest.param("1x1x2x2:machine", 2, 1, marks=pytest.mark.long),
        pytest.param("2x1x1x1", 1, 1, marks=pytest.mark.long),
    ],
)
def test_all_parts_go_on_from_one_step(stack: contextlib.ExitStack, layout: str, machines: int, servers: int) -> None:
    words = ["-np", "2", "--machines", str(machines), "--servers", str(servers)]
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), layout, str(STEPS)) as job:
        assert job.end() == 0, job.text
        expected = digests(job)
    assert len(expected) == 2 * machines * STEPS
    cluster = ShadowedCluster(stack, machines, servers, BYTEPS_PARTITION_BYTES="4096", BYTEPS_LOCAL_SIZE="2")
    cluster.program = PROGRAM
    scheduler, *killed = cluster.start(layout, "100000", "0.2")
    killed[0].until("rank 0: step 7:")
    for one in killed:
        one.close()
    assert scheduler.end() == 1
    for server in cluster.servers:
        server.until("are kept for 600 s for a restarted job")
    before = digests(*killed)
    assert before == {place: found for place, found in expected.items() if place in before}
    again = cluster.start(layout, str(STEPS))
    for one in again:
        assert one.end() == 0, one.text
    restored = re.findall(r"restored at (\w+)", "\n".join(one.text for one in again))
    assert len(restored) == 2 * machines
    assert len(set(restored)) == 1
    begun = int(restored[0])
    assert 5 <= begun <= max(step for _, step in before) + 1
    found = digests(*again)
    assert found == {(rank, step): bits for (rank, step), bits in expected.items() if step > begun}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_another_mesh_is_refused(stack: contextlib.ExitStack) -> None:
    """On all ranks, and so is a checkpoint of the whole model."""
    cluster = ShadowedCluster(stack, 2, 1, BYTEPS_LOCAL_SIZE="2")
    cluster.program = PROGRAM
    scheduler, *killed = cluster.start("2x1x1x2:sharded", "100000", "0.2")
    killed[0].until("rank 0: step 7:")
    cluster.held_step(5)
    for one in killed:
        one.close()
    assert scheduler.end() == 1
    cluster.servers[0].until("are kept for 600 s for a restarted job")
    scheduler, *again = cluster.start("1x1x1x4:sharded", "10")
    texts = [(one.end(), one.text)[1] for one in again]
    for text in texts:
        assert "restore(): servers hold states of optimizers that ranks 0, 2 and ranks 1, 3 share, and this" in text
