"""The steps of torch's optimizers that a service makes, their numbers, and the names of their states. Pure; any
thread."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.update_rules import Decay, Hyperparameters, Method, StepKind, UpdateRule
from byteps_py.tensors import DType
from byteps_py.torch.collectives.dtypes import WIRE
from byteps_py.torch.optim import LAMB

_METHODS: dict[type[torch.optim.Optimizer], Method] = {
    torch.optim.SGD: Method.SGD,
    torch.optim.Adam: Method.ADAM,
    torch.optim.AdamW: Method.ADAM,
    torch.optim.Adagrad: Method.ADAGRAD,
    LAMB: Method.LAMB,
}
_MOMENTS = {
    Method.SGD: ("momentum_buffer",),
    Method.ADAM: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    Method.ADAGRAD: ("sum",),
    Method.LAMB: ("exp_avg", "exp_avg_sq"),
}
_NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "eps", "lr_decay", "always_adapt")
#: In a state_dict: the master of a parameter of fewer bits, of which the parameter is a rounded copy.
MASTER = "master_param"


def check_class(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError for an optimizer whose steps a service does not make."""
    if type(optimizer) not in _METHODS:
        kept = ", ".join(kind.__name__ for kind in _METHODS)
        raise UsageError(
            f"hosted=True: the service makes the steps of {kept}, not of {type(optimizer).__name__}. "
            "Leave hosted out to step on the ranks"
        )
    for number, group in enumerate(optimizer.param_groups):
        for name in ("capturable", "differentiable"):
            if group.get(name):
                raise UsageError(f"hosted=True: param_groups[{number}] has {name}=True, which needs steps on the rank")


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> UpdateRule:
    """The rule of one of its param_groups."""
    method = _METHODS[_class_of(optimizer)]
    is_adamw = _class_of(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    is_adam = method is Method.ADAM
    has_betas = method in (Method.ADAM, Method.LAMB)
    return UpdateRule(
        method,
        Decay.DECOUPLED if is_adam and is_adamw else Decay.COUPLED,
        momentum=method is Method.SGD and bool(group["momentum"]),
        nesterov=method is Method.SGD and bool(group["nesterov"]),
        amsgrad=is_adam and bool(group["amsgrad"]),
        maximize=bool(group.get("maximize")),
        is_mostly_new=has_betas and 1 - float(group["betas"][0]) >= 0.5,
    )


def check_numbers(numbers: Sequence[Hyperparameters]) -> None:
    """Raises UsageError if one of the numbers, of each of the param_groups, is NaN or infinite."""
    for number, found in enumerate(numbers):
        for field in dataclasses.fields(found):
            value = getattr(found, field.name)
            if not math.isfinite(value):
                raise UsageError(f"param_groups[{number}] has {field.name}={value}: a step needs a number")


@dataclasses.dataclass(frozen=True, slots=True)
class GroupNumbers:
    """The numbers and the rule of a step, of each param_group."""

    numbers: list[Hyperparameters]
    rules: list[UpdateRule]


class HostedGroups:
    """The param_groups of an optimizer, as a step needs them, with what they have now.

    group_of: of each parameter, the number of its param_group; see ``add``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.group_of: dict[torch.nn.Parameter, int] = {}
        self.add()

    def add(self) -> None:
        """Take the parameters of new groups in."""
        for number, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                self.group_of.setdefault(param, number)

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """All parameters, in order."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def states_bytes(self) -> int:
        """The size of the states of all parameters, if each gradient has the dtype of its parameter."""
        kinds = {param: StepKind(self.rule(param), WIRE[param.dtype], WIRE[param.dtype]) for param in self.params}
        return sum(param.numel() * kind.states * kind.state_itemsize for param, kind in kinds.items())

    def numbers(self) -> GroupNumbers:
        """For a step that is made now."""
        groups = self.optimizer.param_groups
        return GroupNumbers([_numbers_of(each) for each in groups], [rule_of(self.optimizer, each) for each in groups])

    def rule(self, param: torch.nn.Parameter) -> UpdateRule:
        """The rule of a parameter's group."""
        return rule_of(self.optimizer, self.optimizer.param_groups[self.group_of[param]])

    def initial_sum(self, param: torch.nn.Parameter) -> float:
        """Adagrad's first state of a parameter."""
        return float(self.optimizer.param_groups[self.group_of[param]].get("initial_accumulator_value", 0.0))


def moment_names(rule: UpdateRule) -> tuple[str, ...]:
    """The names of the moments in a state_dict."""
    return _MOMENTS[rule.method][: rule.moments]


def counts_steps(rule: UpdateRule) -> bool:
    """True if a state_dict has "step"."""
    return rule.method is not Method.SGD


def check_dtypes(name: str, gradient: DType, parameter: DType) -> None:
    """Raises UsageError if there is no step for parameters and gradients of these dtypes."""
    if parameter is DType.FLOAT64 and gradient is not DType.FLOAT64:
        raise UsageError(
            f"hosted=True: the gradient of {name!r}, which is float64, is sent as {gradient.name.lower()}: its master "
            "would have fewer bits than the parameter. Use compression=bps.Compression.none"
        )


def _class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class that the user has chosen: a DistributedOptimizer derives from it."""
    return next(kind for kind in type(optimizer).__mro__ if kind in _METHODS)


def _numbers_of(group: dict[str, Any]) -> Hyperparameters:
    given = {name: float(group[name]) for name in _NUMBERS if name in group}
    if "betas" in group:
        given["beta1"], given["beta2"] = map(float, group["betas"])
    return Hyperparameters(**given)
