"""Machines with two network cards each: namespaces with two shaped links. Sums go over both at the same time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.run import ENVIRON, PROGRAM as CHAOS_PROGRAM, STEPS, calm
from support.breaking import Job, command, launch
from support.clusters import ROOT, has_namespaces
from test_recovery import OPTIONS, kill_and_return, nothing, train

from benchmarks.cluster.hosts import Host, cluster, second_cards
from byteps_py.launch.process_plan import free_port

RATE_MBIT = 100.0
PROGRAM, SENDS = (ROOT / "tests" / "programs" / name for name in ("until_told.py", "sends.py"))
ELEMENTS, LEAST_BYTES = 2 << 20, 20 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)"),
]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster([RATE_MBIT] * 3) as made, second_cards(made):
        yield made


class Processes:
    """The scheduler and machine 0 on the first host, machine 1 on the second, a CPU machine on the third. The first
    letters of the interfaces' names name their cards."""

    def __init__(self, stack: contextlib.ExitStack, hosts: list[Host], program: Path, *words: str) -> None:
        self._hosts = hosts
        self._common = {
            **ENVIRON, "DMLC_PS_ROOT_URI": hosts[0].address, "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "BYTEPS_SECRET": "the secret of a test",
            "BYTEPS_INTERFACES": "bps", "BYTEPS_PARTITION_BYTES": "65536", "BYTEPS_LOG_LEVEL": "INFO",
        }  # fmt: skip
        line = (sys.executable, str(program), *words)
        self.scheduler = stack.enter_context(self._job(0, DMLC_ROLE="scheduler"))
        self.server = stack.enter_context(self._job(2, DMLC_ROLE="server"))
        self.machines = [
            stack.enter_context(self._job(n, *line, DMLC_ROLE="worker", DMLC_WORKER_ID=str(n))) for n in range(2)
        ]

    def _job(self, host: int, *program: str, **own: str) -> contextlib.AbstractContextManager[Job]:
        line = self._hosts[host].command([sys.executable, "-m", "byteps_py.launch", *program])
        return command(*line, limit_s=90, **{**self._common, **own})

    def end(self) -> None:
        """The job ends in order."""
        assert [each.end() for each in self.machines] == [0, 0], self.machines[0].text
        assert self.scheduler.end() == 0, self.scheduler.text
        self.server.end()


def test_sums_go_over_both(hosts: list[Host]) -> None:
    with contextlib.ExitStack() as stack:
        job = Processes(stack, hosts, PROGRAM, str(ELEMENTS))
        first = job.machines[0]
        first.until("rank 0 is ready")
        while min(carried_bytes(host, number) for host in hosts for number in (0, 1)) < LEAST_BYTES:
            pass
        assert first.process.stdin is not None
        first.process.stdin.close()
        job.end()
    assert all(0.6 < share(host) < 1.7 for host in hosts)


@pytest.mark.long  # test_peer_links.py has such links over loopback
def test_ranks_send_to_each_other_over_both(hosts: list[Host], tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with contextlib.ExitStack() as stack:
        job = Processes(stack, hosts, SENDS, str(stop), str(ELEMENTS))
        while min(carried_bytes(host, number) for host in hosts[:2] for number in (0, 1)) < LEAST_BYTES:
            pass
        stop.touch()
        job.end()
    assert all(f"rank {rank}: all as sent" in each.text for rank, each in enumerate(job.machines))
    assert all(0.6 < share(host) < 1.7 for host in hosts[:2])


@pytest.mark.long  # test_rails.py breaks such links, and has no server
@pytest.mark.parametrize("hosted", [False, True], ids=["sums", "hosted"])
def test_servers_die_and_the_weights_are_those_of_machines_with_one_card(hosted: bool) -> None:
    """Addresses of loopback stand for the cards."""
    faults = [nothing, kill_and_return("--gpu-machine"), kill_and_return(), nothing]
    environ = {**ENVIRON, "BYTEPS_INTERFACES": "127.0.0.1,127.0.0.2", **({"TEST_HOSTED": "1"} if hosted else {})}
    with launch(OPTIONS, str(len(faults)), str(STEPS), program=CHAOS_PROGRAM, **environ) as job:
        digests = train(job, faults)
    assert digests == calm(len(faults), OPTIONS).digests


def share(host: Host) -> float:
    """What the first card of ``host`` has carried for each byte of the second."""
    return carried_bytes(host, 0) / carried_bytes(host, 1)


def carried_bytes(host: Host, card: int) -> int:
    """The bytes that a card has sent, as the other end of its link counts them."""
    outside = host.outside if card == 0 else host.outside.replace(f"l{host.index}", f"l{100 + host.index}")
    return int(Path("/sys/class/net", outside, "statistics", "rx_bytes").read_text())
