"""Metrics and logs of whole jobs in real processes, while members are lost and come back."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.breaking import Job, environ_of, launch
from support.clusters import ROOT
from support.metrics_pages import free_ports, read, steps, until, value

from byteps_py.cli.__main__ import main as bps
from byteps_py.system.machine import process_at

PROGRAM = str(ROOT / "tests" / "programs" / "watched.py")


def end(job: Job, port: int, stop: Path) -> int:
    """The exit code of the job, once it has ended. ``stop``: see the program; some steps are made until it is seen."""
    stop.with_suffix(".new").write_text(str(int(max(steps(read(port)).values())) + 200))
    stop.with_suffix(".new").rename(stop)
    return job.end()


def status_of(job: Job, *options: str) -> str:
    """What `bps status` prints, in the environment of the job."""
    environ = environ_of(job.pid("byteps_py.scheduler"))
    command = [sys.executable, "-m", "byteps_py.cli", "status", *options]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    "way",
    [
        "plain",
        pytest.param("shadow", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.long) for each in ("hosted", "ddp")),
    ],
)
def test_one_page_has_all_of_a_job_and_each_process_has_its_own(way: str, tmp_path: Path) -> None:
    options = "--machines 2 --servers 1 -np 1"
    with (
        free_ports(3 * 4) as port,
        launch(options, way, str(tmp_path / "stop"), program=PROGRAM, BYTEPS_METRICS_PORT=str(port)) as job,
    ):
        job.until("job at")
        found = until(port, lambda page: len(steps(page)) == 2 and min(steps(page).values()) >= 3)
        assert {rank for (_, role, _, rank) in found if role == "rank"} == {"0", "1"}
        machines = {machine.partition(":")[0] for (_, role, machine, _) in found if role == "server"}
        assert machines == {"gpu-0", "gpu-1", "cpu-127.0.0.1"}
        assert value(found, "tokens_total") > 0
        if way != "ddp":  # which goes from rank to rank
            until(port, lambda page: value(page, "sent_bytes_total") > 0 and value(page, "result_bytes_total") > 0)
        if way == "shadow":
            until(port, lambda page: value(page, "shadow_survives_loss") == 1 and value(page, "shadow_step") > 0)
        for offset, role, name in ((1, "worker", "rounds_total"), (5, "worker", "rounds_total"),
                                   (3, "rank", "steps_total"), (7, "rank", "steps_total"),
                                   (2, "server", "in_flight_bytes"), (10, "server", "in_flight_bytes")):  # fmt: skip
            own = until(port + offset, bool)
            assert [role] == [each for (metric, each, _, _) in own if metric == f"byteps_{name}"]
        assert set(steps(read(port + 1))) == {"0"}  # a communication service has those of its machine
        until(port, lambda page: value(page, "tokens_per_second") > 0)
        assert "training: step " in (said := status_of(job))
        assert "tokens/s" in said
        ranks = [rank for member in json.loads(status_of(job, "--json"))["members"] for rank in member["ranks"]]
        assert sorted(rank["rank"] for rank in ranks) == [0, 1]  # members are in the order of their coming
        assert (end(job, port, tmp_path / "stop") if way == "shadow" else job.end()) == 0, job.text
        assert job.text.count("exposed True") == 2


@pytest.mark.slow
def test_a_server_that_is_lost_is_down_and_its_figures_go() -> None:
    options = "--machines 2 --servers 1 -np 1"
    with (
        free_ports(3 * 4) as port,
        launch(options, "plain", program=PROGRAM, BYTEPS_METRICS_PORT=str(port)) as job,
    ):
        job.until("job at")
        before = until(port, lambda page: len(steps(page)) == 2)
        (machine,) = {machine for (_, _, machine, _) in before if machine.startswith("cpu-")}
        os.kill(job.pid("byteps_py.server", BYTEPS_MACHINE_ID="c0"), signal.SIGKILL)
        after = until(port, lambda page: page.get(("byteps_member_up", "server", machine, "")) == 0)
        assert ("byteps_summed_bytes_total", "server", machine, "") not in after
        assert value(after, "members_lost_total") == 1
        again = until(port, lambda page: value(page, "epoch") > value(before, "epoch"))
        until(port, lambda page: min(steps(page).values(), default=0) > max(steps(again).values()))
        assert job.end() == 0, job.text


@pytest.mark.slow
def test_a_rank_that_is_started_again_goes_on_from_its_step(tmp_path: Path) -> None:
    """In place: the other ranks wait for it. Its page comes back at the same port."""
    options = "--machines 2 --servers 1 -np 1 --max-restarts 2"
    with (
        free_ports(3 * 4) as port,
        launch(options, "shadow", str(tmp_path / "stop"), program=PROGRAM, BYTEPS_METRICS_PORT=str(port)) as job,
    ):
        job.until("job at")
        before = until(port, lambda page: value(page, "shadow_step") > 3 and len(steps(page)) == 2)
        rank = re.match(r"process (\d+) has it", process_at("127.0.0.1", port + 7))  # not the one that stands by for it
        assert rank is not None
        os.kill(int(rank[1]), signal.SIGKILL)
        made = max(steps(before).values())
        after = until(port, lambda page: len(steps(page)) == 2 and value(page, "recoveries_total") >= 1
                      and min(steps(page).values()) > made)  # fmt: skip
        assert value(after, "epoch") > value(before, "epoch")
        own = until(port + 7, bool)
        assert steps(own)["1"] > made
        assert end(job, port, tmp_path / "stop") == 0, job.text


def test_a_port_in_use_is_a_warning_and_the_job_trains() -> None:
    """Rank 0 has no page; the communication service has its figures."""
    with (
        free_ports(5) as port,
        socket.create_server(("127.0.0.1", port + 3)),
        launch("-np 2", "plain", program=PROGRAM, BYTEPS_METRICS_PORT=str(port)) as job,
    ):
        said = job.until("can't be used")
        where = (
            f"metrics: port {port + 3} of 127.0.0.1 can't be used: Address already in use (process {os.getpid()} has"
        )
        what = "Without it, rank 0 of this machine has no page here; the scheduler's page has its figures. Set another"
        assert where in said
        assert what in said
        found = until(port + 1, lambda page: len(steps(page)) == 2)
        assert min(steps(found).values()) >= 1
        assert set(steps(until(port + 4, bool))) == {"1"}
        assert job.end() == 0, job.text


def test_logs_are_objects_and_bps_logs_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"-np 2 --log-dir {tmp_path}"
    variables = {"BYTEPS_LOG_FORMAT": "json", "BYTEPS_LOG_LEVEL": "INFO", "BYTEPS_FORCE_DISTRIBUTED": "1"}
    with launch(options, "plain", program=PROGRAM, **variables) as job:
        assert job.end() == 0, job.text
    found = [json.loads(line) for line in job.said if line.startswith("{")]
    assert {"worker"} <= {line["role"] for line in found}
    for line in found:
        assert {"time", "level", "logger", "job", "role", "message"} <= set(line)
    assert bps(["logs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "byteps_py worker gpu-0 INFO: epoch 1: 1 machines, 2 ranks" in printed
    assert '"message"' not in printed
