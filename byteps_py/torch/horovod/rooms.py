"""The memory of a GATHER or an EXCHANGE, seen as bytes, in which each round lays out its pieces as it needs.

Owns how much room a name has. Must not know what the pieces mean. One user at a time, as with an Exchange.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import cast

import numpy as np
import torch

from byteps_py.session import Session, Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.exchange import Mover, Tensors, finish_departure

#: Pieces of different tensors start at multiples of this: any dtype may lie there.
ALIGNMENT = 16


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size_class(nbytes: int) -> int:
    """The room that is made for ``nbytes``: at most a quarter more, so that small growth is rarely a new declaration.

    >>> [size_class(n) for n in (0, 1, 4096, 5000, 100_000)]
    [4096, 4096, 4096, 5120, 114688]
    """
    if nbytes <= 4096:
        return 4096
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class Room:
    """A slot and views of its bytes."""

    def __init__(self, session: Session, slot: Slot, mover: Mover) -> None:
        self._session = session
        self.slot = slot
        self.mover = mover
        self._departure: Future[None] | None = None
        self._is_fetched = False
        for memory in {id(m): m for m in (*slot.inputs, slot.result)}.values():
            mover.adopt(memory)
        self._inputs = [_octets(memory) for memory in slot.inputs]
        self._result = _octets(slot.result)

    def input(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A piece of the next contribution."""
        return _piece(self._inputs[self.slot.round % len(self._inputs)], offset, dtype, shape)

    def result(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A piece of the result: valid from ``wait`` to the next ``send``."""
        return _piece(self._result, offset, dtype, shape)

    def send(self, views: list[torch.Tensor], tensors: Tensors, layout: Layout) -> None:
        """Copy tensors to views of the input, and hand it over."""
        self._is_fetched = False
        with torch.no_grad():
            self._departure = self.mover.send(self._session, self.slot, views, tensors, layout)

    def send_as_it_is(self, layout: Layout) -> None:
        """Hand over what the input holds."""
        if self._is_fetched:
            self.send([], [], layout)  # a copy from the result to its device may not be over yet: the mover knows
        else:
            self._session.hand_over(self.slot, layout=layout)

    def fetch(self, views: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Copy pieces of the result to outputs."""
        if views:
            self._is_fetched = True
            with torch.no_grad():
                self.mover.fetch(views, outputs)

    @property
    def done(self) -> bool:
        """True once ``wait`` would not block."""
        return (self._departure is None or self._departure.done()) and self._session.is_done(self.slot)

    def wait(self) -> None:
        """Raises what Session.wait raises."""
        departure, self._departure = self._departure, None
        finish_departure(departure, self.slot)
        self._session.wait(self.slot)


class Rooms:
    """The rooms of one session by name."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rooms: dict[str, Room] = {}

    def get(self, name: str, op: Op, group: tuple[int, ...], room_in: int, room_out: int, device: torch.device) -> Room:
        """The room of a name, with at least so many bytes for the input and the result."""
        context = self._context
        with context.lock:
            session = context.session
            mover = context.mover(device)
            room = self._rooms.get(name)
            if (
                room is None
                or room.slot.error is not None
                or room.mover is not mover
                or not _holds(room, room_in, room_out)
            ):
                shape = (size_class(room_in), size_class(room_out))
                if room is not None and room.slot.spec.op is op:
                    shape = (max(shape[0], room.slot.spec.shape[0]), max(shape[1], room.slot.spec.shape[1]))
                (slot,) = session.declare([TensorSpec(name, DType.UINT8, shape, op, group=group)])
                room = self._rooms[name] = Room(session, slot, mover)
            return room

    def close(self) -> None:
        """The slots' memory goes with the session."""
        self._rooms.clear()


def rooms_of(context: Context) -> Rooms:
    """The rooms of the context's session."""
    with context.lock:
        context.session  # noqa: B018  raises NotInitializedError
        found = context.belongings.setdefault(Rooms, Rooms(context))
        return cast(Rooms, found)


def _holds(room: Room, room_in: int, room_out: int) -> bool:
    there_in, there_out = room.slot.spec.shape
    return room.slot.error is None and room_in <= there_in and room_out <= there_out


def _octets(memory: memoryview) -> torch.Tensor:
    # Through numpy, which keeps the memory mapped for as long as a view lives; torch.frombuffer does not.
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


def _piece(octets: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return octets[offset : offset + nbytes].view(dtype).view(shape)
