"""A step of AdamW in one pass over memory, beside a copy of memory, torch's fused optimizer and DeepSpeed's for CPUs.

    python -m benchmarks.optimizer_steps [--parameters 16] [--threads 1 2] [--rounds 7] [--json FILE]

"bfloat16": gradients and parameters of bfloat16 with masters and moments of float32, 28 bytes a parameter; torch needs
casts of both. So does DeepSpeed, which takes part if it is installed (it needs a compiler). "float32": 28 bytes too,
because the master is the parameter. The speed of memory is that of memcpy, in bytes read and written, with as many
threads. Contenders take turns; a figure is the median over the rounds, and ratios are medians of each round's ratio,
with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from byteps_py.kernels.optimizer_steps import bind_step
from byteps_py.kernels.update_rules import Decay, Hyperparameters, Method, StepKind, UpdateRule, step_scalars
from byteps_py.tensors import DType

RULE = UpdateRule(Method.ADAM, Decay.DECOUPLED)
NUMBERS = Hyperparameters(lr=1e-3, weight_decay=0.01)
BYTES = 28
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def side_by_side(calls: list[Callable[[], None]]) -> None:
    """Each on a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls[1:]]
    for thread in threads:
        thread.start()
    calls[0]()
    for thread in threads:
        thread.join()


class Contenders:
    """``dtype``: of gradients and parameters. ``threads``: of each contender."""

    def __init__(self, dtype: DType, count: int, threads: int) -> None:
        self.count, self._threads = count, threads
        kind = torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float32
        rng = torch.Generator().manual_seed(1)
        self._gradient = torch.randn(count, generator=rng).to(kind)
        self._parameter = torch.randn(count, generator=rng).to(kind)
        self._states = [self._parameter.float(), torch.zeros(count), torch.zeros(count)]
        is_cast = dtype is DType.BFLOAT16
        addresses = [state.data_ptr() for state in self._states], [self._gradient.data_ptr()]
        outputs = [self._parameter.data_ptr()] if is_cast else []
        self._step_of = [bind_step(StepKind(RULE, dtype, dtype), *addresses, outputs) for _ in range(threads)]
        self._master = torch.nn.Parameter(self._parameter.float())
        self._master.grad = self._gradient.float()
        self._fused = torch.optim.AdamW([self._master], lr=NUMBERS.lr, weight_decay=NUMBERS.weight_decay, fused=True)
        self._deepspeed: torch.optim.Optimizer | None = None
        if HAS_DEEPSPEED:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            self._deepspeed = DeepSpeedCPUAdam([self._master], lr=NUMBERS.lr, weight_decay=NUMBERS.weight_decay)
        self._is_cast = is_cast
        self._there, self._here = torch.zeros(count * 14, dtype=torch.uint8), torch.ones(count * 14, dtype=torch.uint8)
        self._steps = 0

    def ours(self) -> None:
        """One pass."""
        self._steps += 1
        scalars = step_scalars(RULE, NUMBERS, self._steps)
        share = -(-self.count // self._threads)
        parts = [range(start, min(start + share, self.count)) for start in range(0, self.count, share)]
        side_by_side(
            [lambda run=run, part=part: run(scalars, part) for run, part in zip(self._step_of, parts, strict=True)]  # type: ignore[misc]
        )

    def torchs(self) -> None:
        """torch's fused optimizer, and the casts that it needs."""
        self._cast_and_step(self._fused)

    def deepspeeds(self) -> None:
        """The same of DeepSpeed."""
        if self._deepspeed is not None:
            self._cast_and_step(self._deepspeed)

    def _cast_and_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.set_num_threads(self._threads)
        if self._is_cast and self._master.grad is not None:
            self._master.grad.copy_(self._gradient)
        optimizer.step()
        if self._is_cast:
            self._parameter.copy_(self._master.detach())

    def memory(self) -> None:
        """memcpy of as many bytes."""
        share = self._here.numel() // self._threads
        side_by_side(
            [
                lambda at=at: ctypes.memmove(self._there.data_ptr() + at, self._here.data_ptr() + at, share)  # type: ignore[misc]
                for at in range(0, share * self._threads, share)
            ]
        )


def measure(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, by round."""
    names = ("ours", "torchs", "memory", *(("deepspeeds",) if HAS_DEEPSPEED else ()))
    seen: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name, times in seen.items():
            began = time.perf_counter()
            for _ in range(3):
                getattr(contenders, name)()
            if number:  # the first round warms up
                times.append((time.perf_counter() - began) / 3)
    return seen


def ratio(one: list[float], other: list[float]) -> tuple[float, float, float]:
    found = [a / b for a, b in zip(one, other, strict=True)]
    return statistics.median(found), min(found), max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=16, help="in millions")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{arguments.parameters} million parameters, AdamW, {BYTES} bytes each")
    print(
        f"{'dtype':10}{'threads':>8}{'ours':>18}{'memcpy':>12}{'of memory':>22}{'over fused':>22}{'over DeepSpeed':>22}"
    )
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for threads in arguments.threads:
            contenders = Contenders(dtype, arguments.parameters * 1_000_000, threads)
            seen = measure(contenders, arguments.rounds)
            moved = BYTES * contenders.count
            ours, memory = (moved / statistics.median(seen[name]) / 1e9 for name in ("ours", "memory"))
            others = [seen[name] for name in ("memory", "torchs", "deepspeeds") if name in seen]
            ratios = [ratio(other, seen["ours"]) for other in others]
            cells = [f"{middle:.2f} ({low:.2f}–{high:.2f})" for middle, low, high in ratios]
            print(
                f"{dtype.name.lower():10}{threads:8}{ours:13.1f} GB/s{memory:7.1f} GB/s"
                + "".join(f"{cell:>22}" for cell in cells)
            )
            rows.append({"dtype": dtype.name.lower(), "threads": threads, "seconds": seen, "bytes": moved})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
