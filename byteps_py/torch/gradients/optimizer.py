"""DistributedOptimizer: from an optimizer and what is asked of it to one that works on all ranks together.

Owns the choice of parts, nothing of what they do: hooks.py (order of calls), passes.py (which gradients
there are), buckets.py (gradients on their way), adasum_optimizer.py. The training thread calls.
"""

from __future__ import annotations

from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.torch.compression import Compression, Compressor
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.gradients.adasum_optimizer import AdasumOptimizerMixin, DeltaExchange
from byteps_py.torch.gradients.backward_passes import BackwardPasses, CountedPasses, ReducedPasses
from byteps_py.torch.gradients.bucket import GradientOptions
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.optimizer_arguments import (
    Groups,
    NamedParameters,
    check_names,
    check_passes,
    check_predivide,
    which_groups,
)
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin, Names
from byteps_py.torch.horovod.ops import Adasum, Average, ReduceOp
from byteps_py.torch.horovod.process_sets import ProcessSet, global_process_set, prefix_of, ranks_of


def DistributedOptimizer(  # noqa: N802  a class to its users, as in BytePS and Horovod
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """``optimizer``, with gradients averaged over all ranks before each step; communication overlaps backward.

    The result is an instance of the optimizer's class that shares its state and param_groups.

    named_parameters: usually model.named_parameters(), all or more of the optimizer's, in order of the forward
    pass; the names must be the same on all ranks. Without it, numbers are used.
    compression: Compression.none, .fp16 or .bf16. backward_passes_per_step: gradients of so many passes are
    summed before they are combined over ranks.
    op: Average, Sum, Min, Max, Product; or Adasum: each rank steps by itself, and what the steps changed is combined.
    gradient_predivide_factor: with f, an average divides by f before the sum and
    multiplies by f/size after it.
    num_groups, groups: which gradients travel together. A number: so many groups of neighbours. A list of lists of
    parameters: these groups, and the others as their sizes suggest. Without it, small ones do (BYTEPS_FUSION_BYTES).
    sparse_as_dense: make sparse gradients dense before they are combined; without effect for SparseAdam, which takes
    sparse ones only.
    process_set: the ranks among which gradients are combined; on others the optimizer works with its own gradients.
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
    if isinstance(optimizer, DistributedOptimizerMixin):
        raise UsageError("the optimizer is a DistributedOptimizer already")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = check_names(optimizer, named_parameters)
    mine = set(params)
    context = contexts.current()
    together = which_groups(num_groups, groups, params)
    ranks = ranks_of(process_set)
    if op is Adasum:
        prefix = prefix_of(process_set, "Delta")
        adasum: AdasumOptimizerMixin = _dress(
            optimizer, AdasumOptimizerMixin, CountedPasses(backward_passes_per_step), names
        )
        adasum._deltas = DeltaExchange(context, context.claim(prefix), ranks, compression)
        adasum._passes.hook(params)
        return adasum
    reducer = GradientReducer(
        context,
        [(name, param) for param, name in names.items() if param in mine],
        GradientOptions(
            compression,
            op,
            gradient_predivide_factor,
            group=ranks,
            prefix=prefix_of(process_set, "Gradient."),
            sparse_as_dense=sparse_as_dense and not isinstance(optimizer, torch.optim.SparseAdam),
        ),
        [[names[param] for param in group] for group in together],
    )
    wrapped = _dress(optimizer, DistributedOptimizerMixin, ReducedPasses(reducer, backward_passes_per_step), names)
    wrapped._reducer = reducer
    wrapped._passes.hook(params)
    return wrapped


def _dress(
    optimizer: torch.optim.Optimizer, kind: type[DistributedOptimizerMixin], passes: BackwardPasses, names: Names
) -> Any:
    """An object of ``kind`` and the optimizer's class that shares the optimizer's state."""
    base = type(optimizer)
    wrapped: Any = object.__new__(type(base.__name__, (kind, base), {"__doc__": base.__doc__}))
    wrapped.__dict__.update(optimizer.__dict__)
    for name in ("step", "param_groups", "state"):  # a scheduler's wrapper of step() would step around us
        wrapped.__dict__.pop(name, None)
    wrapped._wrapped = optimizer
    wrapped._groups_taken_in = len(optimizer.param_groups)
    wrapped._passes = passes
    wrapped._parameter_names = names
    wrapped._synchronized = False
    wrapped._should_synchronize = True
    return wrapped
