"""A job whose network breaks, or changes what passes through it, while all its processes live."""

from __future__ import annotations

import contextlib
import sys

import pytest
from support.breaking import command, launch
from support.clusters import ROOT

from byteps_py.launch.process_plan import free_port


def reduce_under(*faults: str) -> tuple[str, str]:
    """Two machines check every sum of theirs, through a server whose network does ``faults``. Returns what the ranks
    and the server said."""
    where = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    # A machine that is busy with other tests is none that has died.
    patience = {"PS_HEARTBEAT_TIMEOUT": "30"}
    cluster = {**where, **patience, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "BYTEPS_PLACEMENT": "servers-only"}
    program = str(ROOT / "tests" / "programs" / "proxied_server.py")
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        scheduler = enter(launch("", **cluster, DMLC_ROLE="scheduler"))
        server = enter(command(sys.executable, program, **cluster))
        ranks = [
            enter(launch("", "told", **cluster, DMLC_ROLE="worker", DMLC_WORKER_ID=index, BYTEPS_MACHINE_ID=index))
            for index in ("0", "1")
        ]
        for index, rank in enumerate(ranks):
            rank.until(f"{index}: training")
        assert server.process.stdin is not None
        for fault in faults:
            print(fault, file=server.process.stdin, flush=True)
            server.until(f"done: {fault}")
        assert [rank.end() for rank in ranks] == [0, 0]
        assert (server.end(), scheduler.end()) == (0, 0)
    for index, rank in enumerate(ranks):
        assert f"{index}: closed" in rank.text
    return "\n".join(rank.text for rank in ranks), server.text


def test_lost_and_damaged_messages_are_said_again_and_every_sum_is_exact() -> None:
    faults = ("cut", "flip up", "cut", "flip down", "flip up", "flip down", "cut")
    ranks, server = reduce_under(*faults)
    assert server.count("came damaged") == faults.count("flip up")
    assert ranks.count("came damaged: it is sent again") == faults.count("flip up")
    assert ranks.count("came damaged: it is asked for again") == faults.count("flip down")


@pytest.mark.parametrize("times", [25, pytest.param(100, marks=pytest.mark.long)])
def test_one_message_in_twenty_is_lost_with_its_connection_and_every_sum_is_exact(times: int) -> None:
    """Also of those that a new connection begins with."""
    reduce_under(f"lose {times}")
