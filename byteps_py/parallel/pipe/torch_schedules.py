"""torch's own schedules that split backward passes in two: zero-bubble (Qi et al., 2023), ZB-V and DualPipeV.

They are torch.distributed.pipelining's public classes, unchanged, with its limits: two stages on each worker, the same
shapes in all steps, no skip connections, and an exception on one worker leaves the others to the backend's timeout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Program
from byteps_py.parallel.pipe.step_data import Losses, MicroBatches
from byteps_py.parallel.pipe.trees import flatten

_CLASSES: Mapping[str, Any] = {
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
    """The stages of this worker under one of torch's schedules."""

    def __init__(
        self, program: Program, stages: Mapping[int, nn.Module], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self._name = program.name
        self._losses: Losses | None = None
        self._is_first, self._is_last = 0 in stages, program.stages - 1 in stages
        of_torch = [
            PipelineStage(module, number, program.stages, device, group=group)
            for number, module in sorted(stages.items())
        ]
        self._schedule = _CLASSES[program.name](of_torch, program.micro_batches, self._loss, scale_grads=False)

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
        self._schedule.step(
            *(arguments if self._is_first else ()),
            target=targets if self._is_last else None,
            losses=found,
            return_outputs=False,
        )
        # torch calls the loss function for other purposes, too: only calls for parts count.
        losses.total += sum(float(one.detach()) for one in found) / losses.weight
        losses.count += len(found)

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        if self._losses is None:
            raise RuntimeError("a loss without a step")
        return self._losses.of(output, target)
