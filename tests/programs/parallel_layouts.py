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
from llama import Trainer
from llama_model import LlamaOptions, llama, token_loss

import byteps_py.torch  # noqa: F401  (the backend)
from byteps_py.parallel import Mesh, checkpoint
from byteps_py.parallel.tensor import Shard, sharded_parameters

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
    return tokens[:, :-1], tokens[:, 1:]


class OneProcess:
    def __init__(self, options: LlamaOptions) -> None:
        self.options, self.model = options, llama(options).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        losses, count = token_loss(self.options, self.model[0].groups, self.model(inputs), targets)
        (losses / count).backward()
        return float((losses / count).detach())


def named(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter, Shard | None]]:
    owner = trainer.model if trainer.pipe is None else trainer.pipe
    shards = sharded_parameters(trainer.model) if trainer.pipe is None else trainer.pipe.sharded_parameters()
    for name, parameter in owner.named_parameters():
        yield name.removeprefix("module."), parameter, shards.get(name)


def check_sharded(trainer: Trainer, data: str, mesh: Mesh) -> None:
    """FSDP2 has cut every parameter for as many ranks as the layout says."""
    parts = {"zero2": mesh.dp * mesh.cp, "hsdp": mesh.cp}.get(data, 1)
    for name, parameter, _ in named(trainer):
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        mesh_of = parameter.device_mesh if isinstance(parameter, DTensor) else None
        cut = [mesh_of.size(dim) for dim, one in enumerate(placements) if one.is_shard() and mesh_of is not None]
        assert math.prod(cut) == parts, f"{name} is cut for {cut} ranks, not {parts}"


def check_gradients(trainer: Trainer, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter, shard in named(trainer):
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
        dtype=torch.float64, data=data, schedule="dapple", micro_batches=2, lr=1e-3, no_sequence_parallel=False
    )
    for one in others:
        name, _, value = one.partition("=")
        setattr(chosen, name, type(getattr(chosen, name))(value))
    return chosen


def run(layout: str, number: int, folder: str, reference: OneProcess) -> None:
    sizes, *others = layout.split(":")
    data = others.pop(0) if others and "=" not in others[0] else "ddp"
    others = [one for one in others if one != TIED]
    mesh = Mesh(*(int(one) for one in sizes.split("x")))
    trainer = Trainer(reference.options, mesh, arguments_of(data, others))
    check_sharded(trainer, data, mesh)
    model = trainer.pipe or getattr(trainer.model, "module", trainer.model)
    if number:
        checkpoint.load(model, f"{folder}/{number - 1}", trainer.optimizer)
    for step in (2 * number, 2 * number + 1):
        inputs, targets = batch(step)
        expected_loss = reference.backward(inputs, targets)
        expected = {
            name: one.grad
            for name, one in reference.model.named_parameters(remove_duplicate=False)
            if one.grad is not None
        }
        if step == 0:  # the same weights to the last bit
            own = [one.chunk(mesh.dp)[mesh.rank("dp")] for one in (inputs, targets)]
            trainer.optimizer.zero_grad()
            loss = trainer.backward(*own)
            check_gradients(trainer, expected)
            norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5)
            assert abs(trainer.clip_gradients(0.5) - norm) <= CLOSE * norm, f"{trainer.clip_gradients(9.0)} {norm}"
            check_gradients(trainer, expected)
            trainer.optimizer.step()
        else:
            nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0)
            loss = trainer.step(inputs, targets)
        close = CLOSE if step == 0 else CLOSE_AFTER_STEPS
        assert abs(loss - expected_loss) <= close, f"step {step}: {loss} {expected_loss}"
        reference.optimizer.step()
    checkpoint.save(model, f"{folder}/{number}", trainer.optimizer)
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
