"""bpslaunch -H with a real sshd on each host, a network namespace. Every rank runs tests/programs/rank.py, which checks
its sums."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.breaking import RANK
from support.clusters import ROOT
from support.documents import Page, at_own_places, commands_of
from support.elastic_reference import Reference
from support.launching import Launch
from support.ssh_hosts import SshHosts, require_ssh_hosts, ssh_hosts

SECRET = "a secret that only standard input carries"

pytestmark = pytest.mark.slow  # test_hosts.py has what needs no host


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    require_ssh_hosts()
    with ssh_hosts(4, tmp_path_factory.mktemp("ssh")) as found:
        yield found


def launch(hosts: SshHosts, *words: str, options: tuple[str, ...] = (), **environ: str) -> Launch:
    """Two hosts with two ranks each, and a third one that sums."""
    gpu1, gpu2, cpu, _ = (host.address for host in hosts.hosts)
    lists = ["-H", f"{gpu1}:2,{gpu2}:2", "--server-hosts", cpu]
    environ = {"BYTEPS_LINK_MBIT": "1000", **environ}
    return hosts.launch(*lists, *options, sys.executable, RANK, *words, **environ)


@pytest.mark.parametrize(("page", "block"), [("launching", "with one command"), ("several-machines", "hosts over ssh")])
def test_the_command_of_a_page(hosts: SshHosts, page: str, block: str) -> None:
    gpu1, gpu2, cpu1, cpu2 = (host.address for host in hosts.hosts)
    [(line, shown)] = commands_of(Page(ROOT / "docs" / "howto" / f"{page}.md").blocks_after(block)[0])
    places = {"gpu1:4": f"{gpu1}:2", "gpu2:4": f"{gpu2}:2", "cpu1": cpu1, "cpu2": cpu2}
    words = shlex.split(at_own_places(line, {**places, "python train.py": shlex.join((sys.executable, RANK, "short"))}))
    assert words[0] == "bpslaunch"
    with hosts.launch(*words[1:], BYTEPS_LINK_MBIT="1000") as job:
        assert job.end() == 0, job.text
    assert {f"[{gpu1}/0] 0: reduced", f"[{gpu2}/3] 3: reduced"} <= set(job.said)
    if shown:  # a line of the launcher, and one of a rank
        name, rank = shown.splitlines()
        assert job.said[0].startswith(name.rpartition(" ")[0])
        assert rank.startswith("[gpu1/0] ")
    assert not hosts.left()


def test_a_job_on_three_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    gpu1, gpu2, *_ = (host.address for host in hosts.hosts)
    with launch(hosts, "train", BYTEPS_SECRET_FILE=str(secret)) as job:
        job.until("0: training", "1: training", "2: training", "3: training")
        shown = subprocess.run(["ps", "axeww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        assert "byteps_py.worker" in shown
        assert SECRET not in shown
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 128 + signal.SIGINT
    assert {f"[{gpu1}/0] 0: training", f"[{gpu2}/3] 3: training"} <= set(job.said)
    assert not hosts.left()


def test_what_ranks_find(hosts: SshHosts) -> None:
    show = 'echo "$RANK/$WORLD_SIZE $HOROVOD_CROSS_RANK $MASTER_ADDR $MINE $PWD"'
    gpu1, gpu2, *_ = (host.address for host in hosts.hosts)
    options = ("-H", f"{gpu1}:2,{gpu2}:1", "--grace-period=1", "-x", "MINE=m n")
    with hosts.launch(*options, "sh", "-c", show) as job:
        assert job.end() == 0, job.text
    here = os.getcwd()
    expected = {
        f"[{gpu1}/0] 0/3 0 {gpu1} m n {here}",
        f"[{gpu1}/1] 1/3 0 {gpu1} m n {here}",
        f"[{gpu2}/2] 2/3 1 {gpu1} m n {here}",
    }
    assert expected <= set(job.said), job.text


@pytest.mark.parametrize("what", ["ssh", "launcher"])
def test_nothing_goes_on_without_its_connection(hosts: SshHosts, what: str) -> None:
    with launch(hosts, "train") as job:
        job.until("0: training", "3: training")
        if what == "launcher":
            job.process.kill()
        else:
            os.kill(hosts.ssh_to(job, hosts.hosts[1]), signal.SIGKILL)
        status = job.end()
        assert not hosts.left()
    assert status in (-signal.SIGKILL, 128 + signal.SIGKILL)


FAILS = """
from byteps_py.session import open_session
session = open_session()
session.barrier()
if session.rank == 3:
    raise ValueError("the data of batch 7 is bad")
session.barrier()
"""


def test_the_cause_comes_last_and_once_and_its_status_counts(hosts: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    gpu1, gpu2, *_ = (host.address for host in hosts.hosts)
    command = (sys.executable, str(tmp_path / "fails.py"))
    with hosts.launch("-H", f"{gpu1}:2,{gpu2}:2", *command, BYTEPS_LINK_MBIT="1000") as job:
        assert job.end() == 1, job.text
    assert f"bpslaunch on {gpu2}: rank 3 exited with status 1" in job.text
    assert job.said[-1] == f"[{gpu2}/3] ValueError: the data of batch 7 is bad"
    assert job.text.count("Traceback") == 1
    assert not hosts.left()


def test_a_host_that_can_not_be_reached_is_named_and_nothing_starts(hosts: SshHosts, tmp_path: Path) -> None:
    gpu1 = hosts.hosts[0].address
    with hosts.launch("-H", f"{gpu1}:1,10.89.0.99:1", "touch", str(tmp_path / "started")) as job:
        assert job.end() == 1
    assert "1 of 2 hosts can't run this job, so nothing was started" in job.text
    assert "10.89.0.99: ssh: connect to host 10.89.0.99 port 22: No route to host" in job.text
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ssh-options", "-o HostKeyAlias=another"), "run ssh"),
        (("--ssh-options", "-o IdentitiesOnly=yes -l nobody"), "run ssh-copy-id"),
        (("--remote-python", "/no/python"), "--remote-python names another Python"),
        (("--remote-python", "/usr/bin/python3"), "byteps_py is to be installed there"),
        (("no_such_program",), "no_such_program: command not found"),
    ],
)
def test_what_a_host_lacks_is_said(hosts: SshHosts, options: tuple[str, ...], words: str) -> None:
    command = () if options == ("no_such_program",) else ("true",)
    with hosts.launch("-H", f"{hosts.hosts[0].address}:1", *options, *command) as job:
        assert job.end() == 1, job.text
    assert words in job.text


def test_an_elastic_job_goes_on_without_a_host_that_is_lost(hosts: SshHosts, tmp_path: Path) -> None:
    gpu1, gpu2, *_ = (host.address for host in hosts.hosts)
    torch.set_num_threads(1)
    told, reference = tmp_path / "told", Reference()
    options = ("-H", f"{gpu1}:1,{gpu2}:1", "--elastic", "--min-np", "1")
    program = (sys.executable, str(ROOT / "tests" / "programs" / "elastic.py"), str(told))

    def tell(text: str) -> None:
        told.with_suffix(".new").write_text(text)
        told.with_suffix(".new").rename(told)

    tell("8 0")
    with hosts.launch(*options, *program, BYTEPS_LINK_MBIT="1000") as job:
        job.until(f"[{gpu1}/0] after 8 steps {reference.go(8, [1, 1])}", "rank 1: committed is step 8")
        hosts.crash(hosts.hosts[1])
        job.until(f"[{gpu1}/0] group from step 8: 1")
        tell("16 1")
        assert job.end() == 0, job.text
    assert f"[{gpu1}/0] after 16 steps {reference.go(16, [1])}" in job.said
    assert not hosts.left()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_spare_host_takes_the_place_of_one_that_is_lost(hosts: SshHosts, tmp_path: Path) -> None:
    """The last test: it loses a host."""
    gpu1, gpu2, cpu, spare = (host.address for host in hosts.hosts)
    [(line, _)] = commands_of(Page(ROOT / "docs" / "howto" / "several-machines.md").blocks_after("spare hosts")[0])
    program = (sys.executable, str(ROOT / "tests" / "programs" / "in_place.py"), str(tmp_path), "30")
    places = {"gpu1:4": f"{gpu1}:1", "gpu2:4": f"{gpu2}:1", "cpu1": cpu, "gpu8,gpu9": spare}
    words = shlex.split(at_own_places(line, {**places, "python train.py": shlex.join(program)}))
    with hosts.launch(*words[1:], BYTEPS_LINK_MBIT="1000") as job:
        job.until("rank 1: step 5")
        hosts.lose(hosts.hosts[1])
        assert job.end() == 0, job.text
    assert f"the connection to {gpu2} has failed" in job.text
    assert f"bpslaunch on {spare}: machine 1 is lost: this one takes its place" in job.text
    assert any(line.startswith(f"[{spare}/1] rank 1 ends: ") for line in job.said)
    assert not hosts.left()
