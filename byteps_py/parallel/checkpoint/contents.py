"""What a rank saves of its model: its parameters and buffers, and other objects of the state dict. One thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.parallel.tensor.plan import sharded_parameters
from byteps_py.parallel.tensor.shard import Shard
from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel

#: The first words of names in a checkpoint.
MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True, slots=True)
class ModelContents:
    """Of a model on this rank.

    Attributes:
        values: its state dict. Tensors share the model's memory; others are what ``get_extra_state`` returns.
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
        """Raises UsageError for what is no model, or has no values yet."""
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
        """The names of parameters and buffers: other values of a state dict are what modules make of it."""
        return set(self.parameters) | {
            prefix + name for prefix, module in self.modules for name, _ in module.named_buffers(remove_duplicate=False)
        }

    @property
    def buffers(self) -> set[str]:
        """The names of buffers, and of other values that are no parameters."""
        return set(self.values) - set(self.parameters)

    def entries(self) -> dict[str, Any]:
        """What this rank saves, by the names in a checkpoint."""
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
        """Whether this rank has only a part of a parameter."""
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
