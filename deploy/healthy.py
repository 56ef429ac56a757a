"""The images' health check: exit status 0 if the scheduler answers and reports this container's processes as alive.

It asks only the scheduler: heartbeats say more than the existence of a process or an open port. Single-threaded. It
prints one line, which `docker inspect` shows.
"""

from __future__ import annotations

import socket
import sys

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.scheduler import query

TIMEOUT_S = 5.0


def main() -> int:
    try:
        settings = Settings.from_env()
        if not settings.scheduler_address:
            print("healthy: a single machine without a scheduler")
            return 0
        reply = query.status(settings, TIMEOUT_S)
    except BytePSError as error:
        print(f"unhealthy: {error}")
        return 1
    if reply.state == reply.STATE_FAILED:
        print(f"unhealthy: the job has failed: {reply.reason}")
        return 1
    own_host = socket.gethostname()
    # A GPU machine may have two members, its communication service and its summation service. Of a container that was
    # started again, the latest of each counts.
    own = {status.member.role: status.alive for status in reply.members if status.member.host == own_host}
    if settings.role != "scheduler" and not (own and all(own.values())):
        print(f"unhealthy: {own_host} is {'lost' if own else 'absent'}, says the scheduler: {reply.reason}")
        return 1
    print(f"healthy: {reply.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
