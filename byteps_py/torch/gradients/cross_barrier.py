"""CrossBarrier: step() hands over and returns; each layer's next forward pass waits for its own gradients only.

Without it a step ends with a barrier: no layer computes before the last gradient has arrived. With it the gradients
of the back layers travel while the front layers already compute the next forward pass, so that a step takes the
longer of computation and communication, not their sum. BytePS's name and idea (ByteScheduler's, before). As in BytePS,
a script may import this module alone: ``import byteps_py.torch.gradients.cross_barrier as bps``.

    step t:      backward ───────────────────► step() returns at once
                 gradients leave, back first
    step t + 1:  layer 1 waits for its own, updates, computes; layer 2 waits for its own, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.gradients.adasum_optimizer import AdasumOptimizerMixin
from byteps_py.torch.gradients.optimizer import DistributedOptimizer
from byteps_py.torch.gradients.optimizer_arguments import NamedParameters
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin
from byteps_py.torch.gradients.pending_updates import Hyperparameters, PendingUpdates
from byteps_py.torch.horovod.api import (
    byteps_push_pull,
    init,
    local_rank,
    local_size,
    poll,
    rank,
    shutdown,
    size,
    synchronize,
)
from byteps_py.torch.horovod.functions import broadcast_optimizer_state, broadcast_parameters

#: What BytePS's module has.
__all__ = [
    "Compression",
    "CrossBarrier",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

#: These use their children's parameters without calling the children.
_WHOLE = (torch.nn.MultiheadAttention,)


class _CrossBarrierMixin(DistributedOptimizerMixin):
    """What CrossBarrier puts before the DistributedOptimizer's class."""

    _pending: PendingUpdates
    _crossed: Any  # the DistributedOptimizer
    _model: torch.nn.Module
    _whole: tuple[torch.nn.Module, ...]
    _covered: dict[torch.nn.Module, list[torch.nn.Parameter]]
    _guarded: set[torch.nn.Parameter]
    _steps_left: int  # the last of them completes its updates

    def finish_updates(self) -> None:
        """Complete what step() left to the next forward pass. Call it before reading weights or changing them in
        another way than through a forward pass, state_dict() or load_state_dict()."""
        self._pending.finish()

    def synchronize(self) -> None:
        """As in DistributedOptimizer; step() then updates at once."""
        self._pending.finish()
        super().synchronize()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over what is left of the gradients and return. From here to the next forward pass of a layer, its
        weights are the old ones and its gradients NaN.

        With gradients that were averaged before (synchronize()), and if the optimizer has step hooks, which need
        the new weights, it waits and updates as DistributedOptimizer does. So does the step whose number is
        ``num_steps``. Raises UsageError for a closure.
        """
        if closure is not None:
            raise UsageError(
                "CrossBarrier can't step with a closure: it would evaluate the model before the update. Use the "
                "DistributedOptimizer without CrossBarrier"
            )
        self._pending.finish()  # of layers that the last forward pass left out
        self._steps_left -= 1
        averaged = self._synchronized and not self._passes.begun
        if averaged or not self._should_synchronize or _has_step_hooks(self):
            return super().step()
        self._synchronized = False
        self._tell_schedulers()
        self._take_in()
        departed = self._reducer.depart()
        self._passes.hook(p for group in self.param_groups for p in group["params"])  # unfrozen meanwhile
        hyperparameters = [_snapshot(group) for group in self.param_groups]  # a scheduler may change them next
        for bucket in departed:
            self._pending.add(bucket, hyperparameters)
        params = [param for group in self.param_groups for param in group["params"]]
        pending = [param for param in params if param in self._pending]
        # What took no part in the exchange is frozen; if it has a gradient, the optimizer uses it all the same.
        self._update(hyperparameters, [p for p in params if p not in self._pending and p.grad is not None])
        covered = set(itertools.chain.from_iterable(self._covered.values()))
        for param in pending:
            if param in covered:
                self._guard(param)
        self._pending.wait_for(param for param in pending if param not in covered)
        if self._steps_left == 0:
            self._pending.finish()
        return None

    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer."""
        self._pending.finish()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        self._pending.finish()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        self._pending.finish()
        super().add_param_group(param_group)

    def _tell_schedulers(self) -> None:
        super()._tell_schedulers()
        self._crossed._opt_called = True

    def _take_in(self) -> bool:
        has_new = super()._take_in()
        if has_new:
            self._cover()
        return has_new

    def _update(self, hyperparameters: Hyperparameters, params: list[torch.nn.Parameter]) -> None:
        """Let the wrapped optimizer step with ``params`` alone."""
        chosen = set(params)
        all_groups = self.param_groups
        numbered = [
            (number, {**values, "params": [p for p in group["params"] if p in chosen]})
            for number, (values, group) in enumerate(zip(hyperparameters, all_groups, strict=True))
        ]
        numbered = [(number, group) for number, group in numbered if group["params"]]
        if not numbered:
            return
        self.param_groups = [group for _, group in numbered]
        try:
            # The wrapped optimizer's.
            super(DistributedOptimizerMixin, self).step()  # type: ignore[misc]
        finally:
            self.param_groups = all_groups
        for number, group in numbered:  # some optimizers count in their groups
            was = hyperparameters[number]
            changed = {k: v for k, v in group.items() if k != "params" and (k not in was or v is not was[k])}
            all_groups[number].update(changed)

    def _cover(self) -> None:
        """Make every module that uses parameters wait for them; those that do it already are left alone."""
        for module in self._model.modules():
            if module in self._covered:
                continue
            has_forward = type(module).forward is not torch.nn.Module.forward
            whole = isinstance(module, _WHOLE) or module in self._whole
            params = list(module.parameters() if whole else _used_by(module)) if has_forward else []
            self._covered[module] = params
            if params:
                # First of all: older hooks may compute weights from parameters (torch.nn.utils.weight_norm).
                module.register_forward_pre_hook(_UpdateHook(self._pending, params), prepend=True)
            module.register_state_dict_pre_hook(_UpdateHook(self._pending))
            module.register_load_state_dict_pre_hook(_UpdateHook(self._pending))

    def _guard(self, param: torch.nn.Parameter) -> None:
        """Notice a gradient that was computed with a weight that is not up to date."""
        if param in self._guarded or not param.requires_grad:
            return
        self._guarded.add(param)
        pending, name = self._pending, self._parameter_names[param]

        def check(_: torch.Tensor) -> None:
            if param in pending:
                raise GradientOrderError(
                    f"the parameter {name!r} was used while its update was pending: the forward pass did not call "
                    "the module that owns it. Name the module that uses it: CrossBarrier(model, optimizer, "
                    "whole=[module])"
                )

        param.register_hook(check)


def CrossBarrier(  # noqa: N802  BytePS's name
    model: torch.nn.Module,
    optimizer: Any,
    named_parameters: NamedParameters | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
    *,
    whole: Iterable[torch.nn.Module] = (),
) -> Any:
    """``optimizer`` for ``model``, whose communication also overlaps the next forward pass.

    A DistributedOptimizer, made before with what it needs; or a plain one, from which DistributedOptimizer(optimizer,
    named_parameters, compression, backward_passes_per_step) is made, as in BytePS. The weights are bit for bit those
    that it gives; use the result in its place. step() returns at once; a layer is updated when the next forward pass
    calls it. state_dict(), shutdown() and what else needs all weights waits for them; before you read weights yourself,
    call finish_updates().

    num_steps: that step completes its updates, so that weights may be read after the last one.
    whole: modules that use parameters of their children without calling them: they wait for all of these (known by
    itself for torch.nn.MultiheadAttention).
    Wrap it before the first step: what has travelled keeps its priority, and a UserWarning says so.
    Raises UsageError for what it can't overlap, and for arguments that the DistributedOptimizer had to be given.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> opt = bps.CrossBarrier(model, opt, model.named_parameters(), num_steps=3)
    >>> for _ in range(3):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     opt.step()
    ...     opt.zero_grad()
    >>> bps.shutdown()
    """
    if isinstance(optimizer, AdasumOptimizerMixin):
        raise UsageError("CrossBarrier can't overlap Adasum, which combines whole steps; use the optimizer as it is")
    if isinstance(optimizer, _CrossBarrierMixin):
        raise UsageError("the optimizer is a CrossBarrier already")
    if not isinstance(optimizer, DistributedOptimizerMixin):
        optimizer = DistributedOptimizer(optimizer, named_parameters, compression, backward_passes_per_step)
    elif named_parameters is not None or compression is not Compression.none or backward_passes_per_step != 1:
        raise UsageError(
            "the optimizer is a DistributedOptimizer already: give named_parameters, compression and "
            "backward_passes_per_step to it, or give CrossBarrier the optimizer that it wraps"
        )
    if optimizer._reducer.has_sparse:
        raise UsageError("CrossBarrier can't overlap sparse gradients; use DistributedOptimizer(sparse_as_dense=True)")
    optimizer._reducer.takes_sparse = False
    optimizer._reducer.prioritize()
    base = type(optimizer)
    crossing: Any = object.__new__(type(base.__name__, (_CrossBarrierMixin, base), {"__doc__": base.__doc__}))
    crossing.__dict__.update(optimizer.__dict__)
    crossing.__dict__.pop("step", None)  # a learning-rate scheduler's wrapper, which would step around us
    crossing._pending = PendingUpdates(crossing._reducer, crossing._update)
    contexts.current().unfinished.add(crossing._pending)
    crossing._crossed = optimizer
    crossing._model = model
    crossing._whole = tuple(whole)
    crossing._covered = {}
    crossing._guarded = set()
    crossing._steps_left = num_steps
    crossing._cover()
    return crossing


def _used_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Its own parameters, and those of children that can't be called (ParameterList, ParameterDict)."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield from _used_by(child)


class _UpdateHook:
    """A module's hook that completes updates first: those of ``params``, or all. The module may be copied or saved:
    what comes of that is another one, for which nothing is pending."""

    def __init__(self, pending: PendingUpdates, params: list[torch.nn.Parameter] | None = None) -> None:
        self._pending, self._params = pending, params

    def __call__(self, *_: Any) -> None:
        if self._params is None:
            self._pending.finish()
        else:
            self._pending.wait_for(self._params)

    def __reduce__(self) -> Any:
        return _NoHook, ()


class _NoHook:
    """The hook in the copy."""

    def __call__(self, *_: Any) -> None:
        pass


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """The group's hyperparameters as they are. A learning rate that is a tensor is changed in place later."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _has_step_hooks(optimizer: Any) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
