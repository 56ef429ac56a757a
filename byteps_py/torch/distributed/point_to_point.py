"""Sends and receives: for every pair of members and every tag a channel each way, first in, first out.

A message is a round of an exchange between the two. A send is over when its tensor is copied; up to ``2 * LANES``
messages wait at the sender for their receive. Those beyond wait for their turn without blocking the caller: a thread of
the pool sends them, in order, as soon as there is room; until then their tensors must not change (as always before
``wait``). Any thread may call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from byteps_py.errors import StallError, UsageError
from byteps_py.tensors import Layout, Op
from byteps_py.torch.distributed.arguments import Landing, octets
from byteps_py.torch.distributed.direct import spec_of
from byteps_py.torch.distributed.lanes import Lane
from byteps_py.torch.distributed.members import Members
from byteps_py.torch.distributed.threads import POOL
from byteps_py.torch.distributed.work import Operation, Pending, Surroundings

#: Of a channel, used in turn. The service keeps two rounds of each for a receiver that is late.
LANES = 2
#: How long a receive from anybody looks at one sender before it looks at the next.
_LOOK_S = 0.002


class Message(Pending):
    """A send or a receive. It begins in its turn: ``begun`` is set, by whichever thread began it, or could not."""

    def __init__(
        self, around: Surroundings, what: str, tensor: torch.Tensor, timeout_s: float, source: int | None = None
    ) -> None:
        super().__init__(around, what, [tensor], timeout_s)
        self.tensor = tensor
        self.begun = threading.Event()
        self.operation: Operation | None = None
        self.lane: Lane | None = None
        self.failure: Exception | None = None
        self.source = source

    def _complete(self, deadline: float) -> None:
        self._slices(deadline, self._begin_within)
        if self.failure is not None:
            raise self.failure
        if self.operation is not None and self.source is not None:
            self._slices(deadline, self.operation.settle)
            self.operation.wait()
        elif self.lane is not None:
            self._slices(deadline, self.lane.departed)

    def _begin_within(self, timeout_s: float) -> None:
        if not self.begun.wait(timeout_s):
            raise StallError(f"{self.what}: waits for earlier ones")

    def _is_ready(self) -> bool:
        if self.failure is not None or not self.begun.is_set():
            return self.failure is not None
        return self.source is None or self.operation is None or self.operation.is_completed()

    def source_rank(self) -> int:
        if self.source is None:
            return super().source_rank()
        return self.source


@dataclass(eq=False)
class Channel:
    """Messages of one tag between this process and ``peer``, one way."""

    members: Members
    around: Surroundings
    peer: int
    tag: int
    is_sender: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    lanes: list[Lane] = field(default_factory=list)
    calls: int = 0
    waiting: deque[Message] = field(default_factory=deque)
    is_served: bool = False

    def post(self, message: Message) -> Message:
        """Begin ``message`` now, if nothing is before it, else in its turn. Never blocks for others."""
        with self.lock:
            self.around.check()
            if not self.waiting and self._is_free(self._next):
                self._begin(message)
                return message
            self.waiting.append(message)
            if not self.is_served:
                self.is_served = True
                POOL.run(self._serve)
            return message

    @property
    def _next(self) -> Lane:
        if not self.lanes:
            self.lanes = [Lane(self.members.session, self.members.mover) for _ in range(LANES)]
        return self.lanes[self.calls % LANES]

    def _is_free(self, lane: Lane) -> bool:
        return lane.occupant is None or lane.occupant.is_completed()

    def _serve(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    self.is_served = False
                    return
                message, lane = self.waiting[0], self._next
                occupant = lane.occupant
            if occupant is not None:
                try:
                    occupant.settle()
                except Exception as error:
                    self._fail(error)
                    return
            with self.lock:
                self.waiting.popleft()
                self._begin(message)

    def _fail(self, error: Exception) -> None:
        with self.lock:
            self.is_served = False
            failed = list(self.waiting)
            self.waiting.clear()
        for message in failed:
            message.failure = error
            message.begun.set()

    def _begin(self, message: Message) -> None:
        """Its lane is free; called with the lock held."""
        try:
            self._hand_over(message, self._next, self.calls % LANES)
        except Exception as error:
            message.failure = error
        self.calls += 1
        message.begun.set()

    def _hand_over(self, message: Message, lane: Lane, number: int) -> None:
        members, tensor = self.members, message.tensor
        own, other = members.position, self.peer
        pair = tuple(sorted((own, other)))
        source, target = (own, other) if self.is_sender else (other, own)
        name = f"{members.prefix}.p2p.{members.ranks[source]}.{members.ranks[target]}.{self.tag}.{number}"
        nbytes = tensor.numel() * tensor.itemsize
        sent, due = (nbytes, 0) if self.is_sender else (0, nbytes)
        lane.declare(spec_of(name, Op.EXCHANGE, members.some(pair), lane, sent, due))
        at = pair.index(other)
        layout = Layout(
            tuple((0, sent if p == at else 0) for p in range(2)), tuple((0, due if p == at else 0) for p in range(2))
        )
        deliver: Callable[[], None]
        if self.is_sender:
            places, deliver = [(0, octets(tensor))], _nothing
        else:
            landing = Landing(tensor)
            places = []

            def deliver() -> None:
                lane.fetch(tensor.device, [(0, landing.memory)])
                landing.land()

        operation = Operation(
            self.around, None, message.what, lane, tensor.device, [tensor], deliver, self.around.timeout_s
        )
        lane.begin(tensor.device, places, layout)
        lane.occupant = operation
        message.lane, message.operation = lane, operation


def _nothing() -> None:
    """A send has nothing to deliver."""


class PointToPoint:
    """The channels of one group."""

    def __init__(self, members: Members, around: Surroundings) -> None:
        self._members = members
        self._around = around
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int, bool], Channel] = {}
        self._kept: dict[tuple[int, int], deque[Message]] = {}  # posted for anybody's, not yet taken
        self._anybody = threading.Lock()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        self._check(peer)
        what = f"send to rank {self._members.ranks[peer]}, tag {tag}"
        return self._channel(peer, tag, True).post(Message(self._around, what, tensor.detach(), self._around.timeout_s))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        self._check(peer)
        what = f"receive from rank {self._members.ranks[peer]}, tag {tag}"
        with self._lock:
            kept = self._kept.get((peer, tag))
            early = kept.popleft() if kept else None
        if early is not None:
            return Taken(self._around, what, early, tensor, self._around.timeout_s)
        message = Message(self._around, what, tensor.detach(), self._around.timeout_s, peer)
        return self._channel(peer, tag, False).post(message)

    def receive_from_anybody(self, tensor: torch.Tensor, tag: int) -> Pending:
        """The first message of this tag to come. A receive is posted for every member; those that stay without a
        message are taken by later receives, which must expect as many bytes."""
        return FromAnybody(self._around, self, tensor, tag)

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self._members.count or peer == self._members.position:
            raise UsageError(
                f"rank {self._members.position} of a group of {self._members.count} can't send to, or receive from, "
                f"rank {peer} of it"
            )

    def _channel(self, peer: int, tag: int, is_sender: bool) -> Channel:
        with self._lock:
            key = (peer, tag, is_sender)
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = Channel(self._members, self._around, peer, tag, is_sender)
            return channel

    # ---- from anybody ----------------------------------------------------------------------------------

    def first_of(self, like: torch.Tensor, tag: int, timeout_s: float) -> Message:
        """The message of the first member whose message is there. Raises StallError."""
        deadline = time.monotonic() + timeout_s
        with self._anybody:
            posted = {p: self._posted(p, tag, like) for p in range(self._members.count) if p != self._members.position}
            while True:
                for peer, message in posted.items():
                    if message.is_completed():
                        with self._lock:
                            self._kept[peer, tag].popleft()
                        return message
                if time.monotonic() > deadline:
                    raise StallError(f"receive from anybody, tag {tag}: no message")
                for message in posted.values():
                    _look(message)

    def _posted(self, peer: int, tag: int, like: torch.Tensor) -> Message:
        with self._lock:
            kept = self._kept.setdefault((peer, tag), deque())
            if kept:
                return kept[0]
        what = f"receive from anybody (rank {self._members.ranks[peer]}), tag {tag}"
        message = Message(self._around, what, torch.empty_like(like), self._around.timeout_s, peer)
        self._channel(peer, tag, False).post(message)
        with self._lock:
            kept.append(message)
        return message


def _look(message: Message) -> None:
    try:
        message.settle(_LOOK_S)
    except StallError:
        return


class Taken(Pending):
    """A receive for which a receive from anybody has been posted already."""

    def __init__(self, around: Surroundings, what: str, early: Message, tensor: torch.Tensor, timeout_s: float) -> None:
        super().__init__(around, what, [tensor], timeout_s)
        self._early = early

    def _complete(self, deadline: float) -> None:
        self._slices(deadline, self._early.settle)
        self._early.wait()
        _copy(self._early.tensor, self._outputs[0], self.what)

    def _is_ready(self) -> bool:
        return self._early.is_completed()

    def source_rank(self) -> int:
        return self._early.source_rank()


class FromAnybody(Pending):
    """A receive whose sender is not known before its message is there."""

    def __init__(self, around: Surroundings, owner: PointToPoint, tensor: torch.Tensor, tag: int) -> None:
        super().__init__(around, f"receive from anybody, tag {tag}", [tensor], around.timeout_s)
        self._owner = owner
        self._tag = tag
        self._found: Message | None = None

    def _complete(self, deadline: float) -> None:
        self._slices(deadline, self._find)
        found = self._found
        if found is not None:
            found.wait()
            _copy(found.tensor, self._outputs[0], self.what)

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
    if source.numel() * source.itemsize != target.numel() * target.itemsize:
        raise UsageError(
            f"{what}: a receive from anybody was posted before for messages of {source.numel() * source.itemsize} bytes, "
            f"and this one expects {target.numel() * target.itemsize}; use another tag for messages of another size"
        )
    target.detach().copy_(source.view(target.dtype).view(target.shape))
