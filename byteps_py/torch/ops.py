"""Starting reductions and broadcasts of tensors. Any thread.

The public functions are in api.py, allreduce.py and scatter.py; what they differ in (synchronous or not, in place or
not) is there. What is gathered or exchanged without being combined is in collectives/.

    tensors ─ parts (of one dtype, on one device, side by side) ─ an Exchange each ─ outputs
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.tensors import MAX_TERMS_BYTES, DType, Op, TensorSpec
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.context import Context, Request
from byteps_py.torch.dtypes import bits_of, check_dense, wire_dtype
from byteps_py.torch.exchange import Exchange
from byteps_py.torch.handles import Operation
from byteps_py.torch.scaling import fetch_scaled, scaled, send_scaled

#: Once one part of a group has failed, how long the others are waited for: ranks may disagree about how many there are.
_OTHER_PARTS_S = 10.0


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


@dataclass(frozen=True, slots=True)
class How:
    """How tensors are reduced. ``kind`` keeps operations of one name apart; ``before``, ``after``: scale factors."""

    op: ReduceOp
    kind: str = ""
    group: tuple[int, ...] = ()
    before: float = 1.0
    after: float = 1.0
    compression: type[Compressor] = Compression.none
    priority: int = 0
    scatters: bool = False


def start_reduction(
    context: Context,
    tensors: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor] | None,
    name: str | None,
    how: How,
    is_group: bool = False,
) -> int:
    """Begin to reduce each of ``tensors`` into that of ``into`` (may be the same; None: new ones). Returns a handle.

    Its result is the output, of a group the tuple of them. Raises UsageError.
    """
    bits = [_reducible(tensor, name, how.op) for tensor in tensors]
    dtypes = [how.compression.wire_dtype(tensor.dtype) for tensor in bits]
    wires = [wire_dtype(dtype, name) for dtype in dtypes]
    terms = _terms(tensors, how, is_group)
    kind = kind_in(how.group, f"grouped_{how.kind}" if is_group else how.kind or "push_pull")
    if name is None:
        what = (tuple(tuple(tensor.shape) for tensor in bits), tuple(wires), how.op, terms)
        nbytes = sum(tensor.numel() * dtype.itemsize for tensor, dtype in zip(bits, dtypes, strict=True))
        full = context.names.next(kind, what, nbytes)
    elif how.kind:
        full = f"{kind}.{name}"
    elif context.is_claimed(name):
        raise UsageError(f"tensor name {name!r} belongs to a gradient of a DistributedOptimizer; choose another")
    else:
        full = name
    parts = _parts(bits, dtypes, how.scatters)
    requests = [
        _request(context, f"{full}.{i}" if is_group else full, wires[part[0]], [bits[j] for j in part], how, terms)
        for i, part in enumerate(parts)
    ]
    outputs = [_output(context, tensor, how) for tensor in tensors] if into is None else list(into)
    targets = [bits_of(output) if output.dtype is torch.bool else output.detach() for output in outputs]

    def begin(exchanges: list[Exchange]) -> Operation:
        for exchange, part in zip(exchanges, parts, strict=True):
            send_scaled(exchange, [bits[j] for j in part], how.before)

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            _wait_all(exchanges)
            for exchange, part in zip(exchanges, parts, strict=True):
                fetch_scaled(exchange, [targets[j] for j in part], how.after)
            return tuple(outputs) if is_group else outputs[0]

        return operation_of(context, full, name is None, lambda: all(e.done for e in exchanges), complete)

    return begin_when_free(context, full, name, lambda: begin(context.exchanges(requests)))


def start_adasum(
    context: Context,
    tensors: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor] | None,
    name: str | None,
    how: How,
    is_group: bool = False,
) -> int:
    """Begin to combine each of ``tensors`` by Adasum; else as ``start_reduction``. Raises UsageError."""
    from byteps_py.torch import adasum

    bits = [_reducible(tensor, name, how.op) for tensor in tensors]
    kind = kind_in(how.group, "grouped_adasum" if is_group else "adasum")
    if name is None:
        what = tuple((tuple(tensor.shape), tensor.dtype) for tensor in bits)
        full = context.names.next(kind, (what, how.before, how.after), sum(tensor.nbytes for tensor in bits))
    else:
        full = f"{kind}.{name}"
    outputs = [torch.empty_like(tensor) for tensor in bits] if into is None else list(into)

    def begin() -> Operation:
        given = [scaled(tensor, how.before) for tensor in bits]
        running = adasum.start(context, given, full, how.group)

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            for output, result in zip(outputs, running.wait(), strict=True):
                output.detach().copy_(scaled(result, how.after))
            return tuple(outputs) if is_group else outputs[0]

        return operation_of(context, full, name is None, lambda: running.done, complete)

    return begin_when_free(context, full, name, begin)


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


# ---- what is declared --------------------------------------------------------------------------------------


def _reducible(tensor: torch.Tensor, name: str | None, op: ReduceOp) -> torch.Tensor:
    """The tensor as the service sees it: truth values as bytes of 0 and 1."""
    check_dense(tensor, name)
    if tensor.dtype is torch.bool and op in (Min, Max, Product):
        return bits_of(tensor)
    return tensor.detach()


def _terms(tensors: Sequence[torch.Tensor], how: How, is_group: bool) -> str:
    """What the spec does not say and ranks must agree on all the same."""
    found = []
    if how.before != 1.0 or how.after != 1.0:
        found.append(f"prescale factor {how.before!r} and postscale factor {how.after!r}")
    if is_group:
        pieces = ", ".join(f"{_dtype_name(t.dtype)}{list(t.shape)}" for t in tensors)
        found.append(f"group of {len(tensors)}: {pieces}")
    elif any(tensor.dtype is torch.bool for tensor in tensors):
        found.append("bool")
    text = "; ".join(found)
    if len(text.encode()) > MAX_TERMS_BYTES:
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        text = f"{text[: MAX_TERMS_BYTES - 20]}… {digest}"
    return text


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], scatters: bool) -> list[list[int]]:
    """Which tensors travel together: those of one dtype on one device, unless each is scattered by its own rows."""
    if scatters:
        return [[i] for i in range(len(tensors))]
    parts: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        parts.setdefault((dtype, tensor.device), []).append(i)
    return list(parts.values())


def _request(
    context: Context, name: str, wire: DType, tensors: Sequence[torch.Tensor], how: How, terms: str
) -> Request:
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    shape = shapes[0] if len(shapes) == 1 else (sum(tensor.numel() for tensor in tensors),)
    spec = TensorSpec(
        name,
        wire,
        shape,
        how.op.wire_op,
        how.op is Average,
        priority=how.priority,
        group=how.group,
        scatters=how.scatters,
        terms=terms,
    )
    results = ((_rows(context, shape[0], how.group), *shape[1:]),) if how.scatters else None
    return Request(spec, how.compression.wire_dtype(tensors[0].dtype), shapes, tensors[0].device, results)


def _rows(context: Context, rows: int, group: tuple[int, ...]) -> int:
    """How many of ``rows`` this rank gets of a scattered tensor."""
    session = context.session
    members = group or range(session.size)
    return rows // len(members) + (members.index(session.rank) < rows % len(members))


def _output(context: Context, tensor: torch.Tensor, how: How) -> torch.Tensor:
    shape = tuple(tensor.shape)
    if how.scatters:
        shape = (_rows(context, shape[0], how.group), *shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def _wait_all(exchanges: Sequence[Exchange]) -> None:
    for i, exchange in enumerate(exchanges):
        try:
            exchange.wait()
        except CommunicationError:
            for other in exchanges[i + 1 :]:
                with contextlib.suppress(CommunicationError):  # the first one is on its way to the caller
                    other.wait(_OTHER_PARTS_S)
            raise


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
) -> Request:
    """What must be declared to broadcast ``tensor``. Raises UsageError."""
    check_root(context, root_rank, group)
    check_dense(tensor, name)
    bits = bits_of(tensor)
    wire, shape = wire_dtype(bits.dtype, name), tuple(bits.shape)
    terms = "" if bits.dtype is tensor.dtype else _dtype_name(tensor.dtype)
    kind = kind_in(group, "broadcast")
    if name is None:
        full = context.names.next(kind, (root_rank, wire, shape, terms), bits.nbytes)
    else:
        full = f"{kind}.{name}"
    spec = TensorSpec(full, wire, shape, Op.BROADCAST, root=root_rank, group=group, terms=terms)
    return Request(spec, bits.dtype, (shape,), tensor.device)


def start_broadcast(
    context: Context, request: Request, tensor: torch.Tensor, output: torch.Tensor, name: str | None
) -> int:
    """Begin to broadcast the root's ``tensor`` into ``output`` (may be the same tensor). Returns a handle."""

    def begin() -> Operation:
        (exchange,) = context.exchanges([request])
        is_root = context.session.rank == request.spec.root
        if not is_root:
            exchange.send_nothing()
        else:
            if output is not tensor:
                output.detach().copy_(tensor.detach())
            exchange.send([bits_of(tensor)])

        def complete() -> torch.Tensor:
            exchange.wait()
            if not is_root:
                exchange.fetch([bits_of(output)])
            return output

        return operation_of(context, request.spec.name, name is None, lambda: exchange.done, complete)

    return begin_when_free(context, request.spec.name, name, begin)


# ---- names -------------------------------------------------------------------------------------------------


def operation_of(
    context: Context, full: str, is_unnamed: bool, is_done: Callable[[], bool], complete: Callable[[], object]
) -> Operation:
    """An operation after whose disagreement the ranks count unnamed ones anew."""
    epoch = context.names.epoch

    def recount() -> None:
        if is_unnamed:
            context.names.restart(epoch)

    return Operation(full, is_done, complete, recount)


def begin_when_free(context: Context, full: str, name: str | None, begin: Callable[[], Operation]) -> int:
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
