"""A job whose network breaks while all its processes live."""

from __future__ import annotations

import contextlib
import re
import sys

from support.breaking import ERROR_STATUS, command, launch
from support.clusters import ROOT

from byteps_py.launch.cluster import free_port


def test_a_connection_that_is_cut_in_a_round_is_named_on_every_rank() -> None:
    where = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(free_port())}
    cluster = {**where, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "BYTEPS_PLACEMENT": "servers-only"}
    program = str(ROOT / "tests" / "programs" / "proxied_server.py")
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        scheduler = enter(launch("", **cluster, DMLC_ROLE="scheduler"))
        server = enter(command(sys.executable, program, **cluster))
        ranks = [
            enter(launch("", "stubborn", **cluster, DMLC_ROLE="worker", DMLC_WORKER_ID=index, BYTEPS_MACHINE_ID=index))
            for index in ("0", "1")
        ]
        for index, rank in enumerate(ranks):
            rank.until(f"{index}: training")
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert [rank.end() for rank in ranks] == [ERROR_STATUS, ERROR_STATUS]
        assert (server.end(), scheduler.end()) == (1, 1)
    address = server.said[0].removeprefix("address ")
    text = rf"PeerLostError: the connection to the summation service at {re.escape(address)} broke while 1 of this"
    for index, rank in enumerate(ranks):
        assert re.search(f"^{index}: {text} machine's messages waited for their answers", rank.text, re.MULTILINE)
