"""What a machine keeps from round to round for a tensor's codec: taken from the memory of slots, and put back there.

Errors and momentum lie with the rank that is the first of its machine in the tensor's group (``Slot.coded_state``).
They belong to a name, shape, dtype and codec: only a tensor with the same ones goes on with them. The caller holds the
session's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from byteps_py.errors import UsageError
from byteps_py.session.base import CodedState, Slot

_log = logging.getLogger("byteps_py")


class CodedStates:
    """Of one session."""

    def __init__(self) -> None:
        self._waiting: dict[str, CodedState] = {}  # of tensors that are not declared yet

    def declared(self, slot: Slot) -> None:
        """A new slot, whose memory has zeros: it goes on with what waits for its name, if that is of the same kind."""
        state = self._waiting.pop(slot.spec.name, None)
        if state is None or slot.spec.codec is None:
            return
        spec = slot.spec
        if (state.shape, state.dtype, state.codec) != (spec.shape, spec.dtype, spec.codec):
            _log.warning(
                "tensor %r begins with errors and momentum of zeros: those that were there are of %s%s with %s, and it "
                "is %s now",
                spec.name, state.dtype.name.lower(), list(state.shape), state.codec, spec.describe(),
            )  # fmt: skip
        elif slot.coded_state is not None:  # else nothing is coded, or another rank of this machine has it
            slot.coded_state[:] = state.data

    def take(self, slots: Iterable[Slot]) -> dict[str, CodedState]:
        """Copies of those of ``slots``, and of those that wait. Raises UsageError if a round is under way."""
        found = dict(self._waiting)
        for slot in _idle(slots):
            spec = slot.spec
            if spec.codec is not None and slot.coded_state is not None:
                found[spec.name] = CodedState(spec.shape, spec.dtype, spec.codec, bytes(slot.coded_state))
        return found

    def put(self, states: Mapping[str, CodedState], slots: Iterable[Slot]) -> None:
        """Go on with ``states`` and no others. Raises UsageError if a round is under way."""
        slots, self._waiting = _idle(slots), dict(states)
        for slot in slots:
            if slot.coded_state is not None:
                slot.coded_state[:] = bytes(len(slot.coded_state))
                self.declared(slot)


def _idle(slots: Iterable[Slot]) -> list[Slot]:
    """Those with a state. Raises UsageError for one with a round under way, which changes the state at any time."""
    found = [slot for slot in slots if slot.coded_state is not None]
    for slot in found:
        if slot.pending or slot.begun_bytes:
            raise UsageError(
                f"tensor {slot.spec.name!r} is on its way, so its error feedback and momentum can't be saved or loaded "
                "now: do it between two steps, after optimizer.step() or synchronize()"
            )
    return found
