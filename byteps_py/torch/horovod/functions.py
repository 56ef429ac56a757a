"""Making all ranks alike before training: broadcast of parameters, optimizer states and objects.

Names and arguments as in byteps.torch and horovod.torch. One thread at a time, the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.errors import CommunicationError, ProtocolError, UsageError
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.dtypes import as_bytes, check_result
from byteps_py.torch.horovod.broadcast_stream import broadcast_stream
from byteps_py.torch.horovod.ops import broadcast_request, check_root, kind_in, start_broadcast
from byteps_py.torch.horovod.pickling import NotPickledError, packed, unpacked
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, group_of


class StateListener:
    """An optimizer that keeps more than its ``state_dict``, and hears when that was replaced."""

    def _state_replaced(self) -> None:
        """Ranks are about to be equal. Also called on the rank whose state the others get."""
        raise NotImplementedError


NamedTensors = Mapping[str, Any] | Sequence[tuple[str, Any]]


def broadcast_parameters(params: NamedTensors, root_rank: int, prefix: str = "Parameter.") -> None:
    """Copy the root's tensors into every rank's, in place. Any dtype, bit by bit.

    params: a ``state_dict()``, a list of (name, tensor) such as ``list(model.named_parameters())``, or a list of
    tensors, which are matched by their places in it.
    Raises UsageError for anything else, a generator included, and MismatchError where ranks' shapes differ.
    """
    context = contexts.current()
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, list | tuple) and all(_is_pair(p) for p in params):
        pairs = list(params)
    elif isinstance(params, list | tuple) and all(isinstance(p, torch.Tensor) for p in params):
        pairs = [(f"number {i}", tensor) for i, tensor in enumerate(params)]
    else:
        raise UsageError(
            f"invalid params of type {type(params)}: give model.state_dict() or list(model.named_parameters())"
        )
    pairs = [(name, tensor) for name, tensor in pairs if tensor is not None]
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name!r} is a {type(tensor).__name__}, not a tensor; use broadcast_object for it")
    for name, tensor in pairs:  # before the first of them travels
        check_result(tensor, name)
    requests = [broadcast_request(context, tensor, root_rank, f"{prefix}{name}") for name, tensor in pairs]
    context.slot_views(requests)  # one declaration for all
    handles = [
        start_broadcast(context, request, tensor, tensor, name)
        for request, (name, tensor) in zip(requests, pairs, strict=True)
    ]
    operations = [context.handles.pop(handle) for handle in handles]
    for operation in operations:  # all of them before the first error is raised, so that none stays pending
        if operation is not None:
            operation.settle()
    for operation in operations:
        if operation is not None:
            operation.deliver()


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's ``obj`` on every rank: pickled by the root, unpickled by the others.

    root_rank: a global rank, also with a process set. Raises CommunicationError on the other ranks, with the reason,
    if the root can't pickle it.
    """
    context = contexts.current()
    group = group_of(process_set)
    check_root(context, root_rank, group)
    label = f"{kind_in(group, 'broadcast_object')}.{name or 'noname'}"
    is_root = context.session.rank == root_rank
    payload, failure = packed(obj) if is_root else (b"", None)
    length = torch.tensor([len(payload)])
    broadcast_stream(context, [as_bytes(length)], root_rank, label, group)
    if int(length) < 1:
        raise ProtocolError(f"rank {root_rank} broadcasts an object of {int(length)} bytes")
    data = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if is_root
        else torch.empty(int(length), dtype=torch.uint8)
    )
    broadcast_stream(context, [data], root_rank, label, group)
    if failure is not None:
        raise failure
    if is_root:
        return obj
    try:
        return unpacked(data.numpy().tobytes())
    except NotPickledError as reason:
        raise CommunicationError(f"rank {root_rank} could not pickle the object to broadcast: {reason}") from None


@dataclass(frozen=True)
class _TensorStandIn:
    """Stands for a tensor in a state that is sent as an object."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    prefix: str | torch.nn.Module | None = "Parameter.",
    model: torch.nn.Module | None = None,
) -> None:
    """Give every rank's optimizer the root's state and hyperparameters.

    The others' state may be empty, or differ; types of hyperparameters (int, bool, None, tensor …) are kept.
    As in Horovod, if the root's optimizer has no state yet, parameters without a gradient get one of zeros.
    ``prefix`` is BytePS's and only a label. ``model``, Horovod's, may be given in its place: embeddings in it whose
    gradients are sparse get sparse ones. Raises ValueError for LBFGS, whose state is not per parameter.
    """
    if not isinstance(prefix, str):
        model = prefix if model is None else model
        prefix = "Parameter."
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("cannot broadcast torch.optim.LBFGS state")
    context = contexts.current()
    label = f"{prefix}optimizer_state"
    if context.session.rank == root_rank:
        tensors: list[torch.Tensor] = []
        own = optimizer.state_dict()
        broadcast_object(_map(own, torch.Tensor, lambda t: _take(t, tensors)), root_rank, label)
        _send_tensors(context, tensors, root_rank, label)
        if not own["state"]:
            _begin_gradients(optimizer, model)
        if isinstance(optimizer, StateListener):
            optimizer._state_replaced()
        return
    skeleton = broadcast_object(None, root_rank, label)
    received: list[torch.Tensor] = []
    state = _map(skeleton, _TensorStandIn, lambda t: _make(t, received))
    _send_tensors(context, received, root_rank, label)
    optimizer.load_state_dict(_map(state, _Placed, lambda p: p.tensor.to(p.device_type)))
    if not skeleton["state"]:
        _begin_gradients(optimizer, model)


def _begin_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Zeros for parameters that have no gradient: scripts made for Horovod may read them before the first backward."""
    sparse = {
        module.weight
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
    every = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                zeros = torch.zeros_like(param, requires_grad=False)
                param.grad = zeros.to_sparse() if every or param in sparse else zeros


@dataclass(frozen=True)
class _Placed:
    """A received tensor in host memory, and the type of device it goes to."""

    tensor: torch.Tensor
    device_type: str


def _take(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> _TensorStandIn:
    tensors.append(tensor)
    return _TensorStandIn(len(tensors) - 1, tensor.dtype, tuple(tensor.shape), tensor.device.type)


def _make(stand_in: _TensorStandIn, tensors: list[torch.Tensor]) -> _Placed:
    tensors.append(torch.empty(stand_in.shape, dtype=stand_in.dtype))
    return _Placed(tensors[-1], stand_in.device_type)


def _send_tensors(context: Context, tensors: list[torch.Tensor], root: int, label: str) -> None:
    broadcast_stream(context, [as_bytes(tensor.cpu()) for tensor in tensors], root, label)


def _map(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which ``function`` replaces each instance of ``kind``."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(item, kind, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, kind, function) for item in value)
    return value
