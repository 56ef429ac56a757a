"""Trains a model in parts with shadow=True in a job whose ranks are started again.

    mesh_in_place.py FOLDER TPxCPxPPxDP[:SCHEDULE[:MODEL[:STATES]]] STEPS

MODEL: "llama" (of examples/), or by default blocks with dropout and batch norms. STATES: "machine" or "sharded". Says
"rank R begins at step S (process P)" once, "rank R: step S: LOSS" after each step, and at the end what the parameters
and buffers are. TEST_KILLS: "RANK:CALL:WHERE …": the rank kills itself there, once; WHERE: "forward", "backward",
"step" (before the optimizer's), "after" (the step); and with the CALL "again", in a process that is not the first one,
"mesh" (before it is made) and "restore". TEST_BY_HAND: ``training.restore()`` in place of a RunState. TEST_FLOAT16:
with a GradScaler. TEST_EVALUATE: after each step; then WHERE may be "evaluation". TEST_OVERFLOW: a call in which the
gradients of one batch overflow. TEST_RETRY: steps by hand, in a function with RunState.retry. TEST_LATE_GROUP: makes a
group after the first step. TEST_INT8: gradients
travel as int8. TEST_PAUSE_S: after each step.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from in_place import grown, say
from torch import nn

import byteps_py.torch as bps
from byteps_py.parallel import Mesh, ParallelOptions, ParallelTraining, parallelize_model
from byteps_py.parallel.tensor import Column, Row

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama_model import SEQUENCE, Groups, LlamaOptions, llama, plan, token_loss

WIDTH, ROWS, CONTEXT, LAYERS = 16, 8, 32, 6
LLAMA = LlamaOptions(vocabulary=50, width=16, layers=LAYERS, heads=8, kv_heads=4, feed_forward=24, eos_id=3)
PAUSE_S = float(os.environ.get("TEST_PAUSE_S", "0"))


class Kills:
    """Where this rank dies. What it has done once is a file in ``folder``, for the process that comes after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._planned = set(os.environ.get("TEST_KILLS", "").split())
        self.call = 0

    def here(self, where: str) -> None:
        own = os.environ["RANK"]
        is_again = not self.call and any(self._folder.glob(f"{own}-*"))
        place = f"{own}:{'again' if is_again else self.call}:{where}"
        done = self._folder / place.replace(":", "-")
        if place in self._planned and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Scaler(torch.amp.GradScaler):
    def __init__(self, kills: Kills, is_enabled: bool) -> None:
        super().__init__("cpu", init_scale=16.0, growth_interval=3, enabled=is_enabled)
        self._kills = kills

    def step(self, optimizer: torch.optim.Optimizer) -> float | None:
        self._kills.here("step")
        return super().step(optimizer)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.drop(self.w2(self.w1(x).tanh())))


def new_training(mesh: Mesh, schedule: str, is_llama: bool, states: str) -> ParallelTraining:
    torch.manual_seed(7)
    options = {
        "schedule": schedule,
        "micro_batches": 2 * mesh.pp,
        "max_norm": 0.5,
        "shadow": True,
        "hosted": states or True,
        "compression": bps.Compression.int8 if "TEST_INT8" in os.environ else bps.Compression.none,
        "autocast": torch.float16 if "TEST_FLOAT16" in os.environ else None,
    }
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    if is_llama:
        groups = Groups(mesh.group("tp"), mesh.group("cp"))
        how = ParallelOptions(plan=plan(LLAMA), sequence_dim=SEQUENCE, **options)
        return parallelize_model(llama(LLAMA, groups), mesh, token_loss(LLAMA, groups), optimizer, how)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))
    how = ParallelOptions(plan={"*.w1": Column(), "*.w2": Row()}, **options)
    return parallelize_model(model, mesh, nn.functional.mse_loss, optimizer, how)


def batch(mesh: Mesh, call: int, is_llama: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(call)
    rows = 2 * mesh.pp * ROWS * mesh.dp
    if is_llama:
        tokens = torch.randint(LLAMA.vocabulary, (rows, CONTEXT + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        return tokens[:, :-1].chunk(mesh.dp)[mesh.rank("dp")], targets.chunk(mesh.dp)[mesh.rank("dp")]
    own = torch.randn(rows, WIDTH, generator=generator).chunk(mesh.dp)[mesh.rank("dp")]
    return own, own.flip(1)


def step_by_hand(training: ParallelTraining, kills: Kills, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = training.backward(inputs, targets)
    training.scaler.unscale_(training.optimizer)
    training.clip_grad_norm_(0.5)
    kills.here("step")
    training.scaler.step(training.optimizer)
    training.scaler.update()
    dist.all_reduce(again := loss.clone())
    return loss + 0 * again


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[3])
    sizes, schedule, model, states, *_ = (*sys.argv[2].split(":"), "", "", "")
    kills = Kills(folder)
    dist.init_process_group("byteps")
    torch.set_num_threads(1)
    kills.here("mesh")
    mesh = Mesh(*(int(one) for one in sizes.split("x")))
    training = new_training(mesh, schedule or "dapple", model == "llama", states)
    training.scaler = Scaler(kills, training.scaler.is_enabled())
    module = training.local_module
    first = next(iter(module.parameters()))
    first.register_hook(lambda grad: kills.here("backward"))
    next(iter(module.children())).register_forward_hook(lambda *_: kills.here("forward"))
    torch.manual_seed(100 + mesh.rank("dp"))  # of the dropout: the same on ranks with parts of a layer
    kills.here("restore")
    scheduler = None
    if "TEST_BY_HAND" in os.environ:
        begun = training.restore() or 0
        if begun and training.scaler.is_enabled():
            training.scaler.load_state_dict(grown(training.optimizer.shadow_extra))
        numbers: Iterable[int] = range(begun, steps)
    else:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
        run = bps.RunState(module, training.optimizer, scheduler=scheduler, scaler=training.scaler)
        begun, numbers = run.iteration, run.iterations(steps)
        if "TEST_RETRY" in os.environ:
            training.step = run.retry(functools.partial(step_by_hand, training, kills))
    dist.barrier()  # between restore() and the first step
    say(f"rank {bps.rank()} begins at step {begun} (process {os.getpid()})")
    for number in numbers:
        kills.call = number + 1
        if kills.call == 4 and "TEST_LATE_GROUP" in os.environ:
            dist.new_group(range(bps.size()))
        inputs, targets = batch(mesh, number, model == "llama")
        if os.environ.get("TEST_OVERFLOW") == str(kills.call) and mesh.rank("dp") == mesh.dp - 1:
            targets = targets * torch.inf
        if scheduler is None:
            training.optimizer.shadow_extra = training.scaler.state_dict()
            torch.manual_seed(1000 * kills.call + mesh.rank("dp"))
        loss = training.step(inputs, targets)
        kills.here("after")
        if "TEST_EVALUATE" in os.environ:
            module.eval()
            for _ in range(2):
                loss += training.evaluate(inputs, targets)
                kills.here("evaluation")
            module.train()
        if scheduler is not None:
            scheduler.step()
            torch.rand(3)
        say(f"rank {bps.rank()}: step {kills.call}: {float(loss):.17g}")
        time.sleep(PAUSE_S)
    values = [value.detach().contiguous().view(-1).view(torch.uint8) for value in module.state_dict().values()]
    whole = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()[:16]
    say(f"rank {bps.rank()} ends: {whole}, scale {training.scaler.get_scale():g} (process {os.getpid()})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
