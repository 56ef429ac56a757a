"""Memory that the members of a process group on one machine share, and how they wait for each other.

The callers agree on the order of writes: nothing is locked here. The calling thread does everything; one thread at a
time.
"""

from __future__ import annotations

import torch

from byteps_py.session.peers import PeerTransport, Stream, StreamReceipt
from byteps_py.system.shm import Segment
from byteps_py.torch.collectives.group_work import GroupContext
from byteps_py.torch.collectives.members import Members


class MachineMemory:
    """``nbytes`` of memory that this machine's members of a group share; the first of them makes it. A page of it uses
    memory once it is touched, and reads as zeros before.

    All members of a machine create it together. ``number``: of such memories of the group, from 0. Raises OSError on
    the member that makes it, if the system can't provide as much; StallError and the error that ends the group or the
    session.
    """

    def __init__(self, members: Members, group_context: GroupContext, number: int, nbytes: int) -> None:
        session = members.session
        first = session.rank - session.local_rank
        near = [rank for rank in members.ranks if first <= rank < first + session.local_size]
        #: The other members on this machine.
        self.others = tuple(rank for rank in near if rank != session.rank) if session.size > 1 else ()
        self._group_context = group_context
        self._peers: PeerTransport | None = None
        self._turns: Stream | None = None
        self._segment: Segment | None = None
        group_context.check()
        if self.others and session.peers is not None:
            name = f"{members.prefix}.memory.{number}"
            peers = self._peers = session.peers
            peers.directory.request_introduction(f"{name}#{session.incarnation}", self.others)
            group_context.wait_in_slices(
                peers.directory.introduction_wait(f"{name}#{session.incarnation}", self.others)
            )
            self._turns = peers.stream(f"{name}.turns", self.others)
            shared = peers.shared_segment(peers.stream(name, self.others), min(near), nbytes)
            group_context.wait_in_slices(shared.map)
            self._segment = shared.segment
        else:
            self._segment = Segment.create(nbytes)
            self._segment.close_descriptor()
        #: All of it: uint8, of ``nbytes`` elements. It keeps the memory, also after the session.
        self.octets = torch.frombuffer(self._segment.view, dtype=torch.uint8, count=nbytes)

    def check(self) -> None:
        """Raises the error that every operation of the group would raise: UsageError if it was destroyed,
        NotInitializedError after the session, or the error that has ended either."""
        self._group_context.check()

    def wait_for_others(self) -> None:
        """Return when all members of this machine have called it. What they have written before is visible then. Raises
        StallError, JoinedError and the error that ends the group or the session."""
        self._group_context.check()
        peers, turns = self._peers, self._turns
        if peers is None or turns is None:
            return
        receipt = StreamReceipt(turns, is_mutual=True, owner=self)
        for rank in self.others:
            receipt.expect(rank, (), 0)
        peers.send(turns, self.others, ((0, 0),), is_led=False)
        self._group_context.wait_in_slices(lambda timeout_s: peers.collect(receipt, timeout_s))

    def forget(self) -> None:
        """Give all of its pages back to the system. Afterwards they read as zeros on all members."""
        if self._segment is not None:
            self._segment.forget(0, self._segment.nbytes)
