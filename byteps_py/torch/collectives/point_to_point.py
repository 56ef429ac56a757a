"""The sends and receives of one group: to and from a member, or from any other member. Any thread may call.

message_channels.py has the ways on which messages go, and their queues.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, cast

import torch

from byteps_py.errors import StallError, UsageError
from byteps_py.tensors import Op
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.message_channels import (
    EarlyReceive,
    Message,
    MessageChannel,
    MessageQueue,
    OwnChannel,
    PeerReceive,
    PeerReceives,
    PeerSends,
    ServiceChannel,
    deliver,
)
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.router import Route, Router
from byteps_py.torch.collectives.work import Call, Work

#: The time that a receive from any member polls one sender before it polls the next.
_POLL_S = 0.002


class PointToPoint:
    """``streams``: to the other members, if they reach each other directly."""

    def __init__(
        self, members: Members, group_context: GroupContext, router: Router, streams: PeerStreams | None = None
    ) -> None:
        self._members = members
        self._group_context = group_context
        self._router = router
        self._streams = streams
        self._lock = threading.Lock()
        #: By member, tag, whether this rank sends, and whether they reach each other directly.
        self._queues: dict[tuple[int, int, bool, bool], MessageQueue[Any]] = {}
        self._kept: dict[tuple[int, int], deque[EarlyReceive]] = {}  # for receives from any member, not taken yet
        self._anybody = threading.Lock()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Send ``tensor`` to the member at position ``peer``. The Work is over once the bytes are copied. Raises
        UsageError."""
        self._check(peer)
        call = self._call(f"send to rank {self._members.ranks[peer]}, tag {tag}", tensor.detach())
        return self._post(call, tensor, peer, tag, is_sender=True)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Receive into ``tensor`` from the member at position ``peer``. The Work raises MismatchError for a message of
        another size. Raises UsageError."""
        self._check(peer)
        call = self._call(f"receive from rank {self._members.ranks[peer]}, tag {tag}", tensor.detach())
        with self._lock:
            kept = self._kept.get((peer, tag))
            early = kept.popleft() if kept else None
        if early is not None:
            early.ask_for(tensor.detach(), is_final=True)
            return TakenReceive(self._group_context, call, early)
        return self._post(call, tensor, peer, tag, is_sender=False)

    def receive_from_anybody(self, tensor: torch.Tensor, tag: int) -> Work:
        """Receive the first message with this tag from any member. A receive is posted for every member; those that get
        no message are used by later receives."""
        return ReceiveFromAnybody(
            self._group_context, self._call(f"receive from any rank, tag {tag}", tensor), self, tag
        )

    def _post(self, call: Call, tensor: torch.Tensor, peer: int, tag: int, is_sender: bool) -> Work:
        queue = self._queue(peer, tag, is_sender, self._streams_for(tensor))
        message: Message = queue.post(queue.channel.message(call, is_sender))
        return message

    def _streams_for(self, tensor: torch.Tensor) -> PeerStreams | None:
        is_direct = self._router.move(Op.EXCHANGE, tensor.nbytes, tensor.is_cpu).route is Route.PEERS
        return self._streams if is_direct else None

    def _call(self, what: str, tensor: torch.Tensor) -> Call:
        return Call(what, [tensor], self._group_context.timeout_s)

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self._members.count:
            raise UsageError(f"a group of {self._members.count} has no rank {peer} to send to, or to receive from")

    def _queue(self, peer: int, tag: int, is_sender: bool, streams: PeerStreams | None) -> MessageQueue[Any]:
        is_own = peer == self._members.position
        key = peer, tag, is_sender and not is_own, streams is not None
        with self._lock:
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = MessageQueue(self._channel(peer, tag, is_sender, streams))
            return queue

    def _channel(self, peer: int, tag: int, is_sender: bool, streams: PeerStreams | None) -> MessageChannel[Any]:
        if peer == self._members.position:
            return OwnChannel(self._members, self._group_context)
        if streams is None:
            return ServiceChannel(self._members, self._group_context, peer, tag, is_sender)
        return (PeerSends if is_sender else PeerReceives)(self._members, streams, peer, tag)

    # ---- from any member -------------------------------------------------------------------------------

    def first_of(self, like: torch.Tensor, tag: int, timeout_s: float) -> EarlyReceive | PeerReceive:
        """The first message with this tag from any member. ``like``: a tensor of the expected size. Raises
        StallError."""
        deadline = time.monotonic() + timeout_s
        others = [peer for peer in range(self._members.count) if peer != self._members.position]
        with self._anybody:
            if (streams := self._streams_for(like)) is not None:
                return self._first_of_peers(streams, like, tag, deadline)
            while True:
                posted = {peer: self._posted(peer, tag, like) for peer in others}
                for peer, message in posted.items():
                    if message.differs:  # the first message to come: the caller gets the error
                        message.ask_for(like, is_final=True)
                    if message.is_completed() and self._take(peer, tag, message):
                        return message
                if time.monotonic() > deadline:
                    raise StallError(f"receive from any rank, tag {tag}: no message")
                for message in posted.values():
                    _poll(message)

    def _first_of_peers(self, streams: PeerStreams, like: torch.Tensor, tag: int, deadline: float) -> PeerReceive:
        """A message is visible before it is received, so no receive is posted in vain."""
        queues = {peer: self._queue(peer, tag, False, streams) for peer in streams.others}
        channels = {peer: cast(PeerReceives, queue.channel) for peer, queue in queues.items()}
        while True:
            nexts = [channel.next for channel in channels.values()]
            streams.peers.await_next(nexts, max(0.0, deadline - time.monotonic()))
            for peer, channel in channels.items():
                what = f"receive from any rank (rank {self._members.ranks[peer]}), tag {tag}"
                with channel.lock:
                    if channel.has_next and queues[peer].is_empty:
                        message: PeerReceive = queues[peer].post(
                            channel.message(self._call(what, torch.empty_like(like)), False)
                        )
                        return message

    def _take(self, peer: int, tag: int, message: EarlyReceive) -> bool:
        """False if another receive has taken this one already."""
        with self._lock:
            kept = self._kept[peer, tag]
            is_there = bool(kept) and kept[0] is message
            if is_there:
                kept.popleft()
            return is_there

    def _posted(self, peer: int, tag: int, like: torch.Tensor) -> EarlyReceive:
        with self._lock:
            kept = self._kept.setdefault((peer, tag), deque())
            message = kept[0] if kept else None
        if message is not None:
            message.ask_for(like, is_final=False)
            return message
        queue = self._queue(peer, tag, False, None)
        what = f"receive from any rank (rank {self._members.ranks[peer]}), tag {tag}"
        message = EarlyReceive(cast(ServiceChannel, queue.channel), what, like)
        queue.post(message)
        with self._lock:
            kept.append(message)
        return message


def _poll(message: Work) -> None:
    try:
        message.complete(_POLL_S)
    except StallError:
        return


class TakenReceive(GroupWork):
    """A receive for which a receive from any member was posted before."""

    def __init__(self, group_context: GroupContext, call: Call, early: EarlyReceive) -> None:
        super().__init__(group_context, call)
        self._early = early

    def _complete(self, deadline: float) -> None:
        self._wait_in_slices(deadline, self._early.complete)
        self._early.wait()
        deliver(self._early.received, self._outputs[0], self.what)
        self._comes_after([self._early])

    def _is_ready(self) -> bool:
        return self._early.is_completed()

    def source_rank(self) -> int:
        return self._early.source_rank()


class ReceiveFromAnybody(GroupWork):
    """A receive whose sender is unknown until its message arrives."""

    def __init__(self, group_context: GroupContext, call: Call, owner: PointToPoint, tag: int) -> None:
        super().__init__(group_context, call)
        self._owner = owner
        self._tag = tag
        self._found: EarlyReceive | PeerReceive | None = None

    def _complete(self, deadline: float) -> None:
        self._wait_in_slices(deadline, self._find)
        found = self._found
        if found is not None:
            found.wait()
            deliver(found.received, self._outputs[0], self.what)
            self._comes_after([found])

    def _find(self, timeout_s: float) -> None:
        if self._found is None:
            self._found = self._owner.first_of(self._outputs[0], self._tag, timeout_s)

    def _is_ready(self) -> bool:
        try:
            self._find(0.0)
        except StallError:
            return False
        return True

    def source_rank(self) -> int:
        """The position of the sender. Raises UsageError before ``wait``."""
        if self._found is None:
            raise UsageError("wait for a receive from any rank before asking whose message it was")
        return self._found.source_rank()
