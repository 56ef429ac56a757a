"""The states of an optimizer on this rank, of whatever kind: torch's, a ZeroRedundancyOptimizer, a
DistributedOptimizer, hosted or not, and that of ``sharding.shard``. One thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.checkpoint.contents import OPTIMIZER, ModelContents
from byteps_py.parallel.checkpoint.ranks import Ranks
from byteps_py.parallel.sharding.sharded_optimizer import ShardedOptimizer
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.hosted.rules import MASTER
from byteps_py.torch.horovod import api

#: By names of parameters, then of entries.
States = dict[str, dict[str, Any]]
#: Of torch's optimizers: an option of a group, and the first letters of the state that it needs.
_NEEDED = {"amsgrad": "max_exp_avg", "centered": "grad_avg"}


class OptimizerStates:
    """Of one optimizer, whose parameters are ``contents``'s. Raises UsageError for one that has others."""

    def __init__(self, optimizer: torch.optim.Optimizer, contents: ModelContents) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"the optimizer is a {type(optimizer).__name__}: give the torch.optim.Optimizer")
        self._whole, self._contents = optimizer, contents
        inner = getattr(optimizer, "optim", None)
        #: That of this rank's own parameters: inside a ZeroRedundancyOptimizer.
        self._own = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        names: dict[int, list[str]] = {}
        for name, parameter in contents.parameters.items():
            names.setdefault(id(parameter), []).append(name)
        self._names = names
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise UsageError(
                        f"parameter {place} of the optimizer's param_groups[{number}], of shape "
                        f"{list(parameter.shape)}, is not one of the model's: its states would be lost. Give the "
                        "module that has it, or an optimizer of this model's parameters"
                    )

    def check_ranks(self, ranks: Ranks) -> None:
        """Raise UsageError if states lie with ranks that do not take part."""
        if isinstance(self._whole, HostedOptimizerMixin) and ranks.size < api.size():
            raise UsageError(
                f"the states of a hosted optimizer lie with all {api.size()} ranks of the job, and the group has "
                f"{ranks.size}: call this on all ranks, without a group"
            )

    @property
    def family(self) -> list[str]:
        """The names of the optimizer's class and of those that it extends: optimizers that have one in common have
        the same states."""
        own = self._own
        for attribute in ("_inner", "_wrapped"):  # of a ShardedOptimizer, of a DistributedOptimizer
            inner = getattr(own, attribute, None)
            own = inner if isinstance(inner, torch.optim.Optimizer) else own
        classes = type(own).__mro__
        end = classes.index(torch.optim.Optimizer)
        return [one.__name__ for one in classes[:end]]

    def finish(self) -> None:
        """Wait for steps that are under way. All ranks call it."""
        if isinstance(self._whole, HostedOptimizerMixin):
            self._whole.flush()
        if isinstance(self._whole, ShardedOptimizer) and self._whole.offloaded is not None:
            self._whole.offloaded.finish()

    def named(self) -> States:
        """Of all parameters that have states here. Collective for a hosted optimizer, whose states are whole."""
        if isinstance(self._whole, HostedOptimizerMixin):
            packed = self._whole.state_dict()["state"]
            return {
                name: dict(packed[place])
                for place, parameter in enumerate(self._parameters(self._whole))
                if packed.get(place)
                for name in self._names[id(parameter)]
            }
        for key in self._own.state:
            if not isinstance(key, torch.Tensor):
                raise UsageError(f"the optimizer has a state {key!r} that belongs to no parameter, and would be lost")
        return {
            name: dict(self._own.state[parameter])
            for parameter in self._parameters(self._own)
            if self._own.state.get(parameter)
            for name in self._names[id(parameter)]
        }

    def entries(self, states: States) -> dict[str, Any]:
        """What this rank saves, by the names in a checkpoint. Raises UsageError for states that it can't hold."""
        found: dict[str, Any] = {}
        for name, own in states.items():
            for entry, value in own.items():
                if not isinstance(entry, str):
                    raise UsageError(f"the state {entry!r} of {name!r} has no name: a checkpoint can't hold it")
                self._contents.check_state(name, entry, value)
                found |= self._contents.pieces(f"{OPTIMIZER}{name}.{entry}", name, value)
        return found

    def steps(self) -> list[str]:
        """The names of the parameters whose states this rank has, or would have."""
        return [name for one in self._parameters(self._own) if self._owns(one) for name in self._names[id(one)]]

    def device_of(self, name: str, entry: str, is_scalar: bool) -> torch.device:
        """Where a state belongs."""
        parameter = self._contents.parameters[name]
        if isinstance(self._whole, HostedOptimizerMixin):
            return torch.device("cpu")
        if not is_scalar:
            return parameter.device
        group = self._group_of(parameter)
        # As in torch: counts of steps stay on the CPU, unless a kernel reads them.
        is_read = bool(group.get("capturable") or group.get("fused"))
        return parameter.device if entry == "step" and is_read else torch.device("cpu")

    def check(self, states: States, path: str) -> None:
        """Raise UsageError if the optimizer can't go on with ``states``."""
        if isinstance(self._whole, HostedOptimizerMixin):
            parameters, stepper = self._contents.parameters, self._whole._stepper
            given = {parameters[name]: own for name, own in states.items() if own}
            stepper.states.check(given, stepper.wrapped.names)
            return
        for name, own in states.items():
            if not own:
                continue
            group = self._group_of(self._contents.parameters[name])
            if MASTER in own:
                raise UsageError(
                    f"{path}: the state of {name!r} has a {MASTER}: it is of a hosted optimizer, and parameters of 16 "
                    "bits. Load it into a hosted one, or load the model without the optimizer"
                )
            for option, needed in _NEEDED.items():
                if group.get(option) and not any(entry.startswith(needed) for entry in own):
                    raise UsageError(
                        f"{path}: the optimizer here has {option}=True, and the state of {name!r} there has only "
                        f"{', '.join(sorted(own))}: it is of an optimizer with other options"
                    )

    def load(self, states: States) -> None:
        """Take ``states`` over, and forget all others. Nothing is left to be refused. Collective for none."""
        parameters = self._contents.parameters
        if isinstance(self._whole, HostedOptimizerMixin):
            packed = torch.optim.Optimizer.state_dict(self._whole)
            of = {id(parameters[name]): own for name, own in states.items() if own}
            places = enumerate(self._parameters(self._whole))
            state = {place: of[id(one)] for place, one in places if id(one) in of}
            self._whole.load_state_dict({"state": state, "param_groups": packed["param_groups"]})
            return
        self._own.state.clear()
        for name, own in states.items():
            if own:
                self._own.state[parameters[name]] = own
        if isinstance(self._whole, ShardedOptimizer) and self._whole.offloaded is not None:
            self._whole.offloaded.rest()

    def _owns(self, parameter: nn.Parameter) -> bool:
        """Whether this rank steps ``parameter``: a ShardedOptimizer has parameters that other ranks own."""
        return not isinstance(self._whole, ShardedOptimizer) or self._whole.owns(parameter)

    def _parameters(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _group_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        return next(one for one in self._whole.param_groups if any(parameter is each for each in one["params"]))
