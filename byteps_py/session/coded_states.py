"""The state that a machine keeps from round to round for a tensor's codec: taken from the memory of slots, and put back
there.

Errors and momentum lie with the rank that is the first of its machine in the tensor's group (``Slot.coded_state``).
They belong to a name, shape, dtype and codec: only a tensor with the same ones goes on with them. For how many rounds a
codec has drawn is known to all ranks, which must agree on it. The caller holds the session's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from byteps_py.errors import UsageError
from byteps_py.session.base import CodedState, Slot
from byteps_py.tensors import TensorSpec

_log = logging.getLogger("byteps_py")


class CodedStates:
    """Of one session."""

    def __init__(self) -> None:
        self._waiting: dict[str, CodedState] = {}  # of tensors that are not declared yet

    def drawn(self, spec: TensorSpec) -> int:
        """For how many rounds machines have drawn for a tensor that is to be declared."""
        state = self._waiting.get(spec.name)
        return state.codec.drawn if state is not None and _fits(state, spec) else 0

    def declared(self, slot: Slot) -> None:
        """A new slot, whose memory has zeros: it goes on with what waits for its name, if that is of the same kind."""
        slot.drawn = self.drawn(slot.spec)
        self._fill(slot)

    def _fill(self, slot: Slot) -> None:
        state, spec = self._waiting.pop(slot.spec.name, None), slot.spec
        if state is None or spec.codec is None:
            return
        if not _fits(state, spec):
            _log.warning(
                "tensor %r begins with errors and momentum of zeros: those that were there are of %s%s with %s, and it "
                "is %s now",
                spec.name, state.dtype.name.lower(), list(state.shape), state.codec, spec.describe(),
            )  # fmt: skip
        elif (
            slot.coded_state is not None and state.data
        ):  # else nothing is coded, or another rank of the machine has it
            slot.coded_state[:] = state.data

    def take(self, slots: Iterable[Slot]) -> dict[str, CodedState]:
        """Copies of those of ``slots``, and of those that wait. Raises UsageError if a round is under way."""
        found = dict(self._waiting)
        for slot in _idle(slots):
            spec = slot.spec
            if spec.codec is not None:
                codec = replace(spec.codec, drawn=slot.drawn + slot.done_round) if spec.codec.draws else spec.codec
                found[spec.name] = CodedState(spec.shape, spec.dtype, codec, bytes(slot.coded_state or b""))
        return found

    def put(self, states: Mapping[str, CodedState], slots: Iterable[Slot]) -> None:
        """Go on with ``states`` and no others; what is declared already goes on drawing as it does. Raises UsageError
        if a round is under way."""
        slots = list(slots)
        _idle(slots)
        self._waiting = dict(states)
        for slot in slots:
            if slot.coded_state is not None:
                slot.coded_state[:] = bytes(len(slot.coded_state))
            self._fill(slot)


def _fits(state: CodedState, spec: TensorSpec) -> bool:
    """A tensor of this kind may go on with the state."""
    mine = spec.codec and replace(spec.codec, drawn=0)
    return (state.shape, state.dtype, replace(state.codec, drawn=0)) == (spec.shape, spec.dtype, mine)


def _idle(slots: Iterable[Slot]) -> list[Slot]:
    """Those that have a state, or draw. Raises UsageError for one with a round under way, which changes it at any
    time."""
    found = [slot for slot in slots if slot.coded_state is not None or (slot.spec.codec and slot.spec.codec.draws)]
    for slot in found:
        if slot.pending or slot.begun_bytes:
            raise UsageError(
                f"tensor {slot.spec.name!r} is on its way, so its error feedback and momentum can't be saved or loaded "
                "now: do it between two steps, after optimizer.step() or synchronize()"
            )
    return found
