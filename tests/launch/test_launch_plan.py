"""What bpslaunch starts for each role and layout, its command line, and how it shows output. No process is started."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from byteps_py.errors import ConfigurationError
from byteps_py.launch.__main__ import CommandError, resolve
from byteps_py.launch.command_line import parse
from byteps_py.launch.installation import visible_gpus
from byteps_py.launch.process_output import MAX_LINE_BYTES, LineTagger
from byteps_py.launch.process_plan import ClusterSize, ProcessKind, ProcessSpec, cluster_plan, free_port, role_plan

ROOT = {"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9000"}
COMMAND = ("python", "train.py")


def by_hand(role: str, workers: int = 1, servers: int = 0, **more: str) -> dict[str, str]:
    sizes = {"DMLC_ROLE": role, "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers)}
    return {**sizes, **ROOT, "DMLC_WORKER_ID": "0", **more}


def plan_role(environ: Mapping[str, str], gpus: int = 0, cores: int = 8) -> list[ProcessSpec]:
    return role_plan(environ, COMMAND, visible_gpus=gpus, cores=cores, token="abc", port=7000)


def plan_cluster(ranks: int, machines: int = 1, servers: int = 0, **environ: str) -> list[ProcessSpec]:
    return cluster_plan(
        environ,
        COMMAND,
        ClusterSize(ranks, machines, servers),
        port=9000,
        torch_port=9500,
        cores=8,
        token="abc",
    )


def programs(specs: list[ProcessSpec]) -> list[str]:
    """The processes in short: scheduler, server, server --gpu-machine, worker, and r for a rank."""
    return [
        "r" if s.argv == COMMAND else " ".join(s.argv[3:]).removeprefix("byteps_py.").removesuffix(" --stay")
        for s in specs
    ]


GPU_SS = "server --gpu-machine"


TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TestRolePlan:
    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            (by_hand("worker", 1, 0, BYTEPS_LOCAL_SIZE="2"), "1 2 1 2 127.0.0.1 7000"),
            (by_hand("worker", 2, 1, DMLC_WORKER_ID="1", BYTEPS_LOCAL_SIZE="2"), "3 4 1 2 10.0.0.1 8999"),
            (by_hand("worker", 2, 1, MASTER_ADDR="gpu0", MASTER_PORT="1", RANK="5", WORLD_SIZE="7"), "5 7 0 1 gpu0 1"),
            (by_hand("worker", 2, 1, BYTEPS_LOCAL_SIZE="2", RANK="5", WORLD_SIZE="7"), "1 4 1 2 10.0.0.1 8999"),
        ],
    )
    def test_the_last_rank_gets_the_variables_of_torch(self, environ: dict[str, str], expected: str) -> None:
        rank = plan_role(environ)[-1]
        assert [rank.env[name] for name in TORCH] == expected.split()

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            (by_hand("scheduler", 2, 1), ["scheduler"]),
            (by_hand("server", 2, 1), ["server"]),
            ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1"}, ["r"]),
            (by_hand("worker", 1, 0), ["r"]),
            (by_hand("worker", 1, 0, BYTEPS_FORCE_DISTRIBUTED="1"), ["worker", "r"]),
            (by_hand("worker", 1, 0, BYTEPS_LOCAL_SIZE="2"), ["worker", "r", "r"]),
            (by_hand("worker", 1, 1), ["worker", "r"]),
            (by_hand("worker", 2, 0), [GPU_SS, "worker", "r"]),
            (by_hand("worker", 2, 1, BYTEPS_LOCAL_SIZE="3"), [GPU_SS, "worker", "r", "r", "r"]),
            (by_hand("worker", 2, 2), [GPU_SS, "worker", "r"]),  # ready for the day when a CPU machine goes
            (by_hand("worker", 2, 3), [GPU_SS, "worker", "r"]),
            (by_hand("worker", 2, 3, BYTEPS_PLACEMENT="servers-only"), ["worker", "r"]),
            (by_hand("joint", 2, 0), [GPU_SS, "worker", "r"]),
            (by_hand("joint", 2, 2), ["server", GPU_SS, "worker", "r"]),
            (by_hand("Worker", 2, 2), [GPU_SS, "worker", "r"]),
        ],
    )
    def test_processes(self, environ: dict[str, str], expected: list[str]) -> None:
        specs = plan_role(environ)
        assert programs(specs) == expected
        assert all(
            (s.kind is ProcessKind.MAIN) == (p == "r" or len(specs) == 1) for s, p in zip(specs, expected, strict=True)
        )

    def test_environment_of_a_worker(self) -> None:
        specs = plan_role(by_hand("worker", 2, 1, DMLC_WORKER_ID="1", BYTEPS_LOCAL_SIZE="2"))
        shared = {
            "DMLC_ROLE": "worker",
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "1",
            "DMLC_WORKER_ID": "1",
            "BYTEPS_LOCAL_SIZE": "2",
            "BYTEPS_SOCKET_NAME": "byteps-abc-cs",
        }
        assert [{name: text for name, text in s.env.items() if name not in TORCH} for s in specs] == [
            shared,
            shared,
            {**shared, "BYTEPS_LOCAL_RANK": "0", "OMP_NUM_THREADS": "4"},
            {**shared, "BYTEPS_LOCAL_RANK": "1", "OMP_NUM_THREADS": "4"},
        ]
        assert [s.reads_stdin for s in specs] == [False, False, True, False]
        assert specs[3].name == "local rank 1 of machine 1"

    def test_srun_says_which_machine_this_is(self) -> None:
        step = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
        environ = {"DMLC_ROLE": "worker", "DMLC_NUM_SERVER": "2", "SLURM_LOCALID": "0", **step, **ROOT}
        rank = plan_role(environ, gpus=3)[-1]
        assert (rank.env["DMLC_NUM_WORKER"], rank.env["DMLC_WORKER_ID"]) == ("2", "1")
        assert (rank.env["BYTEPS_LOCAL_SIZE"], rank.env["BYTEPS_LOCAL_RANK"]) == ("3", "2")  # it started bpslaunch only

    def test_local_size_defaults_to_the_visible_gpus(self) -> None:
        assert programs(plan_role(by_hand("worker"), gpus=3)) == ["worker", "r", "r", "r"]

    def test_one_machine_without_scheduler_gets_a_job_id(self) -> None:
        environ = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "BYTEPS_LOCAL_SIZE": "2"}
        assert {s.env["BYTEPS_JOB_ID"] for s in plan_role(environ)} == {"abc"}
        assert [(s.env["HOROVOD_RANK"], s.env["HOROVOD_SIZE"]) for s in plan_role(environ)[1:]] == [
            ("0", "2"),
            ("1", "2"),
        ]
        assert {s.env.get("BYTEPS_JOB_ID") for s in plan_role({**environ, "BYTEPS_JOB_ID": "mine"})} == {None}

    def test_the_users_thread_count_is_kept(self) -> None:
        assert plan_role(by_hand("worker", OMP_NUM_THREADS="3"))[-1].env["OMP_NUM_THREADS"] == "3"
        assert plan_role(by_hand("worker", BYTEPS_LOCAL_SIZE="9"))[-1].env["OMP_NUM_THREADS"] == "1"

    @pytest.mark.parametrize(
        ("environ", "missing"),
        [
            ({}, ["DMLC_ROLE"]),
            (
                {"DMLC_ROLE": "worker"},
                ["DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_WORKER_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"],
            ),
            ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "0", **ROOT}, ["DMLC_WORKER_ID"]),
            (
                {"DMLC_ROLE": "joint", "DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "", **ROOT},
                ["DMLC_NUM_SERVER", "DMLC_WORKER_ID"],
            ),
            ({"DMLC_ROLE": "server"}, ["DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"]),
            (
                {"DMLC_ROLE": "scheduler", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"},
                ["DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"],
            ),
        ],
    )
    def test_every_missing_variable_is_named(self, environ: dict[str, str], missing: list[str]) -> None:
        with pytest.raises(ConfigurationError) as caught:
            plan_role(environ)
        assert re.findall(r"^  (\w+)", str(caught.value), re.MULTILINE) == missing
        assert "default" not in str(caught.value)  # what is needed has none

    @pytest.mark.parametrize(
        ("environ", "text"),
        [
            (by_hand("boss"), "DMLC_ROLE='boss' is not valid: it takes one of worker"),
            (by_hand("worker", BYTEPS_LOCAL_SIZE="none"), "BYTEPS_LOCAL_SIZE='none' is not valid"),
            (by_hand("worker", 2, DMLC_WORKER_ID="2"), "DMLC_WORKER_ID=2 must be below DMLC_NUM_WORKER=2"),
        ],
    )
    def test_bad_values_are_named(self, environ: dict[str, str], text: str) -> None:
        with pytest.raises(ConfigurationError, match=re.escape(text)):
            plan_role(environ)


class TestClusterPlan:
    @pytest.mark.parametrize(
        ("layout", "expected"),
        [
            ((1, 1, 0), ["r"]),
            ((2, 1, 0), ["scheduler", "worker", "r", "r"]),
            ((1, 1, 1), ["scheduler", "server", "worker", "r"]),
            ((1, 2, 0), ["scheduler", GPU_SS, "worker", GPU_SS, "worker", "r", "r"]),
            ((1, 2, 1), ["scheduler", "server", GPU_SS, "worker", GPU_SS, "worker", "r", "r"]),
            ((1, 2, 2), ["scheduler", "server", "server", GPU_SS, "worker", GPU_SS, "worker", "r", "r"]),
            ((2, 2, 3), ["scheduler", *["server"] * 3, GPU_SS, "worker", GPU_SS, "worker", "r", "r", "r", "r"]),
        ],
    )
    def test_processes(self, layout: tuple[int, int, int], expected: list[str]) -> None:
        assert programs(plan_cluster(*layout)) == expected

    @pytest.mark.parametrize(
        ("given", "kept"),
        [("", ""), ("eth0,eth1", ""), ("127.0.0.1,eth1", ""), ("127.0.0.1, 127.0.0.2", "127.0.0.1, 127.0.0.2")],
    )
    def test_network_cards_are_those_of_loopback(self, given: str, kept: str) -> None:
        specs = plan_cluster(1, machines=2, BYTEPS_INTERFACES=given)
        assert {spec.env["BYTEPS_INTERFACES"] for spec in specs} == {kept}

    def test_forced_services_for_one_rank(self) -> None:
        assert programs(plan_cluster(1, BYTEPS_FORCE_DISTRIBUTED="1")) == ["scheduler", "worker", "r"]

    def test_environment(self) -> None:
        specs = plan_cluster(2, machines=2, servers=1)
        cluster = {
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "1",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": "9000",
            "DMLC_NODE_HOST": "127.0.0.1",
            "BYTEPS_INTERFACES": "",
            "BYTEPS_JOB_ID": "abc",
        }
        machines = [
            {
                **cluster,
                "DMLC_ROLE": "worker",
                "DMLC_WORKER_ID": str(m),
                "BYTEPS_MACHINE_ID": f"m{m}",
                "BYTEPS_LOCAL_SIZE": "2",
                "BYTEPS_SOCKET_NAME": f"byteps-abc-m{m}-cs",
            }
            for m in (0, 1)
        ]
        assert [s.env for s in specs] == [
            {**cluster, "DMLC_ROLE": "scheduler", "BYTEPS_MACHINE_ID": "m0"},
            {**cluster, "DMLC_ROLE": "server", "BYTEPS_MACHINE_ID": "c0", "BYTEPS_SHADOW_KEEP_S": "0"},
            *(machines[0], machines[0], machines[1], machines[1]),
            *(
                {
                    **machines[m],
                    "BYTEPS_LOCAL_RANK": str(local),
                    "OMP_NUM_THREADS": "2",
                    "HOROVOD_RANK": str(2 * m + local),
                    "HOROVOD_SIZE": "4",
                    "HOROVOD_LOCAL_RANK": str(local),
                    "HOROVOD_LOCAL_SIZE": "2",
                    "HOROVOD_CROSS_RANK": str(m),
                    "HOROVOD_CROSS_SIZE": "2",
                    "RANK": str(2 * m + local),
                    "WORLD_SIZE": "4",
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": "9500",
                }
                for m, local in [(0, 0), (0, 1), (1, 0), (1, 1)]
            ),
        ]
        assert [s.name for s in specs[-4:]] == [
            "rank 0 (local rank 0 of machine m0)",
            "rank 1 (local rank 1 of machine m0)",
            "rank 2 (local rank 0 of machine m1)",
            "rank 3 (local rank 1 of machine m1)",
        ]
        assert [s.reads_stdin for s in specs[-4:]] == [True, False, False, False]
        assert len({s.name for s in specs}) == len({s.label for s in specs}) == len(specs)

    def test_a_lone_rank_gets_no_scheduler(self) -> None:
        (rank,) = plan_cluster(1, DMLC_PS_ROOT_URI="10.0.0.1")
        assert rank.env["DMLC_PS_ROOT_URI"] == rank.env["DMLC_PS_ROOT_PORT"] == ""
        assert "BYTEPS_SOCKET_NAME" not in rank.env

    def test_only_the_communication_service_waits_to_be_dismissed(self) -> None:
        specs = plan_cluster(1, machines=2, servers=1)
        assert [s.label for s in specs if s.is_dismissed] == ["cs-m0", "cs-m1"]

    def test_bad_setting_is_found_before_anything_starts(self) -> None:
        with pytest.raises(ConfigurationError, match="BYTEPS_PARTITION_BYTES=5000 must be a multiple"):
            plan_cluster(2, BYTEPS_PARTITION_BYTES="5000")

    def test_free_ports_are_not_given_out_by_the_system(self) -> None:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert 1024 < free_port() < low or low <= 18000


class TestGpus:
    @pytest.mark.parametrize(
        ("environ", "count"),
        [
            ({}, 7),
            ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
            ({"CUDA_VISIBLE_DEVICES": ""}, 0),
            ({"CUDA_VISIBLE_DEVICES": "-1", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 0),
            ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
            ({"NVIDIA_VISIBLE_DEVICES": "GPU-4a,GPU-5b"}, 2),
            ({"NVIDIA_VISIBLE_DEVICES": "all"}, 7),
            ({"NVIDIA_VISIBLE_DEVICES": "none"}, 0),
        ],
    )
    def test_count(self, environ: dict[str, str], count: int) -> None:
        assert visible_gpus(environ, ask=lambda: 7) == count


class TestOptions:
    def test_horovodrun_names(self) -> None:
        for arguments in (["-np", "2"], ["-n", "2"], ["--num-proc", "2"], ["--num-proc=2"]):
            given = parse([*arguments, "--verbose", "python", "a.py", "-np", "3", "--verbose"], {})
            assert (given.ranks, given.command) == (2, ("python", "a.py", "-np", "3", "--verbose"))

    def test_variables(self) -> None:
        options = "--partition-bytes=8192", "--timeout=5", "--log-level=INFO"
        given = parse(["-np", "2", *options, "--", "cmd"], {})
        assert given.variables == {
            "BYTEPS_PARTITION_BYTES": "8192",
            "BYTEPS_START_TIMEOUT_S": "5",
            "BYTEPS_LOG_LEVEL": "INFO",
        }
        assert given.command == ("cmd",)

    @pytest.mark.parametrize(
        ("arguments", "environ", "text"),
        [
            (["cmd"], {}, "how many ranks?"),
            (["-np", "2"], {}, "which program?"),
            ([], {"DMLC_ROLE": "wroker"}, "DMLC_ROLE='wroker' is not valid: it takes one of worker"),
            (["-np", "2"], {"DMLC_ROLE": "wroker"}, "DMLC_ROLE='wroker' is not valid"),
            (["-np", "2", "cmd"], {"DMLC_ROLE": "worker"}, "DMLC_ROLE=worker is set"),
        ],
    )
    def test_contradictions(self, arguments: list[str], environ: dict[str, str], text: str) -> None:
        with pytest.raises(ConfigurationError, match=re.escape(text)):
            parse(arguments, environ)

    def test_command_resolution(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.touch(mode=0o644)
        assert resolve(("python", "a"), {"PATH": str(tmp_path)}) == (sys.executable, "a")
        with pytest.raises(CommandError, match=r"did you mean: python .*train.py") as caught:
            resolve((str(script),), {})
        assert caught.value.code == 126


class TestLineTagger:
    def test_lines_are_whole_however_they_arrive(self) -> None:
        text = b"a\nbc\r\n10%\r20%\rlast"
        for cut in range(len(text) + 1):
            tagger = LineTagger(b"[0] ")
            shown = tagger.feed(text[:cut]) + tagger.feed(text[cut:]) + tagger.flush()
            assert shown == b"[0] a\n[0] bc\n[0] 10%\n[0] 20%\n[0] last\n"

    def test_an_endless_line_is_not_hoarded(self) -> None:
        tagger = LineTagger(b"> ")
        line = b"x" * (MAX_LINE_BYTES + 1)
        assert tagger.feed(line) == b"> " + line + b"\n"
        assert tagger.flush() == b""
