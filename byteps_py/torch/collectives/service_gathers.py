"""Gathers and exchanges of one group through the communication service: bytes from member to member, without
arithmetic.

The calling thread copies in and hands over. Every member takes part in every round, if only with pieces of 0 bytes.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import torch

from byteps_py.tensors import Layout, Op, Sizes
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.group_work import GroupContext, ServiceWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.movers import QueuedWork
from byteps_py.torch.collectives.slot_view import Place, SlotView
from byteps_py.torch.collectives.tensor_bytes import device_of, octets, places_of, ranges_of
from byteps_py.torch.collectives.work import Call

#: Operations of a group that may be under way at once; a further one waits until the first of them is over.
SLOTS = 2
#: Flat tensors of bytes by member, concatenated.
Octets = list[list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Round:
    """The bytes that a round moves. ``outgoing``, ``incoming``: tensors of bytes and their offsets in the slot's input
    and result. ``layout``: how the pieces lie there. ``kept``: copies (to, from) of the data that a member sends to
    itself. ``capacity``: bytes that the slot needs, in and out."""

    outgoing: list[Place]
    incoming: list[Place]
    layout: Layout
    kept: list[tuple[torch.Tensor, torch.Tensor]]
    capacity: tuple[int, int]


class ServiceGathers:
    """The gathers and exchanges of one group. Any thread; operations run in the order of the calls."""

    def __init__(self, members: Members, group_context: GroupContext, completer: Completer) -> None:
        self._members = members
        self._group_context = group_context
        self._completer = completer
        self._lock = threading.Lock()
        self._views = {
            op: [SlotView(members.session, members.mover) for _ in range(SLOTS)] for op in (Op.GATHER, Op.EXCHANGE)
        }
        self._calls = {op: itertools.count() for op in (Op.GATHER, Op.EXCHANGE)}

    def finish(self) -> None:
        """Complete all operations under way. Raises StallError."""
        with self._lock:
            for view in itertools.chain.from_iterable(self._views.values()):
                self._group_context.finish(view.occupant)

    def even(self, op: Op, call: Call, source: torch.Tensor, target: torch.Tensor) -> ServiceWork:
        """A GATHER of ``source`` to equal shares of ``target``, or an EXCHANGE of equal shares of both; both
        contiguous.

        The others' shares lie before and after this member's own share: two copies, however many members there are.
        """
        own, count = self._members.position, self._members.count
        mine, whole = octets(source), octets(target)
        share = whole.numel() // count
        first, after = own * share, (own + 1) * share
        ranges = tuple((at * share, 0 if at == own else share) for at in range(count))

        def others(tensor: torch.Tensor) -> list[Place]:
            sides = ((0, tensor[:first]), (after, tensor[after:]))
            return [(at, side) for at, side in sides if side.numel()]

        is_gather = op is Op.GATHER
        round_ = _Round(
            [(0, mine)] if is_gather else others(mine),
            others(whole),
            Layout(((0, share),) if is_gather else ranges, ranges, Sizes.TOGETHER),
            [(whole[first:after], mine if is_gather else mine[first:after])],
            (mine.numel(), whole.numel()),
        )
        return self._begin(op, call, round_, device_of([source, target]))

    def move(
        self, op: Op, call: Call, outgoing: Octets, incoming: Octets, sizes: Sizes, device: torch.device
    ) -> ServiceWork:
        """Bytes to each member and from each member, by position; the only piece of a GATHER goes to all."""
        kept = self._keep_own(op, outgoing, incoming)
        layout = Layout(ranges_of(outgoing), ranges_of(incoming), sizes)
        capacity = (_total(outgoing), _total(incoming))
        return self._begin(op, call, _Round(places_of(outgoing), places_of(incoming), layout, kept, capacity), device)

    def _begin(self, op: Op, call: Call, round_: _Round, device: torch.device) -> ServiceWork:
        with self._lock:
            self._group_context.check()
            number = next(self._calls[op]) % SLOTS
            view = self._views[op][number]
            self._group_context.finish(view.occupant)
            name = f"{self._members.prefix}.{op.name.lower()}.{number}"
            view.declare_bytes(name, op, self._members.spec_group, *round_.capacity)

            kept: QueuedWork | None = None

            def deliver() -> None:
                if kept is not None:
                    kept.order()  # the caller may wait on another stream than that on which it has called
                view.fetch_places(device, round_.incoming)
                if call.finish is not None:
                    call.finish()

            work = ServiceWork(self._group_context, self._completer, call._replace(finish=deliver), view, device)
            # The service compares sizes only, so for the log of calls the operation is part of the name.
            work.number = self._group_context.journal.record((call.what,), f"{view.name} {call.what}")
            view.begin(device, round_.outgoing, round_.layout, round_.incoming)
            view.occupant = work
            # Now, while bytes are on their way: another call may complete this operation afterwards.
            with torch.no_grad():
                for target, source in round_.kept:
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)
            if round_.kept and device.type != "cpu":
                kept = view.queued(device)
        return work

    def _keep_own(self, op: Op, outgoing: Octets, incoming: Octets) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Remove the data that a member sends to itself, which need not travel. Returns the copies (to, from) to be
        made."""
        own = self._members.position
        source = outgoing[0 if op is Op.GATHER else own]
        target = incoming[own]
        if [tensor.numel() for tensor in source] != [tensor.numel() for tensor in target]:
            return []  # the service reports the difference
        incoming[own] = []
        if op is Op.EXCHANGE:
            outgoing[own] = []
        return list(zip(target, source, strict=True))


def _total(pieces: Octets) -> int:
    return sum(tensor.numel() for piece in pieces for tensor in piece)
