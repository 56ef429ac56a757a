"""Reductions: their plans, and their start (copy in and hand over, later wait and copy out).

The public functions are in torch/horovod, which knows the synchronous and in-place forms. Scale factors are applied
while tensors are copied to the service and back: float16 and bfloat16 are multiplied in float32 and rounded once,
integers in float64 and rounded towards zero, so the result is deterministic.

A plan has the operation, the options, and the declarations that tensors of given shapes, dtypes and devices need. It is
computed once and used by every later call with equal arguments:

    tensors ─ parts (one dtype, one device, side by side) ─ a TensorRequest for each part

It must not know values or handles, and is made with the context's lock held. Any thread.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.system.log import logger
from byteps_py.tensors import MAX_TERMS_BYTES, Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.all_reduce.negotiated import NegotiatedAllReduce, SumOffer
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import bits_of, check_are_tensors, check_dense, check_result, wire_dtype
from byteps_py.torch.collectives.integer_averages import is_summed_wider, mean, sum_dtype, sum_shape, summands
from byteps_py.torch.collectives.result_pool import empty_result
from byteps_py.torch.collectives.router import Reach, Route, Router, SumFacts
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.collectives.work import Attempt, NamedWork
from byteps_py.torch.compression import Compression, Compressor, codec_for
from byteps_py.torch.operations import adasum
from byteps_py.torch.operations.handles import kind_in_group, named_work, result_of, start_when_name_is_free

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"]

#: The most plans, and names in a plan, that are kept. Beyond it all are dropped and computed again.
_MAX_KEPT = 4096


class ReduceOp(enum.Enum):
    """The operation that combines the ranks' tensors."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    @property
    def wire_op(self) -> Op:
        """The service's operation. Raises UsageError for Adasum, which takes several of them."""
        if self is ReduceOp.ADASUM:
            raise UsageError("op=Adasum is not supported here, only in allreduce and DistributedOptimizer")
        return Op.SUM if self is ReduceOp.AVERAGE else Op[self.name]


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


@dataclass(frozen=True, slots=True)
class ReductionOptions:
    """The options of a reduction. kind: prefix of names, "" for push_pull. is_group: the tensors are one operation,
    whose result is a tuple. before, after: scale factors. scatters: each rank gets its rows of the result only."""

    op: ReduceOp
    kind: str = ""
    group: tuple[int, ...] = ()
    is_group: bool = False
    before: float = 1.0
    after: float = 1.0
    compression: type[Compressor] = Compression.none
    priority: int = 0
    scatters: bool = False


class ReductionPlan:
    """The plan for tensors of some shapes, dtypes and devices. Raises UsageError for tensors that can't be reduced so.

    parts: the indices of the tensors of each request. shapes: of the outputs. signature: equal for tensors without a
    name that are matched with each other. name: for messages.
    """

    def __init__(
        self,
        context: Context,
        tensors: Sequence[torch.Tensor],
        options: ReductionOptions,
        name: str | None,
    ) -> None:
        self._options = options
        self._settings = context.settings
        for tensor in tensors:
            check_dense(tensor, name)
            codec_for(options.compression, tensor.dtype, tensor.nbytes, name, context.settings)
        self.kind = kind_in_group(
            options.group, f"grouped_{options.kind}" if options.is_group else options.kind or "push_pull"
        )
        self.has_bool_as_bytes = any(is_reduced_as_bytes(tensor, options.op) for tensor in tensors)
        seen = [torch.uint8 if is_reduced_as_bytes(tensor, options.op) else tensor.dtype for tensor in tensors]
        #: For each tensor, whether it is summed in a wider dtype and divided by this rank.
        self.are_summed_wider = [options.op is Average and is_summed_wider(dtype) for dtype in seen]
        self._dtypes = [
            sum_dtype(dtype) if is_wider else options.compression.wire_dtype(dtype)
            for dtype, is_wider in zip(seen, self.are_summed_wider, strict=True)
        ]
        self._wires = [wire_dtype(dtype, name) for dtype in self._dtypes]
        self._devices = [tensor.device for tensor in tensors]
        self._inputs = [tuple(tensor.shape) for tensor in tensors]
        self._sent = [
            sum_shape(tensor.dtype, shape) if is_wider else shape
            for tensor, shape, is_wider in zip(tensors, self._inputs, self.are_summed_wider, strict=True)
        ]
        self._counts = [math.prod(shape) for shape in self._sent]
        self._terms = _terms(tensors, options)
        self.nbytes = sum(count * dtype.itemsize for count, dtype in zip(self._counts, self._dtypes, strict=True))
        self.signature = (tuple(self._inputs), tuple(self._wires), options.op, self._terms)
        self.parts = self._make_parts()
        self.shapes = self._inputs
        if options.scatters:
            members = options.group or range(context.session.size)
            position = members.index(context.session.rank)
            self.shapes = [
                (shape[0] // len(members) + (position < shape[0] % len(members)), *shape[1:]) for shape in self._inputs
            ]
        #: The number of ranks that contribute.
        self.count = len(options.group) or context.session.size
        #: The rounding of averages of integers: towards zero in Horovod's operations, down in push_pull.
        self.rounding = "trunc" if options.kind else "floor"
        self._requests: dict[str, list[TensorRequest]] = {}
        #: Decides whether ranks that wait for the sum may add it themselves (all_reduce/negotiated.py).
        machines = context.connections.machines if context.connections is not None else None
        ranks = options.group or range(self.count)
        self.router = Router.for_names(context.session, ranks, shared_memory.is_able, machines)
        self._route = self._find_route() if self._is_plain_sum(tensors) else Route.SERVICE

    def offer(self, full_name: str) -> SumOffer | None:
        """The sum that waiting ranks may add among themselves; None if it always goes through the service."""
        return None if self._route is Route.SERVICE else SumOffer(self.requests(full_name)[0].spec, self._route)

    def _find_route(self) -> Route:
        spec = self._request("one", [0]).spec
        is_exact = spec.dtype.is_floating or not spec.average
        # Must be equal on all ranks, so it ignores the device: a rank with a tensor on a device makes no offer.
        facts = SumFacts(spec.op, spec.nbytes, spec.nbytes * (self.count - 1), is_exact, is_on_host=True)
        choice = self.router.sum(facts)
        logger.debug("%s of %s%s: %s", self.kind, spec.dtype.name.lower(), list(spec.shape), choice)
        return choice.route

    def requests(self, full_name: str) -> list[TensorRequest]:
        """The declaration of each part under the name ``full_name``."""
        found = self._requests.get(full_name)
        if found is None:
            if len(self._requests) >= _MAX_KEPT:
                self._requests.clear()
            found = self._requests[full_name] = self._make_requests(full_name)
        return found

    def _make_requests(self, full_name: str) -> list[TensorRequest]:
        return [
            self._request(f"{full_name}.{i}" if self._options.is_group else full_name, part)
            for i, part in enumerate(self.parts)
        ]

    def _is_plain_sum(self, tensors: Sequence[torch.Tensor]) -> bool:
        options = self._options
        return (
            options.op in (Sum, Average)
            and not options.scatters
            and not options.is_group
            and not any(self.are_summed_wider)
            and options.before == options.after == 1.0
            and options.compression.codec is None
            and self._dtypes == [tensors[0].dtype]
        )

    def _make_parts(self) -> list[list[int]]:
        """The tensors that travel together: those of one dtype on one device. Scattered tensors travel alone."""
        if self._options.scatters:
            return [[i] for i in range(len(self._inputs))]
        parts: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, kind in enumerate(zip(self._dtypes, self._devices, strict=True)):
            parts.setdefault(kind, []).append(i)
        return list(parts.values())

    def _request(self, name: str, part: Sequence[int]) -> TensorRequest:
        options = self._options
        shapes = tuple(self._sent[i] for i in part)
        dtype = self._dtypes[part[0]]
        nbytes = sum(self._counts[i] for i in part) * dtype.itemsize
        spec = TensorSpec(
            name,
            self._wires[part[0]],
            shapes[0] if len(shapes) == 1 else (sum(self._counts[i] for i in part),),
            options.op.wire_op,
            options.op is Average and not self.are_summed_wider[part[0]],
            priority=options.priority,
            group=options.group,
            scatters=options.scatters,
            terms=self._terms,
            codec=codec_for(options.compression, dtype, nbytes, name, self._settings),
        )
        results = None
        if options.scatters:  # this rank's rows of the message
            results = tuple((*self.shapes[i][:1], *self._sent[i][1:]) for i in part)
        return TensorRequest(spec, dtype, shapes, self._devices[part[0]], results)


class ReductionPlans:
    """The plans of one context."""

    def __init__(self) -> None:
        self._plans: dict[object, ReductionPlan] = {}

    def find(
        self,
        context: Context,
        tensors: Sequence[torch.Tensor],
        options: ReductionOptions,
        name: str | None,
    ) -> ReductionPlan:
        """The plan for ``tensors``. name: for messages. Raises UsageError as ReductionPlan does."""
        key = options, *[(t.dtype, t.shape, t.device, t.layout) for t in tensors]
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_KEPT:
                self._plans.clear()
            plan = self._plans[key] = ReductionPlan(context, tensors, options, name)
        return plan

    def close(self) -> None:
        """Drop all plans: they belong to one session."""
        self._plans.clear()


def is_reduced_as_bytes(tensor: torch.Tensor, op: ReduceOp) -> bool:
    """True for a bool tensor that is reduced as bytes of 0 and 1."""
    return tensor.dtype is torch.bool and op in (Min, Max, Product)


def _terms(tensors: Sequence[torch.Tensor], options: ReductionOptions) -> str:
    """The terms that ranks must agree on beside the other fields of the TensorSpec."""
    found = []
    averages = [tensor.dtype for tensor in tensors if options.op is Average and is_summed_wider(tensor.dtype)]
    if averages:  # the terms of a group list its dtypes below
        found.append("average" if options.is_group else f"average of {str(averages[0]).removeprefix('torch.')}")
    if options.before != 1.0 or options.after != 1.0:
        found.append(f"prescale factor {options.before!r} and postscale factor {options.after!r}")
    if options.is_group:
        pieces = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        found.append(f"group of {len(tensors)}: {pieces}")
    elif any(tensor.dtype is torch.bool for tensor in tensors):
        found.append("bool")
    text = "; ".join(found)
    if len(text.encode()) > MAX_TERMS_BYTES:
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        text = f"{text[: MAX_TERMS_BYTES - 20]}… {digest}"
    return text


#: The time to wait for the other parts of a group after one has failed. Ranks may disagree about the number of parts.
_OTHER_PARTS_S = 10.0

Tensors = Sequence[torch.Tensor]


def reduced(tensor: torch.Tensor, op: ReduceOp, name: str, group: tuple[int, ...] = ()) -> torch.Tensor:
    """The reduction of ``tensor`` over the ranks of ``group``, () for all, a new tensor. Waits for the other ranks."""
    handle = start_reduction([tensor], None, name, ReductionOptions(op, group=group), is_awaited=True)
    result: torch.Tensor = result_of(handle)
    return result


def start_reduction(
    tensors: Tensors, into: Tensors | None, name: str | None, options: ReductionOptions, is_awaited: bool = False
) -> int:
    """Begin to reduce each of ``tensors`` into the tensor of ``into`` at its position. Returns a handle.

    into: may be ``tensors``; None for new tensors. is_awaited: the caller is about to wait for the result.
    The handle's result is the output, or a tuple of outputs for a group. Raises UsageError.
    """
    context = contexts.current()
    if options.compression.codec is not None and options.op not in (Sum, Average):
        what = f"tensor {name!r}: compression" if name else "compression"
        op = options.op.name.title()
        raise UsageError(f"{what} {options.compression.codec} is for sums and averages, not for op={op}")
    if options.op is Adasum and options.kind == "allreduce":
        return _start_adasum(context, tensors, into, name, options)
    context.session  # noqa: B018  raises NotInitializedError
    check_are_tensors(tensors, name)
    for output in into or ():
        check_result(output, name)
    with context.lock:
        plans = cast(
            ReductionPlans,
            context.belongings.get(ReductionPlans) or context.belongings.setdefault(ReductionPlans, ReductionPlans()),
        )
        plan = plans.find(context, tensors, options, name)
    if name is None:
        full_name = context.names.next(plan.kind, plan.signature, plan.nbytes)
    elif options.kind:
        full_name = f"{plan.kind}.{name}"
    elif context.is_claimed(name):
        raise UsageError(f"tensor name {name!r} belongs to a gradient of a DistributedOptimizer; choose another")
    else:
        full_name = name
    outputs = (
        [empty_result(tensor, shape) for tensor, shape in zip(tensors, plan.shapes, strict=True)]
        if into is None
        else list(into)
    )

    def start_on_service() -> Attempt:
        slot_views = context.slot_views(plan.requests(full_name))
        view = bits_of if plan.has_bool_as_bytes else torch.Tensor.detach
        for slot_view, part in zip(slot_views, plan.parts, strict=True):
            if plan.are_summed_wider[part[0]]:
                slot_view.contribute([summands(scaled(tensors[i].detach(), options.before)) for i in part])
            else:
                send_scaled(slot_view, [view(tensors[i]) for i in part], options.before)

        def complete() -> None:
            _wait_all(slot_views)
            for slot_view, part in zip(slot_views, plan.parts, strict=True):
                if plan.are_summed_wider[part[0]]:
                    for sums, i in zip(slot_view.results, part, strict=True):
                        average = mean(sums, plan.count, outputs[i].dtype, plan.rounding)
                        outputs[i].detach().copy_(scaled(average, options.after))
                else:
                    fetch_scaled(slot_view, [view(outputs[i]) for i in part], options.after)

        return Attempt(lambda: all(e.is_done for e in slot_views), complete)

    def begin() -> NamedWork:
        # Between machines, the services find out if ranks call different operations without names.
        if plan.router.reach is Reach.MEMORY or (plan.router.reach is Reach.CONNECTIONS and name is not None):
            offer = plan.offer(full_name) if is_awaited else None
            sums = NegotiatedAllReduce.of(context)
            attempt = sums.begin(full_name, options.group, offer, tensors, outputs, start_on_service)
        else:
            attempt = start_on_service()

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            attempt.complete()
            return tuple(outputs) if options.is_group else outputs[0]

        return named_work(context, full_name, name is None, Attempt(attempt.is_done, complete))

    return start_when_name_is_free(context, full_name, name, begin)


def _start_adasum(
    context: Context,
    tensors: Tensors,
    into: Tensors | None,
    name: str | None,
    options: ReductionOptions,
) -> int:
    for tensor in tensors:
        check_dense(tensor, name)
    for output in into or ():
        check_result(output, name)
    kind = kind_in_group(options.group, "grouped_adasum" if options.is_group else "adasum")
    if name is None:
        signature = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        full_name = context.names.next(
            kind, (signature, options.before, options.after), sum(tensor.nbytes for tensor in tensors)
        )
    else:
        full_name = f"{kind}.{name}"
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors] if into is None else list(into)

    def begin() -> NamedWork:
        running = adasum.start(
            context, [scaled(tensor.detach(), options.before) for tensor in tensors], full_name, options.group
        )

        def complete() -> torch.Tensor | tuple[torch.Tensor, ...]:
            for output, result in zip(outputs, running.wait(), strict=True):
                output.detach().copy_(scaled(result, options.after))
            return tuple(outputs) if options.is_group else outputs[0]

        return named_work(context, full_name, name is None, Attempt(lambda: running.done, complete))

    return start_when_name_is_free(context, full_name, name, begin)


def _wait_all(slot_views: Sequence[PieceView]) -> None:
    for i, slot_view in enumerate(slot_views):
        try:
            slot_view.wait()
        except CommunicationError:
            for other in slot_views[i + 1 :]:
                with contextlib.suppress(CommunicationError):  # the first error is raised below
                    other.wait(_OTHER_PARTS_S)
            raise


# ---- scale factors -----------------------------------------------------------------------------------------


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor * factor`` in the tensor's dtype.

    >>> scaled(torch.tensor([3, -3]), 0.5).tolist()
    [1, -1]
    """
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.to(torch.float64) * factor).to(tensor.dtype)


def send_scaled(slot_view: PieceView, tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Contribute ``tensors * factor``."""
    if factor == 1.0:
        slot_view.contribute(tensors)
    elif all(_in_one_pass(tensor, slot_view) for tensor in tensors):
        with torch.no_grad():
            for tensor, view in zip(tensors, slot_view.inputs, strict=True):
                torch.mul(tensor, factor, out=view)
        slot_view.contribute_input()
    else:
        slot_view.contribute([scaled(tensor, factor) for tensor in tensors])


def fetch_scaled(slot_view: PieceView, outputs: Sequence[torch.Tensor], factor: float) -> None:
    """Copy ``results * factor`` to ``outputs``."""
    if factor != 1.0 and all(_in_one_pass(output, slot_view) for output in outputs):
        with torch.no_grad():
            for view, output in zip(slot_view.results, outputs, strict=True):
                torch.mul(view, factor, out=output)
        return
    slot_view.fetch(outputs)
    if factor != 1.0:
        for output in outputs:
            output.copy_(scaled(output, factor))


def _in_one_pass(tensor: torch.Tensor, slot_view: PieceView) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype is slot_view.dtype and tensor.dtype.is_floating_point
