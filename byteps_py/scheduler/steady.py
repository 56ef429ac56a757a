"""How soon TCP says again what was lost on the control plane.

TCP waits twice as long before each attempt. After a network has lost everything for 0.5 s, the next attempt may be
another 0.5 s away, and with it the heartbeats that show who lives. On connections with so little under way Linux can
keep to the first wait instead (TCP_THIN_LINEAR_TIMEOUTS), but gRPC has no option for that, so it is set from outside.
"""

from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path

_TCP_THIN_LINEAR_TIMEOUTS = 16  # of linux/tcp.h; six attempts, then it doubles again
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def retry_steadily(port: int) -> int:
    """Set it on this process's TCP sockets that listen on ``port``, whose connections inherit it, or are connected
    to it. Any thread. Returns how many that were; 0 where the system does not know the option."""
    count = 0
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile, not connected, not known
                if not stat.S_ISSOCK(entry.stat().st_mode):
                    continue
                one = socket.socket(fileno=int(entry.name))
                try:
                    if _is_of(one, port):
                        one.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
                        count += 1
                finally:
                    one.detach()  # it is not ours to close
    return count


def _is_of(one: socket.socket, port: int) -> bool:
    if one.family not in _FAMILIES or one.type != socket.SOCK_STREAM:
        return False
    listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return int((one.getsockname() if listens else one.getpeername())[1]) == port
