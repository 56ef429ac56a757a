"""Votes among ranks about the rounds of an operation: at most one number of each rank for each round.

A vote carries the number of its round, so a round without votes needs no message, and it carries the bytes that belong
to it in the same message. One thread at a time for each operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from byteps_py.errors import ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import MessageMatcher, Stream
from byteps_py.session.peers.peer_connection import PeerConnection
from byteps_py.session.peers.peer_protocol import PeerMessageKind
from byteps_py.session.peers.peer_sockets import PeerOutbox
from byteps_py.session.peers.waiting import PeerWaiter, Wait

_INLINE = int(PeerMessageKind.INLINE)


class Votes:
    """The votes of the ranks of ``stream``, which has no other use. ``me``: this rank. ``lose`` raises the error of a
    rank whose connection has ended. One thread at a time."""

    def __init__(
        self,
        me: int,
        stream: Stream,
        matcher: MessageMatcher,
        outboxes: Mapping[int, PeerOutbox | PeerConnection],
        waiter: PeerWaiter,
        lose: Callable[[int, Wait, float], NoReturn],
    ) -> None:
        self._me = me
        self._stream = stream
        self._matcher = matcher
        self._outboxes = outboxes
        self._waiter = waiter
        self._lose = lose

    @property
    def joined(self) -> Collection[int]:
        """Ranks that cast no more votes. Votes that they cast before are in ``received`` if it is read after this."""
        joined = self._matcher.joined
        return frozenset(joined) if joined else ()

    def cast(self, number: int, vote: int, address: int = 0, nbytes: int = 0) -> None:
        """Send this rank's vote on round ``number`` to all others, with the ``nbytes`` bytes at ``address``."""
        data = ctypes.string_at(address, nbytes) if nbytes else b""
        record = peer_protocol.pack(
            _INLINE, self._me, self._matcher.era, 0, self._stream.key, number, nbytes, nbytes, 0, 0, vote
        )
        for target in self._stream.flows:
            self._outboxes[target].send(record + data)

    def received(self, number: int) -> dict[int, int]:
        """The votes on round ``number`` that have arrived, by rank."""
        found = {}
        for source, flow in self._stream.flows.items():  # called after each message of a small sum
            vote = flow.payloads.get(number)
            if vote is not None and vote.ready == vote.total:
                found[source] = vote.due
        return found

    def wait_until_known(self, number: int, is_enough: Callable[[], bool], name: str, timeout_s: float) -> None:
        """Return when ``is_enough`` returns True; it is called after each message. ``name``: of the operation, for
        error messages. Raises StallError and the error that ends the session."""
        if not is_enough():
            wait = Wait(name, number, lambda: self._missing(number))

            def lost() -> list[int]:
                gone = [source for source in self._stream.flows if self._outboxes[source].failure is not None]
                return [source for source in self._missing(number) if source in gone] if gone else []

            is_known = False

            def is_over() -> bool:
                nonlocal is_known
                is_known = is_enough()
                return is_known or bool(lost())

            self._waiter.until(is_over, wait, timeout_s)
            if not is_known:
                self._lose(lost()[0], wait, timeout_s)
            self._waiter.ended(wait)

    def _missing(self, number: int) -> list[int]:
        come = self.received(number)
        return [source for source in self._stream.flows if source not in come]

    def fetch(self, number: int, source: int, address: int, nbytes: int) -> None:
        """Copy the bytes that came with the vote of ``source`` on round ``number`` to ``address``. The vote has been
        received. Raises ProtocolError if it carries another number of bytes."""
        payload = self._stream.flows[source].payloads[number]
        if payload.data is None or payload.total != nbytes:
            raise ProtocolError(f"rank {source} sent {payload.total} bytes with its vote, not {nbytes}")
        ctypes.memmove(address, payload.data, nbytes)

    def forget(self, number: int) -> None:
        """Drop the votes on rounds up to ``number``. Votes on them that come later are dropped by the next call."""
        for flow in self._stream.flows.values():
            for old in list(flow.payloads):  # a copy: another thread may be taking messages
                if old <= number:
                    del flow.payloads[old]
