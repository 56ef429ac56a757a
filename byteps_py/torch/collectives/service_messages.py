"""Sends and receives through the communication service: a queue for every pair of members, every tag and each
direction.

A message is a round of an exchange between the two members. A send is over when its tensor is copied; up to ``2 *
SLOTS`` messages wait at the sender for their receive, further ones wait for their turn. Any thread may call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from byteps_py.errors import MismatchError, StallError
from byteps_py.tensors import Layout, Op, Sizes
from byteps_py.torch.collectives.group_work import GroupContext, ServiceWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.message_queue import MessageQueue, QueuedMessage
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.tensor_bytes import ResultBuffer, nbytes_of, octets
from byteps_py.torch.collectives.work import Call, Work

#: Slots of a queue, used in turn. The service keeps two rounds of each for a late receiver.
SLOTS = 2


class ServiceMessage(QueuedMessage):
    """A send or, if it has a ``source``, a receive."""

    def __init__(self, group_context: GroupContext, call: Call, source: int | None = None) -> None:
        super().__init__(group_context, call)
        self.round: ServiceWork | None = None
        self.view: SlotView | None = None
        self.source = source
        self.slot_number = 0  # in its queue

    @property
    def sizes(self) -> Sizes:
        """Of a receive: how the service compares its size."""
        return Sizes.PLAIN if self.tensor.numel() else Sizes.CHECKED

    def started(self, round_: ServiceWork) -> Work:
        """``round_`` carries the message. Returns the Work that occupies the slot until it is over."""
        return round_

    def _complete(self, deadline: float) -> None:
        self._wait_for_turn(deadline)
        if self.round is not None and self.source is not None:
            self._receive(self.round, deadline)
        elif self.view is not None:
            self._wait_in_slices(deadline, self.view.wait_for_departure)

    def _receive(self, round_: ServiceWork, deadline: float) -> None:
        self._wait_in_slices(deadline, round_.settle)
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
    """The messages of one tag between this process and ``peer``, in one direction."""

    def __init__(self, members: Members, group_context: GroupContext, peer: int, tag: int, is_sender: bool) -> None:
        super().__init__(group_context)
        self.peer = peer
        self._members, self._tag, self._is_sender = members, tag, is_sender
        self._views: list[SlotView] = []
        self._calls = 0

    @property
    def _next(self) -> SlotView:
        if not self._views:
            self._views = [SlotView(self._members.session, self._members.mover) for _ in range(SLOTS)]
        return self._views[self._calls % SLOTS]

    def _can_begin(self) -> bool:
        occupant = self._next.occupant
        return occupant is None or occupant.is_completed()

    def _wait_to_begin(self) -> None:
        with self.lock:
            occupant = self._next.occupant
        if occupant is not None:
            occupant.settle()

    def _begin(self, message: ServiceMessage) -> None:
        try:
            message.slot_number = self._calls % SLOTS
            self._hand_over(message, self._next)
        finally:
            self._calls += 1

    def hand_over_again(self, message: ServiceMessage) -> ServiceWork:
        """Hand a message over once more, in the slot that it occupies."""
        with self.lock:
            return self._hand_over(message, self._views[message.slot_number])

    def _hand_over(self, message: ServiceMessage, view: SlotView) -> ServiceWork:
        members, tensor = self._members, message.tensor
        own, other = members.position, self.peer
        nbytes = nbytes_of(tensor)
        sent, due = (nbytes, 0) if self._is_sender else (0, nbytes)
        if not view.fits(sent, due):
            source, target = (own, other) if self._is_sender else (other, own)
            ends = f"{members.ranks[source]}.{members.ranks[target]}"
            name = f"{members.prefix}.p2p.{ends}.{self._tag}.{message.slot_number}"
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
            result_buffer = ResultBuffer(tensor)
            places = []

            def deliver() -> None:
                view.fetch_places(tensor.device, [(0, result_buffer.memory)])
                result_buffer.deliver()

        call = Call(message.what, [tensor], self.group_context.timeout_s, deliver)
        round_ = ServiceWork(self.group_context, None, call, view, tensor.device)
        view.begin(tensor.device, places, layout)
        view.occupant = message.started(round_)
        message.view, message.round = view, round_
        return round_


class EarlyReceive(ServiceMessage):
    """A receive that is posted for every member, because a receive from any member does not know whose message comes
    first.

    An unused one stays for a later receive of that member and tag, of any size: a message of another size than
    requested stays at its sender, and the receive is handed over again. ``received``: the message, once the receive is
    over.
    """

    def __init__(self, queue: ServiceMessageQueue, what: str, like: torch.Tensor) -> None:
        super().__init__(
            queue.group_context, Call(what, [torch.empty_like(like)], queue.group_context.timeout_s), queue.peer
        )
        self._queue = queue
        self._is_final = False
        self._was_final = False  # when it was handed over last
        self._asked = threading.Event()  # ``ask_for`` has changed the request since then
        self.received = self.tensor

    @property
    def sizes(self) -> Sizes:
        return Sizes.CHECKED if self._is_final else Sizes.TENTATIVE

    def started(self, round_: ServiceWork) -> Work:
        """The receive occupies its slot until it is over, however often it is handed over."""
        self._was_final, self.received = self._is_final, self.tensor
        self._asked.clear()
        return self

    def ask_for(self, like: torch.Tensor, is_final: bool) -> None:
        """Request as many bytes as ``like`` has. ``is_final``: a message of another size is an error."""
        with self._queue.lock:
            if is_final > self._is_final or nbytes_of(like) != nbytes_of(self.tensor):
                self.tensor, self._is_final = torch.empty_like(like), is_final
                self._asked.set()

    @property
    def differs(self) -> bool:
        """True if the message has arrived with another size than requested."""
        round_ = self.round
        return round_ is not None and self._must_repeat(round_) and not self._asked.is_set()

    def _must_repeat(self, round_: ServiceWork) -> bool:
        return not self._was_final and isinstance(round_.exception(), MismatchError)

    def _receive(self, round_: ServiceWork, deadline: float) -> None:
        self._wait_in_slices(deadline, round_.settle)
        while self._must_repeat(round_):
            self._wait_in_slices(deadline, self._wait_for_request)
            round_ = self._queue.hand_over_again(self)
            self._wait_in_slices(deadline, round_.settle)
        round_.wait()

    def _wait_for_request(self, timeout_s: float) -> None:
        if not self._asked.wait(timeout_s):
            raise StallError(f"{self.what}: a message of another size has arrived")

    def _is_received(self, round_: ServiceWork) -> bool:
        if self._must_repeat(round_) and self._asked.is_set():
            round_ = self._queue.hand_over_again(self)
        return round_.is_completed() and not self._must_repeat(round_)
