"""The common part of a group's collectives: the engine that carries operations out, coalescing, checks. Any thread."""

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
from byteps_py.torch.engine import group_connections
from byteps_py.torch.engine.call_log import CallLog
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.group_engine import GroupEngine
from byteps_py.torch.engine.group_work import CombinedWork, GroupContext
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.peer_streams import PeerStreams
from byteps_py.torch.engine.work import Call, Work
from byteps_py.torch.process_group.collective_arguments import timeout_of
from byteps_py.torch.process_group.group_metadata import GroupMetadata
from byteps_py.torch.process_group.input_check import InputCheck

#: The interval of checks during a wait, in units of the time after which a silent service counts as lost.
_CHECK_INTERVAL = 1.2
#: The number of latest reductions of one element that are kept alive. DistributedDataParallel in join() passes such a
#: work to C++ and drops it. C++ asks it for its future in the next backward pass, which fails if Python has freed it.
_KEPT_WORKS = 64


class GroupBase(GroupMetadata):
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
        check_interval_s = _CHECK_INTERVAL * members.context.settings.patience_s
        self._group_context = GroupContext(members.session, timeout_s, CallLog(members, store), check_interval_s)
        self._completer = Completer()
        self._input_check = InputCheck(members)
        self._streams = None  # kept after join(): members may use this group again at any time
        machines = (
            group_connections.connect(members, self._group_context, self._completer) if members.may_connect else None
        )
        peers = members.session.peers if members.are_local or machines is not None else None
        if peers is not None:
            self._streams = PeerStreams(members, peers, self._group_context, self._completer, machines)
            members.context.until_join.add(self._streams)
        self._coalesced: list[Work] | None = None
        self._kept_works: deque[Work] = deque(maxlen=_KEPT_WORKS)
        self._splits = itertools.count()
        self._memories = itertools.count()
        self._building = threading.Lock()
        self._joins = -1
        self._latest_engine: GroupEngine | None = None
        self._engine  # noqa: B018  made now, with the group

    @property
    def _engine(self) -> GroupEngine:
        """The engine that carries operations out. A new one after each ``byteps_py.join()``, which voids declarations,
        and after which members have not called equally often."""
        members = self._members
        joins = members.context.joins
        engine = self._latest_engine
        if engine is None or joins != self._joins:
            with self._building:
                engine = self._latest_engine
                if engine is None or joins != self._joins:
                    if joins:
                        members = dataclasses.replace(members, prefix=f"{members.prefix}.{joins}")
                    self._group_context.journal = CallLog(members, self._store)
                    engine = GroupEngine(members, self._group_context, self._completer, self._streams)
                    members.context.until_join.add(engine)
                    self._latest_engine, self._joins = engine, joins
        return engine

    # ---- coalescing ------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(self._group_context, Call("coalesced operations", [], self._group_context.timeout_s), works)

    def _record(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _combine(self, what: str, works: Sequence[Work], outputs: list[torch.Tensor], opts: Any) -> Work:
        if len(works) == 1:
            return works[0]
        return CombinedWork(self._group_context, Call(what, outputs, self._limit(opts)), works)

    def _limit(self, opts: Any) -> float:
        return timeout_of(opts, self._group_context.timeout_s)

    def _check_count(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise UsageError(f"{what}: expected a tensor for each of {self.size()} ranks, got {len(tensors)}")


def assign(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, which has as many elements."""
    target.detach().copy_(source.view(target.shape))
