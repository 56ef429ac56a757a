"""What all collectives of a group stand on: the parts that carry operations out, coalescing, common checks."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, Store

from byteps_py.errors import UsageError
from byteps_py.torch.engine.call_log import CallLog
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.operation import Together
from byteps_py.torch.engine.peer_collectives import NearCollectives
from byteps_py.torch.engine.peer_streams import Near
from byteps_py.torch.engine.peer_sums import NearReductions
from byteps_py.torch.engine.point_to_point import PointToPoint
from byteps_py.torch.engine.service_gathers import GroupGathers
from byteps_py.torch.engine.service_reductions import Reductions
from byteps_py.torch.engine.work import GroupContext, Pending
from byteps_py.torch.process_group.arguments import seconds
from byteps_py.torch.process_group.identity import Identity
from byteps_py.torch.process_group.input_check import InputCheck

#: In units of the time after which a silent service counts as lost.
_LOOKS = 1.2
#: Reductions of one number that stay alive when their caller lets go of them. DistributedDataParallel in join() hands
#: such a one to C++, which asks it for its future in the next backward; of a work whose Python half has gone by then,
#: C++ finds no methods.
_TOKENS = 64


class Parts(Identity):
    """A group without its collectives."""

    def __init__(
        self,
        members: Members,
        store: Store,
        timeout_s: float,
        options: Backend.Options,
        leave: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(members.position, members.count, options)
        self._members = members
        self._store = store
        self._leave = leave
        look_s = _LOOKS * members.context.settings.patience_s
        self._around = GroupContext(members.session, timeout_s, CallLog(members, store), look_s)
        self._completer = Completer()
        self._input_check = InputCheck(members)
        neighbours = members.neighbours
        self._near = None  # stays: members that have joined may come back to this group at any time, or never
        if neighbours is not None:
            self._near = Near(members, neighbours, self._around, self._completer)
            members.context.until_join.add(self._near)
        self._coalesced: list[Pending] | None = None
        self._tokens: deque[Pending] = deque(maxlen=_TOKENS)
        self._splits = itertools.count()
        self._building = threading.Lock()
        self._joins = -1
        self._parts = self._built()

    def _built(self) -> tuple[Reductions, GroupGathers, PointToPoint]:
        """The parts, new ones after each ``byteps_py.join()``: what they have declared is void, and members have not
        called equally often."""
        members = self._members
        joins = members.context.joins
        if joins != self._joins:
            with self._building:
                if joins != self._joins:
                    if joins:
                        members = dataclasses.replace(members, prefix=f"{members.prefix}.{joins}")
                    self._around.journal = CallLog(members, self._store)
                    near = self._near
                    collectives = NearCollectives(members, near) if near is not None else None
                    sums = NearReductions(members, near) if near is not None else None
                    reductions = Reductions(members, self._around, self._completer, collectives, sums)
                    direct = GroupGathers(members, self._around, self._completer, collectives)
                    channels = PointToPoint(members, self._around, near)
                    members.context.until_join.update((reductions, direct))
                    self._parts, self._joins = (reductions, direct, channels), joins
        return self._parts

    @property
    def _reductions(self) -> Reductions:
        return self._built()[0]

    @property
    def _direct(self) -> GroupGathers:
        return self._built()[1]

    @property
    def _channels(self) -> PointToPoint:
        return self._built()[2]

    # ---- coalescing ------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Pending:
        works, self._coalesced = self._coalesced or [], None
        return Together(self._around, "coalesced operations", works, [], self._around.timeout_s)

    def _record(self, work: Pending) -> Pending:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, what: str, works: Sequence[Pending], outputs: list[torch.Tensor], opts: Any) -> Pending:
        return works[0] if len(works) == 1 else Together(self._around, what, works, outputs, self._limit(opts))

    def _limit(self, opts: Any) -> float:
        return seconds(opts, self._around.timeout_s)

    def _check_count(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise UsageError(f"{what}: expected a tensor for each of {self.size()} ranks, got {len(tensors)}")


def assign(target: torch.Tensor, source: torch.Tensor) -> None:
    target.detach().copy_(source.view(target.shape))
