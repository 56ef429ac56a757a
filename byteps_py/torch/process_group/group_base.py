"""The common part of a group's collectives: their arguments (reduce operations, options, lists of tensors), the group's
operations, coalescing, checks; and its interface to torch.distributed beside collectives: names, device types, the
backend, options. Any thread.

A group is its own backend: torch looks for a backend for each device type and asks for its features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from byteps_py.errors import BytePSError, NonFiniteInputError, UsageError
from byteps_py.tensors import NonFinite, Op
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.all_reduce.large import LargeSumQueue
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.dtypes import WIRE, check_dense
from byteps_py.torch.collectives.group_collectives import GroupCollectives, Reduction
from byteps_py.torch.collectives.group_work import CallLog, CombinedWork, GroupContext
from byteps_py.torch.collectives.job_connections import RECORD_BYTES, addresses_of, machines_of, record_of
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.peer_streams import PeerStreams
from byteps_py.torch.collectives.recording import GroupRecorder
from byteps_py.torch.collectives.router import ConnectedMachines
from byteps_py.torch.collectives.service_gathers import ServiceGathers
from byteps_py.torch.collectives.work import Call, Work
from byteps_py.torch.process_group import NAME

if TYPE_CHECKING:
    from byteps_py.torch.collectives.all_reduce.local_groups import LocalGroupAllReduce

    # torch's own annotations differ from what torch calls, and between its versions.
    class _Group:
        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...
        def size(self) -> int: ...
else:
    _Group = dist.ProcessGroup
_DEVICES = ("cpu", "cuda")


class _DeviceTypes(list[torch.device]):
    """Device types of a group that torch does not know yet. If the list is true, torch asks C++ for the backend, which
    has none because the group itself is the backend. So the list is false, but torch can iterate over it."""

    def __bool__(self) -> bool:
        return False


class GroupMetadata(_Group):
    """The part of a group that answers torch's questions about it."""

    def __init__(self, rank: int, size: int, options: Backend.Options) -> None:
        super().__init__(rank, size)
        self._name = self._description = ""
        self._options = options
        self._bound_device: torch.device | None = None
        self._is_split = False  # from another group

    # ---- names -----------------------------------------------------------------------------------------

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    # ---- the backend -----------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        found = [torch.device(name) for name in _DEVICES if name == "cpu" or torch.cuda.is_available()]
        known: Any = dist.distributed_c10d._world.pg_map
        if self in known:
            return found
        # Before torch knows the group, it would look for a backend for each type. The only backend is the group itself.
        return _DeviceTypes(found if self._is_split else ())

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_default_backend(self, backend_type: Any) -> None:
        """Without effect: the group is its only backend."""

    def _register_backend(self, *args: Any, **kwargs: Any) -> None:
        """Without effect: the group is its only backend."""

    @property
    def options(self) -> Backend.Options:
        return self._options

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        # A DeviceMesh would try to split a group that is bound to a device.
        if self.supports_splitting:
            self._bound_device = device

    #: Before torch 2.9, split_group() makes a group in C++ whose backend can't be written in Python.
    supports_splitting = hasattr(dist.ProcessGroup, "split_group")
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Without effect: a group is connected from the beginning."""

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Without effect: members that are not in a split take no part in it."""

    def _set_sequence_number_for_group(self) -> None:
        """Without effect: operations are matched by name."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Without effect: there are no hooks to wait for."""

    def __repr__(self) -> str:
        return f"<byteps process group {self._name!r}: rank {self.rank()} of {self.size()}>"


Kinds: Any = dist.ReduceOp.RedOpType
Tensors = torch.Tensor | Sequence[torch.Tensor]
_WIRE_OPS = {Kinds.SUM: Op.SUM, Kinds.AVG: Op.SUM, Kinds.MIN: Op.MIN, Kinds.MAX: Op.MAX, Kinds.PRODUCT: Op.PRODUCT}
_BITWISE = {Kinds.BAND: torch.bitwise_and, Kinds.BOR: torch.bitwise_or, Kinds.BXOR: torch.bitwise_xor}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """The Reduction for torch's ``op``. Raises UsageError for an operation that is not defined for ``dtype``."""
    kind, factor = kind_of(op)
    if factor is None:
        return _reduction(kind, dtype)
    if not (dtype.is_floating_point and dtype in WIRE):
        raise _impossible(kind, dtype)
    return Reduction(Op.SUM, factor=factor)


@functools.cache  # comparing kinds takes half of the time
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    if kind in _BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise _impossible(kind, dtype)
        return Reduction(fold=_BITWISE[kind])
    average = kind == Kinds.AVG
    wire = _WIRE_OPS.get(kind)
    if wire is None:
        raise _impossible(kind, dtype)
    if dtype in WIRE:
        return Reduction(wire, average)
    if dtype is torch.bool and not average:  # logical or, logical and
        return Reduction(Op.MAX if wire in (Op.SUM, Op.MAX) else Op.MIN, view=torch.uint8)
    if dtype in (torch.complex64, torch.complex128):
        if wire is Op.SUM:
            return Reduction(wire, average, view=torch.float32 if dtype is torch.complex64 else torch.float64)
        if wire is Op.PRODUCT:
            return Reduction(fold=torch.mul)
    if dtype in _SIGNED and wire is Op.SUM and not average:
        return Reduction(wire, view=_SIGNED[dtype])  # the same bits in two's complement
    raise _impossible(kind, dtype)


def kind_of(op: Any) -> tuple[Any, float | torch.Tensor | None]:
    """(kind, factor of a PREMUL_SUM). Kinds can be compared and hashed, unlike torch's ReduceOp objects."""
    if isinstance(op, Kinds):
        return op, None
    kind, factor = op.__getstate__()
    return kind, factor


def _impossible(kind: Any, dtype: torch.dtype) -> UsageError:
    return UsageError(f"tensors of dtype {dtype} can't be reduced with {kind.name}; convert them first")


def timeout_of(options: Any, default_s: float) -> float:
    """The timeout of an option object, in seconds; ``default_s`` if it has none."""
    timeout: timedelta | None = getattr(options, "timeout", None)
    limit_s = timeout.total_seconds() if timeout is not None else 0.0
    return limit_s if limit_s > 0 else default_s


def dense_tensors(tensors: Tensors) -> list[torch.Tensor]:
    """``tensors`` as a list. Raises UsageError for a sparse tensor, or one on the meta device."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in found:
        check_dense(tensor, None)
    return found


def only(tensors: Any, what: str) -> Any:
    """The only element of ``tensors``. Raises UsageError for several: a process has one device in a group."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what}: expected one tensor (or one list) per process, got {len(tensors)}")
    return tensors[0]


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
        self._leave = leave
        self._store = store
        self._building = threading.Lock()
        self._kept_works: deque[Work] = deque(maxlen=_KEPT_WORKS)
        self._splits = itertools.count()
        self._memories = itertools.count()
        self._begin(members, timeout_s)

    def _begin(self, members: Members, timeout_s: float) -> None:
        """Connect to the other members, in the session of ``members``."""
        self._members = members
        check_interval_s = _CHECK_INTERVAL * members.context.settings.patience_s
        # Calls before the collectives have their own log: a member that still connects has not called the first one.
        log = CallLog(connecting(members), self._store)
        self._group_context = GroupContext(members.session, timeout_s, log, check_interval_s)
        self._completer = Completer()
        self._input_check = InputCheck(members)
        # Kept after join(): members may use this group again at any time.
        self._streams: PeerStreams | None = None
        self._large_sums: LargeSumQueue | None = None
        machines = _connect(members, self._group_context, self._completer) if members.may_connect else None
        peers = members.session.peers if members.are_local or machines is not None else None
        if peers is not None:
            self._streams = PeerStreams(members, peers, self._group_context, self._completer, machines)
            self._large_sums = LargeSumQueue(members, self._streams)
            members.context.until_join.update((self._streams, self._large_sums))
        self._new_local_groups = _local_groups(members, self._group_context, self._store)
        self._local_groups: LocalGroupAllReduce | None = None
        flight = members.session.flight if members.count > 1 else None
        self.group_recorder = GroupRecorder(flight, members) if flight is not None else None
        self._coalesced: list[Work] | None = None
        self._joins = -1
        self._latest_collectives: GroupCollectives | None = None
        self._collectives  # noqa: B018  made now, with the group

    def _end(self) -> None:
        """Operations are over, or will never be."""
        if self._large_sums is not None:
            with contextlib.suppress(BytePSError):  # the session may have ended
                self._large_sums.close()
        if self._local_groups is not None:
            self._local_groups.close()

    @property
    def sums_on_gpus(self) -> bool:
        """True if the GPUs of a machine make a part of large sums: see all_reduce/local_groups.py."""
        return self._local_groups is not None

    def begin_anew(self) -> None:
        """Be a group of the context's present session: its earlier one has ended with the loss of a rank. All members
        call it, and those whose processes are new make the group. Raises the errors of its creation."""
        members, timeout_s = self._members, self._group_context.timeout_s
        self._end()
        if members.count > 1:
            members = dataclasses.replace(members, session=members.context.session)
        self._begin(members, timeout_s)

    @property
    def _collectives(self) -> GroupCollectives:
        """The operations of this group. New ones after each ``byteps_py.join()``, which voids declarations,
        and after which members have not called equally often."""
        members = self._members
        joins = members.context.joins
        collectives = self._latest_collectives
        if collectives is None or joins != self._joins:
            with self._building:
                collectives = self._latest_collectives
                if collectives is None or joins != self._joins:
                    if joins:
                        members = dataclasses.replace(members, prefix=f"{members.prefix}.{joins}")
                    self._group_context.journal = CallLog(members, self._store)
                    self._local_groups = self._new_local_groups()
                    collectives = GroupCollectives(
                        members, self._group_context, self._completer, self._streams, self._large_sums,
                        self._local_groups,
                    )  # fmt: skip
                    members.context.until_join.add(collectives)
                    self._latest_collectives, self._joins = collectives, joins
        return collectives

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
        return CombinedWork(self._group_context, Call(what, outputs, self._timeout_s(opts)), works)

    def _timeout_s(self, opts: Any) -> float:
        return timeout_of(opts, self._group_context.timeout_s)

    def _check_count(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise UsageError(f"{what}: expected a tensor for each of {self.size()} ranks, got {len(tensors)}")


def _local_groups(
    members: Members, group_context: GroupContext, store: Store
) -> Callable[[], LocalGroupAllReduce | None]:
    """Makes the sums between GPUs of this group, if there are to be any: see all_reduce/local_groups.py."""
    if members.context.settings.local_sum == "host":
        return lambda: None
    from byteps_py.torch.collectives.all_reduce import local_groups  # what reads machines takes a while to import

    plan = local_groups.agreed_plan(members, store, group_context.timeout_s)
    if not plan.groups:
        return lambda: None
    return lambda: local_groups.LocalGroupAllReduce(members, group_context, store, plan)


def assign(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, which has as many elements."""
    target.detach().copy_(source.view(target.shape))


def connecting(members: Members) -> Members:
    """``members`` while they connect: what they call and log then has names of its own."""
    return dataclasses.replace(members, prefix=f"{members.prefix}.addresses")


def _connect(members: Members, group_context: GroupContext, completer: Completer) -> ConnectedMachines | None:
    """The machines of the group, once all members of other machines are connected to this one: they exchange addresses
    through the communication service, and connect in pairs (session/peers/peer_connector.py). job_connections.py does
    the same for all ranks of a job. None if the settings of a member do not allow that. Raises RendezvousError,
    StallError and the error that ends the session."""
    session, settings, count = members.session, members.context.settings, members.count
    # A group whose operations may take a moment only still has time to be made.
    limit_s = max(group_context.timeout_s, settings.start_timeout_s)
    deadline = time.monotonic() + limit_s
    near = range(session.rank - session.local_rank, session.rank - session.local_rank + session.local_size)
    shares_memory = sum(rank in near for rank in members.ranks) > 1 and shared_memory.is_able()
    mine = torch.frombuffer(bytearray(record_of(session, settings, shares_memory)), dtype=torch.uint8)
    whole = torch.empty(count * RECORD_BYTES, dtype=torch.uint8, device="cpu")
    gathers = ServiceGathers(connecting(members), group_context, completer)
    gathers.even(Op.GATHER, Call("exchange of addresses", [whole], limit_s), mine, whole).wait()
    records = [bytes(record.numpy()) for record in whole.chunk(count)]
    machines = machines_of(records)
    if machines is not None and session.peers is not None and session.peers.connector is not None:
        addresses = addresses_of(records, members.ranks, session.machine_index)
        session.peers.connector.connect(addresses, max(0.0, deadline - time.monotonic()))
    return machines


class InputCheck:
    """BYTEPS_NONFINITE=raise for collectives that add: checks a rank's input before it is sent.

    Like NCCL's TORCH_NCCL_NAN_CHECK. A check inside the sum would cost nothing, but sums that members of one machine
    add themselves, and the pieces of a scattered sum, are seen by one member only, and all members must learn the
    guilty rank. The rank with the values raises and, if the script does not catch the error, ends; then the other ranks
    raise an error with its message. Minima, maxima and products are not checked: they may be infinite on purpose.
    Threads call it in the order of the group's operations.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._wanted = nonfinite.mode_of(members.context) is NonFinite.RAISE
        self._sums = itertools.count(1)

    def check(self, what: str, tensors: Sequence[torch.Tensor], how: Reduction) -> None:
        """Raises NonFiniteInputError if any of ``tensors`` is not finite and they are to be added."""
        if not self._wanted or how.op is not Op.SUM or how.fold is not None or not _is_floating(tensors[0]):
            return
        number = next(self._sums)
        for position, tensor in enumerate(tensors):
            if not nonfinite.is_finite(tensor):
                name = what if len(tensors) == 1 else f"{what}, tensor {position}"
                ranks = ", ".join(map(str, self._members.ranks))
                raise NonFiniteInputError(
                    f"NaN or infinity from rank {self._members.ranks[self._members.position]}, sum {number} of the "
                    f"process group of ranks {ranks}: {nonfinite.where(name, tensor)}, of shape {list(tensor.shape)}; "
                    "look at the batch and the loss there. BYTEPS_NONFINITE=allow lets the values pass, which a "
                    "GradScaler needs"
                )


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
