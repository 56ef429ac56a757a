"""A contribution with its memory: what the shell adds to the pure core's view.

There are two kinds of memory. A message that ZeroMQ received belongs to this process: the sum is written into it, and
the same message is sent on. A shared segment belongs to the CS of this machine: it is read, and written only where the
CS wants the answer. The loop's thread owns these objects; pool threads read and write the memory while a round is
being reduced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import zmq

from byteps_py.dataplane.listener import Peer
from byteps_py.server.round_state import Contribution
from byteps_py.system.shm import Segment


class PayloadMemory(ABC):
    """``nbytes`` at ``address``, valid as long as this object lives."""

    address: int
    nbytes: int
    digest: bytes  # of the bytes to send from it; empty if none has been made

    @abstractmethod
    def message(self) -> zmq.Frame:
        """A message that sends these bytes without copying them."""


class FrameMemory(PayloadMemory):
    """The payload of a received message. It may be overwritten: no other process has it."""

    __slots__ = ("_frame", "address", "digest", "nbytes")

    def __init__(self, frame: zmq.Frame) -> None:
        self._frame = frame
        self.digest = b""
        self.nbytes = len(frame)
        self.address = np.frombuffer(frame.buffer, np.uint8).__array_interface__["data"][0] if self.nbytes else 0

    def message(self) -> zmq.Frame:
        return self._frame


class SharedMemory(PayloadMemory):
    """A piece of a segment that another process owns. The caller checks the bounds."""

    __slots__ = ("_offset", "_segment", "address", "digest", "nbytes")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.digest = b""
        self._segment = segment  # keeps the memory mapped
        self._offset = offset
        self.nbytes = nbytes
        self.address = segment.address + offset

    def message(self) -> zmq.Frame:
        return zmq.Frame(self._segment.view[self._offset : self._offset + self.nbytes])


@dataclass(slots=True, eq=False)
class Arrival(Contribution):
    """A contribution with its memory. ``answer``: where a local peer wants the result; None for a remote one.
    ``arrived_s``: when it was taken from the network, on the loop's clock."""

    origin: Peer
    payload: PayloadMemory | None = None
    answer: PayloadMemory | None = None
    arrived_s: float = 0.0
