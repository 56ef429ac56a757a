"""Making all ranks equal before training: broadcast of parameters and of an optimizer's state.

Names and arguments as in byteps.torch and horovod.torch. One thread at a time, the same order on all ranks.
"""

from __future__ import annotations

import contextvars
import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts, parameter_owners
from byteps_py.torch.collectives.dtypes import as_bytes, check_result
from byteps_py.torch.collectives.plan_comparison import PlanComparison
from byteps_py.torch.operations.broadcasts import broadcast_request, broadcast_stream, object_from_root, start_broadcast
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of, members_of

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

_log = logging.getLogger("byteps_py")


class StateListener:
    """An optimizer with state beside its ``state_dict``. It must know when the ``state_dict`` was replaced."""

    def _check_one_has_all(self) -> None:
        """Raises UsageError if no single rank has the whole state."""

    def _is_lost(self) -> bool:
        """True if the state has ended with an earlier job, so that it must be loaded before it is used."""
        return False

    def _state_replaced(self) -> None:
        """All ranks are about to have equal state. Also called on the rank that sends its state."""
        raise NotImplementedError


NamedTensors = Mapping[str, Any] | Sequence[tuple[str, Any]]


_ADVICE = (
    "Give broadcast_parameters the same names in the same order on all ranks. Ranks that train different parts of a "
    "model broadcast each part among its ranks: process_set=…"
)
_WHOLE = (
    "Broadcast parameters before parallelize(), or give process_set the ranks with the same parts, those of "
    "mesh.ranks('dp', 'cp')"
)


def broadcast_parameters(
    params: NamedTensors,
    root_rank: int,
    prefix: str = "Parameter.",
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's tensors into every rank's tensors, in place.

    params: a ``state_dict()``, a list of (name, tensor) such as ``list(model.named_parameters())``, or a list of
    tensors, which are matched by position. Tensors are dense, on cpu or cuda, of any dtype; all bits are copied.
    root_rank: a global rank. prefix: of the tensors' names in the job. process_set: the ranks, which alone call it.
    One thread at a time calls it, in the same order on all ranks.
    Raises UsageError for anything else, a generator included, and for tensors of which the ranks have different parts
    (``tensor.parallelize``, FSDP2), and MismatchError if ranks' names, shapes or dtypes
    differ.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> bps.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    >>> bps.shutdown()
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
    for name, tensor in pairs:  # before the first tensor is sent
        check_result(tensor, name)
    if context.is_catching_up:
        return  # restore() brings them
    group, ranks = group_of(process_set), members_of(process_set)
    parameter_owners.check_whole(pairs, ranks, "broadcast_parameters", _WHOLE)
    if len(ranks) > 1:
        comparison = PlanComparison(context, "tensors to broadcast", _ADVICE, group, is_numbered=False)
        comparison.compare([("", f"{prefix}{name}") for name, _ in pairs])
    requests = [broadcast_request(context, tensor, root_rank, f"{prefix}{name}", group) for name, tensor in pairs]
    context.slot_views(requests)  # one declaration for all
    handles = [
        start_broadcast(context, request, tensor, tensor, name)
        for request, (name, tensor) in zip(requests, pairs, strict=True)
    ]
    operations = [context.handles.pop(handle) for handle in handles]
    for operation in operations:  # all of them before the first error is raised, so that none stays pending
        if operation is not None:
            operation.complete()
    for operation in operations:
        if operation is not None:
            operation.deliver()


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Stands for a tensor in an optimizer state that is sent as an object."""

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
    """Copy the state and hyperparameters of the root's optimizer into every rank's optimizer.

    The other ranks' state may be empty or different. Types of hyperparameters (int, bool, None, tensor …) are kept.
    As in Horovod, if the root's optimizer has no state yet, parameters without a gradient get one of zeros.
    root_rank: a global rank. prefix: BytePS's argument, only a label. model: Horovod's argument, may be given in its
    place; embeddings in it with ``sparse=True`` get sparse gradients of zeros.
    One thread at a time calls it, in the same order on all ranks.
    Raises UsageError (a ValueError) for LBFGS, whose state is not per parameter, and for a hosted optimizer between its
    first step and load_state_dict(), because no rank has its whole state.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> bps.broadcast_optimizer_state(optimizer, root_rank=0)
    >>> bps.shutdown()
    """
    if not isinstance(prefix, str):
        model = prefix if model is None else model
        prefix = "Parameter."
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("cannot broadcast torch.optim.LBFGS state")
    if isinstance(optimizer, StateListener):
        optimizer._check_one_has_all()
    context = contexts.current()
    if context.is_catching_up:
        return  # restore() brings it
    label = f"{prefix}optimizer_state"
    is_root = context.session.rank == root_rank
    state = state_from_root(optimizer.state_dict() if is_root else None, root_rank, label)
    if not is_root:
        optimizer.load_state_dict(state)
    if not state["state"]:
        _begin_gradients(optimizer, model)
    if is_root and isinstance(optimizer, StateListener):
        optimizer._state_replaced()


def state_from_root(state: Any, root_rank: int, label: str, group: tuple[int, ...] = ()) -> Any:
    """The root's ``state``, nested dicts, lists and tuples with tensors and other objects in them, on the ranks of
    ``group`` (empty: all), which alone call it. ``label``: see broadcast_stream."""
    context = contexts.current()
    tensors: list[torch.Tensor] = []
    if context.session.rank == root_rank:
        object_from_root(_map(state, torch.Tensor, lambda t: _replace_tensor(t, tensors)), root_rank, label, group)
        broadcast_stream(context, [as_bytes(tensor.cpu()) for tensor in tensors], root_rank, label, group)
        return state
    skeleton = object_from_root(None, root_rank, label, group)
    received = _map(skeleton, _TensorPlaceholder, lambda t: _allocate_tensor(t, tensors))
    broadcast_stream(context, [as_bytes(tensor) for tensor in tensors], root_rank, label, group)
    return _map(received, _ReceivedTensor, lambda p: p.tensor.to(p.device_type))


class StateSending:
    """Sends ``state`` as ``state_from_root`` does, in a thread, while this rank, the root, goes on. The others call
    ``state_from_root``. A copy is sent."""

    def __init__(self, state: Any, label: str, group: tuple[int, ...] = ()) -> None:
        context = contexts.current()
        arguments = (copy.deepcopy(state), context.session.rank, label, group)
        run = contextvars.copy_context().run  # with this context of ranks
        self._thread = threading.Thread(target=run, args=(self._run, *arguments), name="byteps-state", daemon=True)
        context.unfinished.add(self)
        self._thread.start()

    @staticmethod
    def _run(state: Any, rank: int, label: str, group: tuple[int, ...]) -> None:
        try:
            state_from_root(state, rank, label, group)
        except Exception as error:  # the ranks that wait for the state get one, too
            _log.warning("a new rank has not got the state that the others have: %s", error)

    def finish(self) -> None:
        """Wait until the other ranks have it."""
        self._thread.join()


def _begin_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zeros: scripts written for Horovod may read gradients before the first backward pass."""
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
class _ReceivedTensor:
    """A received tensor in host memory, and the type of device it goes to."""

    tensor: torch.Tensor
    device_type: str


def _replace_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> _TensorPlaceholder:
    tensors.append(tensor)
    return _TensorPlaceholder(len(tensors) - 1, tensor.dtype, tuple(tensor.shape), tensor.device.type)


def _allocate_tensor(placeholder: _TensorPlaceholder, tensors: list[torch.Tensor]) -> _ReceivedTensor:
    tensors.append(torch.empty(placeholder.shape, dtype=placeholder.dtype, device="cpu"))
    return _ReceivedTensor(tensors[-1], placeholder.device_type)


def _map(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which ``function`` replaces each instance of ``kind``."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(item, kind, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, kind, function) for item in value)
    return value
