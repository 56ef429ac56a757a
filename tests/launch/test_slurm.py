"""A real SLURM, each node of it a network namespace: srun, sbatch and bpslaunch, without anything exported. Every rank
runs tests/programs/rank.py, which checks its sums."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.breaking import RANK, environ_of
from support.slurm_cluster import SlurmCluster, require_slurm, slurm_cluster

BPSLAUNCH = str(Path(sys.executable).with_name("bpslaunch"))
RUNS = {"BYTEPS_LINK_MBIT": "1000"}
SHORT = (sys.executable, RANK, "short")
CPU = ("-p", "cpu", "-N2", "--ntasks-per-node=1", BPSLAUNCH)

pytestmark = pytest.mark.slow  # test_launchers.py has the rules


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_slurm()
    with slurm_cluster(["c1", "c2", "g1", "g2"], tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.mark.parametrize(
    "arguments",
    [
        ("-p", "gpu", "-N2", "--ntasks-per-node=2", *SHORT),
        (*CPU, ":", "-p", "gpu", "-N2", "--ntasks-per-node=2", *SHORT),
        (*CPU, ":", "-p", "gpu", "-N2", "--ntasks-per-node=1", BPSLAUNCH, *SHORT),
    ],
    ids=["ranks", "servers and ranks", "servers and bpslaunch"],
)
def test_srun(slurm: SlurmCluster, arguments: tuple[str, ...]) -> None:
    done = slurm.run("srun", *arguments, **RUNS, BYTEPS_LOCAL_SIZE="2" if arguments.count(BPSLAUNCH) > 1 else "")
    assert done.returncode == 0, done.stdout
    for rank in range(4):
        assert f"{rank}: reduced" in done.stdout
    assert not slurm.left()


def test_the_users_secret_is_private_and_in_no_environment(slurm: SlurmCluster) -> None:
    step = slurm.popen("srun", *CPU, ":", "-p", "gpu", "-N2", sys.executable, RANK, "train", **RUNS)
    try:
        assert step.stdout is not None
        for line in step.stdout:
            if "0: training" in line:
                break
        path = slurm.home / ".config" / "byteps" / "secret"
        assert path.stat().st_mode & 0o777 == 0o600
        pids = [pid for node in slurm.nodes for pid in slurm.pids(node)]
        assert pids
        names = {name for pid in pids for name, text in environ_of(pid).items() if "SECRET" in name and text}
        assert not names
    finally:
        step.send_signal(signal.SIGINT)
        step.send_signal(signal.SIGINT)
        step.communicate()
    assert not slurm.left()
