"""Sums by name that all ranks wait for: added by the ranks, without the communication service.

Votes decide for each round whether all ranks wait for it (negotiation.py). Small tensors travel with the votes, from
every rank to every other. Large tensors are added in shares (large.py), one at a time: a rank that has offered one
offers no other before it is over. So large sums that all ranks offer never overlap, and have one order on all ranks.
All other sums go through the service.

Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, cast

import torch

from byteps_py.errors import JoinedError
from byteps_py.session import Slot
from byteps_py.tensors import TensorSpec, key_of
from byteps_py.torch.collectives.all_reduce.large import LargeSum, LargeSums
from byteps_py.torch.collectives.all_reduce.shared_memory import SharedMemorySum
from byteps_py.torch.collectives.all_reduce.shares import add_by_machine
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.fallback_work import DeclinedError, FallbackQueue, FallbackWork
from byteps_py.torch.collectives.negotiation import VotedRounds, VotingGroup
from byteps_py.torch.collectives.router import Route
from byteps_py.torch.collectives.work import Attempt, Call, NamedWork, Work


class SumOffer(NamedTuple):
    """A sum that ranks may add. ``route``: ONE_SHOT, SHARED_MEMORY, DIRECT or HIERARCHICAL."""

    spec: TensorSpec
    route: Route


class NegotiatedAllReduce:
    """The sums by name of one context, until it ends or all ranks have joined."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = context.session
        self._fallbacks = FallbackQueue(context.lock, is_ordered=False)
        self._groups: dict[Sequence[int], NegotiatedGroup] = {}
        self._names: dict[tuple[str, Sequence[int]], _NegotiatedSums] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """The instance of ``context``. Called with the context's lock held. Raises StallError and the error that ends
        the session."""
        return cast(Self, context.belongings.get(cls) or context.belongings.setdefault(cls, cls(context)))

    def begin(
        self,
        name: str,
        group: Sequence[int],
        offer: SumOffer | None,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        fallback: Callable[[], Attempt],
    ) -> Attempt:
        """Begin the sum of all ranks' ``sources`` into ``targets``, which may be the same tensors.

        ``offer``: the sum, if there is only one, the router lets ranks add it, and the caller is about to wait;
        otherwise None. ``fallback`` begins the sum through the service, here or once a rank has
        declined. Called with the context's lock held.
        """
        self._session.check_open()  # before any vote is cast
        sum_group = self._groups.get(group)
        if sum_group is None:
            sum_group = self._groups[group] = NegotiatedGroup(self._context, group)
        entry = self._names.get((name, group))
        if entry is None:
            entry = self._names[name, group] = _NegotiatedSums(sum_group, name)
        if offer is None or not (is_plain(sources[0]) and is_plain(targets[0])):
            entry.rounds.begin_elsewhere()
            return fallback()
        direct = entry.begin(offer, sources[0], targets[0])
        if direct is None:
            return fallback()
        call = Call(name, [], threading.TIMEOUT_MAX)
        work = FallbackWork(self._fallbacks, call, direct, lambda: NamedWork(name, fallback()))
        return Attempt(work.is_completed, work.wait)

    def close(self) -> None:
        """See Closable. After a join the session stays open."""
        if self._context.is_open and self._context.session is self._session:
            for sum_group in self._groups.values():
                sum_group.large_sums.retire()


class NegotiatedGroup(VotingGroup):
    """The ranks of one group, and their large sums: one at a time."""

    def __init__(self, context: Context, ranks: Sequence[int]) -> None:
        super().__init__(context, ranks)
        on_machines = self.machines or (tuple(range(self.count)),)
        self.large_sums = LargeSums(self.peers, f"sums in shares {self.suffix}", self.ranks, self.own, on_machines)
        self._is_taken = False
        self._is_broken = False  # a sum was begun and abandoned here, which others may have continued

    def acquire(self) -> bool:
        """Reserve the large sums for one, until ``release``. False if they are reserved. Called with the context's lock
        held."""
        is_free = not (self._is_taken or self._is_broken)
        if is_free:
            self._is_taken = True
        return is_free

    def release(self) -> None:
        """The sum is over, or was not begun. Any thread."""
        self._is_taken = False

    def start(self, source: torch.Tensor, target: torch.Tensor, average: bool, name: str) -> LargeSum:
        """The sum of flat and plain tensors; in shared memory, its first step is written. The caller has acquired the
        large sums."""
        all_reduce = self.large_sums.all_reduce
        if all_reduce is None:
            raise RuntimeError(f"{name}: as many ranks on each machine are needed")
        # Between machines, streams have the name: other groups may have a tensor of the same name.
        stream = f"{name} {self.suffix}" if len(self.machines) > 1 else name
        large_sum = all_reduce.start(source, target, average, stream)
        if isinstance(large_sum, SharedMemorySum):
            large_sum.write_first_step()
        return large_sum

    def finish(self, large_sum: LargeSum) -> None:
        """Complete a sum that all other ranks complete, too. Raises StallError, JoinedError and the error that ends the
        session."""
        try:
            large_sum.run(time.monotonic() + self.timeout_s)
        except JoinedError:  # no member has begun
            raise
        except BaseException:  # for example an interrupt that the program survives
            self._is_broken = True
            raise


class _NegotiatedSums:
    """The sums of one name, one at a time."""

    def __init__(self, group: NegotiatedGroup, name: str) -> None:
        self._group = group
        self._name = name
        self.rounds = VotedRounds(group, name)
        self._spec: TensorSpec | None = None  # of the latest round for which this rank has waited
        self._offer = 0  # the vote that offers it
        self._buffers: dict[int, torch.Tensor] = {}  # for the others' tensors, by position

    def begin(self, offer: SumOffer, source: torch.Tensor, target: torch.Tensor) -> NegotiatedSum | None:
        """Begin the next round, for which the caller is about to wait. None: the sum has to go through the service."""
        group, rounds, spec = self._group, self.rounds, offer.spec
        is_small = offer.route is Route.ONE_SHOT
        is_taken = not is_small and group.acquire()
        is_under_way = False
        try:
            if spec is not self._spec:
                self._spec, self._offer = spec, _offer_of(spec)
            vote = rounds.begin(self._offer, is_able=is_small or is_taken)
            has_offered = vote == self._offer
            mine, total = source.detach().view(-1), target.detach().view(-1)
            large_sum = group.start(mine, total, spec.average, self._name) if is_taken and has_offered else None
            rounds.cast(vote, source.data_ptr(), spec.nbytes if is_small and has_offered else 0)
            is_under_way = has_offered
        finally:
            if is_taken and not is_under_way:
                group.release()
        if not is_under_way:
            return None
        direct = NegotiatedSum(self, spec, mine, total, large_sum)
        if group.session.flight is not None:
            group.session.flight.begin(direct.slot)
        return direct

    def finish(self, direct: NegotiatedSum) -> None:
        """Complete a sum that this rank has offered. Raises DeclinedError if a rank has not, StallError and the error
        that ends the session."""
        group, spec, flight = self._group, direct.spec, self._group.session.flight
        try:
            if not self.rounds.is_offered_by_all():
                raise DeclinedError
            if direct.large_sum is None:
                with torch.no_grad():
                    self._add_all(direct.mine, direct.total, spec.average)
            else:
                group.finish(direct.large_sum)
            if flight is not None:
                flight.end(direct.slot)
        except (DeclinedError, JoinedError):  # it goes through the service
            if flight is not None:
                flight.withdraw(direct.slot)
            raise
        except BaseException:
            if flight is not None:
                flight.end(direct.slot, has_failed=True)
            raise
        finally:
            if direct.large_sum is not None:
                group.release()
        torch.autograd.graph.increment_version(direct.total)
        observer = group.session.observer
        if observer is not None:
            observer.begun(direct.slot, direct.since_ns)
            observer.delivered(direct.slot)

    def _add_all(self, mine: torch.Tensor, total: torch.Tensor, average: bool) -> None:
        """Add the tensors of all ranks."""
        group, buffers = self._group, self._buffers
        for position, rank in group.others.items():
            buffer = buffers.get(position)
            if buffer is None or buffer.dtype is not mine.dtype or buffer.numel() != mine.numel():
                buffer = buffers[position] = torch.empty_like(mine)
            self.rounds.fetch(rank, buffer.data_ptr(), buffer.nbytes)
        # The result may overwrite the own tensor only if it is one of the first two rows, read before a write.
        own = mine if group.own < 2 else mine.clone()
        add_by_machine([buffers.get(position, own) for position in range(group.count)], group.machines, total, average)


class NegotiatedSum(Work):
    """A sum that this rank has offered: of ``mine`` into ``total``, flat. ``large_sum``: None: it is a small one."""

    def __init__(
        self,
        sums: _NegotiatedSums,
        spec: TensorSpec,
        mine: torch.Tensor,
        total: torch.Tensor,
        large_sum: LargeSum | None,
    ) -> None:
        super().__init__(Call(spec.name, [], threading.TIMEOUT_MAX))
        self._sums = sums
        self.spec, self.mine, self.total, self.large_sum = spec, mine, total, large_sum
        self.since_ns = time.perf_counter_ns()
        self.slot = Slot(spec, (), memoryview(b""), round=sums.rounds.number)  # as observers see it

    def _complete(self, deadline: float) -> None:
        self._sums.finish(self)

    def _is_ready(self) -> bool:
        return False  # nobody polls it: the caller is about to wait


def _offer_of(spec: TensorSpec) -> int:
    """A vote that identifies the sum, independent of its name."""
    return key_of(repr(spec.signature())) >> 1
