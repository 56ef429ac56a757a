"""DistributedOptimizer: wraps an optimizer so that it steps with the gradients of all ranks.

Only chooses the parts: optimizer_mixin.py (what a script sees), a stepper (order of calls), backward_passes.py (which
gradients were computed), gradient_reducer.py (their exchange). The training thread calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import context as contexts, nonfinite, parameter_owners
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.compression import (
    Compression,
    CompressionArgument,
    CompressionChoice,
    CompressionRules,
    check_low_rank,
    choice_of,
    codec_for,
    compression_of,
)
from byteps_py.torch.gradients.async_optimizer import AsyncOptimizer
from byteps_py.torch.gradients.backward_passes import CountedPasses, ReducedPasses
from byteps_py.torch.gradients.bucket import GradientOptions
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.group_bucket import sums_by_gpus
from byteps_py.torch.gradients.hosted.optimizer import (
    HostedOptions,
    check_hosted,
    check_hosted_compression,
    host,
    parameter_codec,
)
from byteps_py.torch.gradients.hosted.replication import check_machines
from byteps_py.torch.gradients.hosted.states_mode import asked_for
from byteps_py.torch.gradients.optimizer_mixin import (
    DistributedOptimizerMixin,
    NamedParameters,
    check_passes,
    checked_names,
)
from byteps_py.torch.gradients.stepper import AdasumStepper, DeltaExchange, LocalStepper, WrappedOptimizer
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, prefix_of, ranks_of
from byteps_py.torch.operations.reductions import Adasum, Average, ReduceOp, Sum
from byteps_py.torch.optim import LAMB

Groups = int | list[list[torch.nn.Parameter]] | None


def DistributedOptimizer(  # noqa: N802  a class to its users, as in BytePS and Horovod
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: CompressionArgument = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    hosted: bool | str = False,
    delayed_update_after: int | None = None,
    step_in_backward: bool = False,
    shadow: bool | None = None,
    parameter_compression: Any = Compression.none,
) -> Any:
    """Wrap ``optimizer`` so that it averages gradients over all ranks before each step. Use the result.

    Communication overlaps the backward pass. The result is an instance of the optimizer's class that shares its state
    and param_groups. Parameters are on cpu or cuda, of dtype float16, bfloat16, float32 or float64.

    named_parameters: usually model.named_parameters(). It must contain all of the optimizer's parameters, in the order
    of the forward pass, with the same names on all ranks. By default parameters are numbered.
    compression: how gradients travel, one of Compression: none, fp16, bf16, or, between machines, int8, float8,
    topk(ratio, error_feedback) and others; or a dictionary of BytePS. Compression.rules(…), or a function of a name and
    a parameter, chooses for each parameter.
    backward_passes_per_step: the number of backward passes whose gradients are summed before ranks combine them.
    op: Average, Sum, Min, Max, Product or Adasum. With Adasum, each rank steps on its own gradients, and ranks combine
    the changes of the weights.
    gradient_predivide_factor: f divides gradients by f before the sum and multiplies them by f/size after it.
    num_groups, groups: gradients that travel together. A number n makes n groups of neighbours; a list of lists of
    parameters makes these groups. Other small gradients travel together up to BYTEPS_FUSION_BYTES.
    sparse_as_dense: make sparse gradients dense before ranks combine them. No effect for SparseAdam, which takes only
    sparse gradients.
    process_set: the ranks that combine gradients. On other ranks the optimizer uses its own gradients. A hosted
    optimizer's states lie with these ranks, too.
    hosted: the communication services keep the optimizer's states and make its steps: gradients go in, parameters come
    out. "machine": each machine has all states, and a step takes as long on the links as an all-reduce. "sharded": each
    rank has its part, which takes the least memory. True: machine where it makes steps shorter and fits into memory,
    else sharded. For torch's SGD, Adam, AdamW and Adagrad and bps.optim.LAMB, and op Average or Sum.
    delayed_update_after: with hosted, a number of steps after which an update waits for the next step(), so that sums
    and steps are made under the next forward and backward passes: p(k+1) = p(k) - lr·u(g(p(k-1))).
    step_in_backward: with hosted, from the second step on, the services step each partition as soon as its sum is
    there, while backward() still computes others. step() takes the parameters. Not for LAMB, clipping, loss scaling.
    shadow: summation servers on other machines keep the states in step, so that a restarted job goes on from the last
    step after bps.restore(model, optimizer). Makes the optimizer hosted. None: as BYTEPS_SHADOW says.
    parameter_compression: with hosted="sharded", how parameters travel between machines: Compression.int8 sends what a
    step changes them by, in 8 bits, and what the code lacks with the next step. The services keep the masters.

    With BYTEPS_ENABLE_ASYNC=1 the result is an AsyncOptimizer, for which only the first two arguments count.

    One thread uses the result, and all ranks call in the same order. Raises UsageError (a ValueError) for arguments
    that contradict each other, for duplicate or missing names, for parameters of which the ranks have different parts
    (``tensor.parallelize``, FSDP2) and for those whose gradients something else averages (a DistributedDataParallel,
    ``sharding.shard``), and NotInitializedError before init(). The result's step() raises GradientOrderError,
    MismatchError, StallError, PeerLostError or NonFiniteError.

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
    _check_predivide(gradient_predivide_factor, op)
    compression = choice_of(compression)
    if isinstance(optimizer, DistributedOptimizerMixin):
        raise UsageError("the optimizer is a DistributedOptimizer already")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    context = contexts.current()
    if context.settings.enable_async:
        asked = {
            "compression=": compression is not Compression.none,
            f"op={op.name.title()}": op not in (Average, Sum),
            "process_set=": process_set is not global_process_set,
            "hosted=": hosted is not False,
            "shadow=True or BYTEPS_SHADOW=1": context.settings.shadow if shadow is None else shadow,
            "step_in_backward=": step_in_backward,
            "delayed_update_after=": delayed_update_after is not None,
            "parameter_compression=": parameter_compression is not Compression.none,
        }
        if wrong := ", ".join(name for name, is_asked in asked.items() if is_asked):
            raise UsageError(
                f"BYTEPS_ENABLE_ASYNC=1: machines step by themselves and send what their steps change, which does not "
                f"go with {wrong}: leave one of the two out"
            )
        return AsyncOptimizer(optimizer, named_parameters, staleness=context.settings.async_staleness or None)
    names = checked_names(optimizer, named_parameters)
    mine = set(params)
    is_shadowed = context.settings.shadow if shadow is None else shadow
    is_hosted_for_shadow = is_shadowed and hosted is False
    is_hosted = hosted is not False or is_shadowed
    mode = asked_for(hosted) if hosted is not False else None
    others = {
        "shadow=True or BYTEPS_SHADOW=1": is_shadowed,
        "delayed_update_after": delayed_update_after is not None,
        "--elastic": context.settings.elastic and not context.settings.max_restarts,
        "LAMB": isinstance(optimizer, LAMB),
    }
    its = parameter_codec(parameter_compression, hosted, others, {names[param]: param for param in params})
    hosting = HostedOptions(delayed_update_after, step_in_backward, is_shadowed, mode, parameters=its)
    ranks = ranks_of(process_set)
    if is_hosted:
        check_hosted_compression(compression, [(names[param], param) for param in params], mode, is_shadowed)
    _check_compression(compression, op, [(names[param], param) for param in params], context)
    hosting.check(optimizer, is_hosted, nonfinite.mode_of(context), bool(ranks))
    together = which_groups(num_groups, groups, params)
    if context.session.rank in (combining := ranks or range(context.session.size)):
        _check_owners([(name, param) for param, name in names.items() if param in mine], combining)
    if is_hosted:
        try:
            check_hosted(optimizer, op, gradient_predivide_factor, bool(together))
        except UsageError as error:
            if is_hosted_for_shadow:
                raise UsageError(f"{error} (shadow=True or BYTEPS_SHADOW=1 makes it hosted)") from None
            raise
        if hosting.shadow:
            check_machines(context)
        own = context.session.rank
        prefix = prefix_of(process_set, "Gradient.")
        if ranks and own not in ranks:
            ranks, prefix = (own,), f"rank{own}.{prefix}"
        options = GradientOptions(compression, op, group=ranks, prefix=prefix, sparse_as_dense=sparse_as_dense)
        return host(context, optimizer, names, backward_passes_per_step, options, hosting)
    if op is Adasum:
        name = context.claim(prefix_of(process_set, "Delta"))
        deltas = DeltaExchange(context, name, ranks, compression_of(compression))
        counted = WrappedOptimizer(optimizer, names, CountedPasses(backward_passes_per_step))
        counted.hook()
        return DistributedOptimizerMixin.wrap(optimizer, AdasumStepper(counted, deltas))
    options = GradientOptions(
        compression,
        op,
        gradient_predivide_factor,
        group=ranks,
        prefix=prefix_of(process_set, "Gradient."),
        sparse_as_dense=sparse_as_dense and not isinstance(optimizer, torch.optim.SparseAdam),
    )
    reducer = GradientReducer(
        context,
        [(name, param) for param, name in names.items() if param in mine],
        options,
        [[names[param] for param in group] for group in together],
        group_sums=sums_by_gpus(context, replace(options, nonfinite=nonfinite.mode_of(context))),
    )
    wrapped = WrappedOptimizer(optimizer, names, ReducedPasses(reducer, backward_passes_per_step))
    wrapped.hook()
    return DistributedOptimizerMixin.wrap(optimizer, LocalStepper(wrapped, reducer))


# ---- checks of the arguments; the errors have Horovod's words --------------------------------------------------------


def _check_predivide(factor: float, op: ReduceOp) -> None:
    """Raises UsageError for a gradient_predivide_factor that is not positive or does not apply to ``op``."""
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op must be one of {', '.join(op.name.title() for op in ReduceOp)}, got {op!r}")
    if factor != 1.0 and op is not Average:
        raise UsageError(
            f"gradient_predivide_factor not supported with op != Average: it splits an average, and op is "
            f"{op.name.title()}"
        )
    if not (factor > 0 and math.isfinite(factor)):
        raise UsageError(f"gradient_predivide_factor must be a positive number, got {factor}")


def _check_compression(
    compression: CompressionChoice,
    op: ReduceOp,
    named: Iterable[tuple[str, torch.nn.Parameter]],
    context: Context,
) -> None:
    """Raises UsageError for what can't be had here."""
    by_rules = isinstance(compression, CompressionRules)
    if by_rules and op is Adasum:
        raise UsageError("compression by rules is not for op=Adasum, which combines whole steps: give one for all")
    for name, param in named:
        chosen = compression.of(name, param)
        check_low_rank(chosen, name, param)
        if chosen.low_rank is not None:
            _check_op(f"compression {chosen.low_rank}", op)
        if chosen.codec is None:
            continue
        codec_for(chosen, param.dtype, 0, name if by_rules else None, context.settings)
        _check_codec(chosen.codec, f"compression {chosen.codec}", op, context)


def _check_codec(codec: Codec, what: str, op: ReduceOp, context: Context) -> None:
    """Raises UsageError for a codec that can't be had here."""
    _check_op(what, op)
    if codec.has_states and nonfinite.mode_of(context) is NonFinite.SKIP:
        raise UsageError(
            f"{what} can't be had with BYTEPS_NONFINITE=skip: what a skipped step did not send would be lost. Use it "
            "without error feedback and momentum, or BYTEPS_NONFINITE=raise"
        )


def _check_op(what: str, op: ReduceOp) -> None:
    """Raises UsageError for a compression that is not for this operation."""
    if op not in (Average, Sum):
        raise UsageError(f"{what} is for op=Average and op=Sum, not for op={op.name.title()}")


def _check_owners(named: Iterable[tuple[str, torch.nn.Parameter]], ranks: Sequence[int]) -> None:
    """Raises UsageError for a parameter that is a part of a larger one, other parts of which ``ranks`` have, and for
    one whose gradient something else averages."""
    named = list(named)
    caller = "DistributedOptimizer"
    parameter_owners.check_whole(
        named,
        ranks,
        caller,
        "Give process_set the ranks with the same parts, those of mesh.ranks('dp', 'cp')",
    )
    parameter_owners.check_unowned(named, caller)


def which_groups(
    num_groups: int, groups: Groups, params: Sequence[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """The groups of the optimizer's ``params`` that the two arguments describe. Raises UsageError.

    A number n splits the parameters that require gradients into n groups of neighbours, as evenly as possible.
    """
    if num_groups and groups is not None:
        raise UsageError(
            f"num_groups={num_groups} and groups were both given; give one of them (groups also takes a number)"
        )
    chosen: Groups = num_groups if groups is None else groups
    if isinstance(chosen, int) and not isinstance(chosen, bool) and chosen >= 0:
        return _split([param for param in params if param.requires_grad], chosen) if chosen else []
    if not isinstance(chosen, list) or not all(isinstance(group, list | tuple) for group in chosen):
        raise UsageError(
            "groups should be a non-negative integer or a list of list of torch.nn.Parameter, got "
            f"{type(chosen).__name__} {chosen!r}"[:300]
        )
    mine = set(params)
    seen: set[torch.nn.Parameter] = set()
    for number, group in enumerate(chosen):
        for param in group:
            if not isinstance(param, torch.nn.Parameter):
                raise UsageError(
                    f"groups must consist of torch.nn.parameter.Parameter, group {number} has a {type(param).__name__}"
                )
            what = f"a parameter of shape {list(param.shape)}, in group {number} of groups,"
            if param in seen:
                raise UsageError(f"A parameter can only appear once in groups: {what} appears twice")
            if param not in mine:
                raise UsageError(f"{what} is not one of the optimizer's")
            seen.add(param)
    return [list(group) for group in chosen if group]


def _split(params: list[torch.nn.Parameter], parts: int) -> list[list[torch.nn.Parameter]]:
    size, longer = divmod(len(params), parts)
    ends = [(part + 1) * size + min(part + 1, longer) for part in range(parts)]
    return [params[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]
