"""Reductions and broadcasts of one group through the communication service: which name, which slot, copied in, handed
over.

The calling thread does it all. It waits for others only where more operations of one kind are under way than the kind
has slots: then first for the one that has been under way longest.

A name is agreed on once and then used again by every operation of the same kind (operation, dtype, elements), so names
are handed out as places in a list: the first kind gets place 0, the next one place 1, and so on. A kind is not part of
its name, so members whose operations differ meet under one name, and the service tells them what differs. When all
places are taken, the kind that was used longest ago gives up its own: however many sizes a program uses, the memory
they hold is bounded. Nothing here depends on time, so all members that call alike decide alike.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from byteps_py.tensors import TensorSpec
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.group_work import GroupContext, GroupWork
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.service_work import ServiceWork
from byteps_py.torch.engine.slot_view import CPU, SlotView
from byteps_py.torch.engine.tensor_bytes import check_writable, device_of, end_to_end
from byteps_py.torch.engine.work import Call, OperationKind

#: Kinds of operations that a group remembers.
PLACES = 256
#: The other slots of kinds up to this size are declared all at once: it is agreeing on them that takes time.
_SMALL = 1 << 16


@dataclass(slots=True, eq=False)
class KindPlace:
    """The slots of a kind. Its operations use them in turn, so that several can be under way."""

    number: int
    views: list[SlotView] = field(default_factory=list)
    declared: dict[int, OperationKind] = field(default_factory=dict)  # by number of the slot
    calls: int = 0

    def next_slot(self, width: int) -> int:
        """The number of the slot for the next call, of ``width`` slots."""
        self.calls += 1
        return (self.calls - 1) % width


class KindPlaces:
    """The kinds that a group remembers, the one used longest ago first. Called with the group's lock held."""

    def __init__(self, limit: int = PLACES) -> None:
        self._limit = limit
        self._by_kind: OrderedDict[OperationKind, KindPlace] = OrderedDict()
        self._vacant: list[KindPlace] = []

    def all(self) -> list[KindPlace]:
        """Those that kinds have, or had before members disagreed about them."""
        return [*self._by_kind.values(), *self._vacant]

    def find(self, kind: OperationKind) -> KindPlace:
        """The place of ``kind``; a new one, or another kind's, if it has none."""
        place = self._by_kind.get(kind)
        if place is not None:
            self._by_kind.move_to_end(kind)
            return place
        if self._vacant:
            place = self._vacant.pop()
        elif len(self._by_kind) < self._limit:
            place = KindPlace(len(self._by_kind))
        else:
            _, place = self._by_kind.popitem(last=False)
        place.calls = 0
        self._by_kind[kind] = place
        return place

    def forget(self, kind: OperationKind, place: KindPlace) -> None:
        """Members have disagreed about ``kind``: its place, another kind's to the others, is the next to be used."""
        if self._by_kind.get(kind) is place:
            del self._by_kind[kind]
            self._vacant.append(place)


def slots_for(nbytes: int) -> int:
    """How many operations of so many bytes may be under way at once; a further one waits for the first to end."""
    return 4 if nbytes <= 1 << 23 else 2


class ServiceReductions:
    """Any thread; operations go in the order of the calls."""

    def __init__(self, members: Members, around: GroupContext, completer: Completer) -> None:
        self._members = members
        self._around = around
        self._completer = completer
        self._lock = threading.Lock()
        self._places = KindPlaces()
        self._failed: deque[tuple[OperationKind, KindPlace]] = deque()  # to be forgotten; works fail without the lock

    def start(
        self, call: Call, kind: OperationKind, sends: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> ServiceWork:
        """Begin a reduction or a broadcast of ``sends`` to ``targets``, both end to end, in the wire's dtype."""
        device = device_of([*sends, *targets])
        for target in targets:
            check_writable(target)
        due = end_to_end(targets)
        with self._lock:
            self._around.check()
            self._forget_failed()
            place = self._places.find(kind)
            view = self._free_view(kind, place)
            call = call._replace(finish=lambda: view.fetch_places(device, due))
            work = self._work(call, view, device, kind, place)
            work.number = self._around.journal.record((call.what, kind), view.name)
            view.begin(device, end_to_end(sends), due=due)
            view.occupant = work
            return work

    def known_place(self, kind: OperationKind) -> int | None:
        """The number of the place of a kind that is not used for the first time, on which members have agreed."""
        with self._lock:
            self._forget_failed()
            place = self._places.find(kind)
            return place.number if place.calls else None

    def agree(self, what: str, kind: OperationKind, timeout_s: float) -> tuple[int, GroupWork]:
        """All members call this kind for the first time: the number of its place, and a round of one element, in which
        they find out if they differ. A round of the kind itself would need memory of its size."""
        with self._lock:
            self._around.check()
            self._forget_failed()
            place = self._places.find(kind)
            view = self._view_at(place, place.next_slot(1))
            self._around.finish(view.occupant)
            spec = self._spec(kind, place, 0)
            view.declare(replace(spec, shape=(1,), scatters=False, terms=f"to agree on {kind}"))
            place.declared.pop(0, None)
            work = self._work(Call(what, [], timeout_s), view, CPU, kind, place)
            view.begin(CPU, [(0, torch.zeros(1, dtype=view.dtype))])
            view.occupant = work
            return place.number, work

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        with self._lock:
            for place in self._places.all():
                for view in place.views:
                    self._around.finish(view.occupant)

    # ---- with the lock held ----------------------------------------------------------------------------

    def _work(
        self, call: Call, view: SlotView, device: torch.device, kind: OperationKind, place: KindPlace
    ) -> ServiceWork:
        return ServiceWork(
            self._around, self._completer, call, view, device, lambda: self._failed.append((kind, place))
        )

    def _forget_failed(self) -> None:
        while self._failed:
            self._places.forget(*self._failed.popleft())

    def _free_view(self, kind: OperationKind, place: KindPlace) -> SlotView:
        nbytes = math.prod(kind.shape) * kind.dtype.itemsize
        width = slots_for(nbytes)
        calls, number = place.calls, place.next_slot(width)
        view = self._view_at(place, number)
        self._around.finish(view.occupant)
        if calls == 1 and nbytes <= _SMALL:
            self._declare_others(kind, place, width)
        if place.declared.get(number) != kind or not view.is_usable:
            view.declare(self._spec(kind, place, number))
            place.declared[number] = kind
        return view

    def _view_at(self, place: KindPlace, number: int) -> SlotView:
        while len(place.views) <= number:
            place.views.append(SlotView(self._members.session, self._members.mover))
        return place.views[number]

    def _declare_others(self, kind: OperationKind, place: KindPlace, width: int) -> None:
        """All slots but the first one, in which members have met: had they disagreed there, votes in other slots would
        stay, for those who call something else in this place."""
        views = [self._view_at(place, number) for number in range(1, width)]
        for view in views:
            self._around.finish(view.occupant)
        slots = self._members.session.declare([self._spec(kind, place, number) for number in range(1, width)])
        for number, (view, slot) in enumerate(zip(views, slots, strict=True), 1):
            view.adopt(slot)
            place.declared[number] = kind

    def _spec(self, kind: OperationKind, place: KindPlace, number: int) -> TensorSpec:
        return TensorSpec(
            f"{self._members.prefix}.{place.number}.{number}",
            kind.dtype,
            kind.shape,
            kind.op,
            kind.average,
            kind.root,
            group=self._members.spec_group,
            scatters=kind.scatters,
            terms=kind.terms,
        )
