"""``parallel.parallelize_model`` with compression: the gradients of each part of the model are, bit for bit, those of
machines and a server in one process; and a checkpoint, with what machines have not sent beside it, gives the same step
again. With TEST_POWERSGD, gradients travel as factors of low rank, and there is no checkpoint. Arguments: "TPxCPxPPxDP"
layouts. Prints "LAYOUT: right" on each rank."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for support
from support.coded_sums import CodedSums
from support.low_rank import Emulated
from support.threaded import contract

import byteps_py.torch as bps
from byteps_py.parallel import Mesh, ParallelOptions, ParallelTraining, checkpoint, parallelize_model
from byteps_py.parallel.tensor import Column, Row

WIDTH, ROWS, LAYERS = 16, 8, 4  # powers of 2, so that factors of gradients change no bit
CODED = bps.Compression.with_momentum(bps.Compression.with_error_feedback(bps.Compression.int8), 0.5)
FACTORS = bps.Compression.powersgd(rank=2, min_compression_rate=1.0)
COMPRESSION = FACTORS if "TEST_POWERSGD" in os.environ else CODED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(self.w1(x).tanh())


def new_training(mesh: Mesh, hosted: bool | str = False) -> ParallelTraining:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    plan = {"*.w1": Column(), "*.w2": Row()}
    options = ParallelOptions(plan=plan, micro_batches=2, compression=COMPRESSION, hosted=hosted)
    new_optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    return parallelize_model(model, mesh, nn.functional.mse_loss, new_optimizer, options)


def sums_of(name: str, parameter: torch.Tensor, sizes: list[int]) -> Callable[[list[torch.Tensor], int], torch.Tensor]:
    chosen = COMPRESSION.of(name, parameter)
    if chosen.codec is not None:
        return CodedSums(chosen.codec, sizes)
    if chosen.low_rank is None:
        return lambda given, _: contract(given, sizes, average=True)
    emulated = Emulated(name, parameter.shape, sizes, chosen.low_rank.rank)
    return lambda given, _: emulated.mean(given)


class Copies:
    """The sums over the copies of this rank's part, in this process."""

    def __init__(self, mesh: Mesh, training: ParallelTraining) -> None:
        self.ranks = sorted(mesh.ranks("dp", "cp"))
        machine_of = [rank // bps.local_size() for rank in self.ranks]
        sizes = [len(list(ranks)) for _, ranks in itertools.groupby(machine_of)]
        self.own: dict[str, torch.Tensor] = {}
        self.sums: dict[str, Callable[[list[torch.Tensor], int], torch.Tensor]] = {}
        for name, parameter in training.module.named_parameters():
            self.sums[name] = sums_of(name, parameter, sizes)
            parameter.register_post_accumulate_grad_hook(functools.partial(self.note, name))

    def note(self, name: str, parameter: torch.Tensor) -> None:
        """The last one is that of the whole batch of this copy."""
        assert parameter.grad is not None
        self.own[name] = parameter.grad.clone()

    def averages(self) -> dict[str, torch.Tensor]:
        by_rank = bps.allgather_object(self.own, name="own")
        count = len(self.ranks)
        return {name: sums([by_rank[rank][name] for rank in self.ranks], count) for name, sums in self.sums.items()}


def batch(mesh: Mesh, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(mesh.dp * mesh.cp, ROWS, WIDTH, generator=generator)[mesh.rank("dp", "cp")]
    return inputs, inputs.flip(1)


def weights(training: ParallelTraining) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in training.module.parameters()]


def run(mesh: Mesh, folder: Path) -> None:
    training = new_training(mesh)
    copies = Copies(mesh, training)
    before = len(bps.compression_state_dict()["tensors"])
    factor = ROWS * WIDTH / 2  # elements by losses: each micro-batch has one
    for step in range(3):
        training.backward(*batch(mesh, step))
        due = copies.averages()
        for name, parameter in training.module.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, due[name] * factor), f"step {step}: {name}"
        training.optimizer.step()
    if COMPRESSION is FACTORS:
        return
    checkpoint.save(training.module, folder, training.optimizer)
    kept, machine = bps.compression_state_dict(), bps.cross_rank()
    here = [rank for rank in copies.ranks if rank // bps.local_size() == machine]
    has_states = here[0] == bps.rank() and len(here) < len(copies.ranks)
    assert len(kept["tensors"]) == before + len(copies.sums) * has_states
    found = []
    for again in range(2):
        if again:
            checkpoint.load(training.module, folder, training.optimizer)
            bps.load_compression_state_dict(kept)
        training.step(*batch(mesh, 3))
        found.append(weights(training))
    assert all(map(torch.equal, *found)), "another step after the checkpoint"


def run_hosted(mesh: Mesh) -> None:
    """Services step with the same sums."""
    trainings = [new_training(mesh), new_training(mesh, "machine")]
    for step in range(4):
        for training in trainings:
            training.step(*batch(mesh, step))
        assert all(map(torch.equal, *map(weights, trainings))), f"hosted, step {step}: other weights"


def main() -> None:
    torch.set_num_threads(1)
    assert os.environ["BYTEPS_MIN_COMPRESS_BYTES"] == os.environ["BYTEPS_FUSION_BYTES"] == "0"
    dist.init_process_group("byteps")
    folder = Path(bps.broadcast_object(tempfile.mkdtemp() if bps.rank() == 0 else "", name="folder"))
    for layout in sys.argv[1:]:
        mesh = Mesh(*(int(one) for one in layout.split("x")))
        run(mesh, folder / layout)
        if COMPRESSION.codec is not None:
            run_hosted(mesh)
        print(f"{layout}: right", flush=True)
    dist.barrier()
    if bps.rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
