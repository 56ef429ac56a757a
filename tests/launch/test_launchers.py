"""What other launchers' variables mean: real sets of them, in short, and the settings they lead to."""

from __future__ import annotations

from pathlib import Path

import pytest

from byteps_py.config import launchers
from byteps_py.config.settings import Settings
from byteps_py.config.slurm import expand
from byteps_py.errors import ConfigurationError


def torchrun(machines: int, machine: int, size: int, rank: int, **more: str) -> dict[str, str]:
    names = ("GROUP_WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    return {**dict(zip(names, map(str, (machines, machine, size, rank)), strict=True)), **more}


def mpirun(size: int, rank: int, local_size: int, local_rank: int, **more: str) -> dict[str, str]:
    facts = {"SIZE": size, "RANK": rank, "LOCAL_SIZE": local_size, "LOCAL_RANK": local_rank}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in facts.items()}, **more}


def srun(tasks_per_node: str, nodes: int, node: int, rank: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(rank),
        # Of the allocation, and so of other steps, too:
        "SLURM_NNODES": "7",
        "SLURM_NTASKS_PER_NODE": "7",
        **more,
    }


BATCH_SCRIPT = {
    "SLURM_JOB_ID": "3", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "machines", "machine", "size", "rank"),
    [
        (torchrun(1, 0, 2, 1), 1, 0, 2, 1),
        (torchrun(3, 2, 4, 3), 3, 2, 4, 3),
        (mpirun(2, 1, 2, 1), 1, 0, 2, 1),
        (mpirun(6, 4, 2, 0), 3, 2, 2, 0),
        (mpirun(3, 2, 1, 0), 3, 2, 1, 0),
        (mpirun(5, 3, 2, 0, DMLC_NUM_WORKER="2", DMLC_WORKER_ID="1"), 2, 1, 2, 0),  # 3 + 2
        (srun("2", 1, 0, 1), 1, 0, 2, 1),
        (srun("2(x3),1", 4, 2, 1), 4, 2, 2, 1),
        (srun("2(x3),1", 4, 3, 0), 4, 3, 1, 0),
        (srun("3,2", 2, 1, 1), 2, 1, 2, 1),
        (BATCH_SCRIPT, 1, 0, 1, 0),  # a program that a batch script starts itself is alone
        ({**srun("1(x2)", 2, 1, 0), **torchrun(2, 1, 4, 3)}, 2, 1, 4, 3),  # nested: the inner one counts
        ({**srun("1(x2)", 2, 1, 0), **mpirun(4, 1, 4, 1)}, 1, 0, 4, 1),
        (torchrun(3, 2, 4, 3, DMLC_NUM_WORKER="5", BYTEPS_LOCAL_SIZE="8"), 5, 2, 8, 3),  # our own words win
        (torchrun(3, 2, 4, 3, DMLC_NUM_WORKER=""), 3, 2, 4, 3),
        (mpirun(5, 4, 1, 0, DMLC_ROLE="server", DMLC_NUM_WORKER="2"), 2, 0, 1, 0),  # counted as a rank; it is none
        ({"JOB_COMPLETION_INDEX": "1", "DMLC_NUM_WORKER": "2"}, 2, 1, 1, 0),
        ({"JOB_COMPLETION_INDEX": "1"}, 1, 0, 1, 0),  # pods that train alone, or of an operator
        ({"JOB_COMPLETION_INDEX": "1", "DMLC_NUM_WORKER": "2", "DMLC_ROLE": "server"}, 2, 0, 1, 0),
        ({"JOB_COMPLETION_INDEX": "1", "DMLC_NUM_WORKER": "3", **torchrun(3, 2, 4, 3)}, 3, 2, 4, 3),
    ],
)
def test_facts(environ: dict[str, str], machines: int, machine: int, size: int, rank: int) -> None:
    settings = Settings.from_env(environ)
    found = (settings.num_workers, settings.worker_id, settings.local_size, settings.local_rank)
    assert found == (machines, machine, size, rank)


@pytest.mark.parametrize(
    "environ",
    [
        mpirun(3, 1, 2, 1),  # 2 + 1
        mpirun(4, 1, 2, 0),  # by turns: machine 0 has the ranks 0 and 2
        mpirun(5, 3, 2, 0, DMLC_NUM_WORKER="2"),  # which of the two?
    ],
)
def test_ranks_that_do_not_say_their_machine(environ: dict[str, str]) -> None:
    size, rank = environ["OMPI_COMM_WORLD_SIZE"], environ["OMPI_COMM_WORLD_RANK"]
    text = rf"mpirun started {size} ranks, 2 of them .* rank {rank} .* Start equally many"
    with pytest.raises(ConfigurationError, match=text):
        Settings.from_env(environ)


def test_sizes_that_nobody_can_read_are_left_to_the_user() -> None:
    assert Settings.from_env(srun("two", 1, 0, 0)).local_size == 1
    assert Settings.from_env(srun("two", 1, 0, 1, BYTEPS_LOCAL_SIZE="2")).local_rank == 1


HERE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
JOBS = [
    torchrun(1, 0, 2, 0, **HERE, TORCHELASTIC_RUN_ID="a"),
    torchrun(1, 0, 2, 0, **{**HERE, "MASTER_PORT": "29501"}, TORCHELASTIC_RUN_ID="a"),
    torchrun(1, 0, 2, 0, **HERE, TORCHELASTIC_RUN_ID="b"),
    torchrun(1, 0, 2, 0, **HERE, TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="1"),
    mpirun(2, 0, 2, 0, PMIX_NAMESPACE="1234108417"),
    mpirun(2, 0, 2, 0, PMIX_NAMESPACE="1234108417", **HERE),
    mpirun(2, 0, 2, 0, PMIX_NAMESPACE="1202978817", **HERE),
    srun("2", 1, 0, 0, SLURM_JOB_ID="3", SLURM_STEP_ID="0"),
    srun("2", 1, 0, 0, SLURM_JOB_ID="3", SLURM_STEP_ID="1"),
]


def test_launches_are_told_apart_and_their_ranks_are_not() -> None:
    assert len({launchers.job(environ) for environ in JOBS}) == len(JOBS)
    for environ in JOBS:
        ranks = {"LOCAL_RANK": "1", "RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "SLURM_PROCID": "1"}
        assert launchers.job({**environ, **ranks}) == launchers.job(environ)
    assert launchers.job({}) == ""


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"MASTER_ADDR": "gpu0", "MASTER_PORT": "29500"}, ("gpu0", 29501)),
        ({"MASTER_ADDR": "gpu0", "MASTER_PORT": "65535"}, ("gpu0", 65534)),
        ({"MASTER_ADDR": "gpu0"}, None),
        ({"MASTER_ADDR": "gpu0", "MASTER_PORT": "any"}, None),
        ({}, None),
    ],
)
def test_scheduler(environ: dict[str, str], address: tuple[str, int] | None) -> None:
    assert launchers.scheduler(environ) == address


#: As SLURM 22.05 sets them, by srun and for a batch script: CPU nodes c1 and c2, GPU nodes g1 and g2 (two tasks each).
HET_STEP = {
    "SLURM_JOB_ID": "8007", "SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "c[1-2],g[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2),2(x2)",
}  # fmt: skip
GROUPS = [
    {f"SLURM_JOB_NODELIST_{word}_GROUP_{index}": nodes for index, nodes in enumerate(("c[1-2]", "g[1-2]"))}
    for word in ("PACK", "HET")
]


def het(node: int, local_rank: int = 0, groups: int = 0, **more: str) -> dict[str, str]:
    return {**HET_STEP, **GROUPS[groups], "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank), **more}


class TestHeterogeneousJobs:
    @pytest.mark.parametrize("groups", [0, 1])
    def test_the_last_group_trains(self, groups: int) -> None:
        settings = Settings.from_env(het(3, 1, groups))
        assert (settings.num_workers, settings.worker_id, settings.num_servers) == (2, 1, 2)
        assert (settings.local_size, settings.local_rank) == (2, 1)
        assert launchers.scheduler(het(3, 1, groups)) == ("g1", 16384 + 2 * 7 + 1)

    def test_a_step_with_one_of_the_groups(self) -> None:
        only = {"SLURM_STEP_NODELIST": "g[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_NODES": "2"}
        settings = Settings.from_env(het(1, **only))
        assert (settings.num_workers, settings.worker_id, settings.num_servers) == (2, 1, 0)

    def test_a_rank_on_a_node_that_lends_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"on c2, which lends its processors: .* begins with g1"):
            Settings.from_env(het(1))

    def test_bpslaunch_knows_its_part(self) -> None:
        one = {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
        common = {
            "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "g1", "DMLC_PS_ROOT_PORT": "16399",
        }  # fmt: skip
        assert launchers.slurm_part(het(1, **one), False) == {**common, "DMLC_ROLE": "server"}
        worker = {**common, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "1"}
        assert launchers.slurm_part(het(3, **one), True) == worker
        with pytest.raises(ConfigurationError, match="which program"):
            launchers.slurm_part(het(3, **one), False)
        with pytest.raises(ConfigurationError, match="srun starts bpslaunch 2 times on g1"):
            launchers.slurm_part(het(2), True)

    def test_what_is_set_counts_first(self) -> None:
        assert launchers.slurm_part(het(3, DMLC_ROLE="worker"), True) == {}
        assert launchers.slurm_part({**het(3), **torchrun(2, 1, 2, 0)}, True) == {}
        assert launchers.slurm_part(BATCH_SCRIPT, True) == {}
        assert launchers.scheduler(het(3, MASTER_ADDR="ib1", MASTER_PORT="7000")) == ("ib1", 7001)

    def test_all_machines_of_a_job_derive_one_secret(self, tmp_path: Path) -> None:
        found = {
            Settings.from_env(het(node, HOME=str(tmp_path), **more)).secret
            for node, more in ((2, {}), (3, {}), (1, {"DMLC_ROLE": "server", "DMLC_NUM_SERVER": "2"}))
        }
        assert len(found) == 1
        assert found != {""}
        assert (tmp_path / ".config" / "byteps" / "secret").stat().st_mode & 0o777 == 0o600
        assert Settings.from_env(het(3, HOME=str(tmp_path), SLURM_JOB_ID="8")).secret not in found
        assert Settings.from_env(het(3, HOME=str(tmp_path), BYTEPS_SECRET="x" * 16)).secret == "x" * 16
        assert Settings.from_env(het(3)).secret == ""

    def test_a_home_that_can_not_be_written_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="can't be made: Not a directory"):
            Settings.from_env(het(3, HOME=str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("c1", ["c1"]),
        ("c[1-2],g1,x[08-10]y", ["c1", "c2", "g1", "x08y", "x09y", "x10y"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("", []),
        ("c[x]", []),
    ],
)
def test_lists_of_slurm(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


def torch(rank: object, size: object, **more: str) -> dict[str, str]:
    here = {"MASTER_ADDR": "gpu0", "MASTER_PORT": "29500"}
    given = {"RANK": str(rank), "WORLD_SIZE": str(size), **here, **more}
    return {name: text for name, text in given.items() if text}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (torch(1, 2), (1, 2)),
        (torch(3, 4, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"), (3, 4)),
        (torch(1, 2, LOCAL_RANK="0"), (1, 2)),  # each process sees one GPU
        (torch(0, 1), None),
        ({"WORLD_SIZE": "1"}, None),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        ({"MASTER_ADDR": "gpu0", "MASTER_PORT": "29500"}, None),
        (torch(1, 2, BYTEPS_LOCAL_SIZE="2"), None),  # bpslaunch
        (torch(3, 4, **torchrun(2, 1, 2, 1)), None),
        (torch(0, 2, **mpirun(2, 0, 2, 0)), None),
        (torch(1, 2, **BATCH_SCRIPT), (1, 2)),  # which starts its own processes
        ({}, None),
    ],
)
def test_torch_world(environ: dict[str, str], found: tuple[int, int] | None) -> None:
    world = launchers.torch_world(environ)
    assert (world and (world.rank, world.size, world.host, world.port)) == (found and (*found, "gpu0", 29500))


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2 is set, but RANK and MASTER_ADDR and MASTER_PORT are not: .* bpslaunch -np",
        ),
        (torch(1, ""), "RANK=1, MASTER_ADDR=gpu0, MASTER_PORT=29500 are set, but WORLD_SIZE is not"),
        (torch(0, ""), "WORLD_SIZE is not"),
        (torch("", 2), "but RANK is not"),
        (torch(0, 2, MASTER_PORT=""), "MASTER_PORT is not"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, but RANK and WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "2"}, "RANK and WORLD_SIZE"),
        (torch(2, 2), "RANK=2 must be below WORLD_SIZE=2"),
        (torch(1, 1), "RANK=1 must be below WORLD_SIZE=1"),
        (torch(1, 4, LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"), "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
        (torch(1, 2, LOCAL_WORLD_SIZE="4"), "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
        (torch("first", 2), "RANK='first' is not what torch sets"),
        (torch(0, 2, MASTER_PORT="any"), "MASTER_PORT='any' is not a port"),
    ],
)
def test_torch_variables_that_are_incomplete_are_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        launchers.torch_world(environ)


@pytest.mark.parametrize(
    ("local_rank", "local_size", "ranks"),
    [("0", "2", [0, 0, 2, 2]), ("", "", ["", "", "", ""]), ("0", "", ["", "", "", ""]), ("0", "3", ["", "", "", ""])],
)
def test_ranks_of_one_launcher_are_of_one_machine(local_rank: str, local_size: str, ranks: list[object]) -> None:
    found = []
    for rank in range(4):
        local = str(int(local_rank) + rank % int(local_size)) if local_size else local_rank
        found.append(launchers.local_group({"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_size}, rank, 4))
    assert found == [f"/ranks from {first}" if first != "" else "" for first in ranks]
