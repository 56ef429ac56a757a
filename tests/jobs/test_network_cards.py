"""Machines with two network cards each: namespaces with two shaped links. Sums go over both at the same time."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.run import ENVIRON
from support.breaking import Job, command
from support.clusters import ROOT, has_namespaces

from benchmarks.cluster.hosts import Host, cluster, second_cards
from byteps_py.launch.process_plan import free_port

RATE_MBIT = 100.0
PROGRAM = ROOT / "tests" / "programs" / "until_told.py"
ELEMENTS, LEAST_BYTES = 2 << 20, 20 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2 (network namespaces)"),
]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster([RATE_MBIT] * 3) as made, second_cards(made):
        yield made


def test_sums_go_over_both_and_the_rate_of_a_machine_is_that_of_both(hosts: list[Host]) -> None:
    """The first letters of the interfaces' names name them."""
    common = {
        **ENVIRON, "DMLC_PS_ROOT_URI": hosts[0].address, "DMLC_PS_ROOT_PORT": str(free_port()), "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1", "BYTEPS_SECRET": "the secret of a test", "BYTEPS_INTERFACES": "bps",
        "BYTEPS_PARTITION_BYTES": "65536", "BYTEPS_LOG_LEVEL": "INFO",
    }  # fmt: skip

    def job(host: int, *program: str, **own: str) -> contextlib.AbstractContextManager[Job]:
        line = hosts[host].command([sys.executable, "-m", "byteps_py.launch", *program])
        return command(*line, limit_s=90, **{**common, **own})

    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(job(0, DMLC_ROLE="scheduler"))
        server = stack.enter_context(job(2, DMLC_ROLE="server"))
        program = (sys.executable, str(PROGRAM), str(ELEMENTS))
        machines = [stack.enter_context(job(n, *program, DMLC_ROLE="worker", DMLC_WORKER_ID=str(n))) for n in range(2)]
        machines[0].until("rank 0 is ready")
        while min(carried_bytes(host, number) for host in hosts for number in (0, 1)) < LEAST_BYTES:
            pass
        assert machines[0].process.stdin is not None
        machines[0].process.stdin.close()
        assert [each.end() for each in machines] == [0, 0], machines[0].text
        assert scheduler.end() == 0, scheduler.text
        server.end()
    for host in hosts:
        first, second = (carried_bytes(host, number) for number in (0, 1))
        assert 0.6 < first / second < 1.7, (first, second)
    (said,) = (line for line in machines[0].said if "links of " in line)
    rates = [float(rate) for rate in re.findall(r"(\d+)(?:,| Mbit)", said.partition("links of ")[2])]
    assert len(rates) == 5
    assert all(1.5 * RATE_MBIT < rate < 2.1 * RATE_MBIT for rate in rates)


def carried_bytes(host: Host, card: int) -> int:
    """What has left by a card, as the other end of its link counts it."""
    outside = host.outside if card == 0 else host.outside.replace(f"l{host.index}", f"l{100 + host.index}")
    return int(Path("/sys/class/net", outside, "statistics", "rx_bytes").read_text())
