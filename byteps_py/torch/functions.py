"""Making all ranks alike before training: broadcast of parameters, optimizer states and objects.

Names and arguments as in byteps.torch and horovod.torch. One thread at a time, the same order on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.torch import context as contexts
from byteps_py.torch.context import Context
from byteps_py.torch.dtypes import as_bytes
from byteps_py.torch.ops import broadcast_request, start_broadcast
from byteps_py.torch.stream import broadcast_stream

NamedTensors = Mapping[str, Any] | Sequence[tuple[str, Any]]


def broadcast_parameters(params: NamedTensors, root_rank: int, prefix: str = "Parameter.") -> None:
    """Copy the root's tensors into every rank's, in place. Any dtype, bit by bit.

    params: a ``state_dict()``, or a list of (name, tensor) such as ``list(model.named_parameters())``.
    Raises UsageError for anything else, a generator included, and MismatchError where ranks' shapes differ.
    """
    context = contexts.current()
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, list | tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in params):
        pairs = list(params)
    else:
        raise UsageError(
            f"invalid params of type {type(params)}: give model.state_dict() or list(model.named_parameters())"
        )
    pairs = [(name, tensor) for name, tensor in pairs if tensor is not None]
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name!r} is a {type(tensor).__name__}, not a tensor; use broadcast_object for it")
    requests = [broadcast_request(context, tensor, root_rank, f"{prefix}{name}") for name, tensor in pairs]
    context.exchanges(requests)  # one declaration for all
    handles = [
        start_broadcast(context, request, tensor, tensor) for request, (_, tensor) in zip(requests, pairs, strict=True)
    ]
    operations = [context.handles.pop(handle) for handle in handles]
    for operation in operations:  # all of them before the first error is raised, so that none stays pending
        if operation is not None:
            operation.settle()
    for operation in operations:
        if operation is not None:
            operation.finish()


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's ``obj`` on every rank: pickled by the root, unpickled by the others.

    Raises CommunicationError on the other ranks, with the reason, if the root can't pickle it.
    """
    context = contexts.current()
    label = f"broadcast_object.{name or 'noname'}"
    is_root = context.session.rank == root_rank
    if not 0 <= root_rank < context.session.size:
        raise UsageError(f"root rank {root_rank} does not exist, ranks go from 0 to {context.session.size - 1}")
    failure: Exception | None = None
    payload = b""
    if is_root:
        try:
            payload = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # told to the others, who would wait for ever otherwise
            failure = error
            payload = f"{type(error).__name__}: {error}".encode()
    length = torch.tensor([-len(payload) if failure else len(payload)])
    broadcast_stream(context, [as_bytes(length)], root_rank, label)
    nbytes = int(length)
    data = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if is_root
        else torch.empty(abs(nbytes), dtype=torch.uint8)
    )
    broadcast_stream(context, [data], root_rank, label)
    if failure is not None:
        raise failure
    if is_root:
        return obj
    received = data.numpy().tobytes()
    if nbytes < 0:
        raise CommunicationError(f"rank {root_rank} could not pickle the object to broadcast: {received.decode()}")
    return pickle.loads(received)


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor in a state that is sent as an object."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device_type: str


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter.") -> None:
    """Give every rank's optimizer the root's state and hyperparameters.

    The others' state may be empty, or differ; types of hyperparameters (int, bool, None, tensor …) are kept.
    ``prefix`` is BytePS's and only a label. Raises ValueError for LBFGS, whose state is not per parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("cannot broadcast torch.optim.LBFGS state")
    context = contexts.current()
    label = f"{prefix}optimizer_state"
    if context.session.rank == root_rank:
        tensors: list[torch.Tensor] = []
        broadcast_object(_map(optimizer.state_dict(), torch.Tensor, lambda t: _take(t, tensors)), root_rank, label)
        _send_tensors(context, tensors, root_rank, label)
        return
    skeleton = broadcast_object(None, root_rank, label)
    received: list[torch.Tensor] = []
    state = _map(skeleton, _Tensor, lambda t: _make(t, received))
    _send_tensors(context, received, root_rank, label)
    optimizer.load_state_dict(_map(state, _Placed, lambda p: p.tensor.to(p.device_type)))


@dataclass(frozen=True)
class _Placed:
    """A received tensor in host memory, and the type of device it goes to."""

    tensor: torch.Tensor
    device_type: str


def _take(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> _Tensor:
    tensors.append(tensor)
    return _Tensor(len(tensors) - 1, tensor.dtype, tuple(tensor.shape), tensor.device.type)


def _make(stand_in: _Tensor, tensors: list[torch.Tensor]) -> _Placed:
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
