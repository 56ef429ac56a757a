"""Trains with ``shadow=True`` for four steps from the last that servers hold, and ends in some way.

    shadow_endings.py WAY

WAY: see ENDINGS. Rank 0 prints ``restored at S``, and ``ends after N``.
"""

from __future__ import annotations

import atexit
import select
import sys
import time

import torch

import byteps_py as bps
from byteps_py.torch.collectives import context as contexts

STEPS = 4


def wait_until_held(step: int) -> None:
    until_s = time.monotonic() + 60
    while contexts.current().session.state_host.held[0] < step:
        if time.monotonic() > until_s:
            raise SystemExit(f"step {step} is not held")
        select.select([], [], [], 0.01)


def train() -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters()), named_parameters=model.named_parameters(), shadow=True
    )
    begun = bps.restore(model, optimizer) or 0
    if bps.rank() == 0:
        print(f"restored at {begun}", flush=True)
    for number in range(STEPS):
        if number == STEPS - 1:  # ranks learn in a step what is held by then
            wait_until_held(begun + 2)
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if optimizer.shadow_step < begun + 2:
        raise SystemExit("no step is known to be held")
    if bps.rank() == 0:
        print(f"ends after {begun + STEPS}", flush=True)


def raise_in_try() -> None:
    try:
        train()
        raise ValueError("the data is bad")
    finally:
        bps.shutdown()


def exit_in_try(status: int) -> None:
    try:
        train()
        sys.exit(status)
    finally:
        bps.shutdown()


def exit_at_once(status: int) -> None:
    train()
    sys.exit(status)


def shut_down_at_exit() -> None:
    atexit.register(bps.shutdown)
    train()


def finish() -> None:
    train()
    bps.shutdown()


def finish_and_exit() -> None:
    try:
        train()
    finally:
        bps.shutdown()
    sys.exit(0)


ENDINGS = {
    "raise": raise_in_try,
    "exit-0-in-try": lambda: exit_in_try(0),
    "exit-3-in-try": lambda: exit_in_try(3),
    "exit-0": lambda: exit_at_once(0),
    "fall-off": train,
    "at-exit": shut_down_at_exit,
    "finish": finish,
    "finish-and-exit": finish_and_exit,
}


if __name__ == "__main__":
    try:
        import no_such_module  # noqa: F401
    except ImportError:  # an exception that is handled when the job begins is not the job's
        bps.init()
        ENDINGS[sys.argv[1]]()
