"""One pass of a tensor-parallel layer, or of context-parallel attention, on all ranks. Argument: the case."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import byteps_py.torch  # noqa: F401  (the backend)
from byteps_py.parallel import Pipeline, context, tensor

BATCH, SEQUENCE, WIDTH, HEADS, KV_HEADS, MICRO_BATCHES = 2, 64, 256, 8, 4, 4
HEAD_DIM = WIDTH // HEADS


def tensor_parallel(sequence_dim: int | None) -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, 512, bias=False), nn.Linear(512, WIDTH, bias=False))
    plan = {"0": tensor.Column(), "1": tensor.Row()}
    tensor.parallelize(layer, plan, dist.group.WORLD, sequence_dim=sequence_dim)
    length = SEQUENCE if sequence_dim is None else SEQUENCE // dist.get_world_size()
    x = torch.randn(BATCH, length, WIDTH, requires_grad=True)
    layer(x).sum().backward()


def context_parallel() -> None:
    local = SEQUENCE // dist.get_world_size()
    q = torch.randn(BATCH, HEADS, local, HEAD_DIM, requires_grad=True)
    k, v = (torch.randn(BATCH, KV_HEADS, local, HEAD_DIM, requires_grad=True) for _ in range(2))
    context.attention(q, k, v, context.DocumentMask.causal(SEQUENCE), dist.group.WORLD).sum().backward()


def pipeline() -> None:
    stages = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    pipe = Pipeline(nn.Sequential(*stages), "dapple", MICRO_BATCHES)
    x = torch.randn(BATCH * MICRO_BATCHES, SEQUENCE, WIDTH)
    pipe.step(x, x, nn.functional.mse_loss)


CASES = {
    "tensor": lambda: tensor_parallel(None),
    "sequence": lambda: tensor_parallel(1),
    "context": context_parallel,
    "pipeline": pipeline,
}

if __name__ == "__main__":
    dist.init_process_group("byteps")
    CASES[sys.argv[1]]()
    dist.destroy_process_group()
