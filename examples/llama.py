"""Train the small Llama of llama_model.py on real text with any number of ranks in each dimension: tensor (--tp),
context (--cp), pipeline (--pp) and data parallelism (--dp). Their product is the number of ranks.

bpslaunch -np 8 python examples/llama.py --tp 2 --cp 2 --pp 2 --check
bpslaunch -np 2 --machines 2 --servers 1 python examples/llama.py --tp 2 --dp 2 --data zero1
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from gpt import random_batch, read_text
from llama_model import LlamaOptions, llama, parallelize, token_loss
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from byteps_py.parallel import Mesh, Pipeline, clip_grad_norm_
from byteps_py.parallel.context import token_mean_loss

CLOSE = 1e-4
Batch = tuple[torch.Tensor, torch.Tensor]


class Trainer:
    """A model on one rank of the mesh, and its optimizer."""

    def __init__(self, options: LlamaOptions, mesh: Mesh, arguments: argparse.Namespace) -> None:
        self.options, self.mesh, self.arguments = options, mesh, arguments
        model = llama(options).to(arguments.dtype)
        parallelize(model, options, mesh.group("tp"), mesh.group("cp"), not arguments.no_sequence_parallel)
        self.groups = model[0].groups
        self.copies = mesh.group("dp", "cp")
        self.is_fsdp = arguments.data in ("zero2", "hsdp")
        self.pipe: Pipeline | None = None
        self.model: nn.Module = model
        if mesh.pp > 1:
            # FSDP sums gradients itself: each copy of the model is a pipeline of its own.
            dimensions = mesh.device_mesh["pp"] if self.is_fsdp else mesh.device_mesh
            self.pipe = Pipeline(model, arguments.schedule, arguments.micro_batches, dimensions)
            self.model = nn.ModuleList(self.pipe.stages.values())
        if self.is_fsdp:
            for stage in self.pipe.stages.values() if self.pipe else [model]:
                shard(stage, mesh, arguments.data == "hsdp")
        elif self.pipe is None:
            self.model = nn.parallel.DistributedDataParallel(model, process_group=self.copies)
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters() if self.pipe is None else self.pipe.parameters())
        if self.arguments.data == "zero1":
            return ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, process_group=self.copies, lr=self.arguments.lr
            )
        return torch.optim.AdamW(parameters, lr=self.arguments.lr)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step with a batch of all data-parallel ranks; returns its loss, a mean over all tokens."""
        inputs, targets = (one.chunk(self.mesh.dp)[self.mesh.rank("dp")] for one in (inputs, targets))
        self.optimizer.zero_grad()
        loss = self.backward(inputs, targets)
        self.clip_gradients(1.0)
        self.optimizer.step()
        return loss

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """The norm of all gradients, each parameter once."""
        if self.pipe is None:
            return clip_grad_norm_(self.model, max_norm)
        return self.pipe.clip_grad_norm_(max_norm)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        if self.pipe is None:
            losses, count = token_loss(self.options, self.groups, self.model(inputs), targets)
            loss = token_mean_loss(losses, count, self.copies, reduction="mean")
            loss.backward()
            return float(loss.detach())
        if not self.is_fsdp:
            return float(
                self.pipe.step(
                    inputs, targets, lambda output, target: token_loss(self.options, self.groups, output, target)
                )
            )
        parts, copies = self.arguments.micro_batches, dist.get_world_size(self.copies)
        tokens = targets.numel() * self.mesh.dp / parts  # of a micro-batch, on all copies

        def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return token_loss(self.options, self.groups, output, target)[0] * (copies / tokens)

        own = self.pipe.step(inputs, targets, mean_loss)
        dist.all_reduce(own, group=self.copies)
        return float(own) / copies


def shard(stage: nn.Module, mesh: Mesh, is_hybrid: bool) -> None:
    """FSDP2: the ranks of "dp" and "cp" have parts of each layer's parameters, gradients and states. Hybrid: those of
    "cp" have, and those of "dp" are copies. Parameters stay whole between the passes (ZeRO-2)."""
    dimensions = mesh.submesh("dp", "cp", flat=not is_hybrid)
    layers = list(stage.children())
    for layer in layers:
        fully_shard(layer, mesh=dimensions, reshard_after_forward=False)
    fully_shard(stage, mesh=dimensions, reshard_after_forward=False)


class OneProcess:
    """The same training in one process, to compare with."""

    def __init__(self, options: LlamaOptions, arguments: argparse.Namespace) -> None:
        self.options = options
        self.model = llama(options).to(arguments.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.lr)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        losses, count = token_loss(self.options, self.model[0].groups, self.model(inputs), targets)
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
    parser.add_argument("--data", default="ddp", choices=("ddp", "zero1", "zero2", "hsdp"), help="what dp and cp share")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="norms see the whole sequence on all of tp")
    parser.add_argument("--backend", default="byteps", help="of torch.distributed: byteps (default), gloo or nccl")
    parser.add_argument("--schedule", default="dapple", help="of the pipeline: a name of `bps schedule`")
    parser.add_argument("--micro-batches", type=int, default=4)
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
    if arguments.data == "hsdp" and arguments.cp == 1:
        parser.error("--data hsdp shares parameters among the ranks of --cp: give --cp 2 or more, or --data zero2")
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
    trainer = Trainer(options, mesh, arguments)
    is_first = dist.get_rank() == 0
    one_process = OneProcess(options, arguments) if arguments.check and is_first else None
    if is_first:
        print(f"{len(data):,} characters, {mesh}", flush=True)

    generator = torch.Generator(device).manual_seed(1)  # all ranks read the same batch, and use their parts of it
    began, difference, losses = time.perf_counter(), 0.0, []
    for step in range(1, arguments.steps + 1):
        inputs, targets = random_batch(data, arguments.batch_size, arguments.context, generator)
        losses.append(trainer.step(inputs, targets))
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
