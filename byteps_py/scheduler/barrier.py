"""Barriers: which machines have arrived where. Pure."""

from __future__ import annotations

from byteps_py.errors import ProtocolError


class Barriers:
    """Barrier numbers rise by one; a machine arrives at each at most once. Machines all of whose ranks have joined
    are not waited for, and count as having been there."""

    def __init__(self, num_machines: int) -> None:
        self._num_machines = num_machines
        self._latest: dict[int, int] = {}
        self._arrived: dict[int, set[int]] = {}  # barrier → machines there
        self._excused: set[int] = set()

    def arrive(self, machine_index: int, sequence: int) -> bool:
        """True if this machine was the last one. Raises ProtocolError when it comes a second time."""
        latest = self._latest.get(machine_index, -1)
        if sequence <= latest:
            raise ProtocolError(f"it arrived at barrier {sequence} after barrier {latest}")
        self._latest[machine_index] = sequence
        self._arrived.setdefault(sequence, set()).add(machine_index)
        return self._is_over(sequence)

    def excuse(self, machine_index: int) -> list[int]:
        """All ranks of a machine have joined. Returns the barriers that waited only for it."""
        self._excused.add(machine_index)
        return [sequence for sequence in sorted(self._arrived) if self._is_over(sequence)]

    def expect_all(self) -> None:
        """Nobody is excused any more."""
        self._excused.clear()

    def _is_over(self, sequence: int) -> bool:
        if len(self._arrived[sequence] | self._excused) < self._num_machines:
            return False
        del self._arrived[sequence]
        return True
