"""DistributedDataParallel: a module whose gradients are averages over ranks when backward() returns.

The module works with any optimizer. It uses the GradientReducer, as DistributedOptimizer does: this file only knows
when a backward pass begins and ends. Hooks run on autograd's threads, the rest on the training thread.

    forward → hook on the outputs ─ backward begins → hooks of parameters → reducer.ready
                                    └ queues a callback: backward ends → reducer.finish
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import bits_of, wire_dtype
from byteps_py.torch.collectives.parameter_owners import announce_averaging, check_unowned, check_whole
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.compression import (
    Compression,
    CompressionArgument,
    choice_of,
)
from byteps_py.torch.gradients.bucket import GradientOptions, GradientPlace
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of, members_of, prefix_of
from byteps_py.torch.operations.state_broadcast import broadcast_parameters


class DistributedDataParallel(torch.nn.Module):
    """``module`` with equal parameters on all ranks and gradients averaged over them.

    The constructor copies parameters and buffers from the first rank. If ``broadcast_buffers``, each training forward
    pass copies buffers again. A gradient that a backward pass does not compute counts as zeros, so ranks may use
    different parts of the module. device_ids: BytePS's argument, without effect; the module must be on its device.
    process_set: the ranks that average gradients and have equal parameters and buffers, those of the first of them; by
    default all. Only its ranks construct it. compression: see DistributedOptimizer. Parameters are dense, on cpu
    or cuda, of a floating dtype. One thread uses it, in the same order on all ranks.
    The constructor raises NotInitializedError before init(), and UsageError on a rank outside the set, for parameters
    of which ranks of the set have different parts (``tensor.parallelize``, FSDP2), and for those whose gradients
    something else averages; forward() and backward() raise MismatchError, StallError, PeerLostError, GradientOrderError
    or NonFiniteError.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = bps.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.bias.grad
    tensor([1.])
    >>> bps.shutdown()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int] | None = None,
        broadcast_buffers: bool = True,
        compression: CompressionArgument = Compression.none,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.module = module
        self.device_ids = device_ids
        self.broadcast_buffers = broadcast_buffers
        #: False inside no_sync(). The value during a forward pass counts for its backward pass.
        self.require_backward_grad_sync = True
        context = contexts.current()
        group, root = group_of(process_set), members_of(process_set)[0]
        named = list(module.named_parameters())
        caller = "byteps_py's DistributedDataParallel"
        check_whole(
            named,
            members_of(process_set),
            caller,
            "Give process_set the ranks with the same parts, mesh.ranks('dp', 'cp')",
        )
        check_unowned(named, caller)
        name = context.claim(prefix_of(process_set, "DDP"))
        tensors = [*named, *module.named_buffers()]
        broadcast_parameters(tensors, root, prefix=f"{name}.Parameter.", process_set=process_set)
        options = GradientOptions(choice_of(compression), group=group, prefix=f"{name}.Gradient.", caller=caller)
        self._backward = _BackwardTracker(GradientReducer(context, named, options))
        announce_averaging(self._backward, caller, [parameter for _, parameter in named])
        self._buffers_of_root = _BufferBroadcast(context, module, f"{name}.Buffer.", group, root)
        self._buffers_are_stale = False  # a training pass may have changed them since the last broadcast

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The outputs of ``module``, whose backward pass averages gradients over all ranks (see ``no_sync``)."""
        if self.broadcast_buffers and self._buffers_are_stale:
            self._buffers_of_root.broadcast()
        training = torch.is_grad_enabled()
        synchronizing = self._buffers_are_stale = training and self.require_backward_grad_sync
        if training:
            self._backward.prepare(self.module.parameters(), synchronizing)
        outputs = self.module(*inputs, **kwargs)
        if synchronizing:
            self._backward.watch(outputs)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, passes only accumulate gradients. The next backward pass outside averages the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises UsageError: the object belongs to this process and its job."""
        raise UsageError(
            "a DistributedDataParallel can't be copied or pickled: it is a part of this process and its job. Copy "
            "model.module, or save and send model.module.state_dict(), and wrap the module that takes it"
        )

    def synchronize(self) -> None:
        """Wait for gradients in flight. For BytePS's scripts: backward() waits by itself."""
        self._backward.end()


class _BackwardTracker:
    """Tracks when backward passes begin and end."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._hooked: set[torch.Tensor] = set()
        self._expected = False
        self._queued = False

    def prepare(self, params: Iterable[torch.nn.Parameter], expected: bool) -> None:
        """Called before a forward pass. expected: whether to average the gradients of its backward pass."""
        self._expected = expected
        self._queued = False  # a backward pass that raised did not run its callback
        me = weakref.ref(self)  # the module may outlive this wrapper and be wrapped again

        def computed(place: GradientPlace, param: torch.Tensor) -> None:
            backward = me()
            if backward is not None and backward._expected:
                backward._begin()
                backward._reducer.ready(place, param)

        for param in params:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                place = self._reducer.place(param)
                param.register_post_accumulate_grad_hook(functools.partial(computed, place))

    def watch(self, outputs: Any) -> None:
        """Register hooks that notice the begin of the backward pass of ``outputs``.

        These queue the callback for the end. A parameter's hook may run in an inner backward pass (re-entrant
        checkpointing), which ends before the outer one does.
        """
        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin())

    def _begin(self) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """Average all gradients if the pass has computed any (torch.autograd.grad computes none)."""
        self._queued = False
        if self._reducer.has_begun:
            self._reducer.finish()
            self._reducer.skip_step()


class _BufferBroadcast:
    """Broadcasts the module's buffers from the root. Those of one dtype travel together."""

    def __init__(
        self, context: Context, module: torch.nn.Module, prefix: str, group: tuple[int, ...], root: int
    ) -> None:
        self._context = context
        self._module = module
        self._prefix = prefix
        self._group, self._root = group, root

    def broadcast(self) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in self._module.buffers():
            bits = bits_of(buffer)
            groups.setdefault((bits.dtype, bits.device), []).append(bits)
        slot_views = self._context.slot_views([self._request(*kind, group) for kind, group in groups.items()])
        is_root = self._context.session.rank == self._root
        for slot_view, group in zip(slot_views, groups.values(), strict=True):
            if is_root:
                slot_view.contribute(group)
            else:
                slot_view.contribute_input()
        for slot_view, group in zip(slot_views, groups.values(), strict=True):
            slot_view.wait()
            if not is_root:
                slot_view.fetch(group)

    def _request(self, dtype: torch.dtype, device: torch.device, group: list[torch.Tensor]) -> TensorRequest:
        wire = wire_dtype(dtype, self._prefix)
        shapes = tuple(tuple(buffer.shape) for buffer in group)
        count = sum(buffer.numel() for buffer in group)
        name = f"{self._prefix}{wire.name.lower()}"
        spec = TensorSpec(name, wire, (count,), Op.BROADCAST, root=self._root, priority=1, group=self._group)
        return TensorRequest(spec, dtype, shapes, device)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(list(vars(value).values()))
