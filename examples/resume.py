"""Save, stop and resume: with a file, or with the copies that servers keep (--shadow).

bpslaunch -np 2 python examples/resume.py --stop-after 5     # writes resume.pt, and ends
bpslaunch -np 2 python examples/resume.py                    # goes on from step 5
bpslaunch -np 2 python examples/resume.py --hosted           # the same with states that the services keep

With --shadow there is no file. Start a CPU machine with `DMLC_ROLE=server bpslaunch`, and the job twice, as
docs/howto/shadow.md says. All ways end with the same weights as a run that never stopped.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import byteps_py as bps

WIDTH = 32


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data of a step: where the data depends on the step alone, nothing of it has to be saved."""
    generator = torch.Generator().manual_seed(1000 * step + bps.rank())
    inputs = torch.randn(16, WIDTH, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True).tanh()


def save(path: Path, step: int, parts: dict[str, Any]) -> None:
    """Rank 0 writes. All ranks call it: a hosted optimizer's state_dict() gathers."""
    state = {name: part.state_dict() for name, part in parts.items()}
    if bps.rank() == 0:
        draft = path.with_suffix(".writing")
        torch.save({**state, "step": step}, draft)
        draft.replace(path)  # a crash leaves the old file or the new one


def load(path: Path, parts: dict[str, Any]) -> int:
    """All ranks read the file of rank 0's machine. Returns the step to go on with."""
    found = torch.load(path) if bps.rank() == 0 and path.exists() else None
    state = bps.broadcast_object(found, root_rank=0)
    if state is None:
        return 0
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def scaler_after_update(state: dict[str, Any]) -> dict[str, Any]:
    """A GradScaler's state was attached by a step that was made, before ``scaler.update()``: what that makes of it."""
    if not state:  # a scaler that is not enabled
        return state
    growth = state["_growth_tracker"] + 1
    grows = growth == state["growth_interval"]
    scale = state["scale"] * (state["growth_factor"] if grows else 1.0)
    return {**state, "scale": scale, "_growth_tracker": 0 if grows else growth}


def digest(model: nn.Module) -> str:
    data = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stop-after", type=int, default=0, metavar="STEP", help="end in the middle of the training")
    parser.add_argument("--hosted", action="store_true", help="the services keep the optimizer's states")
    parser.add_argument("--shadow", action="store_true", help="servers keep copies of them, instead of a file")
    parser.add_argument("--file", type=Path, default=Path("resume.pt"))
    parser.add_argument("--init-scale", type=float, default=65536.0, help="of the GradScaler; 0: none")
    arguments = parser.parse_args()

    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        hosted=arguments.hosted,
        shadow=arguments.shadow,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    scaler = torch.amp.GradScaler("cpu", init_scale=arguments.init_scale or 1.0, enabled=arguments.init_scale > 0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    if arguments.shadow:
        begun = bps.restore(model, optimizer) or 0
        if begun:
            extra = optimizer.shadow_extra
            scaler.load_state_dict(scaler_after_update(extra["scaler"]))
            scheduler.load_state_dict(extra["scheduler"])
            scheduler.step()
    else:
        begun = load(arguments.file, parts)
        bps.broadcast_parameters(model.state_dict(), root_rank=0)
    if bps.rank() == 0:
        print(f"begins with step {begun}", flush=True)

    for step in range(begun, arguments.steps):
        inputs, targets = batch(step)
        scaler.scale((model(inputs) - targets).square().sum()).backward()
        if arguments.shadow:
            optimizer.shadow_extra = {"scaler": scaler.state_dict(), "scheduler": scheduler.state_dict()}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        if step + 1 == arguments.stop_after:
            if not arguments.shadow:
                save(arguments.file, step + 1, parts)
            raise SystemExit(0)  # without shutdown(): servers keep what they hold

    if bps.rank() == 0:
        print(f"ends with {digest(model)} at scale {scaler.get_scale():g}, lr {scheduler.get_last_lr()[0]:.6f}")
    bps.shutdown()


if __name__ == "__main__":
    main()
