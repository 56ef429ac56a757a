"""The sends and receives of one group, from a member or from anybody. Any thread may call."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from byteps_py.errors import MismatchError, StallError, UsageError
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.peer_messages import NearReceive, NearReceiver, NearSender
from byteps_py.torch.engine.peer_streams import Near
from byteps_py.torch.engine.posted import Posted
from byteps_py.torch.engine.service_messages import MessageQueue, PendingMessage
from byteps_py.torch.engine.work import GroupContext, Pending
from byteps_py.torch.process_group.arguments import nbytes_of

#: How long a receive from anybody looks at one sender before it looks at the next.
_LOOK_S = 0.002


class PointToPoint:
    """The channels of one group."""

    def __init__(self, members: Members, around: GroupContext, near: Near | None = None) -> None:
        self._members = members
        self._around = around
        self._near = near
        self._senders: dict[tuple[int, int], NearSender] = {}
        self._receivers: dict[tuple[int, int], NearReceiver] = {}
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int, bool], MessageQueue] = {}
        self._kept: dict[tuple[int, int], deque[Posted]] = {}  # for anybody's, not yet taken
        self._anybody = threading.Lock()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        self._check(peer)
        what = f"send to rank {self._members.ranks[peer]}, tag {tag}"
        if self._near is not None and tensor.is_cpu:
            return self._sender(self._near, peer, tag).post(what, tensor.detach())
        return self._channel(peer, tag, True).post(
            PendingMessage(self._around, what, tensor.detach(), self._around.timeout_s)
        )

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        self._check(peer)
        what = f"receive from rank {self._members.ranks[peer]}, tag {tag}"
        with self._lock:
            kept = self._kept.get((peer, tag))
            early = kept.popleft() if kept else None
        if early is not None:
            early.ask_for(tensor.detach(), is_final=True)
            return Taken(self._around, what, early, tensor, self._around.timeout_s)
        return self._post(what, tensor.detach(), peer, tag)

    def _post(self, what: str, tensor: torch.Tensor, peer: int, tag: int) -> PendingMessage | NearReceive:
        if self._near is not None and tensor.is_cpu:
            return self._receiver(self._near, peer, tag).post(what, tensor)
        message = PendingMessage(self._around, what, tensor, self._around.timeout_s, peer)
        return self._channel(peer, tag, False).post(message)

    def receive_from_anybody(self, tensor: torch.Tensor, tag: int) -> Pending:
        """The first message of this tag to come. A receive is posted for every member; those that stay without a
        message are taken by later receives."""
        return FromAnybody(self._around, self, tensor, tag)

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self._members.count or peer == self._members.position:
            raise UsageError(
                f"rank {self._members.position} of a group of {self._members.count} can't send to, or receive from, "
                f"rank {peer} of it"
            )

    def _sender(self, near: Near, peer: int, tag: int) -> NearSender:
        with self._lock:
            sender = self._senders.get((peer, tag))
            if sender is None:
                sender = self._senders[peer, tag] = NearSender(self._members, self._around, near, peer, tag)
            return sender

    def _receiver(self, near: Near, peer: int, tag: int) -> NearReceiver:
        with self._lock:
            receiver = self._receivers.get((peer, tag))
            if receiver is None:
                receiver = self._receivers[peer, tag] = NearReceiver(self._members, self._around, near, peer, tag)
            return receiver

    def _channel(self, peer: int, tag: int, is_sender: bool) -> MessageQueue:
        with self._lock:
            key = (peer, tag, is_sender)
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = MessageQueue(self._members, self._around, peer, tag, is_sender)
            return channel

    # ---- from anybody ----------------------------------------------------------------------------------

    def first_of(self, like: torch.Tensor, tag: int, timeout_s: float) -> Posted | NearReceive:
        """The message of the first member whose message is there. Raises StallError."""
        deadline = time.monotonic() + timeout_s
        others = [peer for peer in range(self._members.count) if peer != self._members.position]
        with self._anybody:
            if self._near is not None and like.is_cpu:
                return self._first_near(self._near, like, tag, deadline)
            while True:
                posted = {peer: self._posted(peer, tag, like) for peer in others}
                for peer, message in posted.items():
                    if message.differs:  # the first message to come; the caller is told
                        message.ask_for(like, is_final=True)
                    if message.is_completed() and self._take(peer, tag, message):
                        return message
                if time.monotonic() > deadline:
                    raise StallError(f"receive from anybody, tag {tag}: no message")
                for message in posted.values():
                    _look(message)

    def _first_near(self, near: Near, like: torch.Tensor, tag: int, deadline: float) -> NearReceive:
        """On one machine a message is seen before anybody asks for it: there is no need to ask in vain."""
        receivers = {peer: self._receiver(near, peer, tag) for peer in near.others}
        while True:
            near.neighbours.await_next([r.next for r in receivers.values()], max(0.0, deadline - time.monotonic()))
            for peer, receiver in receivers.items():
                what = f"receive from anybody (rank {self._members.ranks[peer]}), tag {tag}"
                message = receiver.post_if_there(what, like)
                if message is not None:
                    return message

    def _take(self, peer: int, tag: int, message: Posted) -> bool:
        """False if a receive from this member was sooner."""
        with self._lock:
            kept = self._kept[peer, tag]
            is_there = bool(kept) and kept[0] is message
            if is_there:
                kept.popleft()
            return is_there

    def _posted(self, peer: int, tag: int, like: torch.Tensor) -> Posted:
        with self._lock:
            kept = self._kept.setdefault((peer, tag), deque())
            message = kept[0] if kept else None
        if message is not None:
            message.ask_for(like, is_final=False)
            return message
        channel = self._channel(peer, tag, False)
        message = Posted(channel, f"receive from anybody (rank {self._members.ranks[peer]}), tag {tag}", like)
        channel.post(message)
        with self._lock:
            kept.append(message)
        return message


def _look(message: Pending) -> None:
    try:
        message.settle(_LOOK_S)
    except StallError:
        return


class Taken(Pending):
    """A receive for which a receive from anybody has been posted already."""

    def __init__(self, around: GroupContext, what: str, early: Posted, tensor: torch.Tensor, timeout_s: float) -> None:
        super().__init__(around, what, [tensor], timeout_s)
        self._early = early

    def _complete(self, deadline: float) -> None:
        self._slices(deadline, self._early.settle)
        self._early.wait()
        _copy(self._early.received, self._outputs[0], self.what)

    def _is_ready(self) -> bool:
        return self._early.is_completed()

    def source_rank(self) -> int:
        return self._early.source_rank()


class FromAnybody(Pending):
    """A receive whose sender is not known before its message is there."""

    def __init__(self, around: GroupContext, owner: PointToPoint, tensor: torch.Tensor, tag: int) -> None:
        super().__init__(around, f"receive from anybody, tag {tag}", [tensor], around.timeout_s)
        self._owner = owner
        self._tag = tag
        self._found: Posted | NearReceive | None = None

    def _complete(self, deadline: float) -> None:
        self._slices(deadline, self._find)
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
        if self._found is None:
            raise UsageError("wait for a receive from anybody before asking whose message it was")
        return self._found.source_rank()


def _copy(source: torch.Tensor, target: torch.Tensor, what: str) -> None:
    if nbytes_of(source) != nbytes_of(target):
        raise MismatchError(
            f"{what}: a message of {nbytes_of(source)} bytes came, {nbytes_of(target)} were expected; give matching "
            "sizes on both"
        )
    target.detach().copy_(source.view(target.dtype).view(target.shape))
