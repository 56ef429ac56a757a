"""Ranks that are started again meet where rank 0 says, and not at a port that rank 0's old process may still have."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.clusters import clean_environment

MEETS = """
import os
import torch
import torch.distributed as dist

for _ in range(2):
    dist.init_process_group("byteps")
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    value = torch.ones(3)
    dist.all_reduce(value)
    print(dist.get_rank(), value.tolist(), store.port == int(os.environ["MASTER_PORT"]), flush=True)
    dist.destroy_process_group()
"""


def said(*options: str) -> list[str]:
    """Of ranks that import torch with the variables of their job."""
    command = [sys.executable, "-m", "byteps_py.launch", "--no-tag-output", *options, sys.executable, "-c", MEETS]
    ran = subprocess.run(
        command, env=clean_environment(), timeout=100, check=False, stdout=subprocess.PIPE, stderr=None, text=True
    )
    assert ran.returncode == 0
    return sorted(ran.stdout.splitlines())


@pytest.mark.slow
def test_ranks_meet_twice_at_a_port_of_rank_0() -> None:
    found = said("--max-restarts", "1", "-np", "1", "--machines", "2")
    assert found == [f"{rank} [2.0, 2.0, 2.0] False" for rank in (0, 0, 1, 1)]


@pytest.mark.slow
def test_one_rank_and_jobs_without_restarts_meet_as_torch_does() -> None:
    assert said("--max-restarts", "1", "-np", "1") == ["0 [1.0, 1.0, 1.0] True"] * 2
    assert said("-np", "2") == [f"{rank} [2.0, 2.0, 2.0] True" for rank in (0, 0, 1, 1)]
