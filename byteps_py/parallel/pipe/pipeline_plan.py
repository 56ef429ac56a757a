"""The facts of a pipeline that follow from its arguments, and on which all ranks must agree before they begin.

Also torch's own schedules that split backward passes in two: zero-bubble (Qi et al., 2023), ZB-V and DualPipeV. They
are torch.distributed.pipelining's public classes, unchanged, with its limits: two stages on each worker, the same
shapes in all steps, no skip connections, and an exception on one worker leaves the others to the backend's timeout. One
thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.buffers import normalizes_batches
from byteps_py.parallel.pipe.checker import check
from byteps_py.parallel.pipe.groups import PipelineLayout, holders_of
from byteps_py.parallel.pipe.program import Program, WeightRule
from byteps_py.parallel.pipe.schedules import OF_TORCH, make
from byteps_py.parallel.pipe.simulator import SyncMode, reductions
from byteps_py.parallel.pipe.skips import MAIN, Connection, SkipNames, connections_of, declared
from byteps_py.parallel.pipe.split import SplitModel, split
from byteps_py.parallel.pipe.step_data import Losses, MicroBatches
from byteps_py.parallel.pipe.trees import flatten
from byteps_py.parallel.sharding.sharded_optimizer import sharded_with
from byteps_py.torch.horovod.sync_batch_norm import SyncBatchNorm

#: The number of stages -> the module of each.
StagesFunction = Callable[[int], Sequence[nn.Module | None]]


class TiedParameter(NamedTuple):
    """A parameter that several stages use. ``names``: in the model, in each stage."""

    parameter: nn.Parameter
    names: list[str]
    stages: list[int]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """``modules``: of all stages; None for some of other ranks. ``tied``: by the parameter's identity. ``reductions``:
    the stages of this worker whose gradients can be summed after an action, by its position. ``is_torchs``: torch
    carries the schedule out. ``is_split``: parameters have their names in the whole model."""

    program: Program
    modules: Sequence[nn.Module | None]
    tied: Mapping[int, TiedParameter]
    reductions: Mapping[int, Sequence[int]]
    is_torchs: bool
    is_split: bool
    recompute: bool

    def of_worker(self, worker: int) -> PipelinePlan:
        """Without the modules and parameters of other workers, which need not be kept in memory."""
        own = {stage for _, stage in self.program.stages_of(worker)}
        modules = [module if stage in own else None for stage, module in enumerate(self.modules)]
        return dataclasses.replace(self, modules=modules, tied={})

    def tied_by_workers(self) -> dict[frozenset[int], list[TiedParameter]]:
        """The parameters that stages share, by the workers that hold these stages."""
        holders, found = holders_of(self.program), dict[frozenset[int], list[TiedParameter]]()
        for one in self.tied.values():
            found.setdefault(frozenset[int]().union(*(holders[stage] for stage in one.stages)), []).append(one)
        return {workers: found[workers] for workers in sorted(found, key=sorted)}

    def __str__(self) -> str:
        program = self.program
        content = repr((program.workers, program.holders, program.parts_of_micro_batch, self.recompute))
        digest = hashlib.blake2b(content.encode(), digest_size=4).hexdigest()
        return (
            f"schedule {program.name} with {len(program.workers)} workers, {program.stages} stages and "
            f"{program.micro_batches} micro-batches ({digest})"
        )


def make_plan(
    layout: PipelineLayout,
    model: nn.Module | Sequence[nn.Module | None] | StagesFunction,
    schedule: str | Program,
    micro_batches: int,
    recompute: bool,
    sync: str | SyncMode,
    options: Mapping[str, Any],
) -> PipelinePlan:
    """The plan for the arguments of Pipeline. Raises UsageError."""
    is_torchs = isinstance(schedule, str) and schedule in OF_TORCH
    if isinstance(schedule, str):
        making: Callable[..., Program] = torch_program if is_torchs else make
        schedule = making(schedule, layout.workers, micro_batches, **options)
    if not is_torchs:
        check(schedule)
    if is_torchs and recompute:
        raise UsageError(f"{schedule.name} is torch's schedule: it has no recompute=True")
    if len(schedule.workers) != layout.workers:
        raise UsageError(f"the schedule is for {len(schedule.workers)} workers, the mesh has {layout.workers}")
    modules: Sequence[nn.Module | None]
    if isinstance(model, nn.Module):
        modules = split(model, schedule.stages)
    else:
        modules = model(schedule.stages) if callable(model) else model
    if len(modules) != schedule.stages:
        raise UsageError(f"{len(modules)} stages were given, the schedule has {schedule.stages}")
    for _, stage in schedule.stages_of(layout.worker):
        if modules[stage] is None:
            raise UsageError(f"worker {layout.worker} holds stage {stage}, but its module is None")
    check_stages(layout, schedule, modules)
    tied = _tied(modules)
    if tied and schedule.rule is not WeightRule.SYNCHRONOUS:
        name = next(iter(tied.values())).names[0]
        raise UsageError(f"{schedule.name}: stages that share the parameter {name!r} would use different versions")
    if schedule.rule is WeightRule.DOUBLE_BUFFERED and micro_batches < layout.workers:
        raise UsageError(
            f"{schedule.name} needs as many micro-batches as workers ({layout.workers}) or more, not {micro_batches}"
        )
    ends = {} if is_torchs else _ends_of_stages(schedule, layout.worker, sync)
    return PipelinePlan(schedule, modules, tied, ends, is_torchs, isinstance(modules, SplitModel), recompute)


class _Told(NamedTuple):
    """The message of a rank to the others. ``ranks``: of its pipelines."""

    text: str
    problem: str
    ranks: list[int]
    skips: dict[int, SkipNames]


def agree(plan: PipelinePlan | UsageError, layout: PipelineLayout | None) -> list[Connection]:
    """The connections between stages. Raises UsageError on all ranks of the job if one of them has an error in place of
    a plan, if plans or meshes of one pipeline differ, or if skip connections lead nowhere. All ranks call it."""
    if isinstance(plan, UsageError) or layout is None:
        own = _Told("", str(plan), [], {})
    else:
        skips = {stage: _skips(module) for stage, module in enumerate(plan.modules) if module is not None}
        own = _Told(str(plan), "", layout.ranks.flatten().tolist(), skips)
    told = [own] * dist.get_world_size()
    dist.all_gather_object(told, own)
    for rank, each in enumerate(told):
        if each.problem:
            raise UsageError(each.problem if isinstance(plan, UsageError) else f"rank {rank}: {each.problem}")
    for rank, each in enumerate(told):
        for other in each.ranks:
            if told[other].ranks != each.ranks:
                raise UsageError(
                    f"rank {rank} has pipelines of the ranks {each.ranks}, rank {other} of {told[other].ranks}; give "
                    "all ranks of a pipeline the same mesh"
                )
        first = each.ranks[0]
        if each.text != told[first].text:
            raise UsageError(
                f"rank {first} has the {told[first].text}, rank {rank} the {each.text}; give all ranks of a mesh the "
                "same arguments"
            )
    if isinstance(plan, UsageError):
        raise plan
    names = {stage: found for rank in own.ranks for stage, found in told[rank].skips.items()}
    connections = connections_of([names.get(stage, SkipNames()) for stage in range(plan.program.stages)])
    if plan.is_torchs and any(connection.name != MAIN for connection in connections):
        raise UsageError(f"{plan.program.name} is torch's schedule: it has no skip connections")
    return connections


def _skips(module: nn.Module) -> SkipNames:
    return SkipNames(frozenset(declared(module, "stashes")), frozenset(declared(module, "pops")))


def _tied(modules: Sequence[nn.Module | None]) -> dict[int, TiedParameter]:
    found: dict[int, TiedParameter] = {}
    is_split = isinstance(modules, SplitModel)
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters() if module is not None else ():
            tied = found.setdefault(id(parameter), TiedParameter(parameter, [], []))
            tied.names.append(name if is_split else f"{stage}.{name}")
            tied.stages.append(stage)
    return {key: tied for key, tied in found.items() if len(tied.stages) > 1}


def _ends_of_stages(program: Program, worker: int, sync: str | SyncMode) -> dict[int, list[int]]:
    try:
        mode = SyncMode(sync)
    except ValueError:
        names = ", ".join(repr(each.value) for each in SyncMode)
        raise UsageError(f"sync={sync!r} is not possible; it is one of {names}") from None
    at: dict[int, int] = {}
    for position, (_, stage) in reductions(program, None, mode)[worker]:
        at[stage] = max(position, at.get(stage, position))  # a stage of two pipes
    ends: dict[int, list[int]] = {}
    for stage, position in sorted(at.items()):
        ends.setdefault(position, []).append(stage)
    return ends


# ---- modules that would be silently wrong, or would wait for ever, in a stage --------------------------------------


def check_stages(layout: PipelineLayout, program: Program, modules: Sequence[nn.Module | None]) -> None:
    """Raises UsageError for the stages of this worker. ``modules``: of all stages, None for some of other workers."""
    own = {stage: module for _, stage in program.stages_of(layout.worker) if (module := modules[stage]) is not None}
    check_modules(layout, {f"stage {stage}": module for stage, module in own.items()})
    _check_tied_norms(modules)
    for stage, module in own.items():
        if program.parts_of_micro_batch > 1 and normalizes_batches(module):
            raise UsageError(
                f"stage {stage} has a BatchNorm, and {program.name} with more='halving' computes halves of "
                "micro-batches, whose statistics are others: choose more='direct' or 'doubling'"
            )


def check_modules(layout: PipelineLayout, modules: Mapping[str, nn.Module]) -> None:
    """Raises UsageError for a module of an unsupported class on this worker."""
    for what, module in modules.items():
        for name, parameter in module.named_parameters():
            if (optimizer := sharded_with(parameter)) is not None:
                raise UsageError(
                    f"{what}: {name} is sharded, with {optimizer}, and both a Pipeline and shard() divide and sum "
                    "gradients: give the Pipeline a model that is not sharded, and a mesh with 'dp' or FSDP2 for its "
                    "copies"
                )
        for name, norm, ranks in _sync_batch_norms(module):
            if not set(ranks) <= set(layout.copies_of_this_worker()):
                raise UsageError(
                    f"{what}: {name or 'it'} is a {type(norm).__name__} over ranks {_text(ranks)}, which would wait "
                    "for ranks that hold other stages: give it a group of the ranks with this stage in the "
                    f"data-parallel copies, {_text(layout.copies_of_this_worker())}, or use BatchNorm"
                )


def _sync_batch_norms(module: nn.Module) -> Iterator[tuple[str, nn.Module, Sequence[int]]]:
    for name, one in module.named_modules():
        if isinstance(one, SyncBatchNorm):
            yield name, one, one.ranks
        elif isinstance(one, nn.SyncBatchNorm):
            group = one.process_group
            yield name, one, range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)


def _check_tied_norms(modules: Sequence[nn.Module | None]) -> None:
    stage_of: dict[int, int] = {}
    for stage, module in enumerate(modules):
        for name, one in module.named_modules() if module is not None else ():
            if isinstance(one, _NormBase) and one.track_running_stats and stage_of.setdefault(id(one), stage) != stage:
                raise UsageError(
                    f"stages {stage_of[id(one)]} and {stage} share {name}, a {type(one).__name__}: each would keep "
                    "statistics of its own; give them one each, or track_running_stats=False"
                )


def _text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


_TORCH_CLASSES: Mapping[str, Any] = {
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def torch_program(name: str, workers: int, micro_batches: int, **options: Any) -> Program:
    """The program of one of torch's schedules, and the workers of its stages; torch makes the lists of actions.
    Zero-bubble: stages r and p + r; the others: r and 2 p - 1 - r. Raises UsageError."""
    if options:
        raise UsageError(f"the schedule {name} is torch's: it has no option {min(options)}")
    if micro_batches < 1:
        raise UsageError(f"micro-batches: {micro_batches} is not possible; at least 1 is needed")
    there = range(workers)
    back = there if name == "zero-bubble" else reversed(there)
    return Program(name, ((),) * workers, ((*there, *back),), micro_batches)


class TorchSchedule:
    """The stages of this worker under one of torch's schedules.

    Before its first step torch finds the shapes of values between stages in a pass of its own, with values that mean
    nothing. Random states and buffers are as if there were no such pass, so that a job that goes on after a restart has
    the same bits.
    """

    def __init__(
        self, program: Program, stages: Mapping[int, nn.Module], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self._name = program.name
        self._losses: Losses | None = None
        self._is_first, self._is_last = 0 in stages, program.stages - 1 in stages
        self._modules, self._device, self._has_shapes = list(stages.values()), device, False
        of_torch = [
            PipelineStage(module, number, program.stages, device, group=group)
            for number, module in sorted(stages.items())
        ]
        self._schedule = _TORCH_CLASSES[program.name](of_torch, program.micro_batches, self._loss, scale_grads=False)

    def run(self, inputs: Any, targets: Any, losses: Losses) -> None:
        """Forward and backward passes of a step. ``inputs``: a tensor, or a tuple of the first stage's arguments.
        Raises UsageError for inputs that torch can't take, and torch's errors."""
        of_torch = f"{self._name} is torch's schedule"
        if isinstance(inputs, MicroBatches) or isinstance(targets, MicroBatches):
            raise UsageError(f"{of_torch}: it cuts the batch itself, and takes no MicroBatches")
        if any(tensor.requires_grad for tensor in flatten(inputs)[0]):
            raise UsageError(
                f"{of_torch}: its inputs can't require gradients; detach() them, or choose another schedule"
            )
        self._losses = dataclasses.replace(losses, may_count=False)
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        found: list[torch.Tensor] = []
        modules = () if self._has_shapes else self._modules
        hooks = [hook for module in modules for hook in _forget_next_call(module, self._device)]
        try:
            self._schedule.step(
                *(arguments if self._is_first else ()),
                target=targets if self._is_last else None,
                losses=found,
                return_outputs=False,
            )
        finally:
            for hook in hooks:
                hook.remove()
        self._has_shapes = True
        # torch calls the loss function for other purposes, too: only calls for parts count.
        losses.total += sum(float(one.detach()) for one in found) / losses.weight
        losses.count += len(found)

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        if self._losses is None:
            raise RuntimeError("a loss without a step")
        return self._losses.of(output, target)


def _forget_next_call(module: nn.Module, device: torch.device) -> tuple[RemovableHandle, RemovableHandle]:
    """After the next call of ``module``, random states and its buffers are as before. The hooks that see to it."""
    fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
    kept: dict[str, torch.Tensor] = {}

    def begin(*_: Any) -> None:
        first.remove()
        fork.__enter__()
        kept.update({name: buffer.clone() for name, buffer in module.named_buffers()})

    def end(*_: Any) -> None:
        last.remove()
        for name, buffer in module.named_buffers():
            buffer.data.copy_(kept[name])  # torch makes a backward pass yet: so no change that tensors count
        fork.__exit__(None, None, None)

    first, last = module.register_forward_pre_hook(begin), module.register_forward_hook(end)
    return first, last
