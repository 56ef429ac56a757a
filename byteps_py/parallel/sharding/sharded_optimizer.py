"""The optimizer that ``shard`` returns: each rank steps the parameters that it owns. Its state dict has the states of
all parameters, from their owners: it is interchangeable with that of the optimizer on one rank. One thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from byteps_py.errors import MismatchError, UsageError
from byteps_py.parallel.gradients import partial_norms, scale_gradients, total_norm
from byteps_py.parallel.sharding.gathering import SegmentGathering
from byteps_py.parallel.sharding.gradient_owners import GradientOwners
from byteps_py.parallel.sharding.offload import OffloadedStates
from byteps_py.parallel.sharding.segments import NamedParameter
from byteps_py.parallel.tensor.parallel_plan import sharded_parameters, tensor_parallel_group
from byteps_py.wording import ranks_text

#: The names of their optimizers' classes.
_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_sharded(parameters: Iterable[torch.Tensor], optimizer: str) -> None:
    """``optimizer``: the name of its class."""
    for parameter in parameters:
        _SHARDED[parameter] = optimizer


def sharded_with(parameter: torch.Tensor) -> str | None:
    """The name of the optimizer's class; None if the parameter is not sharded."""
    name: str | None = _SHARDED.get(parameter)
    return name


@dataclass(frozen=True, slots=True)
class ShardedParts:
    """The parts that ``shard`` has made of a model."""

    model: nn.Module
    members: Sequence[NamedParameter]
    gathering: SegmentGathering
    gradients: GradientOwners
    #: The ranks of the sharding group, and the group; None for one rank.
    ranks: Sequence[int]
    group: dist.ProcessGroup | None
    #: Groups of ranks with other parameters: workers of a pipeline.
    other_parameters: Sequence[dist.ProcessGroup]
    offloaded: OffloadedStates | None


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer over all parameters of a model, of which this rank steps those that it owns.

    ``param_groups``, ``state`` and ``defaults`` are those of the optimizer that was given to ``shard``; ``state`` has
    entries for own parameters only. Learning-rate schedulers work. Gradients do not accumulate over steps: each step
    begins with none, as after ``zero_grad()``. The trainer's thread calls the methods, on all ranks.
    """

    def __init__(self, inner: torch.optim.Optimizer, parts: ShardedParts) -> None:
        self._inner, self._parts = inner, parts
        self._by_id = {id(member.parameter): member for member in parts.members}
        self._hooked: set[int] = set()
        self._task: int | None = None
        #: States in host memory; None without optimize_offload.
        self.offloaded = parts.offloaded
        for member in parts.members:
            if not member.piece.is_own:
                inner.state.pop(member.parameter, None)  # Adagrad has states from the beginning
        super().__init__([{"params": [torch.empty(0, device="cpu")]}], dict(inner.defaults))
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        parts.gathering.on_forward = self._before_forward
        parts.gathering.on_backward = self._in_backward
        self._before_forward()

    # ---- a step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step own parameters. With gradient merge, only the call after the last backward pass of a step does
        something, so it may be called after each. Raises UsageError for a closure, or if the model has changed."""
        if closure is not None:
            raise UsageError("a sharded optimizer takes no closure: gradients reach their owners in backward passes")
        gradients = self._parts.gradients
        if not gradients.is_complete:
            return
        self._check()
        gradients.sum_over_copies()
        for member in self._parts.members:
            if not member.piece.is_own:
                member.parameter.grad = None  # a stand-in for a GradScaler
        if self.offloaded is None:
            self._inner.step()
        else:
            self.offloaded.step(self._step_some)
        self._parts.gathering.version += 1
        self._parts.gathering.free_all()
        gradients.forget_sums()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; in the middle of a gradient merge, do nothing. They are always set to None: an owner's memory
        for gradients stays."""
        self._task = None  # of a backward pass that has failed
        gradients = self._parts.gradients
        if gradients.passes == 0 or gradients.is_complete:
            gradients.abandon()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Like ``torch.nn.utils.clip_grad_norm_``, over the gradients of all ranks, each counted once. Returns the norm
        before clipping, a scalar of float64 that is the same on all ranks. Call it before ``step``, behind ``unscale_``
        of a GradScaler. In the middle of a gradient merge it does nothing and returns 0. Raises UsageError for a
        ``max_norm`` below 0."""
        if not max_norm >= 0:
            raise UsageError(f"max_norm is {max_norm}: use a number from 0 on")
        parts = self._parts
        if not parts.gradients.is_complete:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        parts.gradients.sum_over_copies()
        own = [member for member in parts.members if member.piece.is_own and member.parameter.grad is not None]
        named = [(member.name, member.parameter.grad) for member in own if member.parameter.grad is not None]
        tp = tensor_parallel_group(parts.model)
        partial = partial_norms(named, sharded_parameters(parts.model), tp, norm_type).to(
            parts.members[0].parameter.device
        )
        groups = [group for group in (parts.group, *parts.other_parameters) if group is not None]
        norm = total_norm(partial, groups, norm_type)
        scale_gradients((member.parameter for member in own), max_norm, norm)
        return norm

    # ---- parameters and states -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Within it, all parameters have their values on all ranks, to be read. Changes count if their owner makes
        them; ranks that all make the same change are right."""
        self._parts.gathering.hold()
        try:
            yield
        finally:
            self._parts.gathering.release()

    def owner_of(self, parameter: torch.Tensor) -> int:
        """The index, in its sharding group, of the rank that owns ``parameter``. Raises UsageError."""
        if id(parameter) not in self._by_id:
            raise UsageError("the model that was sharded has no such parameter")
        return self._by_id[id(parameter)].owner

    def owns(self, parameter: torch.Tensor) -> bool:
        """True if this rank owns ``parameter``. Raises UsageError."""
        return self.owner_of(parameter) == self._parts_own()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer that was given to ``shard``, with whole states on every rank. All ranks of
        the sharding group call this."""
        if self.offloaded is not None:
            self.offloaded.finish()
        members = [self._by_id[id(one)] for group in self.param_groups for one in group["params"]]
        states = gather_states(members, self._inner.state, self._parts.ranks, self._parts.group)
        whole = self._inner.state_dict()
        places = [place for group in whole["param_groups"] for place in group["params"]]
        whole["state"] = {place: state for place, state in zip(places, states, strict=True) if state}
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this optimizer, or of the optimizer on one rank, in a job of any size. Raises
        UsageError if it is of another model; then nothing is loaded."""
        names = {id(member.parameter): member.name for member in self._parts.members}
        check_states(state_dict, self.param_groups, names)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [one for group in self.param_groups for one in group["params"]]
        own = {
            place: state_dict["state"][place]
            for place, one in zip(places, parameters, strict=True)
            if place in state_dict["state"] and self.owns(one)
        }
        self._inner.load_state_dict({**state_dict, "state": own})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        if self.offloaded is not None:
            self.offloaded.rest()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: parameters get their owners in ``shard``."""
        if "_inner" in self.__dict__ and self._is_ready():
            raise UsageError("a sharded optimizer takes no more parameters: give all of them to shard()")
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"Sharded{self._inner!r}"

    # ---- inside ----------------------------------------------------------------------------------------------

    def _is_ready(self) -> bool:
        return self.__dict__.get("param_groups") is self._inner.param_groups

    def _parts_own(self) -> int:
        return self._parts.gathering.own

    def _step_some(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step some parameters alone."""
        chosen = {id(one) for one in parameters}
        whole = self._inner.param_groups
        try:
            self._inner.param_groups = [
                {**group, "params": [one for one in group["params"] if id(one) in chosen]} for group in whole
            ]
            self._inner.step()
        finally:
            self._inner.param_groups = whole

    def _check(self) -> None:
        self._parts.gathering.memory.check()
        for group in self.param_groups:
            for one in group["params"]:
                if id(one) not in self._by_id:
                    raise UsageError(
                        f"the optimizer has got a parameter of shape {tuple(one.shape)} after shard(): give all "
                        "parameters to shard()"
                    )

    def _before_forward(self) -> None:
        self._parts.gathering.memory.check()
        self._parts.gradients.drop_stepped()
        for name, parameter in self._parts.model.named_parameters():
            if id(parameter) not in self._by_id:
                raise UsageError(f"the model has got the parameter {name} after shard(): add parameters before shard()")
        for member in self._parts.members:
            parameter = member.parameter
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _in_backward(self) -> None:
        """An event of a backward pass: the first one begins it."""
        task = torch._C._current_graph_task_id()
        if self._task is None:
            self._parts.gradients.begin_backward()
            self._task = task
            Variable._execution_engine.queue_callback(self._end_backward)
        elif self._task != task:
            raise UsageError(
                "a backward pass runs inside another one, or the last one failed: use activation checkpoints with "
                "use_reentrant=False; after an exception, call zero_grad()"
            )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._in_backward()
        self._parts.gradients.add(self._by_id[id(parameter)])

    def _end_backward(self) -> None:
        self._task = None
        self._parts.gradients.end_backward()
        self._parts.gathering.end_backward()


# ---- whole states --------------------------------------------------------------------------------------------------


def gather_states(
    members: Sequence[NamedParameter],
    state: dict[Any, dict[str, Any]],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[dict[str, Any]]:
    """The states of each of ``members``, whole and on the CPU where an owner's are not this rank's own. ``ranks``: the
    global ranks of ``group``."""
    if group is None:
        return [dict(state.get(member.parameter, {})) for member in members]
    own = [
        {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
        if member.piece.is_own
        else None
        for member in members
        for entries in [state.get(member.parameter, {})]
    ]
    described: list[Any] = [None] * len(ranks)
    dist.all_gather_object(described, own, group=group)
    result = []
    for place, member in enumerate(members):
        holders = [ranks[index] for index, entries in enumerate(described) if entries[place] is not None]
        if holders != [ranks[member.owner]]:
            raise MismatchError(
                f"the states of {member.name} should lie with rank {ranks[member.owner]} alone, and lie with "
                f"{ranks_text(holders) if holders else 'no rank'}: shard() equal models on all ranks"
            )
        entries: dict[str, Any] = {}
        for name, value in described[member.owner][place].items():
            if not isinstance(value, torch.Tensor):
                entries[name] = value
                continue
            device = member.parameter.device
            if member.piece.is_own:
                whole = state[member.parameter][name]
                sent = whole.to(device).contiguous()
            else:
                whole = sent = torch.empty(value.shape, dtype=value.dtype, device=device)
            dist.broadcast(sent, ranks[member.owner], group=group)
            entries[name] = whole if member.piece.is_own else whole.cpu()
        result.append(entries)
    return result


def check_states(loaded: dict[str, Any], groups: Sequence[dict[str, Any]], names: dict[int, str]) -> None:
    """Raise UsageError unless ``loaded`` fits an optimizer with these parameter groups. ``names``: of parameters, by
    id."""
    if not isinstance(loaded, dict) or not {"state", "param_groups"} <= loaded.keys():
        raise UsageError("a state dict of an optimizer has 'state' and 'param_groups'")
    theirs = [len(group["params"]) for group in loaded["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if theirs != ours:
        raise UsageError(
            f"the state dict is of an optimizer with parameter groups of {theirs} parameters, this one has {ours}: it "
            "is of another model. Nothing was loaded"
        )
    places = [place for group in loaded["param_groups"] for place in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        for name, value in loaded["state"].get(place, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape and _is_like(name):
                raise UsageError(
                    f"{name} of {names[id(parameter)]} has the shape {tuple(value.shape)} in the state dict, and the "
                    f"parameter {tuple(parameter.shape)}: it is of another model. Nothing was loaded"
                )


def _is_like(name: str) -> bool:
    """True if a state has its parameter's shape in torch's element-wise optimizers."""
    return name.startswith(("exp_avg", "max_exp_avg", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta"))
