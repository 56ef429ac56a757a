"""The Llama of examples/ in all layouts of tensor, context, pipeline and data parallelism, beside one process: the
loss, every gradient, the gradients' norm, and losses after a step; each layout goes on from the checkpoint of the one
before. Arguments: layouts, as "TPxCPxPPxDP:DATA:OPTION…". Prints "LAYOUT: right" on each rank."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cases  # noqa: F401  (the default device)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama import new_training
from llama_model import Groups, LlamaOptions, llama, token_loss

import byteps_py.torch  # noqa: F401  (the backend)
from byteps_py.parallel import Mesh, ParallelTraining, Pipeline, checkpoint
from byteps_py.parallel.tensor import Shard, sharded_parameters
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin

CLOSE = 1e-12
#: The second layout's losses come after steps of AdamW, which divides by roots of tiny squares.
CLOSE_AFTER_STEPS = 1e-8
#: The first run of a layout with this option is of a model whose output layer is tied to its embedding.
TIED = "tied=1"
ROWS, CONTEXT = 8, 32
OPTIONS = LlamaOptions(vocabulary=300, width=16, layers=6, heads=8, kv_heads=4, feed_forward=24, eos_id=3)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    tokens = torch.randint(OPTIONS.vocabulary, (ROWS, CONTEXT + 1), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.15] = 3
    targets = tokens[:, 1:].clone()
    masked = torch.linspace(0.0, 0.6, ROWS, device=tokens.device)[:, None]  # ranks count differently
    targets[torch.rand(targets.shape, generator=generator) < masked] = -100
    return tokens[:, :-1], targets


class OneProcess:
    def __init__(self, options: LlamaOptions) -> None:
        self.options, self.model = options, llama(options, Groups()).double()
        self.loss = token_loss(options, Groups())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        losses, count = self.loss(self.model(inputs), targets)
        (losses / count).backward()
        return float((losses / count).detach())


def named(training: ParallelTraining) -> Iterator[tuple[str, nn.Parameter, Shard | None]]:
    module = training.module
    shards = module.sharded_parameters() if isinstance(module, Pipeline) else sharded_parameters(module)
    for name, parameter in module.named_parameters():
        yield name, parameter, shards.get(name)


def check_sharded(training: ParallelTraining, data: str, mesh: Mesh) -> None:
    """FSDP2 has cut every parameter for as many ranks as the layout says."""
    parts = {"zero2": mesh.dp * mesh.cp, "zero3": mesh.dp * mesh.cp, "hsdp": mesh.cp}.get(data, 1)
    for name, parameter, _ in named(training):
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        mesh_of = parameter.device_mesh if isinstance(parameter, DTensor) else None
        cut = [mesh_of.size(dim) for dim, one in enumerate(placements) if one.is_shard() and mesh_of is not None]
        assert math.prod(cut) == parts, f"{name} is cut for {cut} ranks, not {parts}"


def check_gradients(training: ParallelTraining, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter, shard in named(training):
        own, whole = parameter.grad, expected[name]
        assert own is not None, name
        if isinstance(own, DTensor):
            own = own.full_tensor()
        if shard is not None:
            whole = shard.cut(whole)
        assert own.shape == whole.shape, f"{name}: {tuple(own.shape)} and {tuple(whole.shape)}"
        difference = (own - whole).abs().max().item() if own.numel() else 0.0
        assert difference <= CLOSE, f"the gradient of {name} differs by {difference}"


def arguments_of(data: str, others: list[str]) -> argparse.Namespace:
    chosen = argparse.Namespace(
        dtype=torch.float64,
        data=data,
        schedule="dapple",
        micro_batches=2,
        lr=1e-3,
        no_sequence_parallel=False,
        hosted="",
    )
    for one in others:
        name, _, value = one.partition("=")
        setattr(chosen, name, type(getattr(chosen, name))(value))
    chosen.hosted = chosen.hosted or False
    return chosen


def run(layout: str, number: int, folder: str, reference: OneProcess) -> None:
    sizes, *others = layout.split(":")
    data = others.pop(0) if others and "=" not in others[0] else "ddp"
    others = [one for one in others if one != TIED]
    mesh = Mesh(*(int(one) for one in sizes.split("x")))
    training = new_training(reference.options, mesh, arguments_of(data, others))
    check_sharded(training, data, mesh)
    model = training.module
    if number:
        checkpoint.load(model, f"{folder}/{number - 1}", training.optimizer)
    for step in (2 * number, 2 * number + 1):
        inputs, targets = batch(step)
        own = [one.chunk(mesh.dp)[mesh.rank("dp")] for one in (inputs, targets)]
        evaluated = training.evaluate(*own)
        expected_loss = reference.backward(inputs, targets)
        expected = {
            name: one.grad
            for name, one in reference.model.named_parameters(remove_duplicate=False)
            if one.grad is not None
        }
        if step == 0:  # the same weights to the last bit
            loss = training.backward(*own)
            is_hosted = isinstance(training.optimizer, HostedOptimizerMixin)  # averages do not come to the ranks
            if not is_hosted:
                check_gradients(training, expected)
            norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
            assert abs(training.clip_grad_norm_(0.5) - norm) <= CLOSE * norm, f"{training.clip_grad_norm_(9.0)} {norm}"
            if not is_hosted:
                check_gradients(training, expected)
            training.optimizer.step()
        else:
            nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0)
            loss = training.step(*own)
        close = CLOSE if step == 0 else CLOSE_AFTER_STEPS
        for found in (loss, evaluated):
            assert abs(found - expected_loss) <= close, f"step {step}: {found} {expected_loss}"
        reference.optimizer.step()
    checkpoint.save(model, f"{folder}/{number}", training.optimizer)
    print(f"{layout}: right", flush=True)


def first_steps(layouts: list[str], options: LlamaOptions) -> None:
    """Each layout from the same weights: exact in its first step; then on from the checkpoint of the one before."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    assert path[0] is not None
    try:
        goes_on = OneProcess(options)
        for number, layout in enumerate(layouts):
            if number:
                own = replace(options, tied=True) if TIED in layout else options
                run(layout, 0, f"{path[0]}/fresh{number}", OneProcess(own))
            run(layout, number, path[0], goes_on)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("TEST_BACKEND", "byteps"))
    first_steps(sys.argv[1:], OPTIONS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
