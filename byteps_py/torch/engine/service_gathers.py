"""Gathers and exchanges of one group through the communication service: bytes from member to member, nothing combined.

The calling thread copies in and hands over. Every member takes part in every round, if only with pieces of 0 bytes.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import torch

from byteps_py.tensors import Layout, Op, Sizes
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.group_work import GroupContext
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.service_work import ServiceWork
from byteps_py.torch.engine.slot_view import Place, SlotView
from byteps_py.torch.engine.tensor_bytes import device_of, octets, places_of, ranges_of
from byteps_py.torch.engine.work import Call

#: Operations of a group that may be under way at once; a further one waits for the first of them to end.
SLOTS = 2
#: By member: flat tensors of bytes, end to end.
Octets = list[list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Round:
    """What a round moves: bytes to the slot's input and from its result, by offset; how they lie there; copies (to,
    from) of what a member has for itself; the room that the slot must have, in and out."""

    outgoing: list[Place]
    incoming: list[Place]
    layout: Layout
    kept: list[tuple[torch.Tensor, torch.Tensor]]
    room: tuple[int, int]


class ServiceGathers:
    """Any thread; operations go in the order of the calls."""

    def __init__(self, members: Members, around: GroupContext, completer: Completer) -> None:
        self._members = members
        self._around = around
        self._completer = completer
        self._lock = threading.Lock()
        self._views = {
            op: [SlotView(members.session, members.mover) for _ in range(SLOTS)] for op in (Op.GATHER, Op.EXCHANGE)
        }
        self._calls = {op: itertools.count() for op in (Op.GATHER, Op.EXCHANGE)}

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        with self._lock:
            for view in itertools.chain.from_iterable(self._views.values()):
                self._around.finish(view.occupant)

    def even(self, op: Op, call: Call, source: torch.Tensor, target: torch.Tensor) -> ServiceWork:
        """A GATHER of ``source`` to equal shares of ``target``, or an EXCHANGE of equal shares of both; contiguous.

        What others have lies on one side of a member's own share or on the other: two copies, however many they are.
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
        """Bytes to each member and from each; a GATHER's only piece goes to all."""
        kept = self._keep_own(op, outgoing, incoming)
        layout = Layout(ranges_of(outgoing), ranges_of(incoming), sizes)
        room = (_total(outgoing), _total(incoming))
        return self._begin(op, call, _Round(places_of(outgoing), places_of(incoming), layout, kept, room), device)

    def _begin(self, op: Op, call: Call, round_: _Round, device: torch.device) -> ServiceWork:
        with self._lock:
            self._around.check()
            number = next(self._calls[op]) % SLOTS
            view = self._views[op][number]
            self._around.finish(view.occupant)
            name = f"{self._members.prefix}.{op.name.lower()}.{number}"
            view.declare_bytes(name, op, self._members.spec_group, *round_.room)

            def deliver() -> None:
                view.fetch_places(device, round_.incoming)
                if call.finish is not None:
                    call.finish()

            work = ServiceWork(self._around, self._completer, call._replace(finish=deliver), view, device)
            # The service compares sizes, not what they are for: to the journal, that is part of the name.
            work.number = self._around.journal.record((call.what,), f"{view.name} {call.what}")
            view.begin(device, round_.outgoing, round_.layout, round_.incoming)
            view.occupant = work
            with torch.no_grad():  # while the others' are on their way; before another call may deliver this one
                for target, source in round_.kept:
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)
        return work

    def _keep_own(self, op: Op, outgoing: Octets, incoming: Octets) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a member has for itself need not travel: take it out. Returns the copies (to, from) to be made."""
        own = self._members.position
        source = outgoing[0 if op is Op.GATHER else own]
        target = incoming[own]
        if [tensor.numel() for tensor in source] != [tensor.numel() for tensor in target]:
            return []  # the service says what is wrong
        incoming[own] = []
        if op is Op.EXCHANGE:
            outgoing[own] = []
        return list(zip(target, source, strict=True))


def _total(pieces: Octets) -> int:
    return sum(tensor.numel() for piece in pieces for tensor in piece)
