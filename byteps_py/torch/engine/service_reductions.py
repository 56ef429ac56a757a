"""Reductions and broadcasts of one group: which name, which lane, copied in, handed over.

The calling thread does it all. It waits for others only where more operations of one kind are under way than the kind
has lanes: then first for the one that has been under way longest.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.dtypes import bits_of, wire_dtype
from byteps_py.torch.engine.lanes import Lane
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.operation import LaneOperation
from byteps_py.torch.engine.operation_kind import OperationKind
from byteps_py.torch.engine.peer_collectives import NearCollectives
from byteps_py.torch.engine.peer_sums import NearReductions, NearSumOptions
from byteps_py.torch.engine.places import Place, Places, lanes_for
from byteps_py.torch.engine.work import Call, GroupContext, Pending
from byteps_py.torch.process_group.arguments import Reduction, check_writable, device_of

#: The other lanes of kinds up to this size are declared all at once: it is agreeing on them that takes time.
_SMALL = 1 << 16
#: So many kinds are kept, to be found by what is called; with more, all are forgotten and found anew.
_MOST_KINDS = 4096


class Reductions:
    """Any thread; operations go in the order of the calls."""

    def __init__(
        self,
        members: Members,
        around: GroupContext,
        completer: Completer,
        near: NearCollectives | None = None,
        near_sums: NearReductions | None = None,
    ) -> None:
        self._near, self._near_sums = near, near_sums
        self._has_met_at_barrier = False
        self._members = members
        self._around = around
        self._completer = completer
        self._lock = threading.Lock()
        self._places = Places()
        self._kinds: dict[object, tuple[OperationKind, bool]] = {}
        self._failed: deque[tuple[OperationKind, Place]] = deque()  # to be forgotten; works fail without the lock

    def reduce(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        how: Reduction,
        timeout_s: float,
        is_awaited: bool = False,
    ) -> Pending:
        """Reduce ``tensors``, of one dtype, end to end; ``outputs`` are as many of the same sizes, or none.
        ``is_awaited``: the caller is about to wait for it."""
        contributions = [how.prepare(tensor) for tensor in tensors]
        targets = [how.seen(output) for output in outputs]
        kind, is_near = self._kind(how, contributions)

        def through_the_service() -> LaneOperation:
            return self._start(what, kind, contributions, targets, list(outputs), timeout_s)

        near = self._near_sums
        if near is None or not is_near:
            return through_the_service()
        found = self._place(what, kind, near.goes_in_shares(kind, contributions), timeout_s)
        if found is None:
            return through_the_service()
        place, agreement = found
        options = NearSumOptions(through_the_service, is_awaited, agreement)
        return near.reduce(place, kind, Call(what, list(outputs), timeout_s), contributions, targets, options)

    def reduce_scatter(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        output: torch.Tensor,
        how: Reduction,
        timeout_s: float,
        is_awaited: bool,
    ) -> Pending:
        """Reduce ``tensors`` end to end, of which ``output`` is this member's even share. ``is_awaited`` as above."""
        contributions = [how.prepare(tensor) for tensor in tensors]
        target = how.seen(output)
        count = sum(tensor.numel() for tensor in contributions)
        members = self._members.count
        kind = OperationKind(
            how.op,
            wire_dtype(target.dtype, None),
            (members, count // members),
            how.average,
            scatters=True,
            terms=how.terms,
        )

        def through_the_service() -> LaneOperation:
            return self._start(what, kind, contributions, [target], [output], timeout_s)

        near = self._near_sums
        if near is None or not near.suits(kind, contributions):
            return through_the_service()
        found = self._place(what, kind, near.goes_in_shares(kind, contributions), timeout_s)
        if found is None:
            return through_the_service()
        place, agreement = found
        options = NearSumOptions(through_the_service, is_awaited, agreement)
        return near.reduce_scatter(place, kind, Call(what, [output], timeout_s), contributions, target, options)

    def broadcast(self, what: str, tensor: torch.Tensor, root: int, timeout_s: float) -> Pending:
        """Copy the tensor of the member at ``root`` to all. Any dtype.

        On one machine only the first of a kind goes through the service, where members find out if they disagree; so do
        small sums.
        """
        view = bits_of(tensor)
        kind = OperationKind(Op.BROADCAST, wire_dtype(view.dtype, None), (view.numel(),), root=self._members.root(root))
        if self._near is not None and tensor.is_cpu:
            place = self._known(kind)
            if place is not None:
                return self._near.broadcast(place, tensor, root, timeout_s)
        sends = [view] if root == self._members.position else []
        targets = [] if sends else [view]
        return self._start(what, kind, sends, targets, [tensor], timeout_s, device_of([tensor]))

    def barrier(self, timeout_s: float) -> Pending:
        """Done when every member has called it."""

        def through_the_service() -> Pending:
            token = torch.zeros(1, dtype=torch.uint8)
            return self._start("barrier", OperationKind(Op.SUM, DType.UINT8, (1,)), [token], [], [], timeout_s)

        if self._near is not None and self._has_met_at_barrier:
            return self._near.barrier(through_the_service, timeout_s)
        self._has_met_at_barrier = True  # as with a broadcast
        return through_the_service()

    def _kind(self, how: Reduction, contributions: Sequence[torch.Tensor]) -> tuple[OperationKind, bool]:
        """That of a sum of these, and whether members on one machine add it up among themselves."""
        first = contributions[0]
        if len(contributions) > 1:
            count, is_on_cpu = sum(tensor.numel() for tensor in contributions), all(t.is_cpu for t in contributions)
        else:
            count, is_on_cpu = first.numel(), first.is_cpu
        key = how.op, how.average, how.terms, first.dtype, count, is_on_cpu
        found = self._kinds.get(key)
        if found is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            kind = OperationKind(how.op, wire_dtype(first.dtype, None), (count,), how.average, terms=how.terms)
            is_near = self._near_sums is not None and self._near_sums.suits(kind, contributions)
            found = self._kinds[key] = kind, is_near
        return found

    def _place(
        self, what: str, kind: OperationKind, goes_in_shares: bool, timeout_s: float
    ) -> tuple[int, Pending | None] | None:
        """That of a kind, for a sum among neighbours, and what has to come before. None: a round through the service
        has to, in which members find out whether they agree."""
        place = self._known(kind)
        if place is not None:
            return place, None
        return self._agree(what, kind, timeout_s) if goes_in_shares else None

    def _known(self, kind: OperationKind) -> int | None:
        """The place of a kind that is not used for the first time."""
        with self._lock:
            self._forget_failed()
            place = self._places.find(kind)
            return place.number if place.calls else None

    def _agree(self, what: str, kind: OperationKind, timeout_s: float) -> tuple[int, Pending]:
        """All members call this kind for the first time: the place that it gets, and a round of one element, in which
        they find out if they differ. A round of the kind itself would need memory of its size."""
        with self._lock:
            self._around.check()
            self._forget_failed()
            place = self._places.find(kind)
            lane = self._lane_at(place, place.next_lane(1))
            self._around.finish(lane.occupant)
            spec = self._spec(kind, place, 0)
            lane.declare(replace(spec, shape=(1,), scatters=False, terms=f"to agree on {kind}"))
            place.declared.pop(0, None)
            here = torch.device("cpu")
            work = LaneOperation(
                self._around,
                self._completer,
                Call(what, [], timeout_s),
                lane,
                here,
                lambda: self._failed.append((kind, place)),
            )
            lane.begin(here, [(0, torch.zeros(1, dtype=lane.result.dtype))])
            lane.occupant = work
            return place.number, work

    def _forget_failed(self) -> None:
        while self._failed:
            self._places.forget(*self._failed.popleft())

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        with self._lock:
            for place in self._places.all():
                for lane in place.lanes:
                    self._around.finish(lane.occupant)
        if self._near_sums is not None:
            self._near_sums.finish()

    def _start(
        self,
        what: str,
        kind: OperationKind,
        sends: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
        timeout_s: float,
        device: torch.device | None = None,
    ) -> LaneOperation:
        where = device_of(sends) if device is None else device
        for target in targets:
            check_writable(target)
        due = _end_to_end(targets)
        with self._lock:
            self._around.check()
            self._forget_failed()
            place = self._places.find(kind)
            lane = self._lane(kind, place)
            work = LaneOperation(
                self._around,
                self._completer,
                Call(what, outputs, timeout_s, lambda: lane.fetch(where, due)),
                lane,
                where,
                lambda: self._failed.append((kind, place)),
            )
            work.number = self._around.journal.record((what, kind), lane.name)
            lane.begin(where, _end_to_end(sends), due=due)
            lane.occupant = work
            return work

    def _lane(self, kind: OperationKind, place: Place) -> Lane:
        width = lanes_for(math.prod(kind.shape) * kind.dtype.itemsize)
        calls, number = place.calls, place.next_lane(width)
        lane = self._lane_at(place, number)
        self._around.finish(lane.occupant)
        if calls == 1 and self._is_small(kind):
            self._declare_others(kind, place, width)
        if place.declared.get(number) != kind or not lane.usable:
            lane.declare(self._spec(kind, place, number))
            place.declared[number] = kind
        return lane

    def _lane_at(self, place: Place, number: int) -> Lane:
        while len(place.lanes) <= number:
            place.lanes.append(Lane(self._members.session, self._members.mover))
        return place.lanes[number]

    def _is_small(self, kind: OperationKind) -> bool:
        return math.prod(kind.shape) * kind.dtype.itemsize <= _SMALL

    def _declare_others(self, kind: OperationKind, place: Place, width: int) -> None:
        """All lanes but the first one, in which members have met: had they disagreed there, votes in other lanes would
        stay, for those who call something else in this place."""
        lanes = [self._lane_at(place, number) for number in range(1, width)]
        for lane in lanes:
            self._around.finish(lane.occupant)
        slots = self._members.session.declare([self._spec(kind, place, number) for number in range(1, width)])
        for number, (lane, slot) in enumerate(zip(lanes, slots, strict=True), 1):
            lane.adopt(slot)
            place.declared[number] = kind

    def _spec(self, kind: OperationKind, place: Place, number: int) -> TensorSpec:
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


def _end_to_end(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    places = []
    first = 0
    for tensor in tensors:
        places.append((first, tensor))
        first += tensor.numel()
    return places
