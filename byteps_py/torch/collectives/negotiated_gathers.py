"""Gathers and exchanges by name that all ranks wait for: from rank to rank, without the communication service.

Votes decide for each round whether all ranks wait for it (negotiation.py). What the ranks have to know of each other's
tensors travels with the votes; larger tensors follow from rank to rank once all know the sizes. All other gathers and
exchanges go through the service. Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self, cast

import torch

from byteps_py.session import Slot
from byteps_py.session.peers import PendingSend, Span, StreamReceipt
from byteps_py.tensors import DType, Op, TensorSpec, key_of
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.negotiation import VotedRounds, VotingGroup
from byteps_py.torch.collectives.router import Reach, Route, Router
from byteps_py.torch.collectives.tensor_bytes import total

Spans = Sequence[Span]
Positions = Collection[int]
FirstMessage = Callable[[], torch.Tensor | None]


class NegotiatedGathers:
    """The gathers and exchanges by name of one context, until it ends or all ranks have joined."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session = context.session
        self._groups: dict[Sequence[int], VotingGroup] = {}
        self._routers: dict[Sequence[int], Router] = {}
        self._names: dict[tuple[str, Sequence[int]], VotedRounds] = {}

    @classmethod
    def of(cls, context: Context) -> Self:
        """The instance of ``context``. Called with the context's lock held. Raises StallError and the error that ends
        the session."""
        return cast(Self, context.belongings.get(cls) or context.belongings.setdefault(cls, cls(context)))

    def begin(
        self, op: Op, name: str, is_named: bool, ranks: Sequence[int], first_message: FirstMessage | None
    ) -> NegotiatedRound | None:
        """Begin a round. Called with the context's lock held.

        Args:
            is_named: the user has given the ``name``. Between machines, the services find out if ranks call different
                operations without names.
            ranks: of the group, () for all.
            first_message: returns the bytes that the others have to know, flat uint8, of a size that depends on the
                group only; None, of the function or in its place: this rank does not wait, or its tensors are not in
                the host's memory.

        Returns None if the round goes through the service.
        """
        self._session.check_open()  # before any vote is cast
        router = self._routers.get(ranks)
        if router is None:
            machines = self._context.connections.machines if self._context.connections is not None else None
            everybody = ranks or range(self._session.size)
            router = Router.for_names(self._session, everybody, shared_memory.is_able, machines)
            self._routers[ranks] = router
        if router.reach is Reach.SERVICE or (router.reach is Reach.CONNECTIONS and not is_named):
            return None
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = VotingGroup(self._context, ranks)
        rounds = self._names.get((name, ranks))
        if rounds is None:
            rounds = self._names[name, ranks] = VotedRounds(group, name)
        mine = first_message() if first_message is not None else None
        if mine is None:
            rounds.begin_elsewhere()
            return None
        offer = key_of(f"{op.name} {mine.numel()}") >> 1
        vote = rounds.begin(offer, is_able=True)
        has_offered = vote == offer
        rounds.cast(vote, mine.data_ptr(), mine.numel() if has_offered else 0)
        return NegotiatedRound(op, name, group, router, rounds, mine) if has_offered else None

    def close(self) -> None:
        """See Closable."""


class NegotiatedRound:
    """One round, in which this rank has offered. One thread at a time."""

    def __init__(
        self, op: Op, name: str, group: VotingGroup, router: Router, rounds: VotedRounds, mine: torch.Tensor
    ) -> None:
        self._op, self._name = op, name
        self.group = group
        self._router, self._rounds, self._mine = router, rounds, mine
        self._since_ns = time.perf_counter_ns()
        self._spec: TensorSpec | None = None

    def wait(self) -> torch.Tensor | None:
        """The messages of all ranks: uint8, [position in the group, byte]. None: the round goes through the service, as
        a rank has not offered. Raises StallError and the error that ends the session."""
        if not self._rounds.is_offered_by_all():
            return None
        group, mine = self.group, self._mine
        every = mine.new_empty((group.count, mine.numel()))
        every[group.own] = mine
        for position, rank in group.others.items():
            self._rounds.fetch(rank, every[position].data_ptr(), mine.numel())
        return every

    def is_direct(self, nbytes: int) -> bool:
        """True if data of which each rank receives ``nbytes``, the same on all, go from rank to rank; otherwise through
        the service."""
        return self._router.move(self._op, nbytes, is_on_host=True).route is Route.PEERS

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

    def report(self) -> None:
        """Tell the observer of the session, such as the timeline, that the round is over."""
        observer = self.group.session.observer
        if observer is not None and self._spec is not None:
            slot = Slot(self._spec, (), memoryview(b""), round=self._rounds.number)
            observer.begun(slot, self._since_ns)
            observer.delivered(slot)
