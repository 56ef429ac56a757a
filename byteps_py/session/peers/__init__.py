"""The ranks of one machine among themselves: bytes from rank to rank without the communication service.

The service only introduces ranks to each other (worker/core/peer_introductions.py). From there on a sender lays what it
has in memory that the receivers map, tells them over a socket, and each receiver copies it straight to where it
belongs: two passes over memory and one wake-up. Small parcels travel in the message itself.

    LocalPeers (the shell) ─┬─ MessageMatcher, StreamReceipt (pure: what came, what is still needed; where it goes)
                            ├─ Ring (a large tensor, step by step)
                            ├─ Votes (a word about each round of something)
                            ├─ PeerDirectory (who knows whom)
                            ├─ Patience (how long to look, when to sleep, when to complain)
                            ├─ peer_protocol (what peers say to each other)
                            ├─ OutgoingMemory, IncomingMemory (memory)
                            └─ Inbox, Outbox (sockets)
"""

from byteps_py.session.peers.local_peers import WINDOW, LocalPeers
from byteps_py.session.peers.message_matcher import Stream
from byteps_py.session.peers.receipts import Span, StreamReceipt
from byteps_py.session.peers.ring import Ring
from byteps_py.session.peers.votes import Votes

__all__ = ["WINDOW", "LocalPeers", "Ring", "Span", "Stream", "StreamReceipt", "Votes"]
