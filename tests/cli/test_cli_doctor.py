"""`bps doctor`: machines as they may be, this one, and the links to a job's members."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator, Sequence

import pytest
from support.breaking import environ_of, launch

from byteps_py.cli.__main__ import main as bps
from byteps_py.config.settings import Settings
from byteps_py.doctor import Finding, machine_checks
from byteps_py.doctor.link_checks import check_server
from byteps_py.launch.process_plan import free_port

MANY = resource.RLIM_INFINITY


def levels(findings: Iterator[Finding]) -> list[str]:
    """And each that is not ok says what to change, in one line."""
    found = list(findings)
    assert all(bool(each.remedy) == (each.level != "ok") for each in found)
    assert not any("\n" in each.text + each.remedy for each in found)
    return [str(each.level) for each in found]


RDMA = {"DMLC_ENABLE_RDMA": "1"}


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        (machine_checks.check_cores(16, 16, None), ["ok"]),
        (machine_checks.check_cores(16, 8, 2.5), ["warn"]),
        (machine_checks.check_cores(16, 8, 8.0), ["ok"]),
        (machine_checks.check_cores(1, 1, None), ["warn"]),
        (machine_checks.check_numa(["node0"]), ["ok"]),
        (machine_checks.check_numa(["node0", "node1"]), ["warn"]),
        (machine_checks.check_numa(["node0", "node1"], is_pinned=True), ["ok"]),
        (machine_checks.check_processor("x86_64", frozenset({"avx2", "f16c"})), ["ok"]),
        (machine_checks.check_processor("x86_64", frozenset({"sse2"})), ["warn"]),
        (machine_checks.check_processor("x86_64", frozenset({"avx2"})), ["warn"]),
        (machine_checks.check_processor("aarch64", frozenset({"asimd"})), ["ok"]),
        (machine_checks.check_memory(1 << 34), ["ok"]),
        (machine_checks.check_memory(1 << 28), ["warn"]),
        (machine_checks.check_open_files(65536, 65536), ["ok"]),
        (machine_checks.check_open_files(1024, MANY), ["warn"]),
        (machine_checks.check_open_files(64, 1024), ["fail"]),
        (machine_checks.check_open_files(MANY, MANY), ["ok"]),
        (machine_checks.check_locked_memory(64 << 10, 64 << 10), ["ok"]),
        (machine_checks.check_locked_memory(64 << 10, 64 << 10, wants_rdma=True), ["fail"]),
        (machine_checks.check_locked_memory(resource.RLIM_INFINITY, resource.RLIM_INFINITY, wants_rdma=True), ["ok"]),
        (machine_checks.check_rdma({}, "", []), []),
        (machine_checks.check_rdma({}, "", ["mlx5_0"]), ["ok"]),
        (machine_checks.check_rdma(RDMA, "nixl_cu12", ["mlx5_0"]), ["ok"]),
        (machine_checks.check_rdma(RDMA, "nixl_cu12", []), ["fail"]),
        (machine_checks.check_rdma(RDMA, "", ["mlx5_0"]), ["fail"]),
        (machine_checks.check_rdma({**RDMA, "BYTEPS_RDMA_TRANSPORTS": "tcp"}, "nixl_cu12", []), ["warn"]),
        (machine_checks.check_rdma({**RDMA, "BYTEPS_ENCRYPT": "1"}, "nixl_cu12", ["mlx5_0"]), []),
        (machine_checks.check_shared_memory(None), ["warn"]),
        (machine_checks.check_shared_memory(64 << 20), ["warn"]),
        (machine_checks.check_shared_memory(1 << 33), ["ok"]),
    ],
)  # fmt: skip
def test_machines_as_they_may_be(findings: Iterator[Finding], expected: Sequence[str]) -> None:
    assert levels(findings) == expected


WANTED = ["numpy<3,>=1.26", "pyzmq>=26", 'torch<2.16,>=2.8; extra == "torch"', 'pytest>=8; extra == "dev"']


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"numpy": "2.4.6", "pyzmq": "27", "torch": "2.13.0+cpu"}, ["ok", "ok"]),
        ({"numpy": "2.4.6", "pyzmq": "27.0.0b1"}, ["ok", "ok"]),  # a machine that only sums
        ({"numpy": "1.26", "torch": "2.16.0"}, ["fail", "fail", "ok"]),
        ({"numpy": "3.0", "pyzmq": "25.9"}, ["fail", "fail", "ok"]),
        ({}, ["fail", "fail", "ok"]),
    ],
)
def test_versions_that_may_be_installed(versions: dict[str, str], expected: list[str]) -> None:
    found = machine_checks.check_requirements(WANTED, lambda name: versions.get(name, ""))
    assert levels(found) == expected


def test_this_installation_has_what_it_needs() -> None:
    assert "fail" not in levels(machine_checks.check_versions())


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "ok"),
        ({"DMLC_NUM_WORKERS": "2"}, "warn"),
        ({"DMLC_PS_ROOT_PORT": "x"}, "fail"),
        ({"DMLC_NODE_HOST": "192.0.2.1"}, "fail"),  # others could connect, and there is no secret
    ],
)
def test_variables(environ: dict[str, str], expected: str) -> None:
    assert levels(machine_checks.check_settings(environ))[0] == expected


def test_ports() -> None:
    port = free_port()
    where = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port)}
    *_, last = machine_checks.check_ports(where)
    assert last.text == f"127.0.0.1:{port} is free for the scheduler"
    *_, last = machine_checks.check_ports({**where, "DMLC_PS_ROOT_URI": "192.0.2.1"})
    assert last.text == f"the scheduler at 192.0.2.1:{port} is on another machine"


def test_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in os.environ if name.startswith(("DMLC_", "BYTEPS_"))]:
        monkeypatch.delenv(name)
    code = bps(["doctor", "--no-job", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == int(any(each["level"] == "fail" for each in found))
    subjects = [each["subject"] for each in found]
    for subject in ("python", "packages", "variables", "cores", "NUMA", "processor", "memory", "open files"):
        assert subject in subjects
    for subject in ("locked memory", "/dev/shm", "clock", "GPUs", "topology", "ports", "links"):
        assert subject in subjects
    monkeypatch.setenv("DMLC_NUM_WORKER", "many")
    assert bps(["doctor", "--no-job"]) == 1
    lines = capsys.readouterr().out.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("fail")]
    assert "DMLC_NUM_WORKER='many' is not valid" in lines[at]
    assert lines[at + 1].strip().startswith("→ correct it")


@pytest.mark.slow
def test_the_links_of_a_job_that_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with launch("-np 1 --machines 2 --servers 1", "told") as job:
        job.until("0: training", "1: training")
        own = environ_of(job.pid("told", DMLC_WORKER_ID="0"))
        for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "BYTEPS_JOB_ID", "BYTEPS_LOCAL_SECRET"):
            monkeypatch.setenv(name, own[name])
        assert bps(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        servers = [each for each in found if each["subject"].startswith("server ")]
        assert len(servers) == 3
        assert all("µs there and back" in each["text"] and " 0 Mbit/s" not in each["text"] for each in servers), servers
        assert len([each for each in found if each["subject"].startswith("worker ")]) == 2
        address = f"{own['DMLC_PS_ROOT_URI']}:{own['DMLC_PS_ROOT_PORT']}"
        bps(["plan", "cluster", address, "--json"])
        planned = json.loads(capsys.readouterr().out)["cluster"]
        assert (planned["machines"], planned["gpus_per_machine"], planned["servers"]) == (2, 1, 1)
        assert planned["network_gb_per_s"] > 0
        assert job.end() == 0  # nothing of it has disturbed the training


def test_a_job_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is expected to run if the command line names it; variables are also set before a job is started."""
    address = f"127.0.0.1:{free_port()}"
    assert bps(["doctor", "--scheduler", address, "--timeout", "0.5"]) == 1
    assert f"no scheduler answers at {address}" in capsys.readouterr().out
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
    monkeypatch.setenv("DMLC_PS_ROOT_PORT", address.rpartition(":")[2])
    bps(["doctor", "--timeout", "0.5"])
    assert f"none answers at {address} yet" in capsys.readouterr().out


def test_a_server_that_can_not_be_reached() -> None:
    found = check_server(Settings(heartbeat_timeout_s=0.5), "server", f"tcp://127.0.0.1:{free_port()}", 0.0)
    assert (found.level, "can't be reached from here" in found.text) == ("fail", True)
    assert "firewall" in found.remedy


def test_network_cards_of_one_network_are_a_warning() -> None:
    own = {"10.0.0.1": "10.0.0.0/24", "10.1.0.1": "10.1.0.0/24", "10.2.0.1": ""}
    (found,) = machine_checks.check_network_cards(own)
    assert found.text == "tensors go over 10.0.0.1 and 10.1.0.1 and 10.2.0.1 at the same time"
    _, warned = machine_checks.check_network_cards({**own, "10.0.0.9": "10.0.0.0/24"})
    assert warned.text.startswith("10.0.0.1 and 10.0.0.9 are in one network, 10.0.0.0/24:")
    shown = list(machine_checks.check_settings({"BYTEPS_INTERFACES": "127.0.0.1,127.0.0.2"}))
    assert [each.level.name for each in shown] == ["OK", "OK"]
    (refused,) = machine_checks.check_settings({"BYTEPS_INTERFACES": "nosuch0"})
    assert "nosuch0 is no interface of this machine" in refused.text
