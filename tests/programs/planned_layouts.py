"""Trains the Llama of examples/ for two steps with the arguments that `bps plan layout --emit` has written, for each of
the files that are given. Prints "FILE: right" on each rank if the losses are those of one process."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path

import cases  # noqa: F401  (the default device)
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama_model import Groups, LlamaOptions, llama, plan, token_loss

import byteps_py.torch  # noqa: F401  (the backend)
from byteps_py.parallel import Mesh, ParallelOptions, parallelize_model

#: The shapes of the model that tests/cli/test_cli_plan_layout.py has planned, and its batch.
OPTIONS = LlamaOptions(vocabulary=64, width=32, layers=4, heads=4, kv_heads=2, feed_forward=48)
ROWS, CONTEXT = 16, 16


def new_model(groups: Groups) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return llama(OPTIONS, groups).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    tokens = torch.randint(OPTIONS.vocabulary, (ROWS, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def losses_of_one_process() -> list[float]:
    model, loss = new_model(Groups()), token_loss(OPTIONS, Groups())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        inputs, targets = batch(step)
        total, count = loss(model(inputs), targets)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / float(count))
    return losses


def main() -> None:
    dist.init_process_group("byteps")
    expected = losses_of_one_process()
    for path in sys.argv[1:]:
        emitted = runpy.run_path(path)
        mesh = Mesh(**emitted["MESH"])
        groups = Groups(mesh.group("tp"), mesh.group("cp"))
        options = ParallelOptions(plan=plan(OPTIONS), **emitted["OPTIONS"])
        optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
        training = parallelize_model(new_model(groups), mesh, token_loss(OPTIONS, groups), optimizer, options)
        found = []
        for step in range(2):
            inputs, targets = (one.chunk(mesh.dp)[mesh.rank("dp")] for one in batch(step))
            found.append(float(training.step(inputs, targets)))
        assert all(abs(one - other) < 1e-9 for one, other in zip(found, expected, strict=True)), (path, found, expected)
        print(f"{Path(path).name}: right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
