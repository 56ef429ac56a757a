"""The messages with which two ranks of different machines begin a connection, and the end that is called. Pure.

caller ──who it is, HELLO────────────────────► listener      each message is preceded by its length;
       ◄─"+" CHALLENGE, or "-" and why not ───               the four in the middle: dataplane/handshake.py
       ──PROOF ──────────────────────────────►
       ◄─"+", or "-" and why not ─────────────
"""

from __future__ import annotations

import struct

from byteps_py.dataplane.handshake import Challenge, ListenerHandshake
from byteps_py.dataplane.stream_seal import StreamSeal
from byteps_py.errors import ProtocolError

_CALL = struct.Struct("<8sIII")  # kind, the caller's rank, the listener's rank, epoch of their group
_MAGIC = b"bps-rank"
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
#: The longest message.
MOST_BYTES = 4096
ACCEPTED, REFUSED = b"+", b"-"

#: The seals of a new connection, for sending and for receiving.
Seals = tuple[StreamSeal, StreamSeal]


def framed(message: bytes) -> bytes:
    """``message`` as it is sent."""
    return _LENGTH.pack(len(message)) + message


def length_of(prefix: bytes) -> int:
    """The length of the message that follows ``prefix``. Raises ProtocolError if it is too long."""
    (nbytes,) = _LENGTH.unpack(prefix)
    if nbytes > MOST_BYTES:
        raise ProtocolError(f"a message of {nbytes} bytes in a handshake; at most {MOST_BYTES} are allowed")
    return int(nbytes)


def call(caller: int, callee: int, epoch: int, hello: bytes) -> bytes:
    """The first message of rank ``caller`` to rank ``callee``, both in the group of ranks of ``epoch``."""
    return _CALL.pack(_MAGIC, caller, callee, epoch) + hello


def accepted(answer: bytes, rank: int) -> bytes:
    """The contents of ``answer``, which rank ``rank`` sent. Raises ProtocolError if it is a refusal."""
    if answer[:1] != ACCEPTED:
        raise ProtocolError(f"rank {rank} turned it away: {answer[1:].decode(errors='replace')}")
    return answer[1:]


def refusal(why: object) -> bytes:
    """An answer that ends the handshake."""
    return REFUSED + str(why).encode()[: MOST_BYTES - 1]


def bound_to(rank: int, address: str) -> str:
    """A text that both proofs cover beside the secret: a proof for one rank is worth nothing at another."""
    return f"rank {rank} at {address}"


class CalledHandshake:
    """The end of rank ``me``, which listens at ``address``, in the group of ranks of ``epoch``.

    ``rank``: who calls, or says so; -1: not known yet. ``seals``: of the connection, once its caller has proven that
    it is of the job.
    """

    def __init__(self, listener: ListenerHandshake, me: int, address: str, epoch: int) -> None:
        self._listener, self._me, self._address, self._epoch = listener, me, address, epoch
        self._challenge: Challenge | None = None
        self.rank = -1
        self.seals: Seals | None = None

    def process(self, message: bytes) -> bytes:
        """The answer to the next message of the caller. Raises ProtocolError if the connection is to end."""
        if self._challenge is not None:
            opening, sealing = self._challenge.accept_for_stream(message)
            self.seals = sealing, opening
            return ACCEPTED
        if len(message) < _CALL.size:
            raise ProtocolError("it is no rank of this job")
        magic, rank, callee, epoch = _CALL.unpack_from(message)
        if magic != _MAGIC or callee != self._me or rank <= self._me:
            raise ProtocolError("it is no rank of this job that connects to this one")
        self.rank = rank
        if epoch != self._epoch:
            raise ProtocolError(f"it belongs to the group of ranks of epoch {epoch}, this one to {self._epoch}")
        place = bound_to(self._me, self._address)
        text, self._challenge = self._listener.challenge(message[_CALL.size :], rank, place, epoch)
        return ACCEPTED + text
