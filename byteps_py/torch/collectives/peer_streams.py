"""The payloads that members of a group send each other without the communication service, in the order of the calls.

Members of one machine share memory; those of different machines have a connection each (byteps_py/session/peers). The
calling thread writes this member's payloads and tells the others; the waiting thread copies arriving payloads to their
destination. Host memory only. Gathers, exchanges and broadcasts are in group_collectives.py, sums in all_reduce/.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence

from byteps_py.errors import CommunicationError, JoinedError, MismatchError
from byteps_py.session.peers import PeerTransport, PendingSend, Span, Stream, StreamReceipt
from byteps_py.tensors import differing
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.fallback_work import FallbackQueue
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.router import ConnectedMachines, Reach
from byteps_py.torch.collectives.tensor_bytes import total
from byteps_py.torch.collectives.work import Call

#: Operations of a stream that may be under way at once; a further one waits until the first of them is over.
LANES = 2
#: The time that a call of ``swap`` waits itself. An operation that takes longer becomes a Work like any other.
_AT_ONCE_S = 0.2

#: The spans for, or from, members of a group, by position. Members without a payload are left out.
Parts = Mapping[int, Sequence[Span]]
#: (spans, spans): the data that this member sends to itself, and its destination.
Own = tuple[Sequence[Span], Sequence[Span]]


class PeerWork(GroupWork):
    """An operation among peers. One that receives nothing is over when its payloads are sent."""

    def __init__(
        self,
        group_context: GroupContext,
        completer: Completer | None,
        call: Call,
        peers: PeerTransport,
        receipt: StreamReceipt,
        unsent: Sequence[PendingSend] = (),
    ) -> None:
        super().__init__(group_context, call)
        self._unsent = unsent
        self.line: list[PeerWork] | None = None
        self._completer = completer
        self._peers = peers
        self._receipt = receipt

    def _complete(self, deadline: float) -> None:
        receipt = self._receipt
        if receipt.left or receipt.error is not None:
            self._wait_in_slices(deadline, lambda timeout_s: self._peers.collect(receipt, timeout_s))
        if self._unsent:
            self._wait_in_slices(deadline, lambda timeout_s: self._peers.wait_until_sent(self._unsent, timeout_s))
        if self._finish is not None:
            self._finish()

    def _is_ready(self) -> bool:
        if self._group_context.aborted is not None:
            return True
        return self._peers.poll(self._receipt) and self._peers.is_sent(self._unsent)

    def _release(self) -> None:
        self._finish = None
        self._unsent = ()
        if self._receipt.left:
            self._peers.abandon(self._receipt)
        if self.line is not None:
            with contextlib.suppress(ValueError):  # it has been removed
                self.line.remove(self)

    def _hand_to_pool(self) -> None:
        if self._completer is not None:
            self._completer.add(self)
        else:
            super()._hand_to_pool()


class _Line:
    """A stream, and its operations under way."""

    __slots__ = ("stream", "under_way")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.under_way: list[PeerWork] = []


class PeerStreams:
    """The streams of one group. ``others``: the ranks of the other members, by position.
    ``machines``: None: all are on this machine. Any thread; operations run in the order of the calls."""

    def __init__(
        self,
        members: Members,
        peers: PeerTransport,
        group_context: GroupContext,
        completer: Completer,
        machines: ConnectedMachines | None = None,
    ) -> None:
        self.peers = peers
        self.machines = machines
        self.others = {p: members.ranks[p] for p in range(members.count) if p != members.position}
        self._all = tuple(self.others.values())
        self._members = members
        self.group_context = group_context
        self.completer = completer
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self.fallbacks = FallbackQueue(threading.RLock(), is_ordered=True)
        self._are_introduced = False
        peers.directory.request_introduction(self._introduction, self._all)

    @property
    def _introduction(self) -> str:
        return f"{self._members.prefix}#{self._members.session.incarnation}"

    def begin(
        self,
        name: str,
        call: Call,
        sends: Parts,
        receives: Parts,
        own: Own | None = None,
        is_led: bool = False,
        together: bool = False,
    ) -> PeerWork:
        """Begin one operation. ``name``: of the stream, the same on all members. ``call.inputs`` keeps the memory of
        ``sends``, the rest of ``call`` that of ``receives``.

        ``is_led``: not all members send. ``own``: the data that this member sends to itself. ``together``: all members
        send to all, and a sender also detects differing sizes; the operation does not begin if a member has joined.
        Without ``together``, nothing is sent if a member for which it is has joined.
        """
        with self._lock:
            line = self._begin(name)
            if error := self._joined(line) if together else self._refused(line, [self.others[p] for p in sends]):
                return self._fail(line, call, {} if together else receives, error)
            sent = {position: total(spans) for position, spans in sends.items()} if together else {}
            receipt = self._receipt(line, call, receives, sent, together)
            unsent: list[PendingSend] = []
            for position, spans in sends.items():
                dues = (total(receives[position]),) if together else ()
                unsent += self.peers.send(line.stream, (self.others[position],), spans, is_led, dues, call.inputs)
            return self._follow(line, call, receipt, own, unsent)

    def to_all(
        self,
        name: str,
        call: Call,
        sends: Sequence[Span] | None,
        receives: Parts,
        own: Own | None = None,
        is_led: bool = False,
        together: bool = False,
    ) -> PeerWork:
        """``begin`` for a member that sends the same spans to all others, or nothing (None)."""
        with self._lock:
            line = self._begin(name)
            if error := self._joined(line) if together else self._refused(line, () if sends is None else self._all):
                return self._fail(line, call, {} if together else receives, error)
            is_checked = together and sends is not None
            sent = dict.fromkeys(self.others, total(sends)) if is_checked and sends is not None else {}
            receipt = self._receipt(line, call, receives, sent, together)
            unsent: Sequence[PendingSend] = ()
            if sends is not None:
                dues = [total(receives[position]) for position in self.others] if together else ()
                unsent = self.peers.send(line.stream, self._all, sends, is_led, dues, call.inputs)
            return self._follow(line, call, receipt, own, unsent)

    def swap(self, name: str, call: Call, mine: Span, receives: Parts) -> PeerWork | None:
        """``to_all`` with ``together``, for a caller that waits at once. None: the operation is complete, which is the
        usual case. The messages are the same."""
        with self._lock:
            line = self._begin(name)
            if error := self._joined(line):
                return self._fail(line, call, {}, error)
            nbytes = mine[1]
            receipt = StreamReceipt(line.stream, is_mutual=True, owner=call)
            for position, spans in receives.items():
                receipt.expect(self.others[position], spans, nbytes, nbytes)
            unsent = self.peers.send(line.stream, self._all, (mine,), False, [nbytes] * len(self._all), call)
            number = self.group_context.journal.record((call.what, call.kind), line.stream.name)
        try:
            self.peers.collect(receipt, min(_AT_ONCE_S, call.timeout_s))
            if unsent:
                self.peers.wait_until_sent(unsent, min(_AT_ONCE_S, call.timeout_s))
        except CommunicationError:  # the Work raises it again
            with self._lock:
                return self._under_way(line, call, receipt, number, unsent)
        if call.finish is not None:
            call.finish()
        return None

    def finish(self) -> None:
        """Complete all operations under way. Raises StallError."""
        with self._lock:
            for line in self._lines.values():
                for work in list(line.under_way):
                    self.group_context.finish(work)

    def introduction_wait(self) -> Callable[[float], None]:
        """A function that waits, for at most the given number of seconds, until all members are introduced. It raises
        StallError, after which it may be called again, and the error that ends the session."""
        return self.peers.directory.introduction_wait(self._introduction, self._all)

    @property
    def reach(self) -> Reach:
        """The way in which the members reach each other."""
        return Reach.MEMORY if self.machines is None else Reach.CONNECTIONS

    @property
    def most_on_machine(self) -> int:
        """The largest number of members on one machine."""
        return self._members.count if self.machines is None else max(map(len, self.machines.positions))

    @property
    def are_introduced(self) -> bool:
        """True if all members are introduced."""
        self._are_introduced = self._are_introduced or self.peers.directory.are_introduced(self._introduction)
        return self._are_introduced

    # ---- with the lock held ----------------------------------------------------------------------------

    def _begin(self, name: str) -> _Line:
        group_context = self.group_context
        group_context.check()
        line = self._lines.get(name)
        if line is None:
            stream = self.peers.stream(f"{self._members.prefix}.{name}", self._all)
            line = self._lines[name] = _Line(stream)
        if not self.are_introduced:
            group_context.wait_in_slices(self.introduction_wait())
        for work in list(line.under_way)[: len(line.under_way) + 1 - LANES]:
            group_context.wait_in_slices(work.complete)
        if not self.peers.can_send(line.stream):
            with contextlib.suppress(JoinedError):  # a call that sends to that member finds it out
                group_context.wait_in_slices(self.peers.window_wait(line.stream))
        return line

    def _joined(self, line: _Line) -> JoinedError | None:
        """The error if a member has no more data."""
        joined = self.peers.joined_among(self._all)
        return self.peers.joined_error(line.stream, joined) if joined else None

    def _refused(self, line: _Line, targets: Sequence[int]) -> JoinedError | None:
        """The error if one of ``targets``, which were to receive a payload, has no more data. The other targets are
        told."""
        joined = self.peers.joined_among(targets)
        if not joined:
            return None
        self.peers.refuse(line.stream, [target for target in targets if target not in joined], min(joined))
        return self.peers.joined_error(line.stream, joined)

    def _receipt(
        self, line: _Line, call: Call, receives: Parts, sent: Mapping[int, int], is_mutual: bool
    ) -> StreamReceipt:
        """Call it before anything is sent, so that payloads go to their destination at once."""
        receipt = StreamReceipt(line.stream, is_mutual=is_mutual, owner=call)
        for position, spans in receives.items():
            receipt.expect(self.others[position], spans, total(spans), sent.get(position, -1))
        return receipt

    def _fail(self, line: _Line, call: Call, receives: Parts, error: JoinedError) -> PeerWork:
        """An operation that has sent nothing, and raises ``error`` once it has received the payloads of others."""
        call = call._replace(finish=None)
        receipt = self._receipt(line, call, receives, {}, False)
        receipt.error = error
        return self._follow(line, call, receipt, None, ())

    def _follow(
        self, line: _Line, call: Call, receipt: StreamReceipt, own: Own | None, unsent: Sequence[PendingSend]
    ) -> PeerWork:
        # Now, while payloads are on their way: another call may complete this operation afterwards.
        if own is not None:
            mine, due = total(own[0]), total(own[1])
            if mine == due:
                keep(*own)
            else:
                rank = self._members.ranks[self._members.position]
                receipt.error = MismatchError(differing(line.stream.name, rank, mine, rank, due))
        stated = (call.what,) if call.kind is None else (call.what, call.kind)
        number = self.group_context.journal.record(stated, line.stream.name)
        return self._under_way(line, call, receipt, number, unsent)

    def _under_way(
        self, line: _Line, call: Call, receipt: StreamReceipt, number: int, unsent: Sequence[PendingSend] = ()
    ) -> PeerWork:
        work = PeerWork(self.group_context, self.completer, call, self.peers, receipt, unsent)
        work.number = number
        if receipt.left or unsent:
            work.line = line.under_way
            line.under_way.append(work)
        return work


def keep(sources: Sequence[Span], targets: Sequence[Span]) -> None:
    """Copy the bytes of ``sources``, concatenated, to ``targets``, of the same total size."""
    if len(sources) == len(targets):
        pairs = list(zip(sources, targets, strict=True))
        if all(source[1] == target[1] for source, target in pairs):
            for (source, nbytes), (target, _) in pairs:
                if source != target:
                    ctypes.memmove(target, source, nbytes)
            return
    whole = b"".join(ctypes.string_at(*source) for source in sources)
    for target, nbytes in targets:
        ctypes.memmove(target, whole[:nbytes], nbytes)
        whole = whole[nbytes:]
