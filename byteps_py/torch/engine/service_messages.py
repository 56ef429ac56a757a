"""Sends and receives: for every pair of members and every tag a channel each way, first in, first out.

A message is a round of an exchange between the two. A send is over when its tensor is copied; up to ``2 * LANES``
messages wait at the sender for their receive. Those beyond wait for their turn without blocking the caller: a thread of
the pool sends them, in order, as soon as there is room; until then their tensors must not change (as always before
``wait``). Any thread may call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from byteps_py.errors import StallError
from byteps_py.tensors import Layout, Op, Sizes
from byteps_py.torch.engine.lanes import Lane
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.operation import LaneOperation
from byteps_py.torch.engine.service_gathers import spec_of
from byteps_py.torch.engine.threads import POOL
from byteps_py.torch.engine.work import Call, GroupContext, Pending
from byteps_py.torch.process_group.arguments import Landing, nbytes_of, octets

#: Of a channel, used in turn. The service keeps two rounds of each for a receiver that is late.
LANES = 2


class PendingMessage(Pending):
    """A send or a receive. It begins in its turn: ``begun`` is set, by whichever thread began it, or could not."""

    def __init__(
        self, around: GroupContext, what: str, tensor: torch.Tensor, timeout_s: float, source: int | None = None
    ) -> None:
        super().__init__(around, what, [tensor], timeout_s)
        self.tensor = tensor
        self.begun = threading.Event()
        self.operation: LaneOperation | None = None
        self.lane: Lane | None = None
        self.failure: Exception | None = None
        self.source = source
        self.turn = 0  # among the lanes of its channel

    @property
    def sizes(self) -> Sizes:
        """Of a receive: how its size is compared."""
        return Sizes.PLAIN if self.tensor.numel() else Sizes.CHECKED

    def given(self, operation: LaneOperation) -> Pending:
        """``operation`` carries it out. Returns what keeps the lane until it is over."""
        return operation

    def _complete(self, deadline: float) -> None:
        self._slices(deadline, self._begin_within)
        if self.failure is not None:
            raise self.failure
        if self.operation is not None and self.source is not None:
            self._receive(self.operation, deadline)
        elif self.lane is not None:
            self._slices(deadline, self.lane.departed)

    def _receive(self, operation: LaneOperation, deadline: float) -> None:
        self._slices(deadline, operation.settle)
        operation.wait()

    def _begin_within(self, timeout_s: float) -> None:
        if not self.begun.wait(timeout_s):
            raise StallError(f"{self.what}: waits for earlier ones")

    def _is_ready(self) -> bool:
        if self.failure is not None or not self.begun.is_set():
            return self.failure is not None
        return self.source is None or self.operation is None or self._is_received(self.operation)

    def _is_received(self, operation: LaneOperation) -> bool:
        return operation.is_completed()

    def source_rank(self) -> int:
        if self.source is None:
            return super().source_rank()
        return self.source


@dataclass(eq=False)
class MessageQueue:
    """Messages of one tag between this process and ``peer``, one way."""

    members: Members
    around: GroupContext
    peer: int
    tag: int
    is_sender: bool
    lock: threading.RLock = field(default_factory=threading.RLock)  # a message may be given again while it is held
    lanes: list[Lane] = field(default_factory=list)
    calls: int = 0
    waiting: deque[PendingMessage] = field(default_factory=deque)
    is_served: bool = False

    def post(self, message: PendingMessage) -> PendingMessage:
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

    def _begin(self, message: PendingMessage) -> None:
        """Its lane is free; called with the lock held."""
        try:
            message.turn = self.calls % LANES
            self._hand_over(message, self._next)
        except Exception as error:
            message.failure = error
        self.calls += 1
        message.begun.set()

    def again(self, message: PendingMessage) -> LaneOperation:
        """Give a message again, in the lane that it keeps."""
        with self.lock:
            return self._hand_over(message, self.lanes[message.turn])

    def _hand_over(self, message: PendingMessage, lane: Lane) -> LaneOperation:
        members, tensor = self.members, message.tensor
        own, other = members.position, self.peer
        nbytes = nbytes_of(tensor)
        sent, due = (nbytes, 0) if self.is_sender else (0, nbytes)
        if not lane.has_room(sent, due):
            source, target = (own, other) if self.is_sender else (other, own)
            name = f"{members.prefix}.p2p.{members.ranks[source]}.{members.ranks[target]}.{self.tag}.{message.turn}"
            pair = (min(own, other), max(own, other))
            lane.declare(spec_of(name, Op.EXCHANGE, members.some(pair), lane, sent, due))
        nothing = (0, 0)
        sizes = Sizes.PLAIN if self.is_sender else message.sizes
        if other < own:
            layout = Layout(((0, sent), nothing), ((0, due), nothing), sizes)
        else:
            layout = Layout((nothing, (0, sent)), (nothing, (0, due)), sizes)
        deliver: Callable[[], None]
        if self.is_sender:
            places, deliver = [(0, octets(tensor))], _nothing
        else:
            landing = Landing(tensor)
            places = []

            def deliver() -> None:
                lane.fetch(tensor.device, [(0, landing.memory)])
                landing.land()

        operation = LaneOperation(
            self.around, None, Call(message.what, [tensor], self.around.timeout_s, deliver), lane, tensor.device
        )
        lane.begin(tensor.device, places, layout)
        lane.occupant = message.given(operation)
        message.lane, message.operation = lane, operation
        return operation


def _nothing() -> None:
    """A send has nothing to deliver."""
