"""Reductions and broadcasts of one group through the communication service: selects names and slots, copies in, hands
over.

The calling thread does all of it. It waits for other ranks only if more operations of one kind are under way than the
kind has slots: then until the oldest of them is over.

Members agree on a name once, and every operation of the same kind (operation, dtype, elements) uses it again. So names
are assigned as places in a list: the first kind gets place 0, the next one place 1, and so on. The kind is not part of
the name, so members whose operations differ use one name, and the service reports the difference. When all places are
taken, the least recently used kind loses its place: however many sizes a program uses, the memory is bounded. Nothing
here depends on time, so members that call alike decide alike.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from byteps_py.tensors import TensorSpec
from byteps_py.torch.collectives.all_reduce import GroupSum
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.group_work import GroupContext, GroupWork, ServiceWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.slot_view import CPU, SlotView
from byteps_py.torch.collectives.tensor_bytes import check_writable, device_of, end_to_end
from byteps_py.torch.collectives.work import Call, OperationKind

#: The most kinds of operations that a group remembers.
PLACES = 256
#: Kinds up to this many bytes declare their other slots all at once, because agreeing on them takes most of the time.
_SMALL = 1 << 16


@dataclass(slots=True, eq=False)
class KindPlace:
    """The slots of a kind. Its operations use them in turn, so that several can be under way."""

    number: int
    views: list[SlotView] = field(default_factory=list)
    declared: dict[int, OperationKind] = field(default_factory=dict)  # by slot number
    calls: int = 0

    def next_slot(self, width: int) -> int:
        """The number of the slot for the next call, of ``width`` slots."""
        self.calls += 1
        return (self.calls - 1) % width


class KindPlaces:
    """The kinds that a group remembers, the least recently used first. Called with the group's lock held."""

    def __init__(self, limit: int = PLACES) -> None:
        self._limit = limit
        self._by_kind: OrderedDict[OperationKind, KindPlace] = OrderedDict()
        self._vacant: list[KindPlace] = []

    def all(self) -> list[KindPlace]:
        """All places: those of kinds, and those freed by disagreements."""
        return [*self._by_kind.values(), *self._vacant]

    def find(self, kind: OperationKind) -> KindPlace:
        """The place of ``kind``. A kind without one gets a new place, or that of another kind."""
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
        """Members have disagreed about ``kind``. Other members may have another kind at this place, so it is used
        next."""
        if self._by_kind.get(kind) is place:
            del self._by_kind[kind]
            self._vacant.append(place)


def slots_for(nbytes: int) -> int:
    """The number of operations of this size that may be under way at once; a further one waits until the first of them
    is over."""
    return 4 if nbytes <= 1 << 23 else 2


class ServiceAllReduce:
    """The reductions and broadcasts of one group. Any thread; operations run in the order of the calls."""

    def __init__(self, members: Members, group_context: GroupContext, completer: Completer) -> None:
        self._members = members
        self._group_context = group_context
        self._completer = completer
        self._lock = threading.Lock()
        self._places = KindPlaces()
        #: To be forgotten by the next call: works fail without the lock held.
        self._failed: deque[tuple[OperationKind, KindPlace]] = deque()

    def begin(self, what: GroupSum) -> ServiceWork:
        """See AllReduce."""
        return self.start(what.call, what.kind, what.contributions, what.targets)

    def start(
        self, call: Call, kind: OperationKind, sends: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> ServiceWork:
        """Begin a reduction or a broadcast of ``sends`` to ``targets``, both concatenated, in the wire's dtype. Raises
        UsageError and the error that has ended the group."""
        device = device_of([*sends, *targets])
        for target in targets:
            check_writable(target)
        due = end_to_end(targets)
        with self._lock:
            self._group_context.check()
            self._forget_failed()
            place = self._places.find(kind)
            view = self._free_view(kind, place)
            call = call._replace(finish=lambda: view.fetch_places(device, due))
            work = self._work(call, view, device, kind, place)
            work.number = self._group_context.journal.record((call.what, kind), view.name)
            view.begin(device, end_to_end(sends), due=due)
            view.occupant = work
            return work

    def agreed_place(self, kind: OperationKind) -> int | None:
        """The number of the place of ``kind``, if it was used before, so that members have agreed on it; otherwise
        None."""
        with self._lock:
            self._forget_failed()
            place = self._places.find(kind)
            return place.number if place.calls else None

    def agree(self, what: str, kind: OperationKind, timeout_s: float) -> tuple[int, GroupWork]:
        """The agreement for the first call of a kind: (number of its place, a round of one element, in which members
        detect a difference). A round of the kind itself would need memory of its size."""
        with self._lock:
            self._group_context.check()
            self._forget_failed()
            place = self._places.find(kind)
            view = self._view_at(place, place.next_slot(1))
            self._group_context.finish(view.occupant)
            spec = self._spec(kind, place, 0)
            view.declare(replace(spec, shape=(1,), scatters=False, terms=f"to agree on {kind}"))
            place.declared.pop(0, None)
            work = self._work(Call(what, [], timeout_s), view, CPU, kind, place)
            view.begin(CPU, [(0, torch.zeros(1, dtype=view.dtype, device="cpu"))])
            view.occupant = work
            return place.number, work

    def finish(self) -> None:
        """See AllReduce. Broadcasts, too."""
        with self._lock:
            for place in self._places.all():
                for view in place.views:
                    self._group_context.finish(view.occupant)

    # ---- with the lock held ----------------------------------------------------------------------------

    def _work(
        self, call: Call, view: SlotView, device: torch.device, kind: OperationKind, place: KindPlace
    ) -> ServiceWork:
        return ServiceWork(
            self._group_context, self._completer, call, view, device, lambda: self._failed.append((kind, place))
        )

    def _forget_failed(self) -> None:
        while self._failed:
            self._places.forget(*self._failed.popleft())

    def _free_view(self, kind: OperationKind, place: KindPlace) -> SlotView:
        nbytes = math.prod(kind.shape) * kind.dtype.itemsize
        width = slots_for(nbytes)
        calls, number = place.calls, place.next_slot(width)
        view = self._view_at(place, number)
        self._group_context.finish(view.occupant)
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
        """Declare all slots but the first one, in which members have agreed. Had they disagreed there, votes on the
        other slots would stay for members that call another kind at this place."""
        views = [self._view_at(place, number) for number in range(1, width)]
        for view in views:
            self._group_context.finish(view.occupant)
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
            codec=kind.codec,
        )
