"""Trains with shadow=True in a job whose ranks are started again: ``python in_place.py FOLDER STEPS``.

Says "rank R begins at step S (process P)" once, "rank R: step S" after each step, and at the end what the parameters
and the scale are. TEST_KILLS: "RANK:CALL:WHERE …": the rank kills itself there, once; WHERE: "forward", "backward"
(between two gradients), "step" (before it), "clip", "after" (the step). TEST_SCALER: a GradScaler, and an infinity on
rank 1 in calls 3 and 4. TEST_CLIP: gradients are clipped. TEST_PRELUDE: an operation before restore(). TEST_METRIC:
ranks also sum their losses, after each step. TEST_INT8: gradients travel as int8. TEST_OWED: they also make a
sum with error feedback.
TEST_GROUPS: there are groups of torch.distributed, and operations of them before and after restore().
TEST_GROUP_METRIC: also after each step, and WHERE may be "metric" (after it).
TEST_RETRY: all of a step is a function with RunState.retry. TEST_EPOCHS: the steps are in two epochs, with an
evaluation after each; WHERE may be "evaluation".
TEST_RUN: a RunState, with a scheduler, in place of restore(). TEST_PAUSE_S: between steps.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import byteps_py as bps

PAUSE_S = float(os.environ.get("TEST_PAUSE_S", "0"))  # time for a test to kill others


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # in one piece: others write, too


class Kills:
    """Where this rank dies. What it has done once is a file in ``folder``, for the process that comes after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._planned = set(os.environ.get("TEST_KILLS", "").split())

    def here(self, call: int, where: str) -> None:
        place = f"{bps.rank()}:{call}:{where}"
        done = self._folder / place.replace(":", "-")
        if place in self._planned and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def grown(state: dict) -> dict:
    """A scaler's state after the update that followed a step which was made."""
    tracker = state["_growth_tracker"] + 1
    is_due = tracker == state["growth_interval"]
    scale = state["scale"] * (state["growth_factor"] if is_due else 1.0)
    return {**state, "scale": scale, "_growth_tracker": 0 if is_due else tracker}


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    bps.init()
    if has_groups := "TEST_GROUPS" in os.environ:
        dist.init_process_group("byteps")
        rows = [dist.new_group(row) for row in ([0, 1], [2, 3])]
        ranks = torch.tensor([bps.rank()])
        dist.all_reduce(ranks, group=rows[bps.rank() // 2])
        if ranks.tolist() != [(1, 5)[bps.rank() // 2]]:
            raise SystemExit(f"rank {bps.rank()}: the sum of a row is {ranks.tolist()}")
    torch.set_num_threads(1)
    torch.manual_seed(bps.rank())  # made equal below
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 1))
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.barrier()
    if "TEST_PRELUDE" in os.environ:
        bps.allgather_object("hello", name="prelude")
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters(), shadow=True,
        compression=bps.Compression.int8 if "TEST_INT8" in os.environ else bps.Compression.none,
        step_in_backward="TEST_IN_BACKWARD" in os.environ,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3, enabled="TEST_SCALER" in os.environ)
    kills = Kills(folder)
    current = 0
    model[0].weight.register_hook(lambda grad: kills.here(current, "backward"))

    def body(call: int) -> None:
        nonlocal current
        current = call
        data = torch.Generator().manual_seed(1000 * call + bps.rank())
        inputs = torch.randn(8, 6, generator=data)
        kills.here(call, "forward")
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if scaler.is_enabled() and bps.rank() == 1 and call in (3, 4):
            loss = loss * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if "TEST_CLIP" in os.environ:
            scaler.unscale_(optimizer)
            kills.here(call, "clip")
            optimizer.clip_grad_norm_(0.5)
        kills.here(call, "step")
        if scheduler is None:
            optimizer.shadow_extra = scaler.state_dict()
        scaler.step(optimizer)
        kills.here(call, "after")
        scaler.update()
        if scheduler is not None:
            scheduler.step()
            optimizer.zero_grad()
        if "TEST_GROUP_METRIC" in os.environ:
            dist.all_reduce(loss.detach())
            kills.here(call, "metric")
        if "TEST_METRIC" in os.environ:
            bps.push_pull(loss.detach(), name="loss")
        if "TEST_OWED" in os.environ:
            bps.push_pull(torch.ones(5000), name="owed", compression=bps.Compression.topk(0.1, error_feedback=True))
        say(f"rank {bps.rank()}: step {call}")
        time.sleep(PAUSE_S)

    if "TEST_RUN" in os.environ:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        has_epochs = "TEST_EPOCHS" in os.environ
        loader = torch.utils.data.DataLoader(range(steps // 2)) if has_epochs else None
        run = bps.RunState(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
        if has_groups:
            dist.barrier()
        say(f"rank {bps.rank()} begins at step {run.iteration} (process {os.getpid()})")
        step = run.retry(body) if "TEST_RETRY" in os.environ else body

        def evaluation() -> None:
            with torch.no_grad():
                loss = model.eval()(torch.rand(8, 6)).square().mean()
            kills.here(run.iteration, "evaluation")
            bps.push_pull(loss, name="evaluation")
            model.train()

        if has_epochs:
            evaluate = run.retry(evaluation)
            for _ in run.epochs(2):
                for _ in run:
                    step(run.iteration - 1)
                evaluate()
        else:
            for call in run.iterations(steps):
                step(call)
    else:
        scheduler = None
        first = bps.restore(model, optimizer) or 0
        if first and scaler.is_enabled():
            scaler.load_state_dict(grown(optimizer.shadow_extra))
        say(f"rank {bps.rank()} begins at step {first} (process {os.getpid()})")
        for call in range(first, steps):
            body(call)
    state = [value.numpy().tobytes() for value in model.state_dict().values()]
    weights = [param.detach().numpy().tobytes() for param in model.parameters()]
    whole, parameters = (hashlib.sha256(b"".join(each)).hexdigest()[:16] for each in (state, weights))
    say(f"rank {bps.rank()} ends: {parameters}, with its buffers {whole}, scale {scaler.get_scale():g}")
    if has_groups:
        dist.destroy_process_group()
    bps.shutdown()


if __name__ == "__main__":
    main()
