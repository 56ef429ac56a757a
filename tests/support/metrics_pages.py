"""What the metrics pages of a job say, read as a scraper does."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

LIMIT_S = 60.0
Page = Mapping[tuple[str, str, str, str], float]  # by name, role, machine and rank
_PORTS_OF_A_JOB = 16


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[int]:
    """The first of ``count`` ports in a row that nobody uses, and that no other test will use until the block ends.

    An abstract Unix socket with the name of the first port is the reservation: a job opens its ports long after they
    were tried here, and the job of a test beside this one must not take them meanwhile. The launcher chooses its own
    ports above these, see `byteps_py.launch.process_plan.free_port`.
    """
    assert count <= _PORTS_OF_A_JOB
    for first in range(10000, 16000, _PORTS_OF_A_JOB):
        with socket.socket(socket.AF_UNIX) as reservation:
            try:
                reservation.bind(f"\0byteps-test-ports-{first}")
                for port in range(first, first + count):
                    with socket.create_server(("127.0.0.1", port)):
                        pass
            except OSError:
                continue
            yield first
            return
    raise AssertionError("no ports are free")


def read(port: int) -> Page:
    """The page at this port; empty while there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return {}
    return {
        (sample.name, sample.labels["role"], sample.labels["machine"], sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "state" not in sample.labels
    }


def until(port: int, is_so: Callable[[Page], bool]) -> Page:
    """The first page of which it is so."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so(found := read(port)):
        assert time.monotonic() < deadline, f"it never was so; the last page: {found}"
        time.sleep(0.05)
    return found


def steps(found: Page) -> dict[str, float]:
    """By rank."""
    return {rank: value for (name, _, _, rank), value in found.items() if name == "byteps_steps_total"}


def value(found: Page, name: str) -> float:
    """The greatest of a metric, whoever has it."""
    return max((each for (metric, *_), each in found.items() if metric == f"byteps_{name}"), default=0.0)
