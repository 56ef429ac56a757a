"""Placement tables of simulated jobs: everything is small there, and in some runs partitions move all the time."""

from __future__ import annotations

from collections.abc import Iterable

from byteps_py.placement.placement_table import Move, PlacementTable

from .program import PARTITION_BYTES


def has_visits(seed: int) -> bool:
    """Some runs have. What happens in the others does not depend on it."""
    return seed % 5 == 4


def slowness(seed: int) -> float:
    """Of servers' kernels: in half of these runs partitions come back before they have been added up."""
    return 30.0 if has_visits(seed) and seed % 2 else 1.0


class SmallTable(PlacementTable):
    """Small as all is here, with the real margin no server is so much above its share that a partition leaves it."""

    margin_bytes = PARTITION_BYTES // 4


class RestlessTable(SmallTable):
    """Half of all partitions go to servers that come, and home when these go: more than the real one moves."""

    def __init__(self, servers: Iterable[tuple[int, int]], partition_bytes: int) -> None:
        super().__init__(servers, partition_bytes)
        self._homes: dict[tuple[int, int], int] = {}  # by key and index

    def rebalance(self, servers: Iterable[tuple[int, int]]) -> list[Move]:
        known = {server for server, _ in self.servers}
        before = {(key, i): part.server for key, it in self._tensors.items() for i, part in enumerate(it.parts)}
        super().rebalance(servers)
        able = [server for server, weight in self.servers if weight]
        new = [server for server in able if server not in known]
        moves = []
        for (key, index), source in before.items():
            parts = list(self.partitions(key))
            home = self._homes.setdefault((key, index), source)
            target = new[key % len(new)] if new and (key + index) % 2 else home if home in able else parts[index].server
            self._account(parts[index : index + 1], -1)
            parts[index] = parts[index]._replace(server=target)
            self._account(parts[index : index + 1], 1)
            self._replace(key, parts)
            if target != source:
                moves.append(Move(key, index, source, target))
        return sorted(moves)


def table_class(seed: int) -> type[PlacementTable]:
    if has_visits(seed):
        return RestlessTable
    return PlacementTable if seed % 5 == 3 else SmallTable
