"""Before a CPU machine's container ends: its server's keys move to the others, as `bps scale` moves them.

Kubernetes runs it as a preStop hook, and sends SIGTERM once it has ended. It waits until the scheduler says that the
server has left, or until TIMEOUT_S have passed. Exit status 0 always: the container ends in any case. Single-threaded.
"""

from __future__ import annotations

import socket
import sys
import time

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.scheduler import query

TIMEOUT_S = 100.0
ANSWER_S = 5.0
PAUSE_S = 0.5


def main() -> int:
    try:
        print(f"drain: {drain(Settings.from_env())}")
    except BytePSError as error:  # no job runs, or its scheduler is gone: nothing is to be moved
        print(f"drain: {error}")
    return 0


def drain(settings: Settings) -> str:
    """Let this host's servers leave. Returns what has become of it, in words. Raises the errors of ``query``."""
    addresses = present(settings)
    if not addresses:
        return "no server of this host is in a job"
    query.scale(settings, -1, addresses, ANSWER_S)
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        if not present(settings):
            return f"the keys of {', '.join(addresses)} have moved"
        time.sleep(PAUSE_S)
    return f"the keys of {', '.join(addresses)} have not moved after {TIMEOUT_S:g} s"


def present(settings: Settings) -> list[str]:
    """The addresses of this host's servers that are in the job."""
    own_host = socket.gethostname()
    facts = query.to_dict(query.status(settings, ANSWER_S))
    return [
        each["address"]
        for each in facts["members"]
        if each["kind"] == "server" and each["host"] == own_host and each["alive"] and not each["left"]
    ]


if __name__ == "__main__":
    sys.exit(main())
