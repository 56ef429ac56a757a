"""A connection of another machine's communication service, as whoever listens sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import zmq

from byteps_py.wire import Header, Kind


class Peer(ABC):
    """One connection of a CS. ``machine``: its index, proven by its HELLO."""

    machine: int

    @abstractmethod
    def answer(self, header: Header, result: zmq.Frame | None, digest: bytes = b"") -> None:
        """Send what was asked for; None: it lies where the peer wants it, or the peer has it. ``digest``: of the
        result, if there is one (seal.py). Never blocks."""

    @abstractmethod
    def tell(self, header: Header, payload: bytes = b"") -> None:
        """Say what is no answer. Never blocks."""

    @abstractmethod
    def refuse(self, header: Header, reason: str) -> None:
        """Say why a message was not accepted: ``ErrorType``, line break, sentence. Never blocks."""


def reply(header: Header, kind: Kind) -> bytes:
    """A request's header as it goes back: all as it came, but for the kind. The request is over."""
    header.kind = kind
    return header.pack()
