"""Records the operations of process groups in the flight recorder: each call of a collective, a send or a receive.

``recorded`` wraps the methods of a group: an operation begins with the call, is started once the call returns, and ends
when its Work is over. While torch.profiler runs, the call is a range in its trace, too. The facts that members must
have in common are recorded as torch's own recorder writes them: see
OPERATIONS of flight_recorder.py. A group of one rank is not recorded. Any thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from byteps_py.system.flight_recorder import DTYPES, OPERATIONS, FlightRecorder, GroupCounter
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.work import OperationRecord, Work

if TYPE_CHECKING:
    from byteps_py.session.round_recorder import RoundRecorder

C = TypeVar("C", bound=type)
Shape = tuple[int, ...] | None

_CODES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long", torch.uint8: "Byte",
    torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
    torch.complex32: "ComplexHalf", torch.uint16: "UInt16", torch.uint32: "UInt32", torch.uint64: "UInt64",
    torch.float8_e4m3fn: "Float8_e4m3fn", torch.float8_e5m2: "Float8_e5m2",
}  # fmt: skip
_DTYPE_CODES = {dtype: DTYPES.index(name) for dtype, name in _CODES.items()}


class OperationFacts(NamedTuple):
    """Of an operation: bytes of this rank's data; type and shape of the input and the output; for a message, the
    positions of the sender and the receiver (None: any), and the tag."""

    operation: int
    nbytes: int = 0
    input: tuple[int, Shape] = (0, ())
    output: tuple[int, Shape] = (0, ())
    message: tuple[int | None, int | None, int] | None = None


# ---- the facts of each call --------------------------------------------------------------------------------------
# Of the arguments of torch.distributed.ProcessGroup's methods, ``own`` is the position of this rank, ``count`` the
# number of members. The method itself refuses an argument that is missing or of another type.

_code = {name: at for at, name in enumerate(OPERATIONS)}
Describe = Callable[[int, int, tuple[Any, ...], dict[str, Any]], OperationFacts]


def _first(tensors: Any) -> torch.Tensor:
    while not isinstance(tensors, torch.Tensor):
        tensors = tensors[0]
    return tensors


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _flat(each)]


def _dtype(tensor: torch.Tensor) -> int:
    return _DTYPE_CODES.get(tensor.dtype, 0)


def _in_place(name: str) -> Describe:
    """A tensor that is input and output."""
    operation = _code[name]

    def describe(own: int, count: int, given: tuple[Any, ...], named: dict[str, Any]) -> OperationFacts:
        tensor = _first(given[0] if given else named["tensors"])
        if tensor.is_sparse:
            return OperationFacts(operation, 0, (_dtype(tensor), None), (_dtype(tensor), None))
        facts = _dtype(tensor), tensor.shape
        return OperationFacts(operation, tensor.nbytes, facts, facts)

    return describe


def _many_in_place(name: str) -> Describe:
    operation = _code[name]

    def describe(own: int, count: int, given: tuple[Any, ...], named: dict[str, Any]) -> OperationFacts:
        tensors = _flat(given[0] if given else named["tensors"])
        facts = _dtype(tensors[0]), (sum(tensor.numel() for tensor in tensors),)
        return OperationFacts(operation, sum(tensor.nbytes for tensor in tensors), facts, facts)

    return describe


def _from_parts(even: str, uneven: str, gathers: bool) -> Describe:
    """A list with a tensor of each member beside one tensor: ``gathers``: the list is the output."""

    def describe(own: int, count: int, given: tuple[Any, ...], named: dict[str, Any]) -> OperationFacts:
        outputs, inputs = _both(given, named, "output_tensors", "input_tensors")
        parts, tensor = (_flat(outputs), _first(inputs)) if gathers else (_flat(inputs), _first(outputs))
        if len({part.numel() for part in parts} | {tensor.numel()}) > 1:
            return OperationFacts(_code[uneven], tensor.nbytes, (_dtype(tensor), None), (_dtype(tensor), None))
        whole = _dtype(tensor), (len(parts), *tensor.shape)
        one = _dtype(tensor), tensor.shape
        return OperationFacts(_code[even], tensor.nbytes, *((one, whole) if gathers else (whole, one)))

    return describe


def _two(name: str, outputs_name: str = "output", inputs_name: str = "input") -> Describe:
    """Tensors, or lists of tensors, that are input and output; elements are counted."""
    operation = _code[name]

    def describe(own: int, count: int, given: tuple[Any, ...], named: dict[str, Any]) -> OperationFacts:
        outputs, inputs = map(_flat, _both(given, named, outputs_name, inputs_name))
        nbytes = sum(tensor.nbytes for tensor in inputs)
        return OperationFacts(operation, nbytes, _counted(inputs), _counted(outputs))

    return describe


def _rooted(name: str, inputs_differ: bool) -> Describe:
    """Only the root has a list: no shape is recorded of it."""
    operation = _code[name]

    def describe(own: int, count: int, given: tuple[Any, ...], named: dict[str, Any]) -> OperationFacts:
        outputs, inputs = _both(given, named, "output_tensors", "input_tensors")
        tensor = _first(outputs if inputs_differ else inputs)
        one, listed = (_dtype(tensor), tensor.shape), (_dtype(tensor), None)
        return OperationFacts(operation, tensor.nbytes, *((listed, one) if inputs_differ else (one, listed)))

    return describe


def _message(name: str, is_sender: bool, from_any: bool = False) -> Describe:
    operation = _code[name]

    def describe(own: int, count: int, given: tuple[Any, ...], named: dict[str, Any]) -> OperationFacts:
        tensor = _first(given[0] if given else named["tensors"])
        rest = list(given[1:])
        peer = None if from_any else rest.pop(0) if rest else named["dst" if is_sender else "src"]
        tag = rest[0] if rest else named.get("tag", 0)
        facts = _dtype(tensor), (tensor.numel(),)
        return OperationFacts(
            operation, tensor.nbytes, facts, facts, (own, peer, tag) if is_sender else (peer, own, tag)
        )

    return describe


def _both(given: tuple[Any, ...], named: dict[str, Any], outputs: str, inputs: str) -> tuple[Any, Any]:
    return given[0] if given else named[outputs], given[1] if len(given) > 1 else named[inputs]


def _counted(tensors: list[torch.Tensor]) -> tuple[int, Shape]:
    if len(tensors) == 1:
        return _dtype(tensors[0]), (tensors[0].numel(),)
    return _dtype(tensors[0]) if tensors else 0, (sum(tensor.numel() for tensor in tensors),)


_DESCRIBE: dict[str, Describe] = {
    "allreduce": _in_place("all_reduce"),
    "allreduce_coalesced": _many_in_place("allreduce_coalesced"),
    "reduce": _in_place("reduce"),
    "broadcast": _in_place("broadcast"),
    "barrier": lambda own, count, given, named: OperationFacts(_code["barrier"]),
    "reduce_scatter": _from_parts("reduce_scatter", "reduce_scatter_v", gathers=False),
    "_reduce_scatter_base": _two("_reduce_scatter_base"),
    "reduce_scatter_tensor_coalesced": _two("reduce_scatter_tensor_coalesced", "outputs", "inputs"),
    "allgather": _from_parts("all_gather", "all_gather_v", gathers=True),
    "allgather_coalesced": lambda own, count, given, named: OperationFacts(
        _code["all_gather_v"], 0, (0, None), (0, None)
    ),
    "_allgather_base": _two("_all_gather_base"),
    "allgather_into_tensor_coalesced": _two("all_gather_into_tensor_coalesced", "outputs", "inputs"),
    "gather": _rooted("gather", inputs_differ=False),
    "scatter": _rooted("scatter", inputs_differ=True),
    "alltoall": _two("all_to_all", "output_tensors", "input_tensors"),
    "alltoall_base": _two("all_to_all"),
    "send": _message("send", is_sender=True),
    "recv": _message("recv", is_sender=False),
    "recv_anysource": _message("recv", is_sender=False, from_any=True),
}
#: By a name from torch 2.13 on: the one before.
LATER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


# ---- recording ---------------------------------------------------------------------------------------------------


class GroupRecorder:
    """Of one process group. ``name`` and ``description``: torch's."""

    def __init__(self, flight: RoundRecorder, members: Members) -> None:
        self.flight = flight
        self.recorder: FlightRecorder = flight.recorder
        self.thread = 0  # that is within a call: what it calls belongs to that
        self._members = members
        self._group: GroupCounter | None = None
        self._messages: dict[tuple[int | None, int | None, int], GroupCounter] = {}

    def begin(self, name: str, description: str, facts: OperationFacts) -> int:
        """The number of the operation that begins."""
        if facts.message is None:
            group = self._group
            if group is None:
                group = self._group = self.recorder.group(name, description, self._members.ranks)
        else:
            found = self._messages.get(facts.message)
            group = found if found is not None else self._add_pair(name, description, facts.message)
        return self.recorder.begin(group, facts.operation, facts.nbytes, facts.input, facts.output)

    def _add_pair(self, name: str, description: str, message: tuple[int | None, int | None, int]) -> GroupCounter:
        ranks, (source, target, tag) = self._members.ranks, message
        own = ranks[self._members.position]
        sender = own if source is None else ranks[source]  # the sender is not known before the message comes
        receiver = own if target is None else ranks[target]
        way = f"{name}:any->{receiver} " if source is None else f"{name}:"
        text = f"{way}{sender}->{receiver}{f' tag {tag}' if tag else ''}"
        group = self.recorder.group(text, description, sorted({sender, receiver}), "pair")
        self._messages[message] = group
        return group


def recorded(cls: C) -> C:
    """A class decorator: calls of the collectives of torch.distributed.ProcessGroup are recorded, and have their names
    from torch 2.13 on, too. Objects have ``group_recorder``: a GroupRecorder, or None."""
    for name in (*_DESCRIBE, *LATER_NAMES):
        setattr(cls, name, _recorded(getattr(cls, LATER_NAMES.get(name, name)), _DESCRIBE[LATER_NAMES.get(name, name)]))
    return cls


def _recorded(method: Callable[..., Work], describe: Describe) -> Callable[..., Work]:
    method = getattr(method, "__wrapped__", method)

    @functools.wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Work:
        flight: GroupRecorder | None = self.group_recorder
        if flight is None or flight.thread == (thread := threading.get_ident()):
            return method(self, *given, **named)
        try:
            facts = describe(self.rank(), self.size(), given, named)
            number = flight.begin(self.group_name, self.group_desc, facts)
        except (LookupError, TypeError, AttributeError, ValueError):  # arguments that the method refuses
            return method(self, *given, **named)
        recorder = flight.recorder
        flight.thread = thread
        try:
            if torch._C._autograd._profiler_enabled():
                with torch.autograd.profiler.record_function(f"byteps::{OPERATIONS[facts.operation]}"):
                    work = method(self, *given, **named)
            else:
                work = method(self, *given, **named)
        except BaseException:
            recorder.end(number, has_failed=True)
            raise
        finally:
            flight.thread = 0
        recorder.start(number)
        work.record = OperationRecord(flight.flight, number)
        if work.is_over:
            recorder.end(number)
        return work

    return call
