"""A rank and the other ranks: bytes from rank to rank without the communication service.

On one machine the service only introduces ranks to each other (worker/core/local_ranks.py). A sender writes a
payload to memory of its own that the receivers map, and sends a message over a socket. Each receiver copies the payload
straight to where it belongs: two passes over memory and one wake-up. A small payload travels in the message itself.

Ranks of different machines have one link for each pair: a TCP connection, or several where one does not fill it. Every
payload follows its message.

    PeerTransport (I/O) ─┬─ MessageMatcher, StreamReceipt (pure: received and expected payloads, and their destinations)
                         ├─ SharedSlots (a large tensor, step by step)
                         ├─ SharedSegment (memory for several ranks)
                         ├─ Votes (one number of each rank about each round of an operation)
                         ├─ PeerDirectory (the ranks that are introduced)
                         ├─ PeerWaiter (polls, sleeps, and reports waits)
                         ├─ peer_protocol (the messages)
                         ├─ OutgoingMemory, IncomingMemory, Inbox, PeerOutbox (ranks of this machine)
                         ├─ PeerConnector, PeerListener, PeerConnection, LinkSocket, ResumableStream (other machines)
                         └─ PlacedPayloads (other machines, by RDMA)
"""

from byteps_py.session.peers.message_matcher import Span, Stream, StreamReceipt, joined_error
from byteps_py.session.peers.peer_connection import PendingSend
from byteps_py.session.peers.peer_transport import WINDOW, PeerTransport
from byteps_py.session.peers.shared_slots import SharedSlots
from byteps_py.session.peers.votes import Votes

__all__ = [
    "WINDOW",
    "PeerTransport",
    "PendingSend",
    "SharedSlots",
    "Span",
    "Stream",
    "StreamReceipt",
    "Votes",
    "joined_error",
]
