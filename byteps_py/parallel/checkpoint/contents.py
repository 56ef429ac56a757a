"""The contents of a checkpoint that a rank saves: parameters, buffers and other objects of its model's state dict, and
its optimizer's states.

The optimizer may be of any kind: torch's, a ZeroRedundancyOptimizer, a DistributedOptimizer, hosted or not, or that of
``sharding.shard``. One thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.parallel.checkpoint.ranks import Ranks
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.parallel.sharding.sharded_optimizer import ShardedOptimizer
from byteps_py.parallel.tensor.parallel_plan import sharded_parameters
from byteps_py.parallel.tensor.shard import Shard
from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.hosted.rules import MASTER
from byteps_py.wording import ranks_text

#: The first words of names in a checkpoint.
MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True, slots=True)
class ModelContents:
    """The contents of a model on this rank.

    Attributes:
        values: its state dict. Tensors share the model's memory; others come from ``get_extra_state``.
        parameters: by all their names.
        shards: of the parameters that tensor-parallel ranks have cut.
        modules: the modules whose state dicts these are, each with the prefix of its names.
    """

    values: Mapping[str, Any]
    parameters: Mapping[str, nn.Parameter]
    shards: Mapping[str, Shard]
    modules: tuple[tuple[str, nn.Module], ...]

    @classmethod
    def of(cls, model: nn.Module | Pipeline) -> ModelContents:
        """Raises UsageError for an object that is no model, or has no values yet."""
        if isinstance(model, Pipeline):
            modules: tuple[tuple[str, nn.Module], ...] = tuple(model.named_stages())
            shards: Mapping[str, Shard] = model.sharded_parameters()
        else:
            plain = _unwrapped(model)
            modules, shards = (("", plain),), sharded_parameters(plain)
        parameters = {
            prefix + name: parameter
            for prefix, module in modules
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        for name, parameter in parameters.items():
            if parameter.is_meta or isinstance(parameter, nn.UninitializedParameter):
                raise UsageError(f"{name!r} has no values yet (meta device, lazy module): call model.to_empty() before")
        values = {prefix + name: value for prefix, module in modules for name, value in module.state_dict().items()}
        return cls(values, parameters, shards, modules)

    @property
    def tensor_names(self) -> set[str]:
        """The names of parameters and buffers: modules may make other values for a state dict."""
        return set(self.parameters) | {
            prefix + name for prefix, module in self.modules for name, _ in module.named_buffers(remove_duplicate=False)
        }

    @property
    def buffers(self) -> set[str]:
        """The names of buffers, and of other values that are no parameters."""
        return set(self.values) - set(self.parameters)

    def entries(self) -> dict[str, Any]:
        """The entries that this rank saves, by their names in a checkpoint."""
        found: dict[str, Any] = {}
        for name, value in self.values.items():
            found |= self.pieces(MODEL + name, name, value)
        return found

    def pieces(self, key: str, name: str, value: Any) -> dict[str, Any]:
        """The entries that this rank writes of the parameter ``name``, or of its optimizer's state: ``key``."""
        shard = self.shards.get(name)
        if shard is None or not isinstance(value, torch.Tensor) or not value.dim():
            return {key: value}
        dim = shard.dim
        # One span without padding is the tensor itself: narrow() would gather an FSDP2 parameter.
        return {
            f"{key}@{dim}:{start}:{stop}": value if stop - start == shard.local else value.narrow(dim, at, stop - start)
            for start, stop, at in shard.pieces()
        }

    def whole_shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of a value in the whole model, without padding."""
        shard, shape = self.shards.get(name), list(tensor.shape)
        if shard is not None:
            shape[shard.dim] = shard.length
        return tuple(shape)

    def is_cut(self, name: str) -> bool:
        """True if this rank has only a part of a parameter."""
        return name in self.shards or isinstance(self.parameters[name], DTensor)

    def check_state(self, name: str, entry: str, value: Any) -> None:
        """Raise UnsupportedError for a state of a parameter in parts that has not the parameter's form: nobody knows
        which parts of it other ranks have."""
        parameter = self.parameters[name]
        if not self.is_cut(name) or not isinstance(value, torch.Tensor) or not value.dim():
            return
        if value.shape != parameter.shape or isinstance(value, DTensor) != isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"the optimizer's state {entry!r} of {name!r} has the shape {list(value.shape)}, and the parameter, of "
                f"which this rank has a part, {list(parameter.shape)}: a checkpoint can't hold such a state. Use an "
                "optimizer whose states have the shapes of their parameters, or save without the optimizer"
            )

    def load_others(self, values: Mapping[str, Any]) -> None:
        """Give ``values``, which are no parameters or buffers, to the modules, as load_state_dict does."""
        for prefix, module in self.modules:
            own = {name.removeprefix(prefix): one for name, one in values.items() if name.startswith(prefix)}
            if own:
                module.load_state_dict(own, strict=False)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DDP and torch.compile, whose names have no prefix."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"a checkpoint is of a module or a Pipeline, and this is a {type(model).__name__}")
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


# ---- the optimizer -------------------------------------------------------------------------------------------------


#: The states, by names of parameters, then of entries.
States = dict[str, dict[str, Any]]
#: Options of groups of torch's optimizers, and the first letters of the state that each needs.
_NEEDED = {"amsgrad": "max_exp_avg", "centered": "grad_avg"}


class OptimizerStates:
    """The states of one optimizer, whose parameters are those of ``contents``. Raises UsageError for one that has
    others."""

    def __init__(self, optimizer: torch.optim.Optimizer, contents: ModelContents) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"the optimizer is a {type(optimizer).__name__}: give the torch.optim.Optimizer")
        self._whole, self._contents = optimizer, contents
        inner = getattr(optimizer, "optim", None)
        #: The optimizer of this rank's own parameters: inside a ZeroRedundancyOptimizer.
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
        if not isinstance(self._whole, HostedOptimizerMixin):
            return
        sharers = self._whole._stepper.ranks
        if not set(ranks.names).issuperset(sharers):
            raise UsageError(
                f"the states of this hosted optimizer lie with {ranks_text(sharers)}, and not all of these are among "
                f"the {ranks.size} of the group: call this on all of them, or without a group"
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
        """The states of all parameters that have some on this rank. Collective for a hosted optimizer, whose states are
        whole."""
        own: Mapping[Any, Any] = self._own.state
        if is_hosted := isinstance(self._whole, HostedOptimizerMixin):
            own = self._whole.state_dict()["state"]
        for key in () if is_hosted else own:
            if not isinstance(key, torch.Tensor):
                raise UsageError(f"the optimizer has a state {key!r} that belongs to no parameter, and would be lost")
        return {
            name: dict(state)
            for place, parameter in enumerate(self._parameters(self._own))
            if (state := own.get(place if is_hosted else parameter))
            for name in self._names[id(parameter)]
        }

    def entries(self, states: States) -> dict[str, Any]:
        """The entries that this rank saves, by their names in a checkpoint. Raises UsageError for states that it can't
        hold."""
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
        """The device of a state."""
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
        """True if this rank steps ``parameter``: a ShardedOptimizer has parameters that other ranks own."""
        return not isinstance(self._whole, ShardedOptimizer) or self._whole.owns(parameter)

    def _parameters(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _group_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        return next(one for one in self._whole.param_groups if any(parameter is each for each in one["params"]))


def contents_of(
    model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None, ranks: Ranks
) -> tuple[ModelContents, OptimizerStates | None]:
    """The contents of the model and the optimizer on this rank. Raises UsageError for a model or an optimizer that
    can't be saved or loaded."""
    contents = ModelContents.of(model)
    if optimizer is None:
        return contents, None
    states = OptimizerStates(optimizer, contents)
    states.check_ranks(ranks)
    return contents, states
