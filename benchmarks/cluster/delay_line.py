"""A delay on the way from hosts into the network, for kernels without netem.

    python -m benchmarks.cluster.delay_line DELAY_MS INSIDE OUTSIDE [INSIDE OUTSIDE …]

Each pair is a link: two interfaces (taps) that this process makes. It carries frames from the inside to the outside
with the delay, and back without. Frames are as large as TCP offers them (64 KB), so that this costs little. It prints a
line when the interfaces are there, and ends, and they with it, when its standard input does. Its processor time is not
that of a benchmark's jobs, but it takes it from the same cores; a frame comes some 0.1 ms late.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TCP segments of IPv4 and of IPv6: whole ones come
_FRAME_BYTES = (64 << 10) + 256
_PR_SET_TIMERSLACK = 29
_IN_A_ROW = 16  # frames of one interface, before others have their turn


def tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


def frames(fd: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < _IN_A_ROW:
        try:
            found.append(os.read(fd, _FRAME_BYTES))
        except BlockingIOError:
            break
        except OSError:  # the interface is down, still or again
            break
    return found


def put(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except OSError:  # down, or its queue is full: a frame may be lost
        return


def carry(delay_s: float, ways: dict[int, tuple[int, bool]]) -> None:
    """``ways``: from a descriptor to another one, and whether with the delay."""
    held: deque[tuple[float, int, bytes]] = deque()
    sources = [*ways, sys.stdin.fileno()]
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready = select.select(sources, [], [], wait_s)[0]
        if sys.stdin.fileno() in ready:
            return
        for source in ready:
            target, is_delayed = ways[source]
            now = time.monotonic()
            for frame in frames(source):
                if is_delayed:
                    held.append((now + delay_s, target, frame))
                else:
                    put(target, frame)
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, target, frame = held.popleft()
            put(target, frame)


def main() -> None:
    delay_s, names = float(sys.argv[1]) / 1e3, sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    os.nice(-20)  # or it would wait for the processor behind those it carries for
    ways: dict[int, tuple[int, bool]] = {}
    for inside, outside in zip(names[::2], names[1::2], strict=True):
        one, other = tap(inside), tap(outside)
        ways[one], ways[other] = (other, True), (one, False)
    print("ready", flush=True)
    carry(delay_s, ways)


if __name__ == "__main__":
    main()
