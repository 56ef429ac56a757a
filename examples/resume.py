"""Save, stop and resume: with a file, or with the copies that servers keep (--shadow).

bpslaunch -np 2 python examples/resume.py --stop-after 5     # writes resume.pt, and ends
bpslaunch -np 2 python examples/resume.py                    # goes on from step 5
bpslaunch -np 2 python examples/resume.py --hosted           # the same with states that the services keep

With --shadow there is no file. Start a CPU machine with `DMLC_ROLE=server bpslaunch`, and the job twice, as
docs/howto/never-lose-a-step.md says. All ways end with the same weights as a run that never stopped.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import byteps_py as bps

WIDTH = 32


def dataset() -> TensorDataset:
    inputs = torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).tanh())


def save(path: Path, run: bps.RunState) -> None:
    """Rank 0 writes. All ranks call it: state_dict() gathers."""
    state = run.state_dict()
    if bps.rank() == 0:
        draft = path.with_suffix(".writing")
        torch.save(state, draft)
        draft.replace(path)  # a crash leaves the old file or the new one


def load(path: Path, run: bps.RunState) -> None:
    """All ranks read the file of rank 0's machine."""
    state = bps.broadcast_object(torch.load(path) if bps.rank() == 0 and path.exists() else None)
    if state is not None:
        run.load_state_dict(state)


def digest(model: nn.Module) -> str:
    data = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-after", type=int, default=0, metavar="STEP", help="end in the middle of the training")
    parser.add_argument("--hosted", action="store_true", help="the services keep the optimizer's states")
    parser.add_argument("--shadow", action="store_true", help="servers keep copies of them, instead of a file")
    parser.add_argument("--file", type=Path, default=Path("resume.pt"))
    parser.add_argument("--init-scale", type=float, default=65536.0, help="of the GradScaler; 0: none")
    arguments = parser.parse_args()

    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        hosted=arguments.hosted,
        shadow=arguments.shadow,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    scaler = torch.amp.GradScaler("cpu", init_scale=arguments.init_scale or 1.0, enabled=arguments.init_scale > 0)
    data = dataset()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, bps.size(), bps.rank()))

    run = bps.RunState(model, optimizer, scheduler=scheduler, scaler=scaler, loader=loader)
    if not arguments.shadow:
        load(arguments.file, run)
        bps.broadcast_parameters(model.state_dict(), root_rank=0)
    if bps.rank() == 0:
        print(f"begins with step {run.iteration}", flush=True)

    for _ in run.epochs(arguments.epochs):
        for inputs, targets in run:
            scaler.scale((model(inputs) - targets).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            if run.iteration == arguments.stop_after:
                if not arguments.shadow:
                    save(arguments.file, run)
                raise SystemExit(0)  # without shutdown(): servers keep what they hold

    if bps.rank() == 0:
        print(f"ends with {digest(model)} at scale {scaler.get_scale():g}, lr {scheduler.get_last_lr()[0]:.6f}")
    bps.shutdown()


if __name__ == "__main__":
    main()
