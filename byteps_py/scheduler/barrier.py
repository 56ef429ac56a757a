"""Barriers: which machines have arrived where. Pure."""

from __future__ import annotations

from byteps_py.errors import ProtocolError


class Barriers:
    """Barrier numbers rise on every machine; a machine arrives at each at most once."""

    def __init__(self, num_machines: int) -> None:
        self._num_machines = num_machines
        self._latest: dict[int, int] = {}
        self._arrived: dict[int, int] = {}  # barrier → number of machines there

    def arrive(self, machine_index: int, sequence: int) -> bool:
        """True if this machine was the last one. Raises ProtocolError when it comes a second time."""
        latest = self._latest.get(machine_index, -1)
        if sequence <= latest:
            raise ProtocolError(f"it arrived at barrier {sequence} after barrier {latest}")
        self._latest[machine_index] = sequence
        self._arrived[sequence] = self._arrived.get(sequence, 0) + 1
        if self._arrived[sequence] < self._num_machines:
            return False
        del self._arrived[sequence]
        return True
