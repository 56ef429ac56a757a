"""What operations can be called, how they get their names, and how broadcasts are started. Any thread.

Reductions are started in reductions.py; what is gathered or exchanged without being combined, in collectives/. The
public functions are elsewhere: what they differ in (synchronous or not, in place or not) is there.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Op, TensorSpec
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.dtypes import bits_of, check_dense, check_result, wire_dtype
from byteps_py.torch.engine.named_work import Attempt, NamedWork
from byteps_py.torch.engine.slot_view import TensorRequest

#: What BytePS's module of this name has; here they are api.py's, which stands on this one.
_OF_BYTEPS = frozenset(
    {
        *("init", "shutdown", "suspend", "resume", "rank", "size", "local_rank", "local_size"),
        *("declare", "poll", "synchronize", "get_pushpull_speed"),
        *("push_pull", "push_pull_async", "push_pull_inplace", "push_pull_async_inplace"),
    }
)


def __getattr__(name: str) -> Any:
    if name not in _OF_BYTEPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("byteps_py.torch"), name)


class ReduceOp(enum.Enum):
    """How the ranks' tensors are combined."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    @property
    def wire_op(self) -> Op:
        """Raises UsageError for Adasum, which is no single operation of the service."""
        if self is ReduceOp.ADASUM:
            raise UsageError("op=Adasum is not possible here, only in allreduce and its kin")
        return Op.SUM if self is ReduceOp.AVERAGE else Op[self.name]


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


def which_op(average: bool, op: ReduceOp | None) -> ReduceOp:
    """The operation that the two arguments name. Raises UsageError if they contradict each other."""
    if op is None:
        return Average if average else Sum
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op must be one of Average, Sum, Min, Max, Product, got {op!r}")
    if op is Average and not average:
        raise UsageError("average=False contradicts op=Average; give one of them")
    return op


def listed(tensors: Any) -> list[torch.Tensor]:
    """The tensors of a group. Raises UsageError for one tensor, whose rows are no group."""
    if isinstance(tensors, torch.Tensor):
        raise UsageError("a group is a list of tensors, got one tensor")
    return list(tensors)


def kind_in(group: tuple[int, ...], kind: str) -> str:
    """``kind`` among the ranks of ``group``: the start of a name that belongs to this group alone."""
    if not group:
        return kind
    text = "-".join(map(str, group))
    if len(text) > 48:
        text = f"{len(group)} ranks {hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    return f"{kind}[{text}]"


# ---- broadcast ---------------------------------------------------------------------------------------------


def check_root(context: Context, root_rank: int, group: tuple[int, ...] = ()) -> None:
    """Raises UsageError unless ``root_rank``, a global rank, takes part."""
    size = context.session.size
    if not 0 <= root_rank < size:
        raise UsageError(f"invalid root rank: {root_rank} does not exist, ranks go from 0 to {size - 1}")
    if group and root_rank not in group:
        raise UsageError(
            f"broadcast received invalid root rank {root_rank} for provided process set of ranks {list(group)}; it is "
            "a global rank, and must be in the set"
        )


def broadcast_request(
    context: Context, tensor: torch.Tensor, root_rank: int, name: str | None, group: tuple[int, ...] = ()
) -> TensorRequest:
    """What must be declared to broadcast ``tensor``. Raises UsageError."""
    check_root(context, root_rank, group)
    check_dense(tensor, name)
    bits = bits_of(tensor)
    wire, shape = wire_dtype(bits.dtype, name), tuple(bits.shape)
    terms = "" if bits.dtype is tensor.dtype else str(tensor.dtype).removeprefix("torch.")
    kind = kind_in(group, "broadcast")
    if name is None:
        full = context.names.next(kind, (root_rank, wire, shape, terms), bits.nbytes)
    else:
        full = f"{kind}.{name}"
    spec = TensorSpec(full, wire, shape, Op.BROADCAST, root=root_rank, group=group, terms=terms)
    return TensorRequest(spec, bits.dtype, (shape,), tensor.device)


def start_broadcast(
    context: Context, request: TensorRequest, tensor: torch.Tensor, output: torch.Tensor, name: str | None
) -> int:
    """Begin to broadcast the root's ``tensor`` into ``output`` (may be the same tensor). Returns a handle."""
    check_result(output, name)

    def begin() -> NamedWork:
        (slot_view,) = context.slot_views([request])
        is_root = context.session.rank == request.spec.root
        if not is_root:
            slot_view.contribute_input()
        else:
            if output is not tensor:
                output.detach().copy_(tensor.detach())
            slot_view.contribute([bits_of(tensor)])

        def complete() -> torch.Tensor:
            slot_view.wait()
            if not is_root:
                slot_view.fetch([bits_of(output)])
            return output

        return operation_of(context, request.spec.name, name is None, Attempt(lambda: slot_view.is_done, complete))

    return begin_when_free(context, request.spec.name, name, begin)


# ---- names -------------------------------------------------------------------------------------------------


def operation_of(context: Context, full: str, is_unnamed: bool, attempt: Attempt) -> NamedWork:
    """An operation after whose disagreement the ranks count unnamed ones anew."""
    epoch = context.names.epoch

    def recount() -> None:
        if is_unnamed:
            context.names.restart(epoch)

    return NamedWork(full, attempt, recount)


def begin_when_free(context: Context, full: str, name: str | None, begin: Callable[[], NamedWork]) -> int:
    """Run ``begin`` once nobody else needs the name ``full``. Returns the operation's handle.

    An earlier operation of the same name: an error if the user gave the name; a name of ours was merely given again
    because the numbers went round, so the earlier one is settled for its owner first.
    """
    while True:
        with context.lock:
            earlier = context.handles.occupant(full)
            if earlier is None:
                return context.handles.add(begin())
        if name is not None:
            raise UsageError(
                f"Duplicate tensor name {name!r}: a tensor with the same name is currently being processed; use a "
                "different tensor name, or call synchronize() on its handle first"
            )
        earlier.settle()
