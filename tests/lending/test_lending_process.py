"""Pools, lenders and jobs as processes: weights are the same bits, whoever lends and whoever leaves."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.breaking import Job, command, environ_of, launch
from support.clusters import ROOT
from support.documents import Page, at_own_places, commands_of

from byteps_py.cli.__main__ import main as bps
from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, ConfigurationError, RendezvousError
from byteps_py.launch.process_plan import free_port
from byteps_py.lending.lend import OwnerWatch
from byteps_py.lending.pool_service import ask, pool_settings
from byteps_py.scheduler import query

SECRET = {"BYTEPS_SECRET": "a secret of a pool in a test"}
PROGRAM = ROOT / "tests" / "programs" / "lent_training.py"
OPTIONS = "-np 1 --machines 2"
STRETCHES = 4
WAIT_S = 90.0


def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, what()


PAGE = Page(ROOT / "docs" / "howto" / "lending.md")
#: The page's command for each part.
_, POOL, LEND, TRAIN = (line for line, _ in commands_of(PAGE.blocks_after("a pool")[0]))


def words_of(line: str, address: str, places: Mapping[str, str] | None = None) -> list[str]:
    own = {"10.0.0.1:9100": address, **(places or {})}
    program, *words = shlex.split(at_own_places(line, own), comments=True)
    assert program == "bps"
    return words


def pool_at(address: str) -> contextlib.AbstractContextManager[Job]:
    return command(sys.executable, "-m", "byteps_py.cli", *words_of(POOL, address), **SECRET)


def lender(address: str, name: str, *more: str) -> contextlib.AbstractContextManager[Job]:
    given = words_of(LEND, address, {"--cores 4": "--cores 1", "8G": "2G"})
    more = ("--name", name, "--owner-cores", "1000", "--slots", "2", *more)
    return command(sys.executable, "-m", "byteps_py.cli", *given, *more, **SECRET)


class Training:
    """A job that trains a stretch when it is told to."""

    def __init__(self, job: Job) -> None:
        self.job = job
        job.until("stretch 0")
        own = environ_of(job.pid(str(PROGRAM), DMLC_WORKER_ID="0"))
        self.settings = Settings.from_env(own)

    def go(self) -> None:
        assert self.job.process.stdin is not None
        print(file=self.job.process.stdin, flush=True)

    def servers(self) -> int:
        """CPU machines that sum."""
        members = query.to_dict(query.status(self.settings, 20))["members"]
        return sum(each["machine"] == "CPU" and each["alive"] and each["weight"] > 0 for each in members)


def weights(job: Job) -> str:
    job.until("weights ")
    assert job.end() == 0
    return {line.partition("weights ")[2] for line in job.said if "weights " in line}.pop()


@pytest.fixture(name="expected", scope="module")
def _expected() -> str:
    """The weights without any lender."""
    with launch(OPTIONS, str(STRETCHES), program=PROGRAM, **SECRET) as job:
        training = Training(job)
        for _ in range(STRETCHES):
            training.go()
        return weights(job)


@pytest.fixture(name="address")
def _address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BYTEPS_SECRET", SECRET["BYTEPS_SECRET"])
    return f"127.0.0.1:{free_port()}"


def status(address: str) -> dict[str, Any]:
    with contextlib.suppress(RendezvousError):  # it is not up yet
        found: dict[str, Any] = ask(pool_settings(address), "Status", {}, 20)
        return found
    return {"lenders": [], "jobs": []}


def served(address: str) -> dict[str, int]:
    return {each["name"]: len(each["serves"]) for each in status(address)["lenders"]}


@pytest.mark.long
def test_three_jobs_and_two_lenders_of_which_one_becomes_busy(
    address: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = tmp_path / "busy"
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_at(address))
        until(lambda: pool.process.poll() is None and bps(["pool", "--show", address]) == 0, lambda: pool.text)
        assert "bpslaunch --pool 10.0.0.1:9100 python train.py" in TRAIN
        options = f"{OPTIONS} --pool {address}"
        [(busy_when, _)] = commands_of(PAGE.blocks_after("busy when")[0])
        condition = shlex.split(at_own_places(busy_when, {"who | grep -q .": f"test -e {busy}"}), comments=True)[-2:]
        jobs = [
            stack.enter_context(launch(options, str(STRETCHES), program=PROGRAM, **SECRET)) for _ in range(3)
        ]  # fmt: skip
        trainings = [Training(job) for job in jobs]
        for training in trainings:
            training.go()
        lenders = {
            "steady": stack.enter_context(lender(address, "steady")),
            "leaving": stack.enter_context(lender(address, "leaving", *condition)),
        }
        # Each job wants two servers; there are four slots, of which no job gets more than two.
        until(lambda: sorted(served(address).values()) == [2, 2], lambda: status(address))
        until(lambda: sum(each.servers() for each in trainings) == 4, lambda: [each.servers() for each in trainings])
        for training in trainings:
            training.go()
        busy.touch()
        until(lambda: served(address) == {"leaving": 0, "steady": 2}, lambda: status(address))
        until(lambda: sum(each.servers() for each in trainings) == 2, lambda: [each.servers() for each in trainings])
        for training in trainings:
            training.go()
        busy.unlink()
        until(lambda: sorted(served(address).values()) == [2, 2], lambda: status(address))
        for training in trainings:
            training.go()
        assert [weights(job) for job in jobs] == [expected] * 3
        until(lambda: served(address) == {"leaving": 0, "steady": 0}, lambda: status(address))
        capsys.readouterr()
        assert bps(["pool", "--show", address, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["jobs"] == []
        for process in (*lenders.values(), pool):
            process.signal(signal.SIGTERM)
            assert process.end() == 0, process.text
        assert "the owner needs this machine" in lenders["leaving"].text
        assert "this machine is free again" in lenders["leaving"].text


@pytest.mark.slow
def test_scale_asks_the_pool_and_a_pool_may_go_and_come(
    address: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with launch(f"{OPTIONS} --pool {address}", str(STRETCHES), program=PROGRAM, **SECRET) as job:
        training = Training(job)
        training.go()  # there is no pool yet
        monkeypatch.setenv("BYTEPS_JOB_ID", training.settings.job_id)
        scale = ["scale", "--scheduler", training.settings.scheduler_address, "--pool", address]
        with lender(address, "one") as one:
            with pool_at(address) as pool:
                until(lambda: training.servers() == 1, lambda: (pool.text, one.text))
                training.go()
                assert bps([*scale, "2"]) == 1
                assert "servers from one: of 1 lender, 0 lend nothing now" in capsys.readouterr().out
                pool.signal(signal.SIGKILL)
                pool.end()
            training.go()
            assert training.servers() == 1  # what is lent stays lent
            with pool_at(address) as pool:
                until(lambda: served(address) == {"one": 1}, lambda: (pool.text, one.text))
                assert bps([*scale, "0"]) == 0
                until(lambda: training.servers() == 0, lambda: one.text)
                training.go()
                assert weights(job) == expected
                for process in (one, pool):
                    process.signal(signal.SIGTERM)
                    assert process.end() == 0, process.text


def test_a_pool_answers_only_who_has_its_secret(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_at(address) as pool:
        until(lambda: bps(["pool", "--show", address]) == 0, lambda: pool.text)
        with pytest.raises(BytePSError, match="no job at x asks this pool for servers"):
            ask(pool_settings(address), "Scale", {"scheduler": "x", "servers": 1})
        monkeypatch.setenv("BYTEPS_SECRET", "another secret than the pool has")
        with pytest.raises(RendezvousError, match="BYTEPS_SECRET is the same here and there"):
            ask(pool_settings(address), "Status", {})
        monkeypatch.delenv("BYTEPS_SECRET")
        with pytest.raises(ConfigurationError, match="prove by the cluster secret"):
            pool_settings(address)
        pool.signal(signal.SIGTERM)
        assert pool.end() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cores", "100000"], "--cores=100000: this machine lends 1 to "),
        (["--memory", "8"], "takes a size such as 800M or 8G"),
        (["--mbit", "0"], "--mbit=0: give a rate"),
        (["--slots", "0"], "--slots=0: give 1 to 64 jobs"),
        (["--pool", "nowhere"], "--pool='nowhere' is not HOST:PORT"),
    ],
)
def test_what_can_not_be_lent(
    address: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--pool": address, "--cores": "1", "--memory": "8G", "--mbit": "2000"}
    given.update([(arguments[0], arguments[1])])
    try:
        code = bps(["lend", *(word for pair in given.items() for word in pair)])
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_the_owners_load_is_that_of_other_processes() -> None:
    assert OwnerWatch(1e6).look().is_high is False
    assert OwnerWatch(-1.0).look().is_high is True  # less than nothing is free
    assert OwnerWatch(1e6, ("/bin/sh", "-c", "exit 0")).look().is_high is True
    assert OwnerWatch(1e6, ("/bin/sh", "-c", "exit 1")).look().is_high is False
    assert OwnerWatch(1e6, ("/no/such/command",)).look().is_high is False


def test_a_job_with_a_pool_needs_a_secret() -> None:
    with launch(f"{OPTIONS} --pool 127.0.0.1:9", "1", program=PROGRAM) as job:
        assert job.end() == 2
    assert "BYTEPS_POOL (--pool) needs the cluster secret of the pool" in job.text
