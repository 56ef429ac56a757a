"""Sends and receives between members on one machine: a stream for every pair of members and every tag, each way.

A send is over when its tensor is copied. ``WINDOW`` messages wait at the sender for their receive; those beyond wait
for their turn without blocking the caller: a thread of the pool sends them, in order, as soon as there is room; until
then their tensors must not change (as always before ``wait``). Where more receives are posted than that, a thread of
the pool completes them, whoever waits for them. Any thread may call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch

from byteps_py.errors import StallError
from byteps_py.session.nearby import WINDOW, Stream, StreamReceipt
from byteps_py.torch.engine.dtypes import is_plain
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.peer_collectives import span
from byteps_py.torch.engine.peer_streams import Near
from byteps_py.torch.engine.threads import POOL
from byteps_py.torch.engine.work import Call, GroupContext, Pending
from byteps_py.torch.process_group.arguments import Landing, octets


class NearSend(Pending):
    """``begun`` is set once it has been sent, or could not be; None: it was at once."""

    def __init__(self, around: GroupContext, what: str, tensor: torch.Tensor, timeout_s: float) -> None:
        super().__init__(around, what, [tensor], timeout_s)
        self.tensor = tensor
        self.begun: threading.Event | None = None
        self.failure: Exception | None = None

    def _complete(self, deadline: float) -> None:
        if self.begun is not None:
            self._slices(deadline, self._begin_within)
        if self.failure is not None:
            raise self.failure

    def _begin_within(self, timeout_s: float) -> None:
        if self.begun is not None and not self.begun.wait(timeout_s):
            raise StallError(f"{self.what}: waits for earlier ones")

    def _is_ready(self) -> bool:
        return self.begun is None or self.begun.is_set()


class NearReceive(Pending):
    """``earlier``: receives of its channel that nobody may have waited for; their messages come before its own."""

    def __init__(
        self,
        call: Call,
        source: int,
        near: Near,
        receipt: StreamReceipt,
        landing: Landing | None,
        channel: deque[NearReceive],
    ) -> None:
        super().__init__(near.around, call.what, call.outputs, call.timeout_s)
        (self.tensor,) = call.outputs
        self._source = source
        self._near = near
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
        if not self._near.has_met:  # there may have to be an answer
            self._meet = self._meet or self._near.meeting()
            self._meet(timeout_s)
        self._near.neighbours.collect(self._receipt, timeout_s)

    def _is_ready(self) -> bool:
        return self._around.aborted is not None or self._near.neighbours.look(self._receipt)

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


class NearSender:
    """Messages of one tag to ``peer``."""

    def __init__(self, members: Members, around: GroupContext, near: Near, peer: int, tag: int) -> None:
        self._around = around
        self._near = near
        self._target = (near.others[peer],)
        self._stream = _stream(members, near, members.position, peer, tag)
        self._lock = threading.Lock()
        self._waiting: deque[NearSend] = deque()
        self._is_served = False

    def post(self, what: str, tensor: torch.Tensor) -> NearSend:
        """Send now, if nothing is before it, else in its turn. Never blocks for others."""
        message = NearSend(self._around, what, tensor, self._around.timeout_s)
        with self._lock:
            self._around.check()
            if not self._waiting and self._near.has_met and self._near.neighbours.has_room(self._stream):
                self._send(message)
                return message
            message.begun = threading.Event()
            self._waiting.append(message)
            if not self._is_served:
                self._is_served = True
                POOL.run(self._serve)
            return message

    def _send(self, message: NearSend) -> None:
        tensor = message.tensor if is_plain(message.tensor) else octets(message.tensor)
        self._near.neighbours.send(self._stream, self._target, (span(tensor),), True)

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_served = False
                    return
            try:
                self._around.patiently(self._near.meeting())
                self._around.patiently(self._near.neighbours.room(self._stream))
            except Exception as error:
                self._fail(error)
                return
            with self._lock:
                message = self._waiting.popleft()
                try:
                    self._send(message)
                except Exception as error:
                    message.failure = error
                if message.begun is not None:
                    message.begun.set()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._is_served = False
            failed = list(self._waiting)
            self._waiting.clear()
        for message in failed:
            message.failure = error
            if message.begun is not None:
                message.begun.set()


class NearReceiver:
    """Messages of one tag from ``peer``."""

    def __init__(self, members: Members, around: GroupContext, near: Near, peer: int, tag: int) -> None:
        self._around = around
        self._near = near
        self._peer = peer
        self._source = near.others[peer]
        self._stream = _stream(members, near, peer, members.position, tag)
        self._lock = threading.RLock()
        self._under_way: deque[NearReceive] = deque()
        self._is_served = False

    def post(self, what: str, tensor: torch.Tensor) -> NearReceive:
        """The next message is for ``tensor``."""
        landing = None if is_plain(tensor) else Landing(tensor)
        target = span(tensor if landing is None else landing.memory)
        receipt = StreamReceipt(self._stream)
        with self._lock:
            self._around.check()
            receipt.expect(self._source, (target,), target[1])
            message = NearReceive(
                Call(what, [tensor], self._around.timeout_s),
                self._peer,
                self._near,
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

    def post_if_there(self, what: str, like: torch.Tensor) -> NearReceive | None:
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


def _stream(members: Members, near: Near, source: int, target: int, tag: int) -> Stream:
    name = f"{members.prefix}.p2p.{members.ranks[source]}.{members.ranks[target]}.{tag}"
    other = source if target == members.position else target
    return near.neighbours.stream(name, (near.others[other],))
