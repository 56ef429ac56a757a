"""Introduces the ranks of one machine to each other. Each asks the communication service, which gives every rank the
descriptors of the others' inboxes once all of them have asked (worker/core/peer_introductions.py). Ranks of other
machines need no introduction: peer_connector.py connects to them.

Must not know the messages of ranks to each other. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from byteps_py.session.peers.waiting import Host, PeerWaiter, Wait
from byteps_py.tensors import key_of
from byteps_py.wire import rank_link as protocol

_ALL = "the ranks of this machine"
_ALL_WITHIN_S = 60.0


class PeerDirectory:
    """``me``: this rank, one of ``local_ranks``, the ranks of its machine. ``write_fd``: the end of its inbox to which
    others write."""

    def __init__(self, host: Host, waiter: PeerWaiter, me: int, local_ranks: range, write_fd: int) -> None:
        self._host = host
        self._waiter = waiter
        self._me = me
        self._local_ranks = local_ranks
        self._others = [rank for rank in local_ranks if rank != me]
        self._write_end = write_fd
        self._has_sent_inbox = False  # the service has ``write_fd``
        self._introduced: set[int] = set()
        #: All ranks of the machine have been, or will be, introduced.
        self.includes_all = False

    def request_introduction(self, name: str, others: Sequence[int]) -> None:
        """Ask to be introduced to those of ``others`` that are on this machine, which ask the same under the same name.
        Returns at once."""
        members = sorted(rank - self._local_ranks[0] for rank in {self._me, *others} if rank in self._local_ranks)
        if len(members) == 1:
            self._introduced.add(key_of(name))
            return
        fds = () if self._has_sent_inbox else (self._write_end,)
        self._has_sent_inbox = True
        self._host.send(protocol.AskIntroduction(key_of(name), tuple(members)), fds)

    def request_all_introductions(self) -> None:
        """Ask to be introduced to all ranks of the machine, which ask the same. Returns at once."""
        self.includes_all = True
        self.request_introduction(_ALL, self._others)

    def introduction_wait(self, name: str, others: Sequence[int]) -> Callable[[float], None]:
        """A function that waits, for at most the given number of seconds, until all members have asked under ``name``.
        It raises StallError, after which it may be called again, and the error that ends the session."""
        key, wait = key_of(name), Wait(f"{name}: introduction", 0, lambda: others)

        def within(timeout_s: float) -> None:
            if key not in self._introduced:
                self._waiter.until(lambda: key in self._introduced, wait, timeout_s)
                self._waiter.ended(wait)

        return within

    def wait_for_all(self) -> None:
        """Return when all ranks of the machine have called ``request_all_introductions``. Raises StallError and the
        error that ends the session."""
        self.introduction_wait(_ALL, self._others)(_ALL_WITHIN_S)

    def are_introduced(self, name: str) -> bool:
        """True if the wait of ``introduction_wait`` would return at once."""
        return key_of(name) in self._introduced

    def introduced(self, key: int) -> None:
        """The service reports that all members have asked under ``key``. Called by the reading thread."""
        self._introduced.add(key)
