"""The image encoder's share of a training step, for each of its placements, on real processes.

    python -m benchmarks.multimodal [--workers 4] [--micro-batches 8] [--rounds 5] [--json FILE]
    python -m benchmarks.multimodal --forward-ms 10 --backward-ms 20 --encoder-forward-ms 7 --encoder-backward-ms 14

Layers compute by waiting: an autograd function sleeps in its forward and in its backward pass, for as long as there are
micro-batches (or parts of one) in its input. So two cores are enough for four workers, and a step shows what the
runtime and the transfers add. Each stage attends to the images once. By default the encoder takes half as long, in all,
as the text model's pipeline: before or in the first stage it would be a third of the step, as it was for Llama 3 before
its encoder was replicated (Chu et al., 2025, section 3.2.1: 33 %, then 8 %).

One job has all contenders, which take turns, round after round; "none" is the text model's pipeline alone. All ranks
begin a step at a moment that they are told beforehand; the step ends with the last rank. The share is
(step - step of "none" in the same round) / step. "predicted" is that of byteps_py/parallel/multimodal/model.py with
the mean waits of the same steps, and without transfers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cluster.contenders import Layout, our_job
from benchmarks.cluster.hosts import LoopbackHost
from benchmarks.turns import Job, orders
from byteps_py.parallel.multimodal.model import EncoderPlacement, step_time
from byteps_py.parallel.pipe.schedules import make
from byteps_py.parallel.pipe.simulator import Durations

NONE = "none"
CONTENDERS = (NONE, *(each.value for each in EncoderPlacement))
_ROWS = 4  # of a micro-batch: an encoder may have less than a whole one
_AHEAD_S = 0.02  # from telling the ranks until they begin a step
_OPTIONS = ("forward_ms", "backward_ms", "encoder_forward_ms", "encoder_backward_ms", "kb", "text_kb", "schedule")


# ---- a rank ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Waits:
    """How long the passes of one micro-batch are to wait, and how long they did, in all."""

    forward_s: float
    backward_s: float
    waited_s: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def wait(self, is_backward: bool, micro_batches: float) -> None:
        began = time.perf_counter()
        time.sleep((self.backward_s if is_backward else self.forward_s) * micro_batches)
        self.waited_s[is_backward] += time.perf_counter() - began

    def taken(self) -> list[float]:
        """Since the last call."""
        found, self.waited_s = self.waited_s, [0.0, 0.0]
        return found


class WaitInBoth(torch.autograd.Function):
    """Waits in both passes, and changes nothing. The weight is there so that there is a backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, waits: Waits) -> torch.Tensor:
        ctx.waits, ctx.micro_batches = waits, value.shape[0] / _ROWS
        waits.wait(False, ctx.micro_batches)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.waits.wait(True, ctx.micro_batches)
        return gradient, torch.zeros(1), None


class WaitingLayer(nn.Module):
    """An image encoder, or a layer that attends to image tokens."""

    attends_to_images = True

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.waits = waits

    def forward(self, value: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        if tokens is not None:
            value = value + tokens[:, :1]
        return WaitInBoth.apply(value, self.weight, self.waits)  # type: ignore[no-any-return]


class Runner:
    """The pipelines of all contenders on this rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import byteps_py as bps
        from byteps_py.parallel.multimodal import MultimodalModel, MultimodalPipeline

        m = arguments.micro_batches
        self.text = Waits(arguments.forward_ms / 1e3, arguments.backward_ms / 1e3)
        self.encoder = Waits(arguments.encoder_forward_ms / 1e3, arguments.encoder_backward_ms / 1e3)
        images = torch.ones(m * _ROWS, _columns(arguments.kb))
        text = torch.ones(m * _ROWS, _columns(arguments.text_kb))
        self.steps: dict[str, Callable[[], object]] = {}
        for name in CONTENDERS:
            layers = nn.Sequential(*(WaitingLayer(self.text) for _ in range(dist.get_world_size())))
            if name == NONE:
                alone = bps.parallel.Pipeline(layers, arguments.schedule, m)
                self.steps[name] = lambda alone=alone: alone.step(text, text, mean_of)  # type: ignore[misc]
                continue
            model = MultimodalModel(WaitingLayer(self.encoder), layers)
            pipe = MultimodalPipeline(model, arguments.schedule, m, placement=name)
            self.steps[name] = lambda pipe=pipe: pipe.step((images, text), text, mean_of)  # type: ignore[misc]

    def step(self, name: str, begin_s: float) -> list[Any]:
        """(duration, waits of the text model's passes, those of the encoder's)."""
        time.sleep(max(0.0, begin_s - time.perf_counter()))
        self.steps[name]()
        end_s = time.perf_counter() - begin_s
        return [end_s, self.text.taken(), self.encoder.taken()]


def mean_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


def _columns(kb: float) -> int:
    """Of float32 numbers in a row, for ``kb`` of a micro-batch."""
    return max(1, int(kb * 1024) // 4 // _ROWS)


def serve(arguments: argparse.Namespace) -> None:
    import byteps_py as bps

    bps.init()
    dist.init_process_group("byteps")
    runner = Runner(arguments)
    with orders(dist.get_rank()) as words:
        for word, answer in words:
            name, begin_s = word.split()
            answer(runner.step(name, float(begin_s)))
    dist.destroy_process_group()


# ---- the benchmark -----------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """The median step of a turn, and what is predicted for its waits: (step, step without the encoder)."""

    step_s: float
    predicted_s: tuple[float, float]


def started(arguments: argparse.Namespace) -> Job:
    program = [__file__, "--rank", "--micro-batches", str(arguments.micro_batches)]
    for option in _OPTIONS:
        program += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    layout = Layout([LoopbackHost(0)], ranks=arguments.workers)
    return our_job("byteps", layout, program, {"PYTHONPATH": str(Path(__file__).parents[1])})


def run(arguments: argparse.Namespace) -> dict[str, list[Turn]]:
    seen: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
    job = started(arguments)
    try:
        job.meet()
        for turn in range(-1, arguments.rounds):  # the first one is a warm-up
            for name in CONTENDERS:
                # A receiver expects a size once it has seen it twice.
                found = take(job, name, arguments, arguments.steps if turn >= 0 else 2)
                if turn >= 0:
                    seen[name].append(found)
    finally:
        job.close()
    return seen


def take(job: Job, name: str, arguments: argparse.Namespace, steps: int) -> Turn:
    taken = []
    for _ in range(steps):
        answers = job.tell(f"{name} {time.perf_counter() + _AHEAD_S!r}")
        taken.append(turn_of(name, answers, arguments))
    return sorted(taken, key=lambda turn: turn.step_s)[(len(taken) - 1) // 2]


def turn_of(name: str, answers: list[Any], arguments: argparse.Namespace) -> Turn:
    """``answers``: of the ranks, for one step."""
    ends_s, text_s, encoder_s = zip(*answers, strict=True)
    p, m = arguments.workers, arguments.micro_batches
    program = make(arguments.schedule, p, m)
    forward_s, backward_s = (sum(each) / (m * p) for each in zip(*text_s, strict=True))
    text = Durations(forward_s, backward_s)
    alone_s = step_time(program, text)
    if name == NONE:
        return Turn(max(ends_s), (alone_s, alone_s))
    forward_s, backward_s = (sum(each) / m for each in zip(*encoder_s, strict=True))
    with_s = step_time(program, text, Durations(forward_s, backward_s), EncoderPlacement(name))
    return Turn(max(ends_s), (with_s, alone_s))


def show(arguments: argparse.Namespace, seen: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    print(
        f"{arguments.workers} workers, {arguments.micro_batches} micro-batches, {arguments.schedule}; forward "
        f"{arguments.forward_ms:g} ms, backward {arguments.backward_ms:g} ms, of the encoder "
        f"{arguments.encoder_forward_ms:g} and {arguments.encoder_backward_ms:g} ms; {arguments.kb:g} KB of tokens "
        f"a micro-batch\nmedians of {arguments.rounds} rounds of {arguments.steps} steps, (spread)\n"
        f"{'encoder':16}{'step':>20}{'predicted':>12}{'share':>9}{'predicted':>12}"
    )
    alone_s = [turn.step_s for turn in seen[NONE]]
    rows = []
    for name, turns in seen.items():
        shares = [1 - alone / turn.step_s for alone, turn in zip(alone_s, turns, strict=True)]
        row = {
            "encoder": name,
            "step_s": statistics.median(turn.step_s for turn in turns),
            "rounds_s": [turn.step_s for turn in turns],
            "predicted_s": statistics.median(turn.predicted_s[0] for turn in turns),
            "share": statistics.median(shares),
            "shares": shares,
            "predicted_share": statistics.median(1 - turn.predicted_s[1] / turn.predicted_s[0] for turn in turns),
        }
        rows.append(row)
        spread = max(row["rounds_s"]) / min(row["rounds_s"])
        step, predicted = f"{row['step_s'] * 1e3:.1f} ms ×{spread:4.2f}", f"{row['predicted_s'] * 1e3:.1f} ms"
        print(f"{name:16}{step:>20}{predicted:>12}{row['share']:9.1%}{row['predicted_share']:12.1%}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", default="dapple")
    parser.add_argument("--forward-ms", type=float, default=30.0, help="of a micro-batch at a stage of the text model")
    parser.add_argument("--backward-ms", type=float, default=60.0)
    parser.add_argument("--encoder-forward-ms", type=float, default=21.0, help="of a micro-batch's images")
    parser.add_argument("--encoder-backward-ms", type=float, default=42.0)
    parser.add_argument("--kb", type=float, default=64.0, help="of a micro-batch's image tokens")
    parser.add_argument("--text-kb", type=float, default=16.0, help="of a micro-batch between stages")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        serve(arguments)
        return
    rows = show(arguments, run(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
