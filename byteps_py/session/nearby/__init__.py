"""The ranks of one machine among themselves: bytes from rank to rank without the communication service.

The service only introduces ranks to each other (worker/core/peer_introductions.py). From there on a sender lays what
it has in memory of its own that the receivers map, tells them over a socket, and each receiver copies it straight to
where it belongs: two passes over memory and one wake-up. Small parcels travel in the message itself.

    Neighbours (the shell) ─┬─ Ledger, Receipt (pure: what came, what is still needed; where it goes)
                            ├─ Ring (a large tensor, step by step)
                            ├─ Talk (a word about each round of something)
                            ├─ Meetings (who knows whom)
                            ├─ Patience (how long to look, when to sleep, when to complain)
                            ├─ messages (what neighbours say to each other)
                            ├─ Outgoing, Incoming (memory)
                            └─ Inbox, Outbox (sockets)
"""

from byteps_py.session.nearby.message_matcher import Stream
from byteps_py.session.nearby.neighbours import WINDOW, Neighbours
from byteps_py.session.nearby.receipts import Span, StreamReceipt
from byteps_py.session.nearby.ring import Ring
from byteps_py.session.nearby.talk import Talk

__all__ = ["WINDOW", "Neighbours", "Ring", "Span", "Stream", "StreamReceipt", "Talk"]
