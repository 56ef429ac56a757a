"""CrossBarrier: step() returns before the gradients arrive; each layer's next forward pass waits for its own ones.

Without it, a step ends with a barrier: no layer computes before the last gradient has arrived. With it, the back
layers' gradients travel while the front layers compute the next forward pass. So a step takes the longer of computation
and communication, not their sum. The name is BytePS's, the idea ByteScheduler's (Peng et al., SOSP 2019). As
in BytePS, a script may import this alone: ``import byteps_py.torch.cross_barrier as bps``.

    step t:      backward ───────────────────► step() returns at once
                 gradients are sent, those of the back layers first
    step t + 1:  layer 1 waits for its gradients, updates, computes; layer 2 waits for its gradients, ...

The training thread calls; hooks run on the threads of forward and backward passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer

from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.gradients.adasum_optimizer import AdasumOptimizerMixin
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.optimizer import DistributedOptimizer
from byteps_py.torch.gradients.optimizer_arguments import NamedParameters
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin
from byteps_py.torch.gradients.pending_updates import Hyperparameters, PendingUpdates

#: Modules that use their children's parameters without calling the children.
_USE_CHILD_PARAMETERS = (torch.nn.MultiheadAttention,)


class _CrossBarrierMixin(DistributedOptimizerMixin):
    """The base class that CrossBarrier puts before the DistributedOptimizer's class."""

    _pending: PendingUpdates
    _inner: Any  # the DistributedOptimizer
    _model: torch.nn.Module
    _whole: tuple[torch.nn.Module, ...]
    _hooked_modules: dict[torch.nn.Module, list[torch.nn.Parameter]]
    _checked_params: set[torch.nn.Parameter]
    _steps_left: int  # the last of these steps completes its updates

    def finish_updates(self) -> None:
        """Complete the updates that step() left to the next forward pass. Call it before you read or change weights,
        unless you do so by a forward pass, state_dict() or load_state_dict()."""
        self._pending.finish()

    def synchronize(self) -> None:
        """As in DistributedOptimizer. The next step() then updates at once."""
        self._pending.finish()
        super().synchronize()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over the remaining gradients and return. Until the next forward pass of a layer, the layer has its old
        weights, and its gradients are NaN.

        After synchronize(), and if the optimizer has step hooks, which need the new weights, step() waits and updates
        as DistributedOptimizer does. The step with number ``num_steps`` waits, too. Raises UsageError for a closure.
        """
        if closure is not None:
            raise UsageError(
                "CrossBarrier can't step with a closure: it would evaluate the model before the update. Use the "
                "DistributedOptimizer without CrossBarrier"
            )
        self._pending.finish()  # of layers that the last forward pass did not call
        self._steps_left -= 1
        averaged = self._synchronized and not self._passes.has_begun
        if averaged or not self._should_synchronize or _has_step_hooks(self):
            return super().step()
        self._synchronized = False
        self._mark_stepped()
        self._add_new_groups()
        handed_over = self._reducer.hand_over_all()
        self._passes.hook(p for group in self.param_groups for p in group["params"])  # some may have been unfrozen
        hyperparameters = [_snapshot(group) for group in self.param_groups]  # a scheduler may change them
        for bucket in handed_over:
            self._pending.add(bucket, hyperparameters)
        params = [param for group in self.param_groups for param in group["params"]]
        pending = [param for param in params if param in self._pending]
        # Other parameters are frozen. If one of them has a gradient, the optimizer uses it nevertheless.
        self._update(hyperparameters, [p for p in params if p not in self._pending and p.grad is not None])
        hooked = set(itertools.chain.from_iterable(self._hooked_modules.values()))
        for param in pending:
            if param in hooked:
                self._check_use_of(param)
        self._pending.wait_for(param for param in pending if param not in hooked)
        if self._steps_left == 0:
            self._pending.finish()
        return None

    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer. Completes pending updates first."""
        self._pending.finish()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Completes pending updates first."""
        self._pending.finish()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Completes pending updates first."""
        self._pending.finish()
        super().add_param_group(param_group)

    def _mark_stepped(self) -> None:
        super()._mark_stepped()
        self._inner._opt_called = True

    def _add_new_groups(self) -> bool:
        has_new = super()._add_new_groups()
        if has_new:
            self._hook_modules()
        return has_new

    def _update(self, hyperparameters: Hyperparameters, params: list[torch.nn.Parameter]) -> None:
        """Let the wrapped optimizer update only ``params``."""
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
            # step() of the wrapped optimizer's class
            super(DistributedOptimizerMixin, self).step()  # type: ignore[misc]
        finally:
            self.param_groups = all_groups
        for number, group in numbered:  # some optimizers keep counts in their groups
            was = hyperparameters[number]
            changed = {k: v for k, v in group.items() if k != "params" and (k not in was or v is not was[k])}
            all_groups[number].update(changed)

    def _hook_modules(self) -> None:
        """Register hooks on new modules, so that each waits for the parameters that it uses."""
        for module in self._model.modules():
            if module in self._hooked_modules:
                continue
            has_forward = type(module).forward is not torch.nn.Module.forward
            whole = isinstance(module, _USE_CHILD_PARAMETERS) or module in self._whole
            params = list(module.parameters() if whole else _used_by(module)) if has_forward else []
            self._hooked_modules[module] = params
            if params:
                # Before older hooks, which may compute weights from parameters (torch.nn.utils.weight_norm).
                module.register_forward_pre_hook(_UpdateHook(self._pending, params), prepend=True)
            module.register_state_dict_pre_hook(_UpdateHook(self._pending))
            module.register_load_state_dict_pre_hook(_UpdateHook(self._pending))

    def _check_use_of(self, param: torch.nn.Parameter) -> None:
        """Raise if a gradient of ``param`` is computed while its update is pending."""
        if param in self._checked_params or not param.requires_grad:
            return
        self._checked_params.add(param)
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
    """Wrap ``optimizer`` of ``model`` so that communication also overlaps the next forward pass. Use the result.

    step() returns at once. A layer is updated when the next forward pass calls it. The weights are bit for bit those
    that DistributedOptimizer computes. state_dict() and shutdown() complete all updates first; call finish_updates()
    before you read weights yourself. The training thread calls.

    optimizer: a DistributedOptimizer; or, as in BytePS, a plain optimizer, which is wrapped by
    DistributedOptimizer(optimizer, named_parameters, compression, backward_passes_per_step). Wrap it before the first
    step: gradients that have travelled before keep their priority, and a UserWarning says so.
    num_steps: the step with this number completes its updates, so that weights may be read after the last step.
    whole: modules that use their children's parameters without calling the children. They wait for all parameters in
    them. torch.nn.MultiheadAttention need not be named.
    Raises UsageError for Adasum, a hosted optimizer and sparse gradients, and for arguments that belong to the
    DistributedOptimizer.

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
    if isinstance(optimizer, HostedOptimizerMixin):
        raise UsageError(
            "CrossBarrier steps on the ranks, and the steps of a hosted optimizer are its services': use it as it is, "
            "with delayed_update_after=… to overlap its steps with the next forward pass"
        )
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
    optimizer._reducer.accepts_sparse = False
    optimizer._reducer.prioritize()
    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (_CrossBarrierMixin, base), {"__doc__": base.__doc__}))
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler's wrapper would bypass this class's step()
    wrapped._pending = PendingUpdates(wrapped._reducer, wrapped._update)
    contexts.current().unfinished.add(wrapped._pending)
    wrapped._inner = optimizer
    wrapped._model = model
    wrapped._whole = tuple(whole)
    wrapped._hooked_modules = {}
    wrapped._checked_params = set()
    wrapped._steps_left = num_steps
    wrapped._hook_modules()
    return wrapped


def _used_by(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The module's own parameters, and those of children that can't be called (ParameterList, ParameterDict)."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield from _used_by(child)


class _UpdateHook:
    """A hook of a module that completes the updates of ``params`` (default: all). A copy of the module, or a saved one,
    has no pending updates, so it gets a hook without effect."""

    def __init__(self, pending: PendingUpdates, params: list[torch.nn.Parameter] | None = None) -> None:
        self._pending, self._params = pending, params

    # torch.compile would trace the optimizer's step, too, which then computes in other dtypes: not the same bits.
    @_disable_dynamo  # it imports dynamo only when the hook is called; making an optimizer does so anyway
    def __call__(self, *_: Any) -> None:
        if self._params is None:
            self._pending.finish()
        else:
            self._pending.wait_for(self._params)

    def __reduce__(self) -> Any:
        return _NoHook, ()


class _NoHook:
    """The hook of a copied module."""

    def __call__(self, *_: Any) -> None:
        pass


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of the group's hyperparameters. A learning rate that is a tensor may later change in place."""
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
