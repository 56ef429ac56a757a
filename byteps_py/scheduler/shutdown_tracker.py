"""Machines whose ranks have all shut down stay a little: what these gave last may be asked for once more. Pure.

all ranks of a machine are gone ─► every other machine says that it lacks no result of theirs, or is gone itself ─► it
may go

An answer that is on its way when a server dies, or a connection breaks, is lost; the sum is taken again from what each
machine has kept. Nobody but the machine that lacks it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from byteps_py.scheduler.member import MemberRecord


class ShutdownTracker:
    def __init__(self) -> None:
        self._gone: set[int] = set()  # ranks
        self._settled: dict[int, set[int]] = {}  # by member id: gone ranks of which it lacks nothing
        self._told: set[int] = set()  # member ids

    def gone(self, ranks: Iterable[int]) -> None:
        """These have shut down."""
        self._gone.update(ranks)

    def settled(self, member: MemberRecord, ranks: Iterable[int]) -> None:
        """A machine lacks no result of rounds that these, which are gone, took part in."""
        self._settled.setdefault(member.id, set()).update(ranks)

    def free(self, workers: Sequence[MemberRecord]) -> list[MemberRecord]:
        """Those of all present ``workers`` that may go, and have not been told."""
        leaving = [worker for worker in workers if self._gone.issuperset(worker.ranks)]
        others = [worker for worker in workers if worker not in leaving]
        free = [
            worker
            for worker in leaving
            if worker.id not in self._told
            and all(self._settled.get(other.id, set()).issuperset(worker.ranks) for other in others)
        ]
        self._told.update(worker.id for worker in free)
        return free
