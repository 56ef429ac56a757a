"""Sends and receives through the communication service: for every pair of members and every tag a queue each way.

A message is a round of an exchange between the two. A send is over when its tensor is copied; up to ``2 * SLOTS``
messages wait at the sender for their receive, those beyond for their turn. Any thread may call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from byteps_py.errors import MismatchError, StallError
from byteps_py.tensors import Layout, Op, Sizes
from byteps_py.torch.engine.group_work import GroupContext
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.message_queue import MessageQueue, QueuedMessage
from byteps_py.torch.engine.service_work import ServiceWork
from byteps_py.torch.engine.slot_view import SlotView
from byteps_py.torch.engine.tensor_bytes import Landing, nbytes_of, octets
from byteps_py.torch.engine.work import Call, Work

#: Of a queue, used in turn. The service keeps two rounds of each for a receiver that is late.
SLOTS = 2


class ServiceMessage(QueuedMessage):
    """A send, or, if it has a ``source``, a receive."""

    def __init__(self, around: GroupContext, call: Call, source: int | None = None) -> None:
        super().__init__(around, call)
        self.round: ServiceWork | None = None
        self.view: SlotView | None = None
        self.source = source
        self.turn = 0  # among the slots of its queue

    @property
    def sizes(self) -> Sizes:
        """Of a receive: how its size is compared."""
        return Sizes.PLAIN if self.tensor.numel() else Sizes.CHECKED

    def given(self, round_: ServiceWork) -> Work:
        """``round_`` carries it out. Returns what keeps the slot until it is over."""
        return round_

    def _complete(self, deadline: float) -> None:
        self._wait_for_turn(deadline)
        if self.round is not None and self.source is not None:
            self._receive(self.round, deadline)
        elif self.view is not None:
            self._slices(deadline, self.view.wait_for_departure)

    def _receive(self, round_: ServiceWork, deadline: float) -> None:
        self._slices(deadline, round_.settle)
        round_.wait()

    def _is_ready(self) -> bool:
        if not self.has_begun:
            return self.failure is not None
        return self.source is None or self.round is None or self._is_received(self.round)

    def _is_received(self, round_: ServiceWork) -> bool:
        return round_.is_completed()

    def source_rank(self) -> int:
        if self.source is None:
            return super().source_rank()
        return self.source


class ServiceMessageQueue(MessageQueue[ServiceMessage]):
    """Messages of one tag between this process and ``peer``, one way."""

    def __init__(self, members: Members, around: GroupContext, peer: int, tag: int, is_sender: bool) -> None:
        super().__init__(around)
        self.peer = peer
        self._members, self._tag, self._is_sender = members, tag, is_sender
        self._views: list[SlotView] = []
        self._calls = 0

    @property
    def _next(self) -> SlotView:
        if not self._views:
            self._views = [SlotView(self._members.session, self._members.mover) for _ in range(SLOTS)]
        return self._views[self._calls % SLOTS]

    def _has_room(self) -> bool:
        occupant = self._next.occupant
        return occupant is None or occupant.is_completed()

    def _wait_for_room(self) -> None:
        with self.lock:
            occupant = self._next.occupant
        if occupant is not None:
            occupant.settle()

    def _begin(self, message: ServiceMessage) -> None:
        try:
            message.turn = self._calls % SLOTS
            self._hand_over(message, self._next)
        finally:
            self._calls += 1

    def again(self, message: ServiceMessage) -> ServiceWork:
        """Give a message again, in the slot that it keeps."""
        with self.lock:
            return self._hand_over(message, self._views[message.turn])

    def _hand_over(self, message: ServiceMessage, view: SlotView) -> ServiceWork:
        members, tensor = self._members, message.tensor
        own, other = members.position, self.peer
        nbytes = nbytes_of(tensor)
        sent, due = (nbytes, 0) if self._is_sender else (0, nbytes)
        if not view.has_room(sent, due):
            source, target = (own, other) if self._is_sender else (other, own)
            name = f"{members.prefix}.p2p.{members.ranks[source]}.{members.ranks[target]}.{self._tag}.{message.turn}"
            pair = (min(own, other), max(own, other))
            view.declare_bytes(name, Op.EXCHANGE, members.some(pair), sent, due)
        nothing = (0, 0)
        sizes = Sizes.PLAIN if self._is_sender else message.sizes
        if other < own:
            layout = Layout(((0, sent), nothing), ((0, due), nothing), sizes)
        else:
            layout = Layout((nothing, (0, sent)), (nothing, (0, due)), sizes)
        deliver: Callable[[], None] | None = None
        if self._is_sender:
            places = [(0, octets(tensor))]
        else:
            landing = Landing(tensor)
            places = []

            def deliver() -> None:
                view.fetch_places(tensor.device, [(0, landing.memory)])
                landing.land()

        call = Call(message.what, [tensor], self.around.timeout_s, deliver)
        round_ = ServiceWork(self.around, None, call, view, tensor.device)
        view.begin(tensor.device, places, layout)
        view.occupant = message.given(round_)
        message.view, message.round = view, round_
        return round_


class EarlyReceive(ServiceMessage):
    """A receive that is posted for every member because a receive from anybody does not know whose message comes first.

    One that is not used stays, for a later receive of that member and tag, of whatever size: a message of another size
    than was asked for stays at its sender, and the receive is given again. ``received``: the message, when it is over.
    """

    def __init__(self, queue: ServiceMessageQueue, what: str, like: torch.Tensor) -> None:
        super().__init__(queue.around, Call(what, [torch.empty_like(like)], queue.around.timeout_s), queue.peer)
        self._queue = queue
        self._is_final = False
        self._was_final = False  # when it was given last
        self._asked = threading.Event()  # for something else since then
        self.received = self.tensor

    @property
    def sizes(self) -> Sizes:
        return Sizes.CHECKED if self._is_final else Sizes.TENTATIVE

    def given(self, round_: ServiceWork) -> Work:
        """It keeps its slot until it is over, however often it is given."""
        self._was_final, self.received = self._is_final, self.tensor
        self._asked.clear()
        return self

    def ask_for(self, like: torch.Tensor, is_final: bool) -> None:
        """Receive as many bytes as ``like`` has. ``is_final``: if the message has another size, that is an error."""
        with self._queue.lock:
            if is_final > self._is_final or nbytes_of(like) != nbytes_of(self.tensor):
                self.tensor, self._is_final = torch.empty_like(like), is_final
                self._asked.set()

    @property
    def differs(self) -> bool:
        """True if the message is there, and has another size than was asked for."""
        round_ = self.round
        return round_ is not None and self._is_to_be_given_again(round_) and not self._asked.is_set()

    def _is_to_be_given_again(self, round_: ServiceWork) -> bool:
        return not self._was_final and isinstance(round_.exception(), MismatchError)

    def _receive(self, round_: ServiceWork, deadline: float) -> None:
        self._slices(deadline, round_.settle)
        while self._is_to_be_given_again(round_):
            self._slices(deadline, self._asked_within)
            round_ = self._queue.again(self)
            self._slices(deadline, round_.settle)
        round_.wait()

    def _asked_within(self, timeout_s: float) -> None:
        if not self._asked.wait(timeout_s):
            raise StallError(f"{self.what}: a message of another size is there")

    def _is_received(self, round_: ServiceWork) -> bool:
        if self._is_to_be_given_again(round_) and self._asked.is_set():
            round_ = self._queue.again(self)
        return round_.is_completed() and not self._is_to_be_given_again(round_)
