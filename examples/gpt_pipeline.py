"""Train the small GPT of gpt.py as a pipeline: each rank has some of its layers. One flag chooses the schedule.

bpslaunch -np 4 python examples/gpt_pipeline.py --schedule chimera
bpslaunch -np 2 python examples/gpt_pipeline.py --schedule interleaved --chunks 2 --check
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from gpt import Block, random_batch, read_text
from torch import nn
from torch.nn import functional

import byteps_py as bps
import byteps_py.torch  # the backend; not needed if pip has installed byteps_py

#: They change the weights while micro-batches are under way: the optimizer goes to step().
STALE = ("pipedream", "pipedream-2bw")
CLOSE = 1e-4


class Embedding(nn.Module):
    """Of characters and of their positions."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        for embedding in (self.token, self.position):  # a token must not drown in its position
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


def gpt(vocabulary: int, arguments: argparse.Namespace) -> nn.Sequential:
    """Layers that run one after the other, the same on all ranks. The embedding is tied to the head, on another rank,
    unless the schedule gives stages different versions of the weights."""
    torch.manual_seed(0)
    embedding = Embedding(vocabulary, arguments.context, arguments.width)
    blocks = (Block(arguments.width, heads=4) for _ in range(arguments.layers))
    head = nn.Linear(arguments.width, vocabulary, bias=False)
    if arguments.schedule not in STALE:
        head.weight = embedding.token.weight
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(arguments.width), head)


def next_character_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class OneProcess:
    """The same training without a pipeline, to compare with."""

    def __init__(self, vocabulary: int, arguments: argparse.Namespace) -> None:
        self.model = gpt(vocabulary, arguments)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.lr)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = next_character_loss(self.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="dapple", help="a name of `bps schedule`")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--chunks", type=int, help="stages of each rank, for interleaved")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of a step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    arguments = parser.parse_args()
    if arguments.check and arguments.schedule in STALE:
        parser.error(f"--check: {arguments.schedule} uses older weights than one process, so its losses are others")

    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("byteps", **({} if "RANK" in os.environ else alone))
    letters, data, held_out = read_text()
    options = {} if arguments.chunks is None else {"chunks": arguments.chunks}
    pipe = bps.parallel.Pipeline(gpt(len(letters), arguments), arguments.schedule, arguments.micro_batches, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=arguments.lr)
    is_first = dist.get_rank() == 0
    one_process = OneProcess(len(letters), arguments) if arguments.check and is_first else None
    if is_first:
        print(f"{len(data):,} characters, {dist.get_world_size()} ranks, {pipe.program.stages} stages", flush=True)

    generator = torch.Generator().manual_seed(1)  # all ranks read the same batch; the first and last stages use it
    began, difference = time.perf_counter(), 0.0
    for step in range(1, arguments.steps + 1):
        inputs, targets = random_batch(data, arguments.batch_size, arguments.context, generator)
        if arguments.schedule in STALE:
            loss = pipe.step(inputs, targets, next_character_loss, optimizer=optimizer)
        else:
            optimizer.zero_grad()
            loss = pipe.step(inputs, targets, next_character_loss)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
        if one_process is not None:
            difference = max(difference, abs(loss.item() - one_process.step(inputs, targets)))
        if is_first and step % max(1, arguments.steps // 10) == 0:
            rate = step * arguments.batch_size * arguments.context / (time.perf_counter() - began)
            print(f"step {step:5d}  loss {loss.item():.3f}  {rate:,.0f} characters/s", flush=True)
    pipe.flush()

    inputs, targets = random_batch(held_out, arguments.batch_size, arguments.context, generator)
    loss = pipe.eval().evaluate(inputs, targets, next_character_loss)
    if is_first:
        print(f"held-out loss {loss.item():.3f}")
    if one_process is not None:
        same = f"equal to {CLOSE:g}" if difference <= CLOSE else f"different by {difference:.2g} at most"
        print(f"the losses of {arguments.steps} steps and those of one process: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
