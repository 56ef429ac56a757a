"""Outsiders at every port that a job opens, found by listing its sockets: it goes on, and its sums stay right."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters import clean_environment
from support.launching import Running
from support.ports import claim, first_routing_id, listening_ports
from support.strangers import HALF_OPEN, begin_visit, resident_bytes, see_off

PROGRAM = Path(__file__).parents[1] / "programs" / "until_told.py"
CLAIMS = 100
EACH = 10  # of each kind of half-open connection, at each port
# What docs/explanation/security.md promises of a connection.
MOST_S = 5
MOST_BYTES = 64 << 10
MARGIN_S = 5  # for a machine that is busy with other things
#: As seen by an outsider, who does not know how many have connected.
AHEAD, BEHIND = range(20, 20 + CLAIMS), range(-CLAIMS, 0)


SECRETS = {"loopback": "", "secret": "known to members"}


#: Jobs without a secret and with one.
secrets = pytest.mark.parametrize("job", [pytest.param(s, id=name) for name, s in SECRETS.items()], indirect=True)
#: The same for a test that takes a minute: with a secret, strangers are refused earlier, and less can go wrong.
in_long = {"secret": pytest.mark.long}
long_secrets = pytest.mark.parametrize(
    "job", [pytest.param(s, id=name, marks=in_long.get(name, ())) for name, s in SECRETS.items()], indirect=True
)

pytestmark = pytest.mark.slow


@pytest.fixture(name="job")
def running_job(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Two machines and a lent one, which sum until rank 0 reads a line."""
    environ = clean_environment(BYTEPS_SECRET=request.param, BYTEPS_LOG_LEVEL="WARNING")
    options = ["-m", "byteps_py.launch", "-np", "1", "--machines", "2", "--servers", "1"]
    running = Running([*options, sys.executable, str(PROGRAM)], **environ)
    try:
        assert sorted(running.line() for _ in range(2)) == ["rank 0 is ready", "rank 1 is ready"]
        yield running
    finally:
        running.close()


def check_end(job: Running) -> None:
    code, out, err = job.finish("over\n")
    assert code == 0, err
    assert out.count("right sums") == 2
    assert "Assertion failed" not in err
    assert "Traceback" not in err


@long_secrets
@pytest.mark.long
def test_forged_routing_ids_at_every_port(job: Running) -> None:
    """libzmq ends the process when an id that a peer chose meets its own counter."""
    ports = listening_ports(job.process.pid)
    # The scheduler's, two communication services', the summation services' of three machines, and two ranks'.
    assert len(ports) >= 8
    start = first_routing_id()
    with contextlib.ExitStack() as stack:
        for port, mechanism, offsets in itertools.product(ports, (b"NULL", b"PLAIN"), (AHEAD, BEHIND)):
            for visitor in claim(port, (start + offset for offset in offsets), mechanism):
                stack.enter_context(visitor)
        assert listening_ports(job.process.pid).keys() == ports.keys()
    check_end(job)


@secrets
def test_what_outsiders_cost_at_every_port(job: Running) -> None:
    """Each is gone after MOST_S, and has cost MOST_BYTES; sums go on beside them."""
    ports = listening_ports(job.process.pid)
    pids = {pid for owners in ports.values() for pid in owners}
    with contextlib.ExitStack() as stack:
        before = {pid: resident_bytes(pid) for pid in pids}
        visits = []
        for port, kind in itertools.product(ports, [*HALF_OPEN] * EACH):
            visits.append(begin_visit(f"127.0.0.1:{port}", kind))
            stack.callback(visits[-1].close)
        after = {pid: resident_bytes(pid) for pid in pids}
        see_off(visits)
    assert max(visit.lasted_s for visit in visits) <= MOST_S + MARGIN_S
    each = max(after[pid] - before[pid] for pid in pids) / (EACH * len(HALF_OPEN))
    assert each <= MOST_BYTES, f"{each / 1024:.0f} KB for each connection"
    check_end(job)
