"""A step of a pipeline in the order that was found for a slow middle stage, beside one process: the same gradients.
Prints "right" on each rank."""

from __future__ import annotations

import copy

import cases  # noqa: F401  (the default device)
import torch
import torch.distributed as dist
from torch import nn

import byteps_py.torch  # noqa: F401  (the backend)
from byteps_py.parallel import Pipeline
from byteps_py.parallel.pipe.schedule_search import StageTimes, search
from byteps_py.parallel.pipe.schedules import dapple


def main() -> None:
    dist.init_process_group("byteps")
    found = search(StageTimes((1, 3, 1), (2, 6, 3), (1, 1), (4, 4, 2)), 6)
    assert found.program.workers != dapple(3, 6).workers
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double()
    alone = copy.deepcopy(model)
    inputs, targets = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    loss = nn.functional.mse_loss(alone(inputs), targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    pipe = Pipeline(model, found.program, 6)
    got = pipe.step(inputs, targets, nn.functional.mse_loss)
    assert abs(float(got) - float(loss)) < 1e-12
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    print("right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
