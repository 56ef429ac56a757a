"""Gathers and exchanges of Horovod's functions from rank to rank, without the communication service.

A rank sends all others a first message when it makes the call: what they have to know of its tensors, and small data.
A vote carries it (byteps_py/session/peers/votes.py), so calls of different names may come in any order. Larger data
follow once a rank has the first messages of all. Nothing is decided by a vote: only calls whose ranks can't reach each
other go through the service, and data on a device or of which each byte would travel several times. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self, TypeVar, cast

import torch

from byteps_py.session import Slot
from byteps_py.session.peers import PendingSend, Span, StreamReceipt, joined_error
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.negotiation import VotingGroup
from byteps_py.torch.collectives.router import Reach, Route, Router
from byteps_py.torch.collectives.tensor_bytes import total

Spans = Sequence[Span]
Positions = Collection[int]
R = TypeVar("R")


class PeerGathers:
    """The gathers and exchanges of one context, until it ends or all ranks have joined."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = context.session
        self._groups: dict[Sequence[int], VotingGroup] = {}
        self._routers: dict[Sequence[int], Router] = {}
        self._names: dict[tuple[str, Sequence[int]], _NamedRounds] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """The instance of ``context``. Called with the context's lock held. Raises StallError and the error that ends
        the session."""
        return cast(Self, context.belongings.get(cls) or context.belongings.setdefault(cls, cls(context)))

    def begin(
        self, op: Op, name: str, ranks: Sequence[int], first_message: Callable[[], torch.Tensor], is_on_host: bool
    ) -> PeerRound | None:
        """Begin a round. Called with the context's lock held.

        Args:
            ranks: of the group, () for all.
            first_message: returns the bytes that the others have to know, flat uint8, of a size that depends on the
                operation and the group only.
            is_on_host: this rank's tensors are in the host's memory.

        Returns None if the ranks can't reach each other: the round goes through the service.
        """
        self._session.check_open()  # before any message is sent
        router = self._routers.get(ranks)
        if router is None:
            machines = self._context.connections.machines if self._context.connections is not None else None
            everybody = ranks or range(self._session.size)
            router = Router.for_names(self._session, everybody, shared_memory.is_able, machines)
            self._routers[ranks] = router
        if router.reach is Reach.SERVICE:
            return None
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = VotingGroup(self._context, ranks)
        rounds = self._names.get((name, ranks))
        if rounds is None:
            rounds = self._names[name, ranks] = _NamedRounds(group, name)
        return PeerRound(op, name, router, rounds, first_message(), is_on_host)

    def close(self) -> None:
        """See Closable."""


class _NamedRounds:
    """The rounds of one name. ``lock`` is held while one is carried out: the data of the next one follow."""

    def __init__(self, group: VotingGroup, name: str) -> None:
        self.group = group
        self.votes = group.peers.votes(f"{name} {group.suffix}", tuple(group.others.values()))
        self.number = 0  # of the latest round
        self.lock = threading.Lock()


class PeerRound:
    """One round, in which this rank has sent its first message, ``mine``."""

    def __init__(
        self, op: Op, name: str, router: Router, rounds: _NamedRounds, mine: torch.Tensor, is_on_host: bool
    ) -> None:
        self._op, self._name = op, name
        self.group = rounds.group
        self._router, self._rounds, self._mine = router, rounds, mine
        self._since_ns = time.perf_counter_ns()
        self._spec: TensorSpec | None = None
        self._are_on_host = is_on_host  # all ranks' tensors, once that is known
        rounds.number += 1
        self._number = rounds.number
        sizes = mine.numel(), mine.numel() * self.group.count
        self._slot = Slot(TensorSpec(name, DType.UINT8, sizes, op), (), memoryview(b""), round=self._number)
        self._flight = self.group.session.flight
        if self._flight is not None:
            self._flight.begin(self._slot)
        rounds.votes.cast(self._number, int(is_on_host), mine.data_ptr(), mine.numel())

    def carry_out(self, complete: Callable[[torch.Tensor], R]) -> R:
        """Wait for the first messages of all ranks, and call ``complete`` with them: uint8, [position in the group,
        byte]. Returns its result. Called once. Raises JoinedError, StallError and the error that ends the session."""
        has_failed = True
        try:
            with self._rounds.lock, torch.no_grad():
                self._wait()
                group, mine, votes = self.group, self._mine, self._rounds.votes
                every = mine.new_empty((group.count, mine.numel()))
                every[group.own] = mine
                for position, rank in group.others.items():
                    votes.fetch(self._number, rank, every[position].data_ptr(), mine.numel())
                votes.forget(self._number)
                result = complete(every)
                has_failed = False
                return result
        finally:
            if self._flight is not None:
                self._flight.end(self._slot, has_failed)

    def _wait(self) -> None:
        """Return when the first messages of all ranks are here."""
        votes, number, others = self._rounds.votes, self._number, self.group.others.values()
        absent: list[int] = []

        def is_known() -> bool:
            joined = votes.joined  # before ``received``: a rank that has joined sends nothing more
            received = votes.received(number)
            absent[:] = [rank for rank in others if rank in joined and rank not in received]
            return bool(absent) or len(received) == len(others)

        votes.wait_until_known(number, is_known, self._name, self.group.timeout_s)
        if absent:
            raise joined_error(self._name, min(absent))
        self._are_on_host &= all(votes.received(number).values())

    def is_direct(self, nbytes: int) -> bool:
        """True if data of which each rank receives ``nbytes``, the same on all, go from rank to rank; otherwise through
        the service."""
        return self._router.move(self._op, nbytes, self._are_on_host).route is Route.PEERS

    def exchange(self, sends: Sequence[tuple[Positions, Spans]], receives: Mapping[int, Spans], owner: object) -> None:
        """Send spans to the members at these positions, and receive them. All members know the next transfer: nothing
        is sent for spans without bytes. ``owner`` keeps the memory of all. Raises StallError and the error that ends
        the session."""
        group, deadline = self.group, time.monotonic() + self.group.timeout_s
        peers = group.peers
        stream = peers.stream(f"data of {self._name} {group.suffix}", tuple(group.others.values()))
        receipt = StreamReceipt(stream, owner=owner)
        for position, spans in receives.items():
            if nbytes := total(spans):
                receipt.expect(group.others[position], spans, nbytes)
        unsent: list[PendingSend] = []
        for positions, spans in sends:
            if total(spans):
                targets = tuple(group.others[position] for position in positions)
                unsent += peers.send(stream, targets, spans, False, owner=owner)
        try:
            if receipt.left:
                peers.collect(receipt, deadline - time.monotonic())
            if unsent:
                peers.wait_until_sent(unsent, deadline - time.monotonic())
        finally:
            if receipt.left:  # for example an interrupt that the program survives
                peers.abandon(receipt)

    def check(self, sent: int, received: int) -> None:
        """Call it before memory for so many bytes is allocated. Raises UsageError if no machine has as much."""
        self._spec = TensorSpec(self._name, DType.UINT8, (sent, received), self._op)
        if self._flight is not None:
            self._flight.recorder.set_bytes(self._slot.flight_number, sent)

    def report(self) -> None:
        """Tell the observer of the session, such as the timeline, that the round is over."""
        observer = self.group.session.observer
        if observer is not None and self._spec is not None:
            slot = Slot(self._spec, (), memoryview(b""), round=self._number)
            observer.begun(slot, self._since_ns)
            observer.delivered(slot)
