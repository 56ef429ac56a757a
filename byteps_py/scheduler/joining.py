"""Ranks that have no more data: who has joined, and when all have. Pure.

a rank joins ─► it votes on nothing, and no barrier waits for it
all ranks have joined, and every machine is idle (no rank of it waits for a round that it had handed over) ─► over
"""

from __future__ import annotations

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb


class JoinTracker:
    def __init__(self, num_machines: int) -> None:
        self._num_machines = num_machines
        self._order: dict[int, None] = {}
        self._idle: set[int] = set()
        self._direct_round = 0

    @property
    def ranks(self) -> set[int]:
        """Those that have joined."""
        return set(self._order)

    def join(self, ranks: range, rank: int) -> bool:
        """A rank of a machine with ``ranks`` has joined. False if it had before, and only more is said about it."""
        if rank not in ranks:
            raise ProtocolError(f"it says that rank {rank} has joined, which is none of its own")
        is_new = rank not in self._order
        self._order[rank] = None
        return is_new

    def idle(self, machine_index: int, ranks: range, direct_round: int) -> pb.AllJoined | None:
        """A machine is idle. ``direct_round``: the highest round of its gathers and exchanges.

        Returns the end of it all if it is the last one, and everybody starts anew.
        """
        if not self.ranks.issuperset(ranks):
            raise ProtocolError("it is idle, but not all of its ranks have joined")
        self._idle.add(machine_index)
        self._direct_round = max(self._direct_round, direct_round)
        if len(self._idle) < self._num_machines:
            return None
        last = list(self._order)[-1]
        self._order.clear()
        self._idle.clear()
        return pb.AllJoined(last=last, direct_round=self._direct_round)
