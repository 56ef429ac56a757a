"""The ranks of one machine among themselves: bytes from rank to rank without the communication service.

The service only introduces ranks to each other (worker/core/peer_introductions.py). A sender writes a payload to memory
of its own that the receivers map, and sends a message over a socket. Each receiver copies the payload straight to where
it belongs: two passes over memory and one wake-up. A small payload travels in the message itself.

    LocalPeers (the shell) ─┬─ MessageMatcher, StreamReceipt (pure: what came, what is still needed, and where it goes)
                            ├─ Ring (a large tensor, step by step)
                            ├─ Votes (one number of each rank about each round of an operation)
                            ├─ PeerDirectory (which ranks are introduced)
                            ├─ PeerWaiter (how long to poll, when to sleep, when to report)
                            ├─ peer_protocol (the messages)
                            ├─ OutgoingMemory, IncomingMemory (memory)
                            └─ Inbox, PeerOutbox (sockets)
"""

from byteps_py.session.peers.local_peers import WINDOW, LocalPeers
from byteps_py.session.peers.message_matcher import Span, Stream, StreamReceipt
from byteps_py.session.peers.ring import Ring
from byteps_py.session.peers.votes import Votes

__all__ = ["WINDOW", "LocalPeers", "Ring", "Span", "Stream", "StreamReceipt", "Votes"]
