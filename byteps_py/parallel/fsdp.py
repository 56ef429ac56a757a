"""FSDP2 on several machines: gathered parameters of a machine's ranks stay in memory that they share.

``cache_parameters`` gives the FSDP2 modules of a model an all-gather whose results a machine keeps, until a piece
changes (``CachedAllGather``). ``GatheredMemory`` says which rank receives which piece from another machine.

FSDP2 calls ``allocate``, copies this rank's piece into its part of the output, and calls the object. This rank's piece
is compared, byte by byte, with the one that is kept, so a change is noticed however it was made: by an optimizer, by
``load_state_dict``, through ``.data``.

    in a forward pass    all ranks tell each other whether their pieces have changed; only those that have travel
    in a backward pass   nothing is said and nothing travels: what the forward pass has gathered is still there

A rank overwrites what is kept only after all ranks have said something about this gather. By then they have copied the
result of the last one, because FSDP2 copies a gather's output before it begins the module's next gather.

All members of the group exchange in the same order, as FSDP2 orders its all-gathers. The thread that runs the model
calls everything here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from byteps_py.errors import BytePSError, MismatchError, UnsupportedError, UsageError
from byteps_py.parallel.collectives import ALL_GATHER, all_gather_single
from byteps_py.parallel.compressed_gradients import compress_gradients as compress_gradients
from byteps_py.system.process_memory import available_memory_bytes
from byteps_py.system.shm import PAGE
from byteps_py.torch.process_group.byteps_process_group import BytePSProcessGroup


@dataclass(frozen=True)
class GatherPlan:
    """``machines``: the machine of each member of a group, by position. Members of a machine need not be adjacent, and
    machines may have different numbers of them. ``position``: of this process.

    The pieces of a machine's members are dealt out in turn to the members of each other machine. So with as many
    members on each machine, each member receives one piece from each other machine.

    >>> plan = GatherPlan((0, 0, 1, 1), position=1)
    >>> plan.sends({0, 1, 2, 3})  # this member's piece goes to one member of machine 1
    [3]
    >>> plan.receives({0, 1, 2, 3})
    [3]
    """

    machines: tuple[int, ...]
    position: int

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """The positions on each machine."""
        found: dict[int, list[int]] = {}
        for position, machine in enumerate(self.machines):
            found.setdefault(machine, []).append(position)
        return found

    def receiver(self, owner: int, machine: int) -> int:
        """The position on ``machine``, another one than the owner's, that receives the piece of ``owner``."""
        others = self.members[machine]
        return others[self.members[self.machines[owner]].index(owner) % len(others)]

    def sends(self, owners: Collection[int]) -> Sequence[int]:
        """The positions to which this member sends its piece, if the pieces of ``owners`` are to travel."""
        if self.position not in owners:
            return []
        own = self.machines[self.position]
        return [self.receiver(self.position, machine) for machine in self.members if machine != own]

    def receives(self, owners: Collection[int]) -> Sequence[int]:
        """The ``owners`` whose pieces this member receives."""
        own = self.machines[self.position]
        return [
            owner
            for owner, machine in enumerate(self.machines)
            if owner in owners and machine != own and self.receiver(owner, own) == self.position
        ]


_libc = ctypes.CDLL(None)  # its calls release the GIL
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
#: A member's message about its piece.
SAME, CHANGED, NOTHING_KEPT = 0, 1, 2


def are_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two contiguous tensors in the host's memory, of as many bytes, have the same bits: NaN is like NaN, and 0
    is unlike -0."""
    return not _libc.memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)


class GatheredMemory:
    """``capacity_bytes``: how much of it there is for all layers of ``group``. Creating it is a collective.

    Raises MismatchError, on all members, if they give different capacities, and the errors of ``share_memory``.
    """

    def __init__(self, group: BytePSProcessGroup, capacity_bytes: int) -> None:
        self._group = cast(dist.ProcessGroup, group)
        count = group.size()
        self._flags = torch.zeros(count, dtype=torch.uint8, device="cpu")
        self._own_flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        stated = torch.empty(count, 2, dtype=torch.int64, device="cpu")
        own = torch.tensor([[group.machine_index, capacity_bytes]], dtype=torch.int64, device="cpu")
        all_gather_single(stated, own, self._group)
        machines, capacities = stated.T.tolist()
        if len(set(capacities)) > 1:
            raise MismatchError(
                f"cache_parameters: the ranks of a process group would keep {capacities} bytes; give the same model "
                "and max_bytes on every rank"
            )
        self._plan = GatherPlan(tuple(machines), group.rank())
        self._memory = group.share_memory(max(PAGE, capacity_bytes))
        self._capacity_bytes = capacity_bytes
        self.used_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory for ``nbytes`` of a layer, uint8; None if there is not as much left. All members call it alike."""
        rounded = -(-nbytes // PAGE) * PAGE
        first = self.used_bytes
        if first + rounded > self._capacity_bytes:
            return None
        self.used_bytes += rounded
        return self._memory.octets[first : first + nbytes]

    def check(self) -> None:
        """Raises the error that has ended the group or the session."""
        self._memory.check()

    def agree(self, flag: int) -> list[int]:
        """The members whose pieces have to travel: those that say CHANGED, or all if one says NOTHING_KEPT. When it
        returns, all members have called it, so none reads the parameters that were gathered before."""
        self._own_flag.fill_(flag)
        all_gather_single(self._flags, self._own_flag, self._group)
        flags = self._flags.tolist()
        if NOTHING_KEPT in flags:
            return list(range(len(flags)))
        return [position for position, each in enumerate(flags) if each == CHANGED]

    def exchange(self, place: torch.Tensor, piece: torch.Tensor, owners: Collection[int]) -> None:
        """Bring the pieces of ``owners`` to their parts of ``place``, which was taken for this layer. ``piece``: this
        member's, uint8. Each piece comes to each other machine once. When it returns, all of ``place`` may be read."""
        plan, count = self._plan, self._group.size()
        parts = place.chunk(count)
        if self._group.rank() in owners:
            parts[plan.position].copy_(piece)
        if len(plan.members) > 1:
            sends, receives = [self._nothing] * count, [self._nothing] * count
            for target in plan.sends(owners):
                sends[target] = piece
            for source in plan.receives(owners):
                receives[source] = parts[source]
            dist.all_to_all(receives, sends, group=self._group)
        self._memory.wait_for_others()

    def close(self, is_collective: bool) -> None:
        """Give the memory back. ``is_collective``: all members on this machine call it, and wait for each other before;
        otherwise it is given back when all of them have closed the session."""
        if is_collective:
            self._memory.wait_for_others()
            self._memory.forget()
        self.used_bytes = 0


class CachedAllGather:
    """An all-gather for ``FSDPModule.set_custom_all_gather``. ``name``: of the module, for messages. ``memory_of``: the
    memory of a process group."""

    def __init__(self, name: str, memory_of: Callable[[dist.ProcessGroup], GatheredMemory]) -> None:
        self._name = name
        self._memory_of = memory_of
        self._memory: GatheredMemory | None = None
        self._group: dist.ProcessGroup | None = None  # over which the module is sharded
        self._place: torch.Tensor | None = None  # the parameters that are kept; None: this layer's are not
        self._is_whole = False  # all ranks have gathered all pieces, and agree on them
        self.is_closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of this module's parameters that this machine keeps."""
        return 0 if self._place is None else self._place.nbytes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The output. Of one that is kept only this rank's part is ever touched. Raises UnsupportedError for a device
        other than the CPU."""
        if device.type != "cpu":
            raise UnsupportedError(
                f"cache_parameters: module {self._name!r} is gathered on {device}; so far only parameters on the CPU "
                "can be kept. Leave cache_parameters out"
            )
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather, and let ``output_tensor`` be the memory of this machine. Returns a Work only where torch's own gather
        does the work: for a layer beyond ``max_bytes``, and for the smaller groups of ``reshard_after_forward=N``.

        Raises UsageError for a parameter that has changed between its forward and its backward pass.
        """
        if self._memory is None and not self.is_closed:
            self._memory, self._group = self._memory_of(group), group
            self._place = self._memory.take(output_tensor.nbytes)
        place, memory = self._place, self._memory
        if memory is None or place is None or group is not self._group or place.nbytes != output_tensor.nbytes:
            return getattr(dist, ALL_GATHER)(output_tensor, input_tensor, group=group, async_op=async_op)
        memory.check()
        piece = input_tensor.view(torch.uint8)
        own = place.chunk(group.size())[group.rank()]
        is_same = are_same_bytes(own, piece)
        if self._is_whole and torch._C._current_graph_task_id() != -1:  # a backward pass, as in FSDP2 itself
            if not is_same:
                raise UsageError(
                    f"cache_parameters: a parameter of module {self._name!r} has changed between its forward and its "
                    "backward pass; change parameters before the forward pass, or after the backward pass"
                )
        else:
            self._update(memory, place, piece, is_same)
        # FSDP2 goes on with the object that it gave, so it copies this memory to the parameters next.
        whole = place.view(output_tensor.dtype)
        output_tensor.set_(whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride())
        return None

    def _update(self, memory: GatheredMemory, place: torch.Tensor, piece: torch.Tensor, is_same: bool) -> None:
        owners = memory.agree(NOTHING_KEPT if not self._is_whole else SAME if is_same else CHANGED)
        if owners:
            self._is_whole = False  # until the exchange has succeeded
            memory.exchange(place, piece, owners)
            self._is_whole = True

    def close(self) -> None:
        """Gather as torch does from now on."""
        self._memory = self._group = self._place = None
        self._is_whole, self.is_closed = False, True


_caches: weakref.WeakKeyDictionary[nn.Module, ParameterCache] = weakref.WeakKeyDictionary()


class ParameterCache:
    """The gathered parameters that this machine keeps for one model. ``cache_parameters`` creates it."""

    def __init__(self, modules: Sequence[tuple[str, FSDPModule]], capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._memories: dict[dist.ProcessGroup, GatheredMemory] = {}
        self._gathers: list[CachedAllGather] = []
        for name, module in modules:
            gather = CachedAllGather(name, self._memory_of)
            try:
                module.set_custom_all_gather(cast(Any, gather))
            except ValueError as error:
                raise UnsupportedError(f"cache_parameters: module {name!r}: {error}") from error
            self._gathers.append(gather)

    @property
    def kept_bytes(self) -> int:
        """Bytes of parameters that this machine keeps, for the process groups of this rank. 0 before the first
        gather."""
        return sum(gather.kept_bytes for gather in self._gathers)

    def close(self) -> None:
        """Give the memory back; the model gathers as torch does from now on. All ranks call it, outside of a step.

        It raises nothing if the process group or the session has ended: then the memory is given back when all ranks of
        the machine have left the session. Raises StallError, and the error that ends the session meanwhile.
        """
        memories, self._memories = self._memories, {}
        for gather in self._gathers:
            gather.close()
        for memory in memories.values():
            memory.close(is_collective=_is_usable(memory))

    @property
    def is_closed(self) -> bool:
        """True after ``close``."""
        return all(gather.is_closed for gather in self._gathers)

    def _memory_of(self, group: dist.ProcessGroup) -> GatheredMemory:
        memory = self._memories.get(group)
        if memory is None:
            ours = cast(object, group)
            if not isinstance(ours, BytePSProcessGroup):
                raise UnsupportedError(
                    f"cache_parameters: the model is sharded over a process group of backend {group.name()!r}; it "
                    'needs the backend "byteps": dist.init_process_group("byteps")'
                )
            memory = self._memories[group] = GatheredMemory(ours, self._capacity_bytes)
        return memory


def cache_parameters(
    model: nn.Module,
    max_bytes: int | None = None,
    available_bytes: Callable[[], float] = available_memory_bytes,
) -> ParameterCache:
    """Keep the gathered parameters of an FSDP2 model in memory that the ranks of a machine share.

    Each byte comes to a machine once, however many ranks it has, when it has changed; the gathers of backward passes,
    and those of further forward passes with the same parameters, take no network. Results are those of FSDP2 without
    it, bit for bit.

    Args:
        model: after ``fully_shard``, over the backend "byteps", with its parameters on the CPU. Its submodules may be
            sharded, too. All ranks call this function, before the first forward pass or between two steps.
        max_bytes: how many bytes of parameters a machine keeps for one process group; the same on all ranks. Modules
            that do not fit, in the order in which they are gathered first, are gathered as without this function. None:
            all are kept. A model needs the bytes of all its parameters, in the ``param_dtype`` of its
            MixedPrecisionPolicy, for each group over which it is sharded that has a rank on the machine. That there is
            as much is checked for one group.
        available_bytes: the memory that the machine has left.

    Returns:
        The cache. ``close`` gives the memory back, as the end of all ranks does.

    Raises:
        UnsupportedError: torch is older than 2.9, or parameters are not on the CPU; from the first forward pass: the
            backend is another one.
        UsageError: the model has no FSDP2 module, or already has a cache; max_bytes is negative; this machine has too
            little memory.

    A parameter that has changed between a forward pass and its backward pass raises UsageError in the backward pass.
    After the process group or the session has ended, every forward and backward pass raises UsageError or
    NotInitializedError.

    >>> cache_parameters(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    byteps_py.errors.UsageError: cache_parameters: the model has no FSDP2 module; call fully_shard() first
    """
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise UnsupportedError(
            f"cache_parameters: torch {torch.__version__} has no FSDPModule.set_custom_all_gather; it needs torch 2.9"
        )
    modules = [(name or "(the model)", each) for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    if not modules:
        raise UsageError("cache_parameters: the model has no FSDP2 module; call fully_shard() first")
    if (earlier := _caches.get(model)) is not None and not earlier.is_closed:
        raise UsageError("cache_parameters: this model already has a cache; close() that first")
    if max_bytes is not None and max_bytes < 0:
        raise UsageError(f"cache_parameters: max_bytes is {max_bytes}; it can't be negative")
    capacity_bytes = needed_bytes = 0
    for name, param, dtype in _sharded(modules):
        if param.device.type not in ("cpu", "meta"):
            raise UnsupportedError(
                f"cache_parameters: parameter {name!r} lies on {param.device}; so far only parameters on the CPU can "
                "be kept. Leave cache_parameters out"
            )
        # Each rank's piece may be padded by a row, and each module to a page.
        padded = param.numel() + dist.get_world_size() * param.numel() // max(1, param.shape[0] if param.dim() else 1)
        needed_bytes += param.numel() * dtype.itemsize
        capacity_bytes += padded * max(dtype.itemsize, param.dtype.itemsize) + PAGE
    if max_bytes is not None:
        capacity_bytes, needed_bytes = min(max_bytes, capacity_bytes), min(max_bytes, needed_bytes)
    left = available_bytes()
    if needed_bytes > left:
        raise UsageError(
            f"cache_parameters: the gathered parameters take {needed_bytes:,} bytes of this machine's memory, and "
            f"{left:,.0f} are left; max_bytes keeps a part of them"
        )
    cache = _caches[model] = ParameterCache(modules, capacity_bytes)
    return cache


def _sharded(modules: Sequence[tuple[str, FSDPModule]]) -> Iterator[tuple[str, nn.Parameter, torch.dtype]]:
    """Each parameter of the modules, and the dtype in which it is gathered."""
    seen: set[nn.Parameter] = set()
    for name, module in reversed(modules):  # submodules come after their modules, and have parameters of their own
        policy = getattr(cast(Any, module)._get_fsdp_state(), "_mp_policy", None)
        for inner, param in cast(nn.Module, module).named_parameters():
            if param not in seen:
                seen.add(param)
                yield f"{name}.{inner}", param, getattr(policy, "param_dtype", None) or param.dtype


def _is_usable(memory: GatheredMemory) -> bool:
    try:
        memory.check()
    except BytePSError:
        return False
    return True
