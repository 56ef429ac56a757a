"""Refuses modules that would be silently wrong, or would wait for ever, in a stage. One thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.buffers import normalizes_batches
from byteps_py.parallel.pipe.layout import PipelineLayout
from byteps_py.parallel.pipe.program import Program
from byteps_py.parallel.sharding.sharded_parameters import sharded_with
from byteps_py.torch.horovod.sync_batch_norm import SyncBatchNorm


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
    """Raises UsageError for a module of this worker, by what it is."""
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
