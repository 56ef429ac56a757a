"""Runs another program while its ranks reach each other through a third machine as well, then directly again, and so
on: ``relayed.py PROGRAM [ARGUMENTS]``.

The same happens when the scheduler finds a slow way between two machines. Here each rank has a relay of its own. Says
at the end what it has carried: ``carried BYTES``.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path

from byteps_py.config.settings import Settings
from byteps_py.dataplane.relay import Relay
from byteps_py.errors import BytePSError
from byteps_py.torch.collectives import context as contexts

PERIOD_S = 0.2
HERE = "127.0.0.1"


def change(relay: Relay, is_over: threading.Event) -> None:
    """All ranks of this machine look at one clock, so both ends of a link change at about the same time."""
    while not is_over.wait(PERIOD_S / 4):
        is_relayed = int(time.monotonic() / PERIOD_S) % 2 == 0
        with contextlib.suppress(BytePSError):  # there is no session, or it ends
            session = contexts.current().session
            peers = session.peers
            if peers is not None:
                first = session.rank - session.local_rank
                near = range(first, first + session.local_size)
                others = [rank for rank in range(session.size) if rank not in near]
                with session.state:
                    peers.set_relays(dict.fromkeys(others, relay.address) if is_relayed else {})


def main() -> None:
    program, *words = sys.argv[1:]
    relay, is_over = Relay(HERE, Settings.from_env()), threading.Event()
    relay.allow(frozenset((HERE,)))
    changing = threading.Thread(target=change, args=(relay, is_over))
    changing.start()
    sys.argv[:] = [program, *words]
    sys.path.insert(0, str(Path(program).parent))
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        is_over.set()
        changing.join()
        relay.close()
        os.write(1, f"carried {relay.bytes_moved}\n".encode())


if __name__ == "__main__":
    main()
