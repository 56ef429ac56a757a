"""Train the small Llama of llama_model.py on real text with any number of ranks in each dimension: tensor (--tp),
context (--cp), pipeline (--pp) and data parallelism (--dp). Their product is the number of ranks.

bpslaunch -np 8 python examples/llama.py --tp 2 --cp 2 --pp 2 --check
bpslaunch -np 2 --machines 2 --servers 1 python examples/llama.py --tp 2 --dp 2 --data zero1
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from gpt import random_batch, read_text
from llama_model import SEQUENCE, Groups, LlamaOptions, llama, plan, token_loss
from torch import nn

from byteps_py.parallel import Mesh, ParallelOptions, ParallelTraining, parallelize_model

CLOSE = 1e-4
DATA = ("ddp", "zero1", "zero2", "zero3", "hsdp")


def new_training(options: LlamaOptions, mesh: Mesh, arguments: argparse.Namespace) -> ParallelTraining:
    """The model on this rank, with its optimizer."""
    groups = Groups(mesh.group("tp"), mesh.group("cp"))
    how = ParallelOptions(
        plan=plan(options),
        sequence_dim=None if arguments.no_sequence_parallel else SEQUENCE,
        data=arguments.data,
        schedule=arguments.schedule,
        micro_batches=arguments.micro_batches,
        max_norm=1.0,
        hosted=arguments.hosted,
    )
    model = llama(options, groups).to(arguments.dtype)
    optimizer = functools.partial(torch.optim.AdamW, lr=arguments.lr)
    return parallelize_model(model, mesh, token_loss(options, groups), optimizer, how)


class OneProcess:
    """The same training in one process, to compare with."""

    def __init__(self, options: LlamaOptions, arguments: argparse.Namespace) -> None:
        self.loss = token_loss(options, Groups())
        self.model = llama(options, Groups()).to(arguments.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.lr)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        losses, count = self.loss(self.model(inputs), targets)
        loss = losses / count
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--pp", type=int, default=1, help="ranks with different layers")
    parser.add_argument("--dp", type=int, default=-1, help="ranks with different sequences; default: all others")
    parser.add_argument("--data", default="ddp", choices=DATA, help="what dp and cp share")
    parser.add_argument("--hosted", default=False, choices=("machine", "sharded"), help="services make the steps")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="norms see the whole sequence on all of tp")
    parser.add_argument("--backend", default="byteps", help="of torch.distributed: byteps (default), gloo or nccl")
    parser.add_argument("--schedule", default="dapple", help="of the pipeline: a name of `bps schedule`")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a step, of all ranks together")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--documents", action="store_true", help="attention reaches back to the beginning of the line")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--no-cuda", action="store_true", help="compute on the CPU even if there are GPUs")
    parser.add_argument("--check", action="store_true", help="compare the losses with those of one process")
    parser.add_argument("--json", metavar="FILE", help="write the losses of all steps")
    arguments = parser.parse_args()
    if arguments.pp == 1:
        arguments.micro_batches = 1
    arguments.cuda = torch.cuda.is_available() and not arguments.no_cuda
    arguments.dtype = torch.float64 if arguments.float64 else torch.float32
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.set_default_device("cuda")
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(arguments.backend, **({} if "RANK" in os.environ else alone))
    device = "cuda" if arguments.cuda else "cpu"
    mesh = Mesh(tp=arguments.tp, cp=arguments.cp, pp=arguments.pp, dp=arguments.dp, device_type=device)
    letters, data, _ = read_text()
    options = LlamaOptions(
        vocabulary=len(letters),
        width=arguments.width,
        layers=arguments.layers,
        feed_forward=3 * arguments.width,
        eos_id=letters.index("\n") if arguments.documents else None,
    )
    training = new_training(options, mesh, arguments)
    is_first = dist.get_rank() == 0
    one_process = OneProcess(options, arguments) if arguments.check and is_first else None
    if is_first:
        print(f"{len(data):,} characters, {mesh}", flush=True)

    generator = torch.Generator(device).manual_seed(1)  # all ranks read the same batch, and use their parts of it
    began, difference, losses = time.perf_counter(), 0.0, []
    for step in range(1, arguments.steps + 1):
        inputs, targets = random_batch(data, arguments.batch_size, arguments.context, generator)
        losses.append(float(training.step(*(one.chunk(mesh.dp)[mesh.rank("dp")] for one in (inputs, targets)))))
        if one_process is not None:
            difference = max(difference, abs(losses[-1] - one_process.step(inputs, targets)))
        if is_first and step % max(1, arguments.steps // 10) == 0:
            rate = step * arguments.batch_size * arguments.context / (time.perf_counter() - began)
            print(f"step {step:5d}  loss {losses[-1]:.3f}  {rate:,.0f} characters/s", flush=True)
    if one_process is not None:
        same = f"equal to {CLOSE:g}" if difference <= CLOSE else f"different by {difference:.2g} at most"
        print(f"the losses of {arguments.steps} steps and those of one process: {same}")
    if is_first and arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"mesh": str(mesh), "data": arguments.data, "losses": losses}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
