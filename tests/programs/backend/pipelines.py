"""Every schedule of torch.distributed.pipelining, against training in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from backend.common import feature, rank, same, size, values

WIDTH = 4
BATCHES = 8


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_((values(10 * seed + number, *param.shape) // 16) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def _loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).sum()


def _check(schedule_of: Any, chunks: int, is_v: bool = False, group: dist.ProcessGroup | None = None) -> None:
    group = group or dist.group.WORLD
    assert group is not None
    ranks, me, n = dist.get_process_group_ranks(group), dist.get_rank(group), dist.get_world_size(group)
    layers = [Layer(seed) for seed in range(n * chunks)]
    mine = [me, 2 * n - 1 - me] if is_v else [me + n * chunk for chunk in range(chunks)]
    x, target = values(9, BATCHES, WIDTH) // 8, torch.zeros(BATCHES, WIDTH)
    whole = copy.deepcopy(nn.Sequential(*layers))
    _loss(whole(x), target).backward()
    device = torch.get_default_device()
    stages = [PipelineStage(layers[index], index, n * chunks, device, group=group) for index in mine]
    schedule = schedule_of(stages if chunks > 1 else stages[0], n_microbatches=4, loss_fn=_loss, scale_grads=False)
    arguments = (x,) if me == 0 else ()
    is_last = n * chunks - 1 in mine
    losses: list[torch.Tensor] = []
    out = schedule.step(*arguments, target=target, losses=losses) if is_last else schedule.step(*arguments)
    if is_last:
        same(out, whole(x))
        same(torch.stack(losses).sum(), _loss(whole(x), target))
    for index in mine:
        same([param.grad for param in layers[index].parameters()], [param.grad for param in whole[index].parameters()])  # type: ignore[misc]
    assert rank() in ranks


@feature
def one_stage_per_rank() -> None:
    for schedule in (ScheduleGPipe, Schedule1F1B):
        for _ in range(2):
            _check(schedule, 1)


@feature
def several_stages_per_rank() -> None:
    for schedule in (ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        _check(schedule, 2)
    _check(ScheduleZBVZeroBubble, 2, is_v=True)


@feature
def beside_data_parallelism() -> None:
    if size() < 4:
        return
    mesh = init_device_mesh(torch.get_default_device().type, (2, size() // 2), mesh_dim_names=("pipe", "data"))
    _check(Schedule1F1B, 1, group=mesh["pipe"].get_group())
    gradient = torch.full((3,), float(mesh["pipe"].get_local_rank()))
    dist.all_reduce(gradient, dist.ReduceOp.AVG, group=mesh["data"].get_group())
    same(gradient, torch.full((3,), float(mesh["pipe"].get_local_rank())))
