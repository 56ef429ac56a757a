"""Large sums by name in shares, if all ranks are at hand for it.

Names may be called in any order, by any thread, and need not be waited for, so no rank knows what the others do next.
Hence a vote: a round of one element under the tensor's name, in which each rank says whether it is waiting for this
sum, and takes part in no other. If all are, they go on together (ring_sum.py); else the tensor goes through the
communication service, as smaller ones do. As nobody says yes to a second sum before the first is over, sums for which
all have said so never overlap, and come in one order on all ranks.

Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch

from byteps_py.session import Session, Slot
from byteps_py.session.nearby import Neighbours
from byteps_py.tensors import TensorSpec
from byteps_py.torch.context import Context, Request
from byteps_py.torch.dtypes import is_plain
from byteps_py.torch.exchange import Exchange
from byteps_py.torch.shares.ring_sum import SLOT_BYTES, RingSum, has_cores

#: With 8 MB a vote that is won saves half a millisecond of 2.8, and one that is lost costs 0.3; with 16 MB 1.6 of 5.6.
LEAST_BYTES = 16 << 20
#: The service ends the waits of who is kept waiting for longer than the stall limit: after that it has had the time to.
_PATIENCE_S = 10.0
_FOREVER_S = 1e9  # without a limit


@dataclass(frozen=True, slots=True)
class Course:
    """An operation that has begun. ``complete`` returns when its outputs are there, or raises."""

    is_done: Callable[[], bool]
    complete: Callable[[], None]


def suit(session: Session, spec: TensorSpec) -> bool:
    """Whether sums of ``spec`` are voted on. All ranks answer alike, wherever their tensors lie."""
    members, first = spec.members(session.size), session.rank - session.local_rank
    return (
        spec.nbytes >= LEAST_BYTES
        and has_cores(len(members))
        and first <= members[0] and members[-1] < first + session.local_size
        and (spec.dtype.is_floating or not spec.average)
        and session.nearby is not None
    )  # fmt: skip


def ballot(request: Request) -> Request:
    """One element, under the name of ``request``, in whose stead it is."""
    spec = request.spec
    what = f"one element to agree on {spec.dtype.name.lower()}{list(spec.shape)}"
    vote = replace(spec, shape=(1,), terms=f"{spec.terms}; {what}" if spec.terms else what)
    return Request(vote, request.dtype, ((1,),), torch.device("cpu"))


class SharedSums:
    """Those of one context, until it ends, or all ranks have joined."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = context.session
        self._circles: dict[Sequence[int], _Circle] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """With the context's lock held."""
        return cast(Self, context.belongings.get(cls) or context.belongings.setdefault(cls, cls(context)))

    def begin(
        self,
        requests: Sequence[Request],
        source: torch.Tensor,
        target: torch.Tensor,
        is_awaited: bool,
        through_the_service: Callable[[], Course],
    ) -> Course:
        """``source`` of all ranks into ``target``, which may be the same. ``requests``: the ballot, and the whole.
        ``is_awaited``: the caller is about to wait. With the context's lock held, as ``through_the_service`` is called
        here or by ``complete``."""
        spec = requests[1].spec
        circle = self._circles.get(spec.group)
        if circle is None:
            circle = self._circles[spec.group] = _Circle(self._session, spec.members(self._session.size))
        is_at_hand = is_awaited and is_plain(source) and is_plain(target) and circle.take()
        try:
            vote = self._vote(requests[0], is_at_hand)
            if not is_at_hand:
                rest = through_the_service()
                return Course(lambda: vote.done and rest.is_done(), lambda: _complete(vote, rest))
        except BaseException:
            if is_at_hand:
                circle.give_back()
            raise

        def complete() -> None:
            try:
                vote.wait()
                if vote.results[0].item() == (1 if spec.average else circle.count):
                    self._add(circle, vote.slot, spec, source, target)
                    return
            finally:
                circle.give_back()
            with self._context.lock:
                rest = through_the_service()
            rest.complete()

        return Course(lambda: vote.done, complete)

    def _vote(self, ballot: Request, is_at_hand: bool) -> Exchange:
        (exchange,) = self._context.exchanges([ballot])
        exchange.send([torch.full((1,), int(is_at_hand), dtype=ballot.dtype)])
        return exchange

    def _add(self, circle: _Circle, vote: Slot, spec: TensorSpec, source: torch.Tensor, target: torch.Tensor) -> None:
        observer = self._session.observer
        slot = Slot(spec, (), memoryview(b""), round=vote.round)
        if observer is not None:
            observer.begun(slot)
        limit_s = self._context.settings.stall_limit_s
        timeout_s = limit_s + _PATIENCE_S if limit_s else _FOREVER_S
        circle.add(source, target, spec.average, vote.spec.name, timeout_s)
        if observer is not None:
            observer.delivered(slot)

    def close(self) -> None:
        """See Closable. After a join the session goes on."""
        if self._context.is_open and self._context.session is self._session:
            for circle in self._circles.values():
                circle.retire()


class _Circle:
    """The ranks of one group, one sum at a time."""

    def __init__(self, session: Session, ranks: Sequence[int]) -> None:
        self._neighbours = cast(Neighbours, session.nearby)
        first, self._own = session.rank - session.local_rank, ranks.index(session.rank)
        self.count = len(ranks)
        self._others = {p: rank - first for p, rank in enumerate(ranks) if p != self._own}
        self._all = tuple(self._others.values())
        self._name = f"sums in shares among ranks {', '.join(map(str, ranks))}"
        self._meeting = f"{self._name}#{session.incarnation}"
        self._stream = self._neighbours.stream(self._name, self._all)
        self._ring = self._neighbours.ring(self._all, SLOT_BYTES)
        self._neighbours.meet(self._meeting, self._all)
        self._is_taken = False

    def take(self) -> bool:
        """For one sum, until ``give_back``. False if there is one already. With the context's lock held."""
        is_free, self._is_taken = not self._is_taken, True
        return is_free

    def give_back(self) -> None:
        self._is_taken = False

    def add(self, source: torch.Tensor, target: torch.Tensor, average: bool, name: str, timeout_s: float) -> None:
        """All others do the same. ``name``: the tensor's. Raises StallError and what ends the session."""
        mine, total = source.detach().view(-1), target.detach().view(-1)
        work = RingSum(self._ring, self._stream, self._own, self._others, mine, total, average, name)
        self._neighbours.await_meeting(self._meeting, self._all, timeout_s)
        with torch.no_grad():
            work.run(time.monotonic() + timeout_s)
        torch.autograd.graph.increment_version(target)

    def retire(self) -> None:
        self._neighbours.retire(self._ring, self._neighbours.stream(f"{self._name}, over", self._all))


def _complete(vote: Exchange, rest: Course) -> None:
    vote.wait()
    rest.complete()
