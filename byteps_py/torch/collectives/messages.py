"""The sends and receives of one group: to and from a member, or from any other member. Any thread may call."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from byteps_py.errors import MismatchError, StallError, UsageError
from byteps_py.tensors import Op
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.own_messages import OwnMessages
from byteps_py.torch.collectives.peer_messages import PeerReceive, PeerReceiver, PeerSend, PeerSendQueue
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.router import Route, Router
from byteps_py.torch.collectives.service_messages import EarlyReceive, ServiceMessage, ServiceMessageQueue
from byteps_py.torch.collectives.tensor_bytes import nbytes_of
from byteps_py.torch.collectives.work import Call, Work

#: How long a receive from any member polls one sender before it polls the next.
_POLL_S = 0.002


class Messages:
    """``streams``: to the other members, if they reach each other directly."""

    def __init__(
        self, members: Members, group_context: GroupContext, router: Router, streams: PeerStreams | None = None
    ) -> None:
        self._members = members
        self._group_context = group_context
        self._router = router
        self._streams = streams
        self._peer_senders: dict[tuple[int, int], PeerSendQueue] = {}
        self._peer_receivers: dict[tuple[int, int], PeerReceiver] = {}
        self._lock = threading.Lock()
        self._own = OwnMessages(group_context)
        self._queues: dict[tuple[int, int, bool], ServiceMessageQueue] = {}
        self._kept: dict[tuple[int, int], deque[EarlyReceive]] = {}  # for receives from any member, not taken yet
        self._anybody = threading.Lock()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Send ``tensor`` to the member at position ``peer``. The Work is over once the bytes are copied. Raises
        UsageError."""
        self._check(peer)
        call = self._call(f"send to rank {self._members.ranks[peer]}, tag {tag}", tensor.detach())
        if peer == self._members.position:
            return self._own.send(call, tag)
        if (streams := self._streams_for(tensor)) is not None:
            return self._peer_sender(streams, peer, tag).post(PeerSend(self._group_context, call))
        return self._queue(peer, tag, True).post(ServiceMessage(self._group_context, call))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Receive into ``tensor`` from the member at position ``peer``. The Work raises MismatchError for a message of
        another size. Raises UsageError."""
        self._check(peer)
        what = f"receive from rank {self._members.ranks[peer]}, tag {tag}"
        if peer == self._members.position:
            return self._own.receive(self._call(what, tensor), tag, peer)
        with self._lock:
            kept = self._kept.get((peer, tag))
            early = kept.popleft() if kept else None
        if early is not None:
            early.ask_for(tensor.detach(), is_final=True)
            return TakenReceive(self._group_context, self._call(what, tensor), early)
        if (streams := self._streams_for(tensor)) is not None:
            return self._peer_receiver(streams, peer, tag).post(what, tensor.detach())
        message = ServiceMessage(self._group_context, self._call(what, tensor.detach()), peer)
        return self._queue(peer, tag, False).post(message)

    def receive_from_anybody(self, tensor: torch.Tensor, tag: int) -> Work:
        """Receive the first message with this tag from any member. A receive is posted for every member; those that get
        no message are used by later receives."""
        return ReceiveFromAnybody(
            self._group_context, self._call(f"receive from any rank, tag {tag}", tensor), self, tag
        )

    def _streams_for(self, tensor: torch.Tensor) -> PeerStreams | None:
        return (
            self._streams if self._router.move(Op.EXCHANGE, tensor.nbytes, tensor.is_cpu).route is Route.PEERS else None
        )

    def _call(self, what: str, tensor: torch.Tensor) -> Call:
        return Call(what, [tensor], self._group_context.timeout_s)

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self._members.count:
            raise UsageError(f"a group of {self._members.count} has no rank {peer} to send to, or to receive from")

    def _peer_sender(self, streams: PeerStreams, peer: int, tag: int) -> PeerSendQueue:
        with self._lock:
            sender = self._peer_senders.get((peer, tag))
            if sender is None:
                sender = PeerSendQueue(self._members, self._group_context, streams, peer, tag)
                self._peer_senders[peer, tag] = sender
            return sender

    def _peer_receiver(self, streams: PeerStreams, peer: int, tag: int) -> PeerReceiver:
        with self._lock:
            receiver = self._peer_receivers.get((peer, tag))
            if receiver is None:
                receiver = PeerReceiver(self._members, self._group_context, streams, peer, tag)
                self._peer_receivers[peer, tag] = receiver
            return receiver

    def _queue(self, peer: int, tag: int, is_sender: bool) -> ServiceMessageQueue:
        with self._lock:
            key = (peer, tag, is_sender)
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = ServiceMessageQueue(
                    self._members, self._group_context, peer, tag, is_sender
                )
            return queue

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
        receivers = {peer: self._peer_receiver(streams, peer, tag) for peer in streams.others}
        while True:
            streams.peers.await_next([r.next for r in receivers.values()], max(0.0, deadline - time.monotonic()))
            for peer, receiver in receivers.items():
                what = f"receive from any rank (rank {self._members.ranks[peer]}), tag {tag}"
                message = receiver.post_if_there(what, like)
                if message is not None:
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
        queue = self._queue(peer, tag, False)
        message = EarlyReceive(queue, f"receive from any rank (rank {self._members.ranks[peer]}), tag {tag}", like)
        queue.post(message)
        with self._lock:
            kept.append(message)
        return message


def _poll(message: Work) -> None:
    try:
        message.settle(_POLL_S)
    except StallError:
        return


class TakenReceive(GroupWork):
    """A receive for which a receive from any member was posted before."""

    def __init__(self, group_context: GroupContext, call: Call, early: EarlyReceive) -> None:
        super().__init__(group_context, call)
        self._early = early

    def _complete(self, deadline: float) -> None:
        self._wait_in_slices(deadline, self._early.settle)
        self._early.wait()
        _copy(self._early.received, self._outputs[0], self.what)

    def _is_ready(self) -> bool:
        return self._early.is_completed()

    def source_rank(self) -> int:
        return self._early.source_rank()


class ReceiveFromAnybody(GroupWork):
    """A receive whose sender is unknown until its message arrives."""

    def __init__(self, group_context: GroupContext, call: Call, owner: Messages, tag: int) -> None:
        super().__init__(group_context, call)
        self._owner = owner
        self._tag = tag
        self._found: EarlyReceive | PeerReceive | None = None

    def _complete(self, deadline: float) -> None:
        self._wait_in_slices(deadline, self._find)
        found = self._found
        if found is not None:
            found.wait()
            _copy(found.received, self._outputs[0], self.what)

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


def _copy(source: torch.Tensor, target: torch.Tensor, what: str) -> None:
    if nbytes_of(source) != nbytes_of(target):
        raise MismatchError(
            f"{what}: a message of {nbytes_of(source)} bytes came, {nbytes_of(target)} were expected; give matching "
            "sizes on both"
        )
    target.detach().copy_(source.view(target.dtype).view(target.shape))
