"""Records the rounds of a session's slots in the flight recorder, each name as a group of its own. Any thread.

The tensors of torch's process groups have names, too; their operations are recorded as such, by
torch/collectives/recording.py, and not here.
"""

from __future__ import annotations

import threading
from typing import Protocol

from byteps_py.system.flight_dump import FlightDump
from byteps_py.system.flight_recorder import OPERATIONS, GroupCounter
from byteps_py.tensors import Op, TensorSpec
from byteps_py.wording import operation_text

#: How names of tensors of process groups begin: see torch/collectives/members.py.
OF_PROCESS_GROUPS = "c10d."
_SUM, _PIECES, _BROADCAST, _GATHER, _EXCHANGE = map(
    OPERATIONS.index, ("all_reduce", "reduce_scatter_v", "broadcast", "all_gather_v", "all_to_all")
)
_WAIT = OPERATIONS.index("wait")
WAITS = "waits"
_MOVES = {Op.BROADCAST: _BROADCAST, Op.GATHER: _GATHER, Op.EXCHANGE: _EXCHANGE}


class RecordedSlot(Protocol):
    """The parts of a slot that are used: see Slot."""

    spec: TensorSpec
    flight_group: GroupCounter | None
    flight_number: int


class RoundRecorder:
    """``dump``: of the recorder. ``size``: ranks of the job."""

    def __init__(self, dump: FlightDump, size: int, records_waits: bool = False) -> None:
        self.dump = dump
        self.recorder = dump.recorder
        self._size = size
        #: For a trace: the waits of the training thread are recorded, too.
        self.records_waits = records_waits
        self._waits = self.recorder.group(WAITS, "", (), "wait")

    def begin_wait(self) -> int:
        """This thread waits from now on. Returns a number for ``end_wait``; 0 if that is not recorded."""
        if not self.records_waits or threading.current_thread().name.startswith("byteps"):
            return 0
        return self.recorder.begin(self._waits, _WAIT)

    def end_wait(self, number: int) -> None:
        """It waits no more."""
        self.recorder.end(number)

    def begin(self, slot: RecordedSlot) -> None:
        """A round of ``slot`` is handed over."""
        spec, group = slot.spec, slot.flight_group
        if group is None:
            if spec.name.startswith(OF_PROCESS_GROUPS):
                return
            name = operation_text(spec.name, spec.group)
            group = slot.flight_group = self.recorder.group(name, "by name", spec.group or range(self._size), "name")
        operation = _MOVES.get(spec.op, _PIECES if spec.scatters else _SUM)
        # Of gathers and exchanges, ranks may have different sizes. DTYPES begins with the types of the wire.
        facts = int(spec.dtype), spec.shape if operation in (_SUM, _BROADCAST) else None
        slot.flight_number = self.recorder.begin(group, operation, spec.nbytes, facts, facts)
        self.recorder.start(slot.flight_number)

    def end(self, slot: RecordedSlot, has_failed: bool = False) -> None:
        """The round of ``slot`` that was begun is over."""
        number, slot.flight_number = slot.flight_number, 0
        if number:
            self.recorder.end(number, has_failed)

    def withdraw(self, slot: RecordedSlot) -> None:
        """The round of ``slot`` that was begun is carried out in another way, which begins it again."""
        number, slot.flight_number = slot.flight_number, 0
        if number and slot.flight_group is not None:
            self.recorder.withdraw(number, slot.flight_group)
