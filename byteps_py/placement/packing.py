"""Which server a piece of a tensor goes to: consistent hashing into weighted intervals, with bounded loads.

Owns the hash and the rule for a full server. Servers are positions 0..N-1 here. Keeps no tensors (placement_table.py
does). Uses integers only, so that every party computes the same on any platform. Pure; any thread.

    piece, largest first ──hash──► server ──has room?──► it is placed
                            ▲        no │
                            └─8 probes──┤
                                        ├─► the least loaded of the servers that have room
                                        ├─► none has: cut off what the roomiest server takes, the rest goes on
                                        └─► no room left, or too small to cut: the server it overloads least
"""

from __future__ import annotations

import hashlib
import heapq
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from byteps_py.tensors import PAGE_BYTES

#: No cut leaves a piece smaller than this: the fixed cost of a message would outweigh the gain.
MIN_CUT_BYTES = 16 << 10
#: Nor one that all servers together could carry so many of in the time of a partition. What a server has in excess
#: passes over its link once for each machine. So the gain is at most a quarter of a partition's time, 0.8 to 1.5 ms
#: (``byteps_py/config/tuning.py``), or less on the fastest links; a message costs services 0.5 ms of processor
#: time. Two machines' sums of 1 MB over loopback take 0.76 of the processor time if they are not cut in two.
_CUTS_PER_PARTITION = 4

_PROBES = struct.Struct("<8Q")
_SEED = struct.Struct("<QQ")


def min_cut_bytes(partition_bytes: int, servers: int) -> int:
    """The size of the smallest piece that a cut leaves, where partitions have at most ``partition_bytes``.

    >>> [min_cut_bytes(size << 10, servers=2) >> 10 for size in (64, 128, 256, 4096, 8192)]
    [16, 16, 32, 512, 1024]
    >>> [min_cut_bytes(8 << 20, servers) >> 10 for servers in (4, 16, 128)]
    [512, 128, 16]
    """
    return max(MIN_CUT_BYTES, partition_bytes // (_CUTS_PER_PARTITION * servers))


class Piece(NamedTuple):
    """A piece of a tensor: its ``key``, ``offset`` and ``length`` in bytes, and the tensor's ``itemsize``."""

    key: int
    offset: int
    length: int
    itemsize: int


class Intervals:
    """sum(weights) hash values. Each server owns as many as its weight; the first server owns the first ones."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._ends = list(accumulate(weights))
        self.total = self._ends[-1]

    def probes(self, key: int, offset: int) -> Iterator[int]:
        """The servers to which the piece at ``offset`` of ``key`` hashes: its first to eighth choice.

        The hash uses the offset, not the piece's number, so that cutting one piece does not change others' hashes.
        """
        digest = hashlib.blake2b(_SEED.pack(key, offset), digest_size=_PROBES.size).digest()
        for value in _PROBES.unpack(digest):
            # Multiply and shift maps 64 bits evenly to [0, total) in exact integers.
            yield bisect_right(self._ends, (value * self.total) >> 64)


class Packer:
    """Places pieces on servers of given ``weights``, which hold ``loads`` bytes and should hold ``bounds``.

    ``loads`` is kept up to date in place. A server of weight 0 gets nothing. ``least_bytes``: no cut leaves a smaller
    piece.
    """

    def __init__(
        self, weights: Sequence[int], loads: list[int], bounds: Sequence[int], least_bytes: int = MIN_CUT_BYTES
    ) -> None:
        self._least_bytes = least_bytes
        self._weights = weights
        self._loads = loads
        self._bounds = bounds
        self._intervals = Intervals(weights)
        self._servers = [position for position, weight in enumerate(weights) if weight]

    def pack(self, pieces: Iterable[Piece], *, cut: bool) -> list[tuple[Piece, int]]:
        """Place the pieces, largest first. Returns (piece, server) pairs. With ``cut``, a piece that fits on no server
        may be cut."""
        queue = [(-piece.length, piece) for piece in pieces]
        heapq.heapify(queue)
        placed = []
        while queue:
            _, piece = heapq.heappop(queue)
            server = self._with_room(piece)
            if server is None:
                server = self._roomiest()
                head = self._head(piece, self._room(server)) if cut else 0
                if head:
                    rest = piece._replace(offset=piece.offset + head, length=piece.length - head)
                    heapq.heappush(queue, (-rest.length, rest))
                    piece = piece._replace(length=head)
                if piece.length > self._room(server):
                    server = self._least_loaded(self._servers, piece.length)
            self._loads[server] += piece.length
            placed.append((piece, server))
        return placed

    def _with_room(self, piece: Piece) -> int | None:
        loads, bounds, length = self._loads, self._bounds, piece.length
        for server in self._intervals.probes(piece.key, piece.offset):
            if loads[server] + length <= bounds[server]:
                return server
        roomy = [s for s in self._servers if loads[s] + length <= bounds[s]]
        return self._least_loaded(roomy, length) if roomy else None

    def _head(self, piece: Piece, room: int) -> int:
        """How many bytes to cut off for a server with ``room``, in whole pages and elements; 0: do not cut."""
        unit = math.lcm(PAGE_BYTES, piece.itemsize)
        least = -(-self._least_bytes // unit) * unit
        head = min(max(room, least), piece.length - self._least_bytes) // unit * unit
        return head if head >= least else 0

    def _room(self, server: int) -> int:
        return self._bounds[server] - self._loads[server]

    def _roomiest(self) -> int:
        return max(self._servers, key=lambda s: (self._room(s), -s))

    def _least_loaded(self, servers: Sequence[int], length: int) -> int:
        """The server that is least full, relative to its weight, after it takes ``length`` more bytes."""
        # 64 fractional bits tell any two loads apart that differ by a byte; no float is involved.
        return min(servers, key=lambda s: (((self._loads[s] + length) << 64) // self._weights[s], s))


def excess_of(held: list[tuple[int, int, int]], excess: int) -> list[tuple[int, int, int]]:
    """Few entries of ``held``, (length, …) in ascending order, that together are at least ``excess`` bytes long.
    Removes them from ``held``.

    Takes the shortest entry that suffices, else the longest and goes on: so each of them is needed.
    """
    chosen = []
    while excess > 0:
        first = bisect_left(held, (excess,))
        chosen.append(held.pop(min(first, len(held) - 1)))
        excess -= chosen[-1][0]
    return chosen
