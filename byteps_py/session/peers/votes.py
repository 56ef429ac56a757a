"""What ranks of one machine say to each other about the rounds of something that all of them do: at most a word each.

It goes with the number of its round, so rounds of which nothing is said need no message, and with the bytes that belong
to it, in the message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping

from byteps_py.errors import ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import MessageMatcher, Stream
from byteps_py.session.peers.peer_protocol import PeerMessageKind
from byteps_py.session.peers.peer_sockets import PeerOutbox
from byteps_py.session.peers.waiting import Patience, Wait

_INLINE = int(PeerMessageKind.INLINE)


class Votes:
    """Of the ranks of ``stream``, which has no other use. One thread at a time."""

    def __init__(
        self, me: int, stream: Stream, matcher: MessageMatcher, outboxes: Mapping[int, PeerOutbox], patience: Patience
    ) -> None:
        self._me = me
        self._stream = stream
        self._matcher = matcher
        self._outboxes = outboxes
        self._patience = patience

    @property
    def joined(self) -> Collection[int]:
        """Ranks that say nothing any more. All that they have said has been heard, if one listens after this."""
        return frozenset(self._matcher.joined)

    def say(self, number: int, word: int, address: int = 0, nbytes: int = 0) -> None:
        """To all others, of this round; with ``nbytes`` that lie at ``address``."""
        data = ctypes.string_at(address, nbytes) if nbytes else b""
        record = peer_protocol.pack(
            _INLINE, self._me, self._matcher.era, 0, self._stream.key, number, nbytes, nbytes, 0, 0, word
        )
        for target in self._stream.flows:
            self._outboxes[target].send(record + data)

    def heard(self, number: int) -> dict[int, int]:
        """What others have said of this round, as far as this rank has heard."""
        flows = self._stream.flows
        return {s: parcel.due for s, flow in flows.items() if (parcel := flow.parcels.get(number)) is not None}

    def await_words(self, number: int, is_enough: Callable[[], bool], name: str, timeout_s: float) -> None:
        """Return when ``is_enough``, which is looked at whenever something has come. ``name``: of what is waited for.
        Raises StallError and what ends the session."""
        if not is_enough():
            wait = Wait(name, number, lambda: [s for s in self._stream.flows if s not in self.heard(number)])
            self._patience.until(is_enough, wait, timeout_s)
            self._patience.ended(wait)

    def fetch(self, number: int, source: int, address: int, nbytes: int) -> None:
        """Copy the bytes that ``source`` has sent with its word about this round, which has been heard, to
        ``address``. Raises ProtocolError if they are not as many."""
        parcel = self._stream.flows[source].parcels[number]
        if parcel.payload is None or parcel.total != nbytes:
            raise ProtocolError(f"local rank {source} has sent {parcel.total} bytes with its word, not {nbytes}")
        ctypes.memmove(address, parcel.payload, nbytes)

    def forget(self, number: int) -> None:
        """What was said of rounds up to this one. Not all of it has to have come before the next round begins."""
        for flow in self._stream.flows.values():
            for old in list(flow.parcels):  # a copy: another thread may be taking messages
                if old <= number:
                    del flow.parcels[old]
