"""Sends and receives between members that reach each other directly: a stream for every pair of
members, every tag and each direction.

A send is over when its tensor is copied. ``WINDOW`` messages wait at the sender for their receive; further ones wait
for their turn. If more receives than that are posted, a thread of the pool completes them, because the sender may wait
for that. Any thread may call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from byteps_py.session.peers import WINDOW, PeerTransport, PendingSend, Stream, StreamReceipt
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.message_queue import MessageQueue, QueuedMessage
from byteps_py.torch.collectives.peer_collectives import span
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.tensor_bytes import ResultBuffer, octets
from byteps_py.torch.collectives.work import Call


class PeerSend(QueuedMessage):
    """A send, over once its bytes are copied."""

    peers: PeerTransport | None = None
    unsent: Sequence[PendingSend] = ()

    def _complete(self, deadline: float) -> None:
        self._wait_for_turn(deadline)
        peers, unsent = self.peers, self.unsent
        if peers is not None and unsent:
            self._wait_in_slices(deadline, lambda timeout_s: peers.wait_until_sent(unsent, timeout_s))

    def _is_ready(self) -> bool:
        if self.begun is not None and not self.begun.is_set():
            return False
        return self.peers is None or self.peers.is_sent(self.unsent)

    def _release(self) -> None:
        self.unsent = ()


class PeerSendQueue(MessageQueue[PeerSend]):
    """The messages of one tag to ``peer``."""

    def __init__(
        self, members: Members, group_context: GroupContext, streams: PeerStreams, peer: int, tag: int
    ) -> None:
        super().__init__(group_context)
        self._streams = streams
        self._target = (streams.others[peer],)
        self._stream = _stream(members, streams, members.position, peer, tag)

    def _can_begin(self) -> bool:
        return self._streams.are_introduced and self._streams.peers.can_send(self._stream)

    def _wait_to_begin(self) -> None:
        self.group_context.wait_in_slices(self._streams.introduction_wait())
        self.group_context.wait_in_slices(self._streams.peers.window_wait(self._stream))

    def _begin(self, message: PeerSend) -> None:
        tensor = message.tensor if is_plain(message.tensor) else octets(message.tensor)
        message.peers = self._streams.peers
        message.unsent = self._streams.peers.send(self._stream, self._target, (span(tensor),), True, owner=tensor)


class PeerReceive(GroupWork):
    """A receive. ``channel``: the receives of its stream under way, in order; their messages come before its own."""

    def __init__(
        self,
        call: Call,
        source: int,
        streams: PeerStreams,
        receipt: StreamReceipt,
        result_buffer: ResultBuffer | None,
        channel: deque[PeerReceive],
    ) -> None:
        super().__init__(streams.group_context, call)
        (self.tensor,) = call.outputs
        self._source = source
        self._streams = streams
        self._receipt = receipt
        self._landing = result_buffer
        self._channel = channel
        self._introduction_wait: Callable[[float], None] | None = None

    def _complete(self, deadline: float) -> None:
        if self._channel[0] is not self:
            for earlier in list(self._channel):
                if earlier is self:
                    break
                self._wait_in_slices(deadline, earlier.settle)
        self._wait_in_slices(deadline, self._collect)
        if self._landing is not None:
            self._landing.deliver()

    def _collect(self, timeout_s: float) -> None:
        if not self._streams.are_introduced:  # the receiver may have to acknowledge
            self._introduction_wait = self._introduction_wait or self._streams.introduction_wait()
            self._introduction_wait(timeout_s)
        self._streams.peers.collect(self._receipt, timeout_s)

    def _is_ready(self) -> bool:
        return self._group_context.aborted is not None or self._streams.peers.poll(self._receipt)

    def _release(self) -> None:
        self._landing = None
        if self._receipt.left:
            self._streams.peers.abandon(self._receipt)
        with contextlib.suppress(ValueError):  # it has been removed
            self._channel.remove(self)

    @property
    def received(self) -> torch.Tensor:
        """The message, once the receive is over."""
        return self.tensor

    def source_rank(self) -> int:
        return self._source


class PeerReceiver:
    """The messages of one tag from ``peer``."""

    def __init__(
        self, members: Members, group_context: GroupContext, streams: PeerStreams, peer: int, tag: int
    ) -> None:
        self._group_context = group_context
        self._streams = streams
        self._peer = peer
        self._source = streams.others[peer]
        self._stream = _stream(members, streams, peer, members.position, tag)
        self._lock = threading.RLock()
        self._under_way: deque[PeerReceive] = deque()
        self._is_served = False

    def post(self, what: str, tensor: torch.Tensor) -> PeerReceive:
        """Receive the next message into ``tensor``. Raises what has ended the group."""
        result_buffer = None if is_plain(tensor) else ResultBuffer(tensor)
        target = span(tensor if result_buffer is None else result_buffer.memory)
        receipt = StreamReceipt(self._stream, owner=(tensor, result_buffer))
        with self._lock:
            self._group_context.check()
            receipt.expect(self._source, (target,), target[1])
            message = PeerReceive(
                Call(what, [tensor], self._group_context.timeout_s),
                self._peer,
                self._streams,
                receipt,
                result_buffer,
                self._under_way,
            )
            self._under_way.append(message)
            if len(self._under_way) > WINDOW and not self._is_served:
                self._is_served = True  # the sender may wait for these receives while this rank waits for it elsewhere
                POOL.run(self._serve)
            return message

    @property
    def next(self) -> tuple[Stream, int]:
        """(stream, local rank of the sender)."""
        return self._stream, self._source

    def post_if_there(self, what: str, like: torch.Tensor) -> PeerReceive | None:
        """Receive the next message into a new tensor like ``like``, if one has arrived without a receipt; otherwise
        None."""
        with self._lock:
            return self.post(what, torch.empty_like(like)) if self._stream.has_next(self._source) else None

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._under_way:
                    self._is_served = False
                    return
                first = self._under_way[0]
            first.settle_whatever_comes()


def _stream(members: Members, streams: PeerStreams, source: int, target: int, tag: int) -> Stream:
    name = f"{members.prefix}.p2p.{members.ranks[source]}.{members.ranks[target]}.{tag}"
    other = source if target == members.position else target
    return streams.peers.stream(name, (streams.others[other],))
