"""One rank of benchmarks/goodput on a mesh PP 2 x TP 2 x DP: ``python rank_mesh.py TASK``. TP inside a machine."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import byteps_py.torch as bps
from benchmarks.goodput.training import CONTEXT, Log, Task, hash_of, loader_of, model_and_data, rest
from byteps_py.parallel import Mesh, ParallelOptions, parallelize_model
from byteps_py.parallel.tensor import Column, Row
from examples.gpt import GPT


class Embedding(nn.Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.token, self.position = gpt.token, gpt.position

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position(torch.arange(CONTEXT))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    task = Task.read()
    dist.init_process_group("byteps")
    mesh = Mesh(tp=2, pp=2, dp=task.copies)
    log = Log(task, dist.get_rank())
    gpt, data = model_and_data(task)
    layers = nn.Sequential(Embedding(gpt), *gpt.blocks, nn.Sequential(gpt.norm, gpt.head))
    options = ParallelOptions(plan={"*.mlp.0": Column(), "*.mlp.2": Row()}, micro_batches=2, hosted=True, shadow=True)
    training = parallelize_model(layers, mesh, loss_of, functools.partial(torch.optim.AdamW, lr=1e-3), options)
    is_first = mesh.rank("tp") == mesh.rank("pp") == 0  # of the ranks that use the same samples
    loader = loader_of(task, data, mesh.rank("dp"))
    run = bps.RunState(training.local_module, training.optimizer, loader=loader)
    for _ in run.epochs(1):
        for samples, inputs, targets in run:
            log.note("begin", step=run.batch - 1, samples=samples.tolist() if is_first else [])
            rest(task)
            training.step(inputs, targets)
            log.note("step", step=run.batch - 1)
    log.note("end", weights=hash_of(training.local_module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
