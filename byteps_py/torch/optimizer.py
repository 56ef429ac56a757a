"""DistributedOptimizer: a wrapped optimizer whose step() works with gradients averaged over all ranks.

Owns hooks, accumulation over passes and the order of calls; what happens to a final gradient is the
GradientReducer's. Hooks run on autograd's threads, everything else on the training thread.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.torch import context as contexts
from byteps_py.torch.arguments import NamedParameters, check_names, check_passes, check_predivide, which_groups
from byteps_py.torch.bucket import Bucket, Place, Scheme
from byteps_py.torch.buckets import GradientReducer
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.ops import Average, ReduceOp


class _Watched:
    """A parameter with a hook. ``passes``: backward passes since the last synchronization."""

    __slots__ = ("passes", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.passes = 0


class _Passes:
    """Counts backward passes of each parameter; on the last one its gradient is ready."""

    def __init__(self, reducer: GradientReducer, passes: int) -> None:
        self.reducer = reducer
        self.per_step = passes
        self._hooked: dict[torch.nn.Parameter, _Watched] = {}
        self._begun: list[_Watched] = []  # has had a pass since the last synchronization

    @property
    def begun(self) -> bool:
        """True if a gradient was computed since the last synchronization."""
        return bool(self._begun)

    def hook(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Watch those that require gradients and are not watched yet."""
        # Weak: the parameters outlive this optimizer, and the next one has hooks of its own.
        me = weakref.ref(self)

        def computed(watched: _Watched, _: torch.Tensor) -> None:
            passes = me()
            if passes is not None:
                passes._computed(watched)

        if self.reducer.outside:
            return
        for param in params:
            if param.requires_grad and param not in self._hooked:
                watched = self._hooked[param] = _Watched(self.reducer.place(param))
                param.register_post_accumulate_grad_hook(functools.partial(computed, watched))

    def _computed(self, watched: _Watched) -> None:
        done = watched.passes + 1
        if done > self.per_step:
            raise GradientOrderError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        if done == 1:
            self._begun.append(watched)
        watched.passes = done
        if done == self.per_step:
            self.reducer.ready(watched.place)

    def finish(self) -> None:
        try:
            self.reducer.finish()
        finally:
            self._over()

    def depart(self) -> list[Bucket]:
        """The first half of ``finish``, see GradientReducer."""
        try:
            return self.reducer.depart()
        finally:
            self._over()

    def drop(self) -> None:
        """Forget what was computed since the last synchronization."""
        try:
            self.reducer.drop()
        finally:
            self._over()

    def _over(self) -> None:
        for watched in self._begun:
            watched.passes = 0
        self._begun.clear()


class _Distributed:
    """What DistributedOptimizer puts before the wrapped optimizer's class."""

    param_groups: list[dict[str, Any]]
    _passes: _Passes
    _named: dict[torch.nn.Parameter, str]
    _synchronized: bool
    _should_synchronize: bool

    @property
    def backward_passes_per_step(self) -> int:
        return self._passes.per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum gradients over so many backward passes from the next step on."""
        check_passes(passes)
        if self._passes.begun:
            raise GradientOrderError("set_backward_passes_per_step() was called between backward() and step()")
        self._passes.per_step = passes

    def synchronize(self) -> None:
        """Wait until every ``p.grad`` is the average over all ranks. Unused parameters count as zeros.

        step() does it by itself; call it to clip or unscale gradients, then step() in skip_synchronize().
        """
        self._passes.finish()
        self._synchronized = True
        self._passes.hook(p for group in self.param_groups for p in group["params"])  # unfrozen meanwhile

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what was not averaged yet, then let the wrapped optimizer step.

        With a closure, the gradients of each evaluation are averaged. A loss it returns stays this rank's:
        an optimizer that branches on it (LBFGS) needs the average, see push_pull.
        """
        if self._should_synchronize:
            if closure is not None:
                closure = self._synchronizing(closure)
            elif not self._synchronized or self._passes.begun:
                self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    # torch wraps a class's step() for its profiler and hooks; the wrapped optimizer's is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError while gradients are on their way."""
        if self._passes.begun:
            raise GradientOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. To drop the "
                "gradients, call optimizer.synchronize() first."
            )
        self._synchronized = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Gradients that were computed since the last step are not combined any more."""
        self._passes.drop()
        self._synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. New parameters have the names that named_parameters gave them, if it did."""
        super().add_param_group(param_group)  # type: ignore[misc]
        number = len(self.param_groups) - 1
        new = [
            (self._named.setdefault(param, f"push_pull.noname.{number}.{i}"), param)
            for i, param in enumerate(self.param_groups[-1]["params"])
        ]
        self._passes.reducer.add(new)
        self._passes.hook(param for _, param in new)


def DistributedOptimizer(  # noqa: N802  a class to its users, as in BytePS and Horovod
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
) -> Any:
    """``optimizer``, with gradients averaged over all ranks before each step; communication overlaps backward.

    The result is an instance of the optimizer's class that shares its state and param_groups.

    named_parameters: usually model.named_parameters(), all or more of the optimizer's, in order of the forward
    pass; the names must be the same on all ranks. Without it, numbers are used.
    compression: Compression.none, .fp16 or .bf16. backward_passes_per_step: gradients of so many passes are
    summed before they are combined over ranks.
    op: Average, Sum, Min, Max, Product. gradient_predivide_factor: with f, an average divides by f before the sum and
    multiplies by f/size after it.
    num_groups, groups: which gradients travel together. A number: so many groups of neighbours. A list of lists of
    parameters: these groups, and the others as their sizes suggest. Without it, small ones do (BYTEPS_FUSION_BYTES).
    sparse_as_dense: make sparse gradients dense before they are combined.
    Raises UsageError (a ValueError) for arguments that contradict each other and for duplicate or missing names,
    NotInitializedError before init().

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> opt.step()
    >>> isinstance(opt, torch.optim.SGD)
    True
    >>> bps.shutdown()
    """
    check_passes(backward_passes_per_step)
    check_predivide(gradient_predivide_factor, op)
    if isinstance(optimizer, _Distributed):
        raise UsageError("the optimizer is a DistributedOptimizer already")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = check_names(optimizer, named_parameters)
    mine = set(params)
    reducer = GradientReducer(
        contexts.current(),
        [(name, param) for param, name in names.items() if param in mine],
        Scheme(compression, op, gradient_predivide_factor, sparse_as_dense=sparse_as_dense),
        [[names[param] for param in group] for group in which_groups(num_groups, groups, params)],
    )
    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__}))
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a learning-rate scheduler's wrapper, which would step around us
    wrapped._passes = _Passes(reducer, backward_passes_per_step)
    wrapped._named = names
    wrapped._synchronized = False
    wrapped._should_synchronize = True
    wrapped._passes.hook(params)
    return wrapped
