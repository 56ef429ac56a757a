"""How ranks of one machine come to know each other: each asks the communication service, which introduces them once all
have asked (worker/core/peer_introductions.py).

Must not know what they have to do with each other. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from byteps_py import rank_protocol as protocol
from byteps_py.session.peers.waiting import Host, Patience, Wait
from byteps_py.tensors import key_of

_ALL = "the ranks of this machine"
_ALL_WITHIN_S = 60.0


class PeerDirectory:
    """``me``: this rank, in the machine's ``local_size``; ``door``: the end of its inbox that others write to."""

    def __init__(self, host: Host, patience: Patience, me: int, local_size: int, door: int) -> None:
        self._host = host
        self._patience = patience
        self._me = me
        self._others = [rank for rank in range(local_size) if rank != me]
        self._door = door
        self._has_told = False  # the service of the door
        self._met: set[int] = set()
        #: All ranks of the machine have been, or will be, introduced.
        self.includes_all = False

    def ask(self, name: str, others: Sequence[int]) -> None:
        """To be introduced to these local ranks, who ask the same under the same name. Returns at once."""
        fds = () if self._has_told else (self._door,)
        self._has_told = True
        members = sorted([self._me, *others])
        self._host.tell(protocol.pack(protocol.RankMessageKind.MEET, key=key_of(name), members=members), fds)

    def ask_all(self) -> None:
        """To be introduced to all ranks of the machine, who ask the same. Returns at once."""
        self.includes_all = True
        self.ask(_ALL, self._others)

    def meeting(self, name: str, others: Sequence[int]) -> Callable[[float], None]:
        """Of one who waits for it: returns, within so many seconds, when all have asked. Raises StallError, after which
        it may be called again, and what ends the session."""
        key, wait = key_of(name), Wait(f"{name}: meeting", 0, lambda: others)

        def within(timeout_s: float) -> None:
            if key not in self._met:
                self._patience.until(lambda: key in self._met, wait, timeout_s)
                self._patience.ended(wait)

        return within

    def wait_for_all(self) -> None:
        """Return when all ranks of the machine have asked that. Raises StallError and what ends the session."""
        self.meeting(_ALL, self._others)(_ALL_WITHIN_S)

    def has_met(self, name: str) -> bool:
        """Whoever waits for it returns at once."""
        return key_of(name) in self._met

    def met(self, key: int) -> None:
        """The service says that all who were to meet under this key have asked."""
        self._met.add(key)
