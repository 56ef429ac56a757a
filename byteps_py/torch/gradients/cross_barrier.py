"""CrossBarrier: step() returns before the gradients arrive; each layer's next forward pass waits for its own ones.

Without it, a step ends with a barrier: no layer computes before the last gradient has arrived. With it, the back
layers' gradients travel while the front layers compute the next forward pass. So a step takes the longer of computation
and communication, not their sum. The name is BytePS's, the idea ByteScheduler's (Peng et al., SOSP 2019). As
in BytePS, a script may import this alone: ``import byteps_py.torch.cross_barrier as bps``.

    step t:      backward ───────────────────► step() returns at once
                 gradients are sent, those of the back layers first
    step t + 1:  layer 1 waits for its gradients, updates, computes; layer 2 waits for its gradients, ...

    step ─ add(bucket) ─► p.grad = placeholder ─┐
    a layer's forward ─ wait_for(params) ───────┴► averages into p.grad ─► update ─► repeat zero_grad's change to p.grad

PendingUpdates owns ``param.grad`` between these. It must not know modules or the wrapped optimizer. The training thread
calls; hooks run on the threads of forward and backward passes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo

from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.torch.collectives import context as contexts, rank_reporting
from byteps_py.torch.compression import Compression, CompressionArgument
from byteps_py.torch.gradients.async_optimizer import AsyncStepper
from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.optimizer import DistributedOptimizer
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin, NamedParameters
from byteps_py.torch.gradients.stepper import AdasumStepper, LocalStepper, StepCall, Stepper

#: Modules that use their children's parameters without calling the children.
_USE_CHILD_PARAMETERS = (torch.nn.MultiheadAttention,)
Hyperparameters = list[dict[str, Any]]  # of each parameter group, without its parameters
Update = Callable[[Hyperparameters, list[torch.nn.Parameter]], None]


class _GradientPlaceholder:
    """Replaces a gradient while it is in flight, and records what the script does to it.

    It reads as NaN, so that no stale gradient is used, and takes no memory. If the gradient stayed in place,
    zero_grad(set_to_none=False) would overwrite shared memory that is being summed.
    """

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param = param
        self._gradient = param.grad
        self._tensor = torch.full((), math.nan, dtype=param.dtype, device=param.device).expand(param.shape)
        param.grad = self._tensor

    def restore(self) -> Callable[[], None]:
        """Put the gradient back. Call the result after the update: it repeats the script's change to the gradient."""
        replacement = self.param.grad
        self.param.grad = self._gradient
        if replacement is not self._tensor:

            def replay() -> None:
                self.param.grad = replacement
        else:
            # All elements share one value, so the script can only have filled it. The tensor's version would not show
            # that: ``grad.data.zero_()`` does not change it.
            value = self._tensor

            def replay() -> None:
                grad = self.param.grad
                if grad is None:
                    return
                if not value.is_cpu:  # does not wait for the device
                    grad.copy_(torch.where(value.isnan(), grad, value))
                elif not math.isnan(filled := value.view(-1)[0].item() if value.numel() else math.nan):
                    grad.fill_(filled)

        return replay


class _PendingBucket:
    """A bucket in flight, and the hyperparameters for the update of its parameters."""

    def __init__(self, bucket: Bucket, hyperparameters: Hyperparameters) -> None:
        self.bucket = bucket
        self.hyperparameters = hyperparameters
        self.params = [p for p, participates in zip(bucket.params, bucket.participates, strict=True) if participates]
        self.placeholders = [_GradientPlaceholder(param) for param in self.params]


class PendingUpdates:
    """``update(hyperparameters, params)`` lets the wrapped optimizer update only ``params``."""

    def __init__(self, reducer: GradientReducer, update: Update) -> None:
        self._reducer = reducer
        self._update = update
        self._pending: dict[torch.nn.Parameter, _PendingBucket] = {}
        self._lock = threading.RLock()

    def __contains__(self, param: torch.nn.Parameter) -> bool:
        return param in self._pending

    def add(self, bucket: Bucket, hyperparameters: Hyperparameters) -> None:
        """Add the parameters of ``bucket``, which is in flight. Their gradients become placeholders."""
        pending = _PendingBucket(bucket, hyperparameters)
        self._pending.update((param, pending) for param in pending.params)

    def wait_for(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Return when ``params`` are up to date, and the parameters whose gradients travel with theirs.

        Raises the first error of their exchange. Then nothing is pending, and the pending updates are discarded.
        """
        if not self._pending:
            return
        with self._lock:
            for param in params:
                pending = self._pending.get(param)
                if pending is not None:
                    self._apply(pending)

    def finish(self) -> None:
        """Return when all parameters are up to date. Raises as ``wait_for`` does."""
        with self._lock:
            while self._pending:
                self._apply(next(iter(self._pending.values())))

    def _apply(self, pending: _PendingBucket) -> None:
        replays = self._remove(pending)
        try:
            is_usable = self._reducer.finish_bucket(pending.bucket)
            # The caller may be in a forward pass under autocast or inference_mode, in which step() was not.
            kinds = {param.device.type for param in pending.params if torch.is_autocast_enabled(param.device.type)}
            with torch.inference_mode(False), _no_autocast(kinds), torch.no_grad():
                if is_usable:
                    self._update(pending.hyperparameters, pending.params)
                for replay in replays:
                    replay()
        except BaseException:
            self._discard_rest()
            raise

    def _remove(self, pending: _PendingBucket) -> list[Callable[[], None]]:
        for param in pending.params:
            del self._pending[param]
        return [placeholder.restore() for placeholder in pending.placeholders]

    def _discard_rest(self) -> None:
        """Receive the other buckets without using them: after an error no exchange may stay pending."""
        while self._pending:
            pending = next(iter(self._pending.values()))
            self._remove(pending)
            with contextlib.suppress(Exception):  # the caller gets the first error
                self._reducer.finish_bucket(pending.bucket)


class BarrierStepper(Stepper):
    """Leaves updates to the next forward pass of ``model``. ``inner``: makes a step at once; ``whole``: see
    CrossBarrier; ``num_steps``: the last of these completes its updates."""

    def __init__(
        self,
        inner: DistributedOptimizerMixin,
        local: LocalStepper,
        model: torch.nn.Module,
        whole: Iterable[torch.nn.Module],
        num_steps: int,
    ) -> None:
        super().__init__(local.wrapped)
        self.averages = local.averages
        self.reducer = local.reducer
        self._inner, self._local, self._model, self._whole = inner, local, model, tuple(whole)
        self._on_rank: Callable[..., Any] = local.wrapped.optimizer.step  # of the latest call of step()
        self._steps_left = num_steps
        self._hooked_modules: dict[torch.nn.Module, list[torch.nn.Parameter]] = {}
        self._checked_params: set[torch.nn.Parameter] = set()
        self.pending = self.under_way = PendingUpdates(self.reducer, self._update)
        self.wrapped.on_new = lambda new: self._hook_modules()
        self._hook_modules()

    def step(self, call: StepCall) -> Any:
        """Hand over the remaining gradients and return."""
        if call.closure is not None:
            raise UsageError(
                "CrossBarrier can't step with a closure: it would evaluate the model before the update. Use the "
                "DistributedOptimizer without CrossBarrier"
            )
        self.pending.finish()  # of layers that the last forward pass did not call
        self._steps_left -= 1
        self._on_rank = call.on_rank
        self._inner._mark_stepped()
        averages = self._local.averages
        if averages.are_current or not averages.are_wanted or _has_step_hooks(self.wrapped.optimizer):
            return self._local.step(call)
        averages.use()
        self.wrapped.mark_stepped()
        self.wrapped.add_groups()
        handed_over = self.reducer.hand_over_all()
        self.wrapped.hook()
        hyperparameters = [_snapshot(group) for group in self.wrapped.groups]  # a scheduler may change them
        for bucket in handed_over:
            self.pending.add(bucket, hyperparameters)
        params = self.wrapped.params
        pending = [param for param in params if param in self.pending]
        # Other parameters are frozen. If one of them has a gradient, the optimizer uses it nevertheless.
        self._update(hyperparameters, [p for p in params if p not in self.pending and p.grad is not None])
        hooked = set(itertools.chain.from_iterable(self._hooked_modules.values()))
        for param in pending:
            if param in hooked:
                self._check_use_of(param)
        self.pending.wait_for(param for param in pending if param not in hooked)
        if self._steps_left == 0:
            self.pending.finish()
        return None

    def groups_to_unscale(self) -> list[dict[str, Any]]:
        if self._local.averages.are_wanted and not self._local.averages.are_current:
            self.pending.finish()
        return self._local.groups_to_unscale()

    def drop(self) -> None:
        self.pending.finish()
        super().drop()

    def _update(self, hyperparameters: Hyperparameters, params: list[torch.nn.Parameter]) -> None:
        """Let the wrapped optimizer update only ``params``."""
        chosen = set(params)
        all_groups = self.wrapped.groups
        numbered = [
            (number, {**values, "params": [p for p in group["params"] if p in chosen]})
            for number, (values, group) in enumerate(zip(hyperparameters, all_groups, strict=True))
        ]
        numbered = [(number, group) for number, group in numbered if group["params"]]
        if not numbered:
            return
        self.wrapped.optimizer.param_groups = [group for _, group in numbered]
        try:
            self._on_rank()
        finally:
            self.wrapped.optimizer.param_groups = all_groups
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
                module.register_forward_pre_hook(_UpdateHook(self.pending, params), prepend=True)
            module.register_state_dict_pre_hook(_UpdateHook(self.pending))
            module.register_load_state_dict_pre_hook(_UpdateHook(self.pending))

    def _check_use_of(self, param: torch.nn.Parameter) -> None:
        """Raise if a gradient of ``param`` is computed while its update is pending."""
        if param in self._checked_params or not param.requires_grad:
            return
        self._checked_params.add(param)
        pending, name = self.pending, self.wrapped.names[param]

        def check(_: torch.Tensor) -> None:
            if param in pending:
                raise GradientOrderError(
                    f"the parameter {name!r} was used while its update was pending: the forward pass did not call "
                    "the module that owns it. Name the module that uses it: CrossBarrier(model, optimizer, "
                    "whole=[module])"
                )

        param.register_hook(check)


class CrossBarrierMixin(DistributedOptimizerMixin):
    """The base class that CrossBarrier puts before the DistributedOptimizer's class."""

    _stepper: BarrierStepper

    def finish_updates(self) -> None:
        """Complete the updates that step() left to the next forward pass. Call it before you read or change weights,
        unless you do so by a forward pass, state_dict() or load_state_dict()."""
        self._stepper.pending.finish()


def CrossBarrier(  # noqa: N802  BytePS's name
    model: torch.nn.Module,
    optimizer: Any,
    named_parameters: NamedParameters | None = None,
    compression: CompressionArgument = Compression.none,
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
    stepper = optimizer._stepper if isinstance(optimizer, DistributedOptimizerMixin) else None
    if isinstance(stepper, AdasumStepper):
        raise UsageError("CrossBarrier can't overlap Adasum, which combines whole steps; use the optimizer as it is")
    if isinstance(optimizer, HostedOptimizerMixin):
        raise UsageError(
            "CrossBarrier steps on the ranks, and the steps of a hosted optimizer are its services': use it as it is, "
            "with delayed_update_after=… to overlap its steps with the next forward pass"
        )
    if isinstance(stepper, BarrierStepper):
        raise UsageError("the optimizer is a CrossBarrier already")
    if not isinstance(optimizer, DistributedOptimizerMixin):
        optimizer = DistributedOptimizer(optimizer, named_parameters, compression, backward_passes_per_step)
    elif named_parameters is not None or compression is not Compression.none or backward_passes_per_step != 1:
        raise UsageError(
            "the optimizer is a DistributedOptimizer already: give named_parameters, compression and "
            "backward_passes_per_step to it, or give CrossBarrier the optimizer that it wraps"
        )
    if isinstance(optimizer._stepper, AsyncStepper):
        raise UsageError(
            "CrossBarrier overlaps averages of gradients with the next forward pass, and an AsyncOptimizer "
            "(BYTEPS_ENABLE_ASYNC=1) has none: use it as it is"
        )
    local: LocalStepper = optimizer._stepper
    if local.reducer.has_sparse:
        raise UsageError("CrossBarrier can't overlap sparse gradients; use DistributedOptimizer(sparse_as_dense=True)")
    local.reducer.accepts_sparse = False
    local.reducer.prioritize()
    barrier = BarrierStepper(optimizer, local, model, whole, num_steps)
    contexts.current().unfinished.add(barrier.pending)
    return CrossBarrierMixin.wrap(optimizer, barrier)


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
        or rank_reporting.has_other_step_hooks()
    )


def _no_autocast(kinds: Iterable[str]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
