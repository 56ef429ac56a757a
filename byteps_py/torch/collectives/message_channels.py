"""Messages from a rank to another one, or to itself: one ``MessageChannel`` for each member, tag and direction, with a
queue before it.

    MessageQueue ─ MessageChannel ┬ OwnChannel      in this process: a pipeline's next stage may be on the same rank
                                  ├ PeerSends       to a member that is reached directly: a stream
                                  ├ PeerReceives    from such a member
                                  └ ServiceChannel  through the communication service: each message is a round of an
                                                    exchange

A message begins at once if no other message waits and the channel has room. Otherwise it waits without blocking the
caller: a thread of the pool begins it, in order, as soon as it can. A send is over when its tensor is copied, which
must not change before. ``WINDOW`` messages of a stream, or ``2 * SLOTS`` of a channel of the service, wait at the
sender for their receive. Any thread may call.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from byteps_py.errors import MismatchError, StallError
from byteps_py.session.peers import WINDOW, PendingSend, Stream, StreamReceipt
from byteps_py.tensors import Layout, Op, Sizes
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork, ServiceWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.movers import MoverOf, QueuedWork
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.tensor_bytes import ResultBuffer, nbytes_of, octets, span
from byteps_py.torch.collectives.work import Call, Work

#: Slots of a channel of the service, used in turn. The service keeps two rounds of each for a late receiver.
SLOTS = 2


class Message(GroupWork):
    """A send or, if it has a ``source``, the position of its sender, a receive. ``begun`` is set once the message has
    begun or has failed to; None: it began at once."""

    def __init__(self, group_context: GroupContext, call: Call, source: int | None = None) -> None:
        super().__init__(group_context, call)
        (self.tensor,) = call.outputs
        self.source = source
        self.begun: threading.Event | None = None
        self.failure: Exception | None = None

    def _carry_out(self, deadline: float) -> None:
        """Wait until the message, which has begun, is sent or received."""
        raise NotImplementedError

    def _is_carried_out(self) -> bool:
        """True if ``_carry_out`` would not block."""
        raise NotImplementedError

    def _complete(self, deadline: float) -> None:
        if self.begun is not None:
            self._wait_in_slices(deadline, self._begin_within)
        if self.failure is not None:
            raise self.failure
        self._carry_out(deadline)

    def _begin_within(self, timeout_s: float) -> None:
        if self.begun is not None and not self.begun.wait(timeout_s):
            raise StallError(f"{self.what}: waits for earlier messages")

    def _is_ready(self) -> bool:
        if self.begun is not None and not self.begun.is_set():
            return False
        return self.failure is not None or self._is_carried_out()

    @property
    def received(self) -> torch.Tensor:
        """The message, once the receive is over."""
        return self.tensor

    def source_rank(self) -> int:
        return super().source_rank() if self.source is None else self.source


M = TypeVar("M", bound=Message)


class MessageChannel(ABC, Generic[M]):
    """The messages of one tag to, or from, one member. ``lock``: that of its queue; a message may be begun again while
    a thread holds it."""

    def __init__(self, group_context: GroupContext) -> None:
        self.group_context = group_context
        self.lock = threading.RLock()

    @abstractmethod
    def message(self, call: Call, is_send: bool) -> M:
        """A message of the call's only tensor, not begun yet."""

    @abstractmethod
    def can_begin(self) -> bool:
        """True if a message can begin at once. Called with the lock held."""

    @abstractmethod
    def wait_to_begin(self) -> None:
        """Return when the first waiting message can begin. Called without the lock. An exception fails all waiting
        messages."""

    @abstractmethod
    def begin(self, message: M) -> None:
        """Begin ``message``, which can begin. Called with the lock held."""


class MessageQueue(Generic[M]):
    """The messages before ``channel``: first in, first out."""

    def __init__(self, channel: MessageChannel[M]) -> None:
        self.channel = channel
        self._waiting: deque[M] = deque()
        self._is_served = False

    @property
    def is_empty(self) -> bool:
        """True if no message waits for its turn."""
        return not self._waiting

    def post(self, message: M) -> M:
        """Begin ``message`` now if no other message waits, otherwise in its turn. Never blocks for other ranks. Raises
        the error that has ended the group."""
        channel = self.channel
        with channel.lock:
            channel.group_context.check()
            if not self._waiting and channel.can_begin():
                self._try_to_begin(message)
                return message
            message.begun = threading.Event()
            self._waiting.append(message)
            if not self._is_served:
                self._is_served = True
                POOL.run(self._serve)
            return message

    def _try_to_begin(self, message: M) -> None:
        try:
            self.channel.begin(message)
        except Exception as error:
            message.failure = error
        if message.begun is not None:
            message.begun.set()

    def _serve(self) -> None:
        lock = self.channel.lock
        while True:
            with lock:
                if not self._waiting:
                    self._is_served = False
                    return
            try:
                self.channel.wait_to_begin()
            except Exception as error:
                self._fail(error)
                return
            with lock:
                self._try_to_begin(self._waiting.popleft())

    def _fail(self, error: Exception) -> None:
        with self.channel.lock:
            self._is_served = False
            failed = list(self._waiting)
            self._waiting.clear()
        for message in failed:
            message.failure = error
            if message.begun is not None:
                message.begun.set()


# ---- in this process ----------------------------------------------------------------------------------


class _SentCopy:
    """A copy of a tensor that was sent."""

    def __init__(self, tensor: torch.Tensor, mover_of: MoverOf) -> None:
        self.tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._mover_of = mover_of
        self._queued = mover_of(tensor.device).queued()

    def copy_to(self, target: torch.Tensor, what: str) -> QueuedWork | None:
        """Returns what ends with the copy, if the target is on a GPU. Raises MismatchError."""
        if self._queued is not None:
            self._queued.order(self.tensor)
        deliver(self.tensor.view(-1), target, what)
        return self._mover_of(target.device).queued()


def deliver(source: torch.Tensor, target: torch.Tensor, what: str) -> None:
    """Copy a message to the tensor that receives it. Raises MismatchError if the sizes differ."""
    if nbytes_of(source) != nbytes_of(target):
        raise MismatchError(
            f"{what}: a message of {nbytes_of(source)} bytes came, {nbytes_of(target)} were expected; give matching "
            "sizes on both"
        )
    target.detach().copy_(source.view(target.dtype).view(target.shape))


class OwnMessage(Message):
    """A send of the own rank to itself, or its receive."""

    def __init__(self, group_context: GroupContext, call: Call, source: int | None = None) -> None:
        super().__init__(group_context, call, source)
        self._copy: _SentCopy | None = None
        self._is_there = threading.Event()

    def give(self, copy: _SentCopy) -> None:
        """The message has been sent."""
        self._copy = copy
        self._is_there.set()

    def _carry_out(self, deadline: float) -> None:
        if self.source is not None:
            self._wait_in_slices(deadline, self._await)
            copy, self._copy = self._copy, None
            if copy is not None:
                self._queued = copy.copy_to(self._outputs[0], self.what)

    def _await(self, timeout_s: float) -> None:
        if not self._is_there.wait(timeout_s):
            raise StallError(f"{self.what}: this rank has not sent it")

    def _is_carried_out(self) -> bool:
        return self.source is None or self._is_there.is_set()


class OwnChannel(MessageChannel[OwnMessage]):
    """The sends of a tag of a rank to itself, and the receives: the n-th receive takes the n-th send, whichever comes
    first."""

    def __init__(self, members: Members, group_context: GroupContext) -> None:
        super().__init__(group_context)
        self._position, self._mover_of = members.position, members.mover
        self._sent: deque[_SentCopy] = deque()
        self._receives: deque[OwnMessage] = deque()

    def message(self, call: Call, is_send: bool) -> OwnMessage:
        return OwnMessage(self.group_context, call, None if is_send else self._position)

    def can_begin(self) -> bool:
        return True

    def wait_to_begin(self) -> None: ...

    def begin(self, message: OwnMessage) -> None:
        if message.source is not None:
            self._receives.append(message)
        else:
            self._sent.append(_SentCopy(message.tensor, self._mover_of))
        while self._sent and self._receives:
            self._receives.popleft().give(self._sent.popleft())


# ---- from rank to rank --------------------------------------------------------------------------------


class PeerSend(Message):
    """A send, over once its bytes are copied."""

    def __init__(self, call: Call, streams: PeerStreams) -> None:
        super().__init__(streams.group_context, call)
        self._peers = streams.peers
        self.unsent: Sequence[PendingSend] = ()

    def _carry_out(self, deadline: float) -> None:
        peers, unsent = self._peers, self.unsent
        if unsent:
            self._wait_in_slices(deadline, lambda timeout_s: peers.wait_until_sent(unsent, timeout_s))

    def _is_carried_out(self) -> bool:
        return self._peers.is_sent(self.unsent)

    def _release(self) -> None:
        self.unsent = ()


class PeerSends(MessageChannel[PeerSend]):
    """The messages of one tag to ``peer``."""

    def __init__(self, members: Members, streams: PeerStreams, peer: int, tag: int) -> None:
        super().__init__(streams.group_context)
        self._streams = streams
        self._target = (streams.others[peer],)
        self._stream = _stream(members, streams, members.position, peer, tag)

    def message(self, call: Call, is_send: bool) -> PeerSend:
        return PeerSend(call, self._streams)

    def can_begin(self) -> bool:
        return self._streams.are_introduced and self._streams.peers.can_send(self._stream)

    def wait_to_begin(self) -> None:
        self.group_context.wait_in_slices(self._streams.introduction_wait())
        self.group_context.wait_in_slices(self._streams.peers.window_wait(self._stream))

    def begin(self, message: PeerSend) -> None:
        tensor = message.tensor if is_plain(message.tensor) else octets(message.tensor)
        message.unsent = self._streams.peers.send(self._stream, self._target, (span(tensor),), True, owner=tensor)


class PeerReceive(Message):
    """A receive. ``under_way``: the receives of its stream that have begun, in order; their messages come before its
    own."""

    def __init__(self, call: Call, source: int, streams: PeerStreams, under_way: deque[PeerReceive]) -> None:
        super().__init__(streams.group_context, call, source)
        self._streams = streams
        self._under_way = under_way
        self.receipt: StreamReceipt | None = None
        self.result_buffer: ResultBuffer | None = None
        self._introduction_wait: Callable[[float], None] | None = None

    def _carry_out(self, deadline: float) -> None:
        if self._under_way[0] is not self:
            for earlier in list(self._under_way):
                if earlier is self:
                    break
                self._wait_in_slices(deadline, earlier.complete)
        self._wait_in_slices(deadline, self._collect)
        if self.result_buffer is not None:
            self.result_buffer.deliver()

    def _collect(self, timeout_s: float) -> None:
        if not self._streams.are_introduced:  # the receiver may have to acknowledge
            self._introduction_wait = self._introduction_wait or self._streams.introduction_wait()
            self._introduction_wait(timeout_s)
        if self.receipt is not None:
            self._streams.peers.collect(self.receipt, timeout_s)

    def _is_ready(self) -> bool:
        return self._group_context.aborted is not None or super()._is_ready()

    def _is_carried_out(self) -> bool:
        return self.receipt is not None and self._streams.peers.poll(self.receipt)

    def _release(self) -> None:
        self.result_buffer = None
        if self.receipt is not None and self.receipt.left:
            self._streams.peers.abandon(self.receipt)
        with contextlib.suppress(ValueError):  # it has been removed, or has not begun
            self._under_way.remove(self)


class PeerReceives(MessageChannel[PeerReceive]):
    """The messages of one tag from ``peer``. As many as the sender's window are under way; a thread of the pool
    completes them if there are more, because the sender may wait for that while this rank waits for it elsewhere."""

    def __init__(self, members: Members, streams: PeerStreams, peer: int, tag: int) -> None:
        super().__init__(streams.group_context)
        self._streams = streams
        self._peer = peer
        self._source = streams.others[peer]
        self._stream = _stream(members, streams, peer, members.position, tag)
        self._under_way: deque[PeerReceive] = deque()

    @property
    def next(self) -> tuple[Stream, int]:
        """(stream, rank of the sender)."""
        return self._stream, self._source

    @property
    def has_next(self) -> bool:
        """True if a message has arrived for which no receive is under way."""
        return self._stream.has_next(self._source)

    def message(self, call: Call, is_send: bool) -> PeerReceive:
        return PeerReceive(call, self._peer, self._streams, self._under_way)

    def can_begin(self) -> bool:
        return len(self._under_way) < WINDOW

    def wait_to_begin(self) -> None:
        while True:
            with self.lock:
                if self.can_begin():
                    return
                first = self._under_way[0]
            first.complete_or_fail()

    def begin(self, message: PeerReceive) -> None:
        tensor = message.tensor
        result_buffer = message.result_buffer = None if is_plain(tensor) else ResultBuffer(tensor)
        target = span(tensor if result_buffer is None else result_buffer.memory)
        receipt = StreamReceipt(self._stream, owner=(tensor, result_buffer))
        receipt.expect(self._source, (target,), target[1])
        message.receipt = receipt
        self._under_way.append(message)


def _stream(members: Members, streams: PeerStreams, source: int, target: int, tag: int) -> Stream:
    name = f"{members.prefix}.p2p.{members.ranks[source]}.{members.ranks[target]}.{tag}"
    other = source if target == members.position else target
    return streams.peers.stream(name, (streams.others[other],))


# ---- through the communication service ----------------------------------------------------------------


class ServiceMessage(Message):
    """A send or a receive through the service."""

    round: ServiceWork | None = None
    view: SlotView | None = None
    slot_number = 0  # in its channel

    @property
    def sizes(self) -> Sizes:
        """The comparison of a receive's size by the service."""
        return Sizes.PLAIN if self.tensor.numel() else Sizes.CHECKED

    def started(self, round_: ServiceWork) -> Work:
        """``round_`` carries the message. Returns the Work that occupies the slot until it is over."""
        return round_

    def _carry_out(self, deadline: float) -> None:
        if self.round is not None and self.source is not None:
            self._receive(self.round, deadline)
        elif self.view is not None:
            self._wait_in_slices(deadline, self.view.wait_for_departure)

    def _receive(self, round_: ServiceWork, deadline: float) -> None:
        self._wait_in_slices(deadline, round_.complete)
        round_.wait()
        self._comes_after([round_])

    def _is_carried_out(self) -> bool:
        return self.source is None or self.round is None or self._is_received(self.round)

    def _is_received(self, round_: ServiceWork) -> bool:
        return round_.is_completed()


class ServiceChannel(MessageChannel[ServiceMessage]):
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

    def message(self, call: Call, is_send: bool) -> ServiceMessage:
        return ServiceMessage(self.group_context, call, None if self._is_sender else self.peer)

    def can_begin(self) -> bool:
        occupant = self._next.occupant
        return occupant is None or occupant.is_completed()

    def wait_to_begin(self) -> None:
        with self.lock:
            occupant = self._next.occupant
        if occupant is not None:
            occupant.complete()

    def begin(self, message: ServiceMessage) -> None:
        try:
            message.slot_number = self._calls % SLOTS
            self._hand_over(message, self._next)
        finally:
            self._calls += 1

    def resubmit(self, message: ServiceMessage) -> ServiceWork:
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
        finish: Callable[[], None] | None = None
        if self._is_sender:
            places = [(0, octets(tensor))]
        else:
            result_buffer = ResultBuffer(tensor)
            places = []

            def finish() -> None:
                view.fetch_places(tensor.device, [(0, result_buffer.memory)])
                result_buffer.deliver()

        call = Call(message.what, [tensor], self.group_context.timeout_s, finish)
        round_ = ServiceWork(self.group_context, None, call, view, tensor.device)
        view.begin(tensor.device, places, layout)
        view.occupant = message.started(round_)
        message.view, message.round = view, round_
        return round_


class EarlyReceive(ServiceMessage):
    """A receive that is posted for every member, because a receive from any member does not know whose message comes
    first.

    An unused one stays for a later receive of that member and tag, of any size: a message of another size than
    requested stays at its sender, and the receive is handed over again.
    """

    def __init__(self, channel: ServiceChannel, what: str, like: torch.Tensor) -> None:
        call = Call(what, [torch.empty_like(like)], channel.group_context.timeout_s)
        super().__init__(channel.group_context, call, channel.peer)
        self._channel = channel
        self._is_final = False
        self._was_final = False  # when it was handed over last
        self._asked = threading.Event()  # ``ask_for`` has changed the request since then
        self._received = self.tensor

    @property
    def received(self) -> torch.Tensor:
        return self._received

    @property
    def sizes(self) -> Sizes:
        return Sizes.CHECKED if self._is_final else Sizes.TENTATIVE

    def started(self, round_: ServiceWork) -> Work:
        """The receive occupies its slot until it is over, however often it is handed over."""
        self._was_final, self._received = self._is_final, self.tensor
        self._asked.clear()
        return self

    def ask_for(self, like: torch.Tensor, is_final: bool) -> None:
        """Request as many bytes as ``like`` has. ``is_final``: a message of another size is an error."""
        with self._channel.lock:
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
        self._wait_in_slices(deadline, round_.complete)
        while self._must_repeat(round_):
            self._wait_in_slices(deadline, self._wait_for_request)
            round_ = self._channel.resubmit(self)
            self._wait_in_slices(deadline, round_.complete)
        round_.wait()
        self._comes_after([round_])

    def _wait_for_request(self, timeout_s: float) -> None:
        if not self._asked.wait(timeout_s):
            raise StallError(f"{self.what}: a message of another size has arrived")

    def _is_received(self, round_: ServiceWork) -> bool:
        if self._must_repeat(round_) and self._asked.is_set():
            round_ = self._channel.resubmit(self)
        return round_.is_completed() and not self._must_repeat(round_)
