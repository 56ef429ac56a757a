"""Where a contribution's bytes lie, and whom its result goes to: what the shell adds to the pure core's view.

Two kinds of memory: a message that ZeroMQ received (ours: the sum is written into it, and the same message is
sent on), and a shared segment of this machine's CS (the CS's: read, and written only where it wants the answer).
Owned by the loop thread; engine threads read and write the memory while a round is being reduced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import zmq

from byteps_py.dataplane.listener import Peer
from byteps_py.server.round_state import Contribution
from byteps_py.shm import Segment


class PayloadMemory(ABC):
    """``nbytes`` at ``address``, valid as long as this object lives."""

    address: int
    nbytes: int
    digest: bytes  # of what is to be sent from it; empty if none has been made

    @abstractmethod
    def message(self) -> zmq.Frame:
        """A message that sends these bytes without copying them."""


class FrameMemory(PayloadMemory):
    """The payload of a received message. May be overwritten: nobody else has it."""

    __slots__ = ("_frame", "address", "digest", "nbytes")

    def __init__(self, frame: zmq.Frame) -> None:
        self._frame = frame
        self.digest = b""
        self.nbytes = len(frame)
        self.address = np.frombuffer(frame.buffer, np.uint8).__array_interface__["data"][0] if self.nbytes else 0

    def message(self) -> zmq.Frame:
        return self._frame


class SharedMemory(PayloadMemory):
    """A piece of a segment that another process owns. The caller has checked its bounds."""

    __slots__ = ("_offset", "_segment", "address", "digest", "nbytes")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.digest = b""
        self._segment = segment  # keeps the mapping
        self._offset = offset
        self.nbytes = nbytes
        self.address = segment.address + offset

    def message(self) -> zmq.Frame:
        return zmq.Frame(self._segment.view[self._offset : self._offset + self.nbytes])


@dataclass(slots=True, eq=False)
class Arrival(Contribution):
    """A contribution with its memory. ``answer``: where a local peer wants the result; None for a remote one.
    ``came_s``: when it was taken from the network."""

    origin: Peer
    payload: PayloadMemory | None = None
    answer: PayloadMemory | None = None
    came_s: float = 0.0
