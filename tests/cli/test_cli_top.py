"""`bps top`: what two statuses say together, and a job that trains, on a terminal and off it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.breaking import Job, environ_of, launch

from byteps_py.cli.__main__ import main as bps
from byteps_py.cli.top import Sample, changes, compare, to_page
from byteps_py.placement.shares import Optimum
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.query import to_dict

MB = 1_000_000
WAIT_S = 60


def member(number: int, role: int, machine: str, weight: int = 0, **counters: int) -> pb.MemberStatus:
    kind = 2 if machine.startswith("cpu") else 1
    about = pb.Member(
        member_id=number, role=role, kind=kind, machine_id=machine, machine_index=number - 1, address="tcp://10.0.0.1:1",  # type: ignore[arg-type]
        host=machine, pid=100 + number, weight=weight, link_mbit=1000,
    )  # fmt: skip
    return pb.MemberStatus(member=about, alive=True, heartbeat_age_s=0.5, statistics=pb.Statistics(**counters))


def reply(*members: pb.MemberStatus, **facts: object) -> pb.StatusReply:
    return pb.StatusReply(state=pb.StatusReply.STATE_RUNNING, reason="all are there", members=members, epoch=1, **facts)  # type: ignore[arg-type]


BEFORE = reply(
    member(1, 1, "gpu0", bytes_sent=10 * MB),
    member(2, 2, "gpu0", weight=1, bytes_received=5 * MB, bytes_summed=MB),
    member(3, 2, "cpu0", weight=3),
)
AFTER = reply(
    member(1, 1, "gpu0", bytes_sent=110 * MB),
    member(2, 2, "gpu0", weight=1, bytes_received=55 * MB, bytes_sent=25 * MB, bytes_summed=26 * MB),
    member(3, 2, "cpu0", weight=3, bytes_received=150 * MB, bytes_sent=150 * MB, bytes_summed=75 * MB),
    stalled=["tensor 'w' waits for rank 1"], slow=["rank 0 is slow"],
)  # fmt: skip


def test_links_have_the_traffic_of_all_services_of_their_machine_and_servers_their_share() -> None:
    found = compare(Sample(to_dict(BEFORE), 10.0), Sample(to_dict(AFTER), 12.0))
    cpu, gpu = found["links"]
    assert (gpu["members"], gpu["received_mbit"], gpu["sent_mbit"]) == (2, 200, pytest.approx(500))
    assert (cpu["host"], cpu["received_mbit"], cpu["link_mbit"]) == ("cpu0", 600, 1000)
    assert [(each["share"], each["formula_share"]) for each in found["servers"]] == [(0.75, 0.75), (0.25, 0.25)]
    assert found["waits"] == ["tensor 'w' waits for rank 1", "rank 0 is slow"]
    page = to_page(found, ["12:00:00 it has rained"]).splitlines()
    assert page[0] == "running: all are there"
    assert "  tensor 'w' waits for rank 1" in page
    assert ["CPU", "cpu0", "600", "600", "1,000", "60%"] in [line.split() for line in page]
    assert page[-1] == "  12:00:00 it has rained"


def test_a_member_that_is_started_again_has_no_rate_at_first() -> None:
    begun_again = reply(member(1, 1, "gpu0", bytes_sent=MB))
    found = compare(Sample(to_dict(BEFORE), 10.0), Sample(to_dict(begun_again), 12.0))
    assert [link["sent_mbit"] for link in found["links"]] == [0]
    found = compare(Sample(to_dict(reply()), 10.0), Sample(to_dict(AFTER), 12.0))
    assert {link["sent_mbit"] for link in found["links"]} == {0}
    assert [each["share"] for each in found["servers"]] == [None, None]
    assert "–" in to_page(found, [])


def test_changes_are_told() -> None:
    lost = reply(*AFTER.members, member(4, 2, "cpu1"), restarts=1)
    lost.epoch = 2
    lost.members[1].alive = False
    lost.members[2].alive, lost.members[2].left = False, True
    found = compare(Sample(to_dict(BEFORE), 0.0), Sample(to_dict(lost), 1.0))
    assert changes(to_dict(BEFORE), found) == [
        "server of GPU 1 (gpu0:102): lost",
        "server of CPU (cpu0:103): left",
        "server of CPU (cpu1:104) has joined",
        "epoch 2: the members, or their shares, have changed",
        "the scheduler was started again, and has resumed the job",
    ]
    assert found["recoveries"]["members_lost"] == ["server of GPU 1 (gpu0:102)"]
    assert changes(to_dict(lost), found) == []


@pytest.fixture(name="job")
def _job() -> Iterator[tuple[Job, dict[str, str]]]:
    """A job that trains, and what `bps` needs to find it."""
    with launch("-np 1 --machines 2 --servers 1", "told", PS_HEARTBEAT_INTERVAL="0.05") as job:
        job.until("0: training", "1: training")
        own = environ_of(job.pid("told", DMLC_WORKER_ID="0"))
        names = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "BYTEPS_JOB_ID", "BYTEPS_LOCAL_SECRET")
        yield job, {name: own[name] for name in names}
        assert job.end() == 0


def test_a_job_that_trains(
    job: tuple[Job, dict[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in job[1].items():
        monkeypatch.setenv(name, text)
    assert bps(["top", "--json", "--interval", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "running"
    assert [link["machine"] for link in found["links"]] == ["CPU", "GPU 0", "GPU 1"]
    formula = sorted(float(share) for share in Optimum(2, 1).shares if share)
    assert sorted(each["formula_share"] for each in found["servers"]) == formula
    assert bps(["top", "--once", "--interval", "0.1"]) == 0
    assert capsys.readouterr().out.startswith("running: ")
    follows_until_interrupted(job[1])
    assert bps(["top", "--interval", "0"]) == 2


def follows_until_interrupted(variables: dict[str, str]) -> None:
    """On a terminal the page comes again in the same place, and Ctrl-C ends it."""
    leader, follower = pty.openpty()
    environ = {**os.environ, **variables, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    command = [sys.executable, "-m", "byteps_py.cli", "top", "--interval", "0.2"]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environ) as process:
        os.close(follower)
        text = b""
        is_told = False
        while select.select([leader], [], [], WAIT_S)[0]:
            try:
                text += os.read(leader, 1 << 16)
            except OSError:  # it has ended
                break
            if text.count(b"\x1b[Hrunning: ") >= 3 and not is_told:
                is_told = True
                process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0, text
    os.close(leader)
    after = text.decode().rpartition("\x1b[?1049l")[2]
    assert after.startswith("running: ")
    assert "Traceback" not in after
