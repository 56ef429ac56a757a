"""Sends and receives between members on one machine: a stream for every pair of members and every tag, each way.

A send is over when its tensor is copied. ``WINDOW`` messages wait at the sender for their receive, those beyond for
their turn. Where more receives are posted than that, a thread of the pool completes them, whoever waits for them. Any
thread may call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch

from byteps_py.session.peers import WINDOW, Stream, StreamReceipt
from byteps_py.torch.engine.completion import POOL
from byteps_py.torch.engine.dtypes import is_plain
from byteps_py.torch.engine.group_work import GroupContext, GroupWork
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.message_queue import MessageQueue, QueuedMessage
from byteps_py.torch.engine.peer_collectives import span
from byteps_py.torch.engine.peer_streams import PeerStreams
from byteps_py.torch.engine.tensor_bytes import Landing, octets
from byteps_py.torch.engine.work import Call


class PeerSend(QueuedMessage):
    """Over once it has been sent."""

    def _complete(self, deadline: float) -> None:
        self._wait_for_turn(deadline)

    def _is_ready(self) -> bool:
        return self.begun is None or self.begun.is_set()


class PeerSendQueue(MessageQueue[PeerSend]):
    """Messages of one tag to ``peer``."""

    def __init__(self, members: Members, around: GroupContext, streams: PeerStreams, peer: int, tag: int) -> None:
        super().__init__(around)
        self._streams = streams
        self._target = (streams.others[peer],)
        self._stream = _stream(members, streams, members.position, peer, tag)

    def _has_room(self) -> bool:
        return self._streams.has_met and self._streams.peers.has_room(self._stream)

    def _wait_for_room(self) -> None:
        self.around.patiently(self._streams.meeting())
        self.around.patiently(self._streams.peers.room(self._stream))

    def _begin(self, message: PeerSend) -> None:
        tensor = message.tensor if is_plain(message.tensor) else octets(message.tensor)
        self._streams.peers.send(self._stream, self._target, (span(tensor),), True)


class PeerReceive(GroupWork):
    """``earlier``: receives of its channel that nobody may have waited for; their messages come before its own."""

    def __init__(
        self,
        call: Call,
        source: int,
        streams: PeerStreams,
        receipt: StreamReceipt,
        landing: Landing | None,
        channel: deque[PeerReceive],
    ) -> None:
        super().__init__(streams.around, call)
        (self.tensor,) = call.outputs
        self._source = source
        self._streams = streams
        self._receipt = receipt
        self._landing = landing
        self._channel = channel
        self._meet: Callable[[float], None] | None = None

    def _complete(self, deadline: float) -> None:
        if self._channel[0] is not self:
            for earlier in list(self._channel):
                if earlier is self:
                    break
                self._slices(deadline, earlier.settle)
        self._slices(deadline, self._collect)
        if self._landing is not None:
            self._landing.land()

    def _collect(self, timeout_s: float) -> None:
        if not self._streams.has_met:  # there may have to be an answer
            self._meet = self._meet or self._streams.meeting()
            self._meet(timeout_s)
        self._streams.peers.collect(self._receipt, timeout_s)

    def _is_ready(self) -> bool:
        return self._around.aborted is not None or self._streams.peers.look(self._receipt)

    def _release(self) -> None:
        self._landing = None
        with contextlib.suppress(ValueError):  # it has been removed
            self._channel.remove(self)

    @property
    def received(self) -> torch.Tensor:
        """The message, when it is over."""
        return self.tensor

    def source_rank(self) -> int:
        return self._source


class PeerReceiver:
    """Messages of one tag from ``peer``."""

    def __init__(self, members: Members, around: GroupContext, streams: PeerStreams, peer: int, tag: int) -> None:
        self._around = around
        self._streams = streams
        self._peer = peer
        self._source = streams.others[peer]
        self._stream = _stream(members, streams, peer, members.position, tag)
        self._lock = threading.RLock()
        self._under_way: deque[PeerReceive] = deque()
        self._is_served = False

    def post(self, what: str, tensor: torch.Tensor) -> PeerReceive:
        """The next message is for ``tensor``."""
        landing = None if is_plain(tensor) else Landing(tensor)
        target = span(tensor if landing is None else landing.memory)
        receipt = StreamReceipt(self._stream)
        with self._lock:
            self._around.check()
            receipt.expect(self._source, (target,), target[1])
            message = PeerReceive(
                Call(what, [tensor], self._around.timeout_s),
                self._peer,
                self._streams,
                receipt,
                landing,
                self._under_way,
            )
            self._under_way.append(message)
            if len(self._under_way) > WINDOW and not self._is_served:
                self._is_served = True  # the sender may be waited for that way, and this rank wait for it elsewhere
                POOL.run(self._serve)
            return message

    @property
    def next(self) -> tuple[Stream, int]:
        """The stream, and whose messages it brings."""
        return self._stream, self._source

    def post_if_there(self, what: str, like: torch.Tensor) -> PeerReceive | None:
        """The next message, for a tensor like this one, if there is one that nobody has asked for."""
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
