"""Starting and finishing reductions and broadcasts of single tensors. Any thread.

The public functions are in api.py; what they differ in (synchronous or not, in place or not) is there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Op, TensorSpec
from byteps_py.torch.compression import Compressor
from byteps_py.torch.context import Context, Request
from byteps_py.torch.dtypes import bits_of, check_dense, wire_dtype
from byteps_py.torch.exchange import Exchange
from byteps_py.torch.handles import Operation


class ReduceOp(enum.Enum):
    """How push_pull combines the ranks' tensors."""

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
            raise UsageError("op=Adasum is not possible here")
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


def start_reduction(
    context: Context,
    tensor: torch.Tensor,
    into: torch.Tensor | None,
    op: ReduceOp,
    name: str | None,
    priority: int,
    compression: type[Compressor],
) -> int:
    """Begin to reduce ``tensor`` into ``into`` (may be the same tensor; None: a new one). Returns a handle."""
    check_dense(tensor, name)
    dtype = compression.wire_dtype(tensor.dtype)
    wire = wire_dtype(dtype, name)
    shape = tuple(tensor.shape)
    if name is None:
        full = context.names.next(op.value, wire.name.lower(), shape, tensor.numel() * dtype.itemsize)
    else:
        full = name
        if context.is_claimed(name):
            raise UsageError(f"tensor name {name!r} belongs to a gradient of a DistributedOptimizer; choose another")
    spec = TensorSpec(full, wire, shape, op.wire_op, op is Average, priority=priority)
    request = Request(spec, dtype, (shape,), tensor.device)
    output = torch.empty(shape, dtype=tensor.dtype, device=tensor.device) if into is None else into

    def begin(exchange: Exchange) -> Operation:
        exchange.send([tensor.detach()])
        return Operation(exchange, output, lambda: exchange.fetch([output.detach()]))

    return _begin(context, request, name is not None, begin)


def broadcast_request(context: Context, tensor: torch.Tensor, root_rank: int, name: str | None) -> Request:
    """What must be declared to broadcast ``tensor``. Raises UsageError."""
    session = context.session
    if not 0 <= root_rank < session.size:
        raise UsageError(f"root rank {root_rank} does not exist, ranks go from 0 to {session.size - 1}")
    check_dense(tensor, name)
    bits = bits_of(tensor)
    wire, shape = wire_dtype(bits.dtype, name), tuple(bits.shape)
    if name is None:
        full = context.names.next(f"broadcast{root_rank}", wire.name.lower(), shape, bits.nbytes)
    else:
        full = f"broadcast.{name}"
    spec = TensorSpec(full, wire, shape, Op.BROADCAST, root=root_rank)
    return Request(spec, bits.dtype, (shape,), tensor.device)


def start_broadcast(
    context: Context, request: Request, tensor: torch.Tensor, output: torch.Tensor, named: bool = True
) -> int:
    """Begin to broadcast the root's ``tensor`` into ``output`` (may be the same tensor). Returns a handle."""

    def begin(exchange: Exchange) -> Operation:
        if context.session.rank != request.spec.root:
            exchange.send_nothing()
            return Operation(exchange, output, lambda: exchange.fetch([bits_of(output)]))
        if output is not tensor:
            output.detach().copy_(tensor.detach())
        exchange.send([bits_of(tensor)])
        return Operation(exchange, output, lambda: None)  # the root has the result already

    return _begin(context, request, named, begin)


def _begin(context: Context, request: Request, named: bool, begin: Callable[[Exchange], Operation]) -> int:
    """Run ``begin`` on the request's exchange once nobody else needs it.

    An earlier operation of the same name: an error if the user gave the name; a name of ours was merely
    given again because the numbers went round, so the earlier one is settled for its owner first.
    """
    name = request.spec.name
    while True:
        with context.lock:
            earlier = context.handles.occupant(name)
            if earlier is None:
                (exchange,) = context.exchanges([request])
                return context.handles.add(begin(exchange))
        if named:
            raise UsageError(
                f"duplicate name: tensor {name!r} is in flight already; call synchronize() on its handle first"
            )
        earlier.settle()
