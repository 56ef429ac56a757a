"""Outsiders at every port that a job opens, found by listing its sockets: it goes on, and its sums stay right."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
from support.clusters import clean_environment
from support.launching import Running
from support.ports import claim, first_routing_id, listening_ports

PROGRAM = Path(__file__).parent / "programs" / "until_told.py"
CLAIMS = 100
#: As seen by an outsider, who does not know how many have connected.
AHEAD, BEHIND = range(20, 20 + CLAIMS), range(-CLAIMS, 0)


@pytest.mark.parametrize("secret", ["", "known to members"], ids=["loopback", "secret"])
def test_forged_routing_ids_at_every_port(secret: str) -> None:
    """libzmq ends the process when an id that a peer chose meets its own counter."""
    environ = clean_environment(BYTEPS_SECRET=secret, BYTEPS_LOG_LEVEL="WARNING")
    options = ["-m", "byteps_py.launch", "-np", "1", "--machines", "2", "--servers", "1"]
    running = Running([*options, sys.executable, str(PROGRAM)], **environ)
    try:
        assert sorted(running.line().rpartition("] ")[2] for _ in range(2)) == ["rank 0 is ready", "rank 1 is ready"]
        ports = listening_ports(running.process.pid)
        # The scheduler's, two communication services', and the summation services' of three machines.
        assert len(ports) >= 6
        assert all(os.getpid() not in pids for pids in ports.values())
        start = first_routing_id()
        visitors = []
        for port, mechanism, offsets in itertools.product(ports, (b"NULL", b"PLAIN"), (AHEAD, BEHIND)):
            visitors += claim(port, (start + offset for offset in offsets), mechanism)
        assert listening_ports(running.process.pid).keys() == ports.keys()
        for visitor in visitors:
            visitor.close()
        code, out, err = running.finish("over\n")
    finally:
        running.close()
    assert code == 0, err
    assert out.count("right sums") == 2
    assert "Assertion failed" not in err
