"""The slots of one session, by name and by number, and the shared memory in which they lie.

Not locked: the session calls with its own lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from byteps_py.errors import BytePSError, ProtocolError
from byteps_py.session.base import Observer, Slot
from byteps_py.shm import Segment
from byteps_py.tensors import TensorSpec


class Slots:
    """``map_segment(descriptor, nbytes)`` maps shared memory."""

    def __init__(self, map_segment: Callable[[int, int], Segment] = Segment) -> None:
        self._map_segment = map_segment
        self._segments: dict[int, Segment] = {}
        self._by_name: dict[str, Slot] = {}
        self._by_id: dict[int, Slot] = {}

    def named(self, name: str) -> Slot | None:
        """The slot of the name's latest declaration, or None."""
        return self._by_name.get(name)

    def is_current(self, slot: Slot) -> bool:
        """False if the name was declared again since, or if the declaration of this slot has failed."""
        return self._by_id.get(slot.id) is slot

    def add_segment(self, number: int, fd: int, nbytes: int) -> None:
        """Map the service's segment ``number``. Owns ``fd`` unless it raises ProtocolError or OSError."""
        if number in self._segments:
            raise ProtocolError(f"segment {number} comes twice")
        self._segments[number] = self._map_segment(fd, nbytes)

    def add(self, spec: TensorSpec, fields: dict[str, Any]) -> Slot:
        """The slot that a DECLARED message describes for ``spec``; it replaces the earlier slot of the name. Raises
        ProtocolError if it lies outside of the segments."""
        inputs = tuple(self._view(place, spec.nbytes) for place in fields["inputs"])
        slot = Slot(spec, inputs, self._view(fields["result"], fields["nbytes"]), int(fields["id"]))
        slot.round = slot.done_round = int(fields["round"])
        if (before := self._by_name.get(spec.name)) is not None:
            del self._by_id[before.id]
        self._by_name[spec.name] = self._by_id[slot.id] = slot
        return slot

    def _view(self, place: list[int], nbytes: int) -> memoryview:
        number, offset = place
        view = self._segments[number].view
        if not 0 <= offset <= offset + nbytes <= len(view):
            raise ProtocolError(f"{nbytes} bytes at {offset} of segment {number}, which has {len(view)}")
        return view[offset : offset + nbytes]

    def done(self, records: Iterable[tuple[int, int, int]], observer: Observer | None = None) -> None:
        """Record delivered rounds: (slot id, round, blame)."""
        for slot_id, round_, blame in records:
            if (slot := self._by_id.get(slot_id)) is not None:
                slot.done_round, slot.blame = round_, blame
                if observer is not None:
                    observer.delivered(slot)

    def arrived(self, records: Iterable[tuple[int, int, int]]) -> None:
        """Record delivered chunks of results: (slot id, round, chunk)."""
        for slot_id, round_, chunk in records:
            if (slot := self._by_id.get(slot_id)) is not None and round_ > slot.done_round:
                slot.chunks.append(chunk)

    def fail(self, slot_ids: Iterable[int], error: BytePSError) -> None:
        """Mark the declarations of these slots as failed with ``error``."""
        for slot_id in slot_ids:
            slot = self._by_id.pop(slot_id, None)
            if slot is not None:
                slot.error = error
                if self._by_name.get(slot.spec.name) is slot:
                    del self._by_name[slot.spec.name]

    def begun(self) -> Slot | None:
        """A slot that is handed over in part, if there is one."""
        return next((slot for slot in self._by_id.values() if slot.begun_bytes), None)

    def close(self) -> None:
        """Forget all slots and unmap the segments, where no views are left."""
        self._by_name.clear()  # slots hold views of the segments
        self._by_id.clear()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()  # memory that still has views is unmapped with the last of them
