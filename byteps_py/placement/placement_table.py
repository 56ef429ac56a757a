"""The placement table: which summation server holds which part of which tensor.

Owns the cuts of every tensor and the server of every partition. The table is a replicated state machine: every party of
a job applies the same sequence of ``add`` and ``rebalance``, and so has the same table, on any platform. Knows no
processes, epochs or messages. The weights come from shares.py or link_optimum.py. Pure; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.placement.packing import MIN_CUT_BYTES, Packer, Piece, excess_of, min_cut_bytes
from byteps_py.tensors import split

#: A server may exceed its share by 1/32 of what it held before: a smaller margin would cost more moves or cuts.
MARGIN = 32


class Entry(NamedTuple):
    """A tensor to enter in the table: its 64-bit ``key``, its size and that of one element, in bytes."""

    key: int
    nbytes: int
    itemsize: int


class Partition(NamedTuple):
    """Bytes ``offset`` to ``offset + length`` of a tensor, and the id of the server that sums them."""

    offset: int
    length: int
    server: int


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """A partition that changed its server in a rebalance."""

    key: int
    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    itemsize: int
    nbytes: int
    parts: tuple[Partition, ...]


class PlacementTable:
    """The table of one job.

    ``servers``: (id, weight) of each server, CPU machines first. Ids are distinct integers that a server keeps for
    life; weights are the numbers of its hash values (``Optimum(n, k).server_weights``). ``partition_bytes``: the length
    of the longest partition. Raises UsageError for a repeated id, a negative weight, or if no weight is above 0 (one
    machine alone has no servers and needs no table).

    >>> table = PlacementTable([(7, 6), (8, 2)], partition_bytes=4096)
    >>> table.add([(1, 8192, 4), (2, 16384, 4)])
    >>> table.partitions(1)
    (Partition(offset=0, length=4096, server=8), Partition(offset=4096, length=4096, server=7))
    >>> table.load(7), table.load(8)
    (20480, 4096)
    """

    #: An excess that is too small to cut off is also too small to move. With large partitions, it is larger.
    margin_bytes = 2 * MIN_CUT_BYTES

    def __init__(self, servers: Iterable[tuple[int, int]], partition_bytes: int) -> None:
        if partition_bytes < 1:
            raise UsageError(f"partition_bytes must be at least 1, got {partition_bytes}")
        self.partition_bytes = partition_bytes
        self._tensors: dict[int, _Tensor] = {}
        self._set_servers(servers)

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def servers(self) -> tuple[tuple[int, int], ...]:
        """(id, weight) of every server, in order."""
        return tuple(zip(self._ids, self._weights, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors in the table."""
        return sum(self._loads)

    def has(self, key: int) -> bool:
        """True if ``key`` is in the table."""
        return key in self._tensors

    def partitions(self, key: int) -> tuple[Partition, ...]:
        """The partitions of ``key`` by offset; empty for a tensor without elements. Raises UsageError for an unknown
        key."""
        try:
            return self._tensors[key].parts
        except KeyError:
            raise UsageError(f"key {key:#x} is not in the placement table: its declaration was not accepted") from None

    def owner(self, key: int, index: int) -> int:
        """The id of the server that sums partition ``index`` of ``key``. Raises UsageError if there is no such
        partition."""
        parts = self.partitions(key)
        if not 0 <= index < len(parts):
            raise UsageError(f"key {key:#x} has {len(parts)} partitions, and none with the index {index}")
        return parts[index].server

    def load(self, server: int) -> int:
        """The bytes that the server with this id holds. Raises UsageError for an unknown id."""
        try:
            return self._loads[self._positions[server]]
        except KeyError:
            raise UsageError(f"server {server} is not in the placement table") from None

    # ---- events ------------------------------------------------------------------------------------------

    def add(self, batch: Iterable[tuple[int, int, int]]) -> None:
        """Enter tensors, (key, nbytes, itemsize) each. The order within a batch does not matter.

        A key that is in the table stays as it is if its size is the same; otherwise it is cut and placed again. If a
        batch has a key twice, the last entry counts. Raises UsageError, and changes nothing, for impossible sizes.
        """
        entries = {entry.key: entry for entry in (_checked(Entry(*each)) for each in batch)}
        pieces = []
        for entry in entries.values():
            known = self._tensors.get(entry.key)
            if known is not None and (known.nbytes, known.itemsize) == (entry.nbytes, entry.itemsize):
                continue
            if known is not None:
                self._account(known.parts, -1)
            self._tensors[entry.key] = _Tensor(entry.itemsize, entry.nbytes, ())
            cuts = split(entry.nbytes, self.partition_bytes, entry.itemsize)
            pieces += [Piece(entry.key, offset, length, entry.itemsize) for offset, length in cuts]
        before = self.nbytes
        bounds = self._bounds(before + sum(piece.length for piece in pieces), before)
        parts: dict[int, list[Partition]] = {}
        for piece, position in Packer(self._weights, self._loads, bounds, self._least_bytes).pack(pieces, cut=True):
            parts.setdefault(piece.key, []).append(Partition(piece.offset, piece.length, self._ids[position]))
        for key, unordered in parts.items():
            self._replace(key, sorted(unordered))

    def rebalance(self, servers: Iterable[tuple[int, int]]) -> list[Move]:
        """Change to these servers, see the constructor. Returns the moves, by key and index.

        Cuts never change. A partition stays where it is, unless its server is not among these (or has weight 0), or
        unless the server exceeds its new share plus a margin and has to give this partition away.
        """
        total = self.nbytes
        self._set_servers(servers)
        margin = self.margin_bytes + 2 * (self._least_bytes - MIN_CUT_BYTES)
        bounds = [bound + margin for bound in self._bounds(total, total)]
        homeless: list[tuple[int, int]] = []
        held: list[list[tuple[int, int, int]]] = [[] for _ in self._ids]  # (length, key, index) of each server
        for key, tensor in self._tensors.items():
            for index, part in enumerate(tensor.parts):
                position = self._positions.get(part.server)
                if position is None or not self._weights[position]:
                    homeless.append((key, index))
                else:
                    held[position].append((part.length, key, index))
                    self._loads[position] += part.length
        for position, parts in enumerate(held):
            for length, key, index in excess_of(sorted(parts), self._loads[position] - bounds[position]):
                homeless.append((key, index))
                self._loads[position] -= length
        return self._settle(homeless, self._bounds(total, 0))

    def _settle(self, homeless: Sequence[tuple[int, int]], bounds: Sequence[int]) -> list[Move]:
        """Place partitions that have no server, without cutting them. Returns those that moved."""
        numbers = {}
        for key, index in homeless:
            tensor = self._tensors[key]
            part = tensor.parts[index]
            numbers[Piece(key, part.offset, part.length, tensor.itemsize)] = index
        moves = []
        changed: dict[int, list[Partition]] = {}
        for piece, position in Packer(self._weights, self._loads, bounds).pack(numbers, cut=False):
            index, target = numbers[piece], self._ids[position]
            if piece.key not in changed:  # one copy for each tensor: it may have many partitions
                changed[piece.key] = list(self._tensors[piece.key].parts)
            parts = changed[piece.key]
            if parts[index].server != target:
                moves.append(Move(piece.key, index, parts[index].server, target))
                parts[index] = parts[index]._replace(server=target)
        for key, each in changed.items():
            self._replace(key, each)
        return sorted(moves)

    # ---- for a member that joins later -------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The whole state as dictionaries, lists and integers, fit for JSON."""
        return {
            "partition_bytes": self.partition_bytes,
            "servers": [list(server) for server in self.servers],
            "tensors": [
                [key, tensor.nbytes, tensor.itemsize, [list(part) for part in tensor.parts]]
                for key, tensor in sorted(self._tensors.items())
            ],
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> PlacementTable:
        """The table of which ``snapshot`` was taken. Raises ProtocolError if it is malformed."""
        try:
            table = cls([(int(i), int(w)) for i, w in snapshot["servers"]], int(snapshot["partition_bytes"]))
            for key, nbytes, itemsize, parts in snapshot["tensors"]:
                entry = _checked(Entry(int(key), int(nbytes), int(itemsize)))
                placed = tuple(Partition(int(o), int(n), int(s)) for o, n, s in parts)
                ends = [0, *(p.offset + p.length for p in placed)]
                if entry.key in table._tensors:
                    raise ProtocolError(f"a snapshot of the placement table has the key {entry.key:#x} twice")
                if [*(p.offset for p in placed), entry.nbytes] != ends or any(p.length < 1 for p in placed):
                    raise ProtocolError(f"the partitions of key {entry.key:#x} do not cover its {entry.nbytes} bytes")
                table._tensors[entry.key] = _Tensor(entry.itemsize, entry.nbytes, placed)
                table._account(placed, 1)
        except (UsageError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"a snapshot of the placement table is malformed: {error!r}") from error
        return table

    # ---- inside ------------------------------------------------------------------------------------------

    def _set_servers(self, servers: Iterable[tuple[int, int]]) -> None:
        given = list(servers)
        ids, weights = [server for server, _ in given], [weight for _, weight in given]
        if len(set(ids)) != len(ids):
            raise UsageError(f"a placement table's servers must be distinct, got ids {ids}")
        if any(weight < 0 for weight in weights) or not sum(weights):
            raise UsageError(f"a placement table needs weights of at least 0, and one above 0; got {weights}")
        self._ids, self._weights = ids, weights
        self._positions = {server: position for position, server in enumerate(ids)}
        self._loads = [0] * len(ids)
        self._least_bytes = min_cut_bytes(self.partition_bytes, sum(1 for weight in weights if weight))

    def _bounds(self, total: int, before: int) -> list[int]:
        """The most bytes that each server should hold: its share of ``total``, plus 1/MARGIN of its share of
        ``before``.

        ``before``: the bytes that were placed before. So a model that enters in one batch is placed evenly, and tensors
        that enter one by one are not each cut into a slice for every server.
        """
        whole = sum(self._weights)
        return [-(-total * weight // whole) + before * weight // (whole * MARGIN) for weight in self._weights]

    def _replace(self, key: int, parts: Iterable[Partition]) -> None:
        tensor = self._tensors[key]
        self._tensors[key] = _Tensor(tensor.itemsize, tensor.nbytes, tuple(parts))

    def _account(self, parts: Iterable[Partition], sign: int) -> None:
        for part in parts:
            self._loads[self._positions[part.server]] += sign * part.length


def _checked(entry: Entry) -> Entry:
    if not 0 <= entry.key < 1 << 64:
        raise UsageError(f"a key has 64 bits, got {entry.key:#x}")
    if entry.itemsize < 1 or entry.nbytes < 0 or entry.nbytes % entry.itemsize:
        raise UsageError(
            f"key {entry.key:#x}: {entry.nbytes} bytes are not a multiple of the element size, {entry.itemsize} bytes"
        )
    return entry
