"""Checks of DistributedOptimizer's arguments. The errors have Horovod's words. Pure; any thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import parameter_owners
from byteps_py.torch.gradients.hosted.rules import check_class
from byteps_py.torch.operations.reduction_plans import Average, ReduceOp, Sum
from byteps_py.torch.optim import LAMB

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]
Groups = int | list[list[torch.nn.Parameter]] | None


def check_passes(passes: int) -> None:
    """Raises UsageError for a number of passes below 1."""
    if passes < 1:
        raise UsageError(f"backward_passes_per_step must be > 0, got {passes}: it must be at least 1")


def check_predivide(factor: float, op: ReduceOp) -> None:
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


def check_hosted(
    optimizer: torch.optim.Optimizer, op: ReduceOp, factor: float, is_subset: bool, has_groups: bool
) -> None:
    """Raises UsageError for what ``hosted=True`` does not go together with. ``is_subset``: a process set is given;
    ``has_groups``: gradients that travel together are."""
    check_class(optimizer)
    if op not in (Average, Sum):
        raise UsageError(f"hosted=True: a step takes the average or the sum of gradients, and op is {op.name.title()}")
    for is_given, what in (
        (factor != 1.0, "gradient_predivide_factor"),
        (is_subset, "process_set"),
        (has_groups, "num_groups or groups"),
    ):
        if is_given:
            raise UsageError(f"hosted=True does not go together with {what}")


def check_delay(after: int | None, hosted: bool, shadow: bool) -> None:
    """Raises UsageError for a ``delayed_update_after`` that is no number of steps, or not of a hosted optimizer, or of
    one that is shadowed."""
    if after is None:
        return
    if shadow:
        raise UsageError(
            "delayed_update_after does not go together with shadow=True: a restarted job would need the parameters of "
            "two steps"
        )
    if not hosted:
        raise UsageError("delayed_update_after needs hosted=True: a step on the ranks is made at once")
    if isinstance(after, bool) or not isinstance(after, int) or after < 0:
        raise UsageError(f"delayed_update_after is {after!r}: give the number of steps before it, from 0 up, or None")


@dataclass(frozen=True, slots=True)
class HostedOptions:
    """When the services make the steps of a hosted optimizer, and whether others make them, too. See
    DistributedOptimizer."""

    delayed_update_after: int | None = None
    step_in_backward: bool = False
    shadow: bool = False

    def check(self, optimizer: torch.optim.Optimizer, hosted: bool, nonfinite: NonFinite) -> None:
        """Raises UsageError for what contradicts ``hosted``, the optimizer, BYTEPS_NONFINITE or one another."""
        check_delay(self.delayed_update_after, hosted, self.shadow)
        if not self.step_in_backward:
            return
        if not hosted:
            raise UsageError("step_in_backward needs hosted=True: an optimizer on the ranks steps in step()")
        if self.delayed_update_after is not None:
            raise UsageError(
                "step_in_backward does not go together with delayed_update_after, which makes steps under the next "
                "passes: give one of them"
            )
        if isinstance(optimizer, LAMB):
            raise UsageError(
                "step_in_backward: a step of LAMB needs norms of whole parameters, so all sums first: leave "
                "step_in_backward out"
            )
        if nonfinite is not NonFinite.ALLOW:
            raise UsageError(
                f"step_in_backward does not go together with BYTEPS_NONFINITE={nonfinite.name.lower()}: parameters "
                "step before it is known whether all gradients are finite. Set it to allow, or leave step_in_backward "
                "out"
            )


def check_owners(named: Iterable[tuple[str, torch.nn.Parameter]], ranks: Sequence[int]) -> None:
    """Raises UsageError for a parameter that is a part of a larger one, other parts of which ``ranks`` have, and for
    one whose gradient something else averages."""
    named = list(named)
    caller = "DistributedOptimizer"
    parameter_owners.check_whole(
        named,
        ranks,
        caller,
        "Give process_set the ranks with the same parts, those of mesh.ranks('dp', 'cp'); a hosted optimizer takes no "
        "process_set, and no model that is cut",
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


def check_names(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None
) -> dict[torch.nn.Parameter, str]:
    """The name of each parameter, in the given order; numbers if ``named_parameters`` is empty. Raises UsageError."""
    named = list(named_parameters) if named_parameters is not None else []
    if any(not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)) for pair in named):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    seen: set[str] = set()
    duplicates = {name for name, _ in named if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    if duplicates:
        raise UsageError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(sorted(duplicates))
        )
    if not named:
        return {
            param: f"push_pull.parameter.{g}.{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, param in enumerate(group["params"])
        }
    names = {param: name for name, param in reversed(named)}
    unnamed = [
        f"{tuple(param.shape)} at position {i} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
        if param not in names
    ]
    if unnamed:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not named. Parameters of shape: "
            + ", ".join(unnamed)
        )
    return dict(reversed(names.items()))
