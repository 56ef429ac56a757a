"""Pipelines on real processes, beside the simulator: whether a step takes as long as its schedule says.

    python -m benchmarks.pipelines [--workers 4] [--micro-batches 4 8 16] [--rounds 5] [--json FILE]
    python -m benchmarks.pipelines --forward-ms 10 --backward-ms 20 --kb 64 --contenders dapple chimera torch-1f1b

Stages compute by waiting: an autograd function sleeps in its forward and in its backward pass. So two cores are enough
for four workers, and a step shows what the runtime and the transfers add. Of two chunks of a worker, each waits half as
long. A micro-batch has --kb between stages.

Both jobs (backend "byteps" and gloo) are alive at once and take turns, round after round: in each turn one job carries
out --steps steps of one contender, and the other one sleeps. All ranks begin a step at a moment that they are told
beforehand; the step ends with the last rank. "torch" are Schedule1F1B and ScheduleInterleaved1F1B of
torch.distributed.pipelining.

"simulated" is the makespan of the simulator (byteps_py/parallel/pipe/simulator.py) with measured durations: the mean
waits of the same step, and the transfers of the same round, from rank 0 to rank 1, each after a pause of a forward
pass. The ratio is a step's time over it.
"1F1B" compares with DAPPLE on the same backend. "CPU" is the processor time of all the job's processes, services too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cluster.contenders import Layout, our_job, torch_job
from benchmarks.cluster.hosts import LoopbackHost
from benchmarks.turns import Cost, Job, charged, new_cost, orders
from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Program
from byteps_py.parallel.pipe.schedules import make
from byteps_py.parallel.pipe.simulator import Durations, simulate

BACKENDS = ("byteps", "gloo")
_ROWS = 2  # of a micro-batch, so that it has halves
_AHEAD_S = 0.02  # from telling the ranks until they begin a step
_TRANSFERS = 30


class Contender(NamedTuple):
    """``schedule`` and ``options``: what the simulator knows it as."""

    schedule: str
    options: dict[str, Any]
    is_torch: bool = False

    def program(self, workers: int, micro_batches: int) -> Program | None:
        """None: the schedule does not exist for these numbers."""
        try:
            return make(self.schedule, workers, micro_batches, **self.options)
        except UsageError:
            return None


CONTENDERS = {
    "gpipe": Contender("gpipe", {}),
    "dapple": Contender("dapple", {}),
    "interleaved": Contender("interleaved", {"chunks": 2}),
    "chimera": Contender("chimera", {}),
    "chimera-doubling": Contender("chimera", {"more": "doubling"}),
    "chimera-halving": Contender("chimera", {"more": "halving"}),
    "torch-1f1b": Contender("dapple", {}, is_torch=True),
    "torch-interleaved": Contender("interleaved", {"chunks": 2}, is_torch=True),
}
_REFERENCE = "dapple"


# ---- a rank ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Waits:
    """How long the passes of a rank are to wait, and how long they did."""

    forward_s: float
    backward_s: float
    forwards_s: list[float] = field(default_factory=list)
    backwards_s: list[float] = field(default_factory=list)


def wait(duration_s: float, taken_s: list[float]) -> None:
    began = time.perf_counter()
    time.sleep(duration_s)
    taken_s.append(time.perf_counter() - began)


class Wait(torch.autograd.Function):
    """Waits in both passes, and changes nothing. The weight is there so that the first stage has a backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, waits: Waits) -> torch.Tensor:
        ctx.waits = waits
        wait(waits.forward_s, waits.forwards_s)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        wait(ctx.waits.backward_s, ctx.waits.backwards_s)
        return gradient, torch.zeros(1), None


class WaitingStage(nn.Module):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.waits = waits

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Wait.apply(value, self.weight, self.waits)  # type: ignore[no-any-return]


def mean_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


class Step(NamedTuple):
    """``call`` is a step, in which passes wait as ``waits`` says."""

    call: Callable[[], object]
    waits: Waits


def new_step(name: str, micro_batches: int, arguments: argparse.Namespace) -> Step:
    contender, workers = CONTENDERS[name], dist.get_world_size()
    program = contender.program(workers, micro_batches)
    assert program is not None
    pieces = program.parts_of_micro_batch * program.stages // workers
    waits = Waits(arguments.forward_ms / 1e3 / pieces, arguments.backward_ms / 1e3 / pieces)
    batch = torch.ones(micro_batches * _ROWS, _floats(arguments.kb) // _ROWS)
    if contender.is_torch:
        return Step(torch_step(program, waits, batch), waits)
    import byteps_py as bps

    stages = [WaitingStage(waits) for _ in range(program.stages)]
    pipe = bps.parallel.Pipeline(stages, program, micro_batches)
    return Step(lambda: pipe.step(batch, batch, mean_of), waits)


def torch_step(program: Program, waits: Waits, batch: torch.Tensor) -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    workers, rank = dist.get_world_size(), dist.get_rank()
    stages = [
        PipelineStage(WaitingStage(waits), stage, program.stages, torch.device("cpu"))
        for stage in range(rank, program.stages, workers)
    ]
    schedule: Any
    if len(stages) == 1:
        schedule = Schedule1F1B(stages[0], program.micro_batches, loss_fn=mean_of)
    else:
        schedule = ScheduleInterleaved1F1B(stages, program.micro_batches, loss_fn=mean_of)
    inputs = (batch,) if rank == 0 else ()
    last: dict[str, Any] = {"target": batch, "losses": []} if rank == workers - 1 else {}
    return lambda: schedule.step(*inputs, **last)


def transfers(arguments: argparse.Namespace) -> list[float]:
    """From rank 0 to rank 1, each after a pause as long as a forward pass: when they began, or arrived."""
    tensor, moments_s = torch.ones(_floats(arguments.kb)), []
    for _ in range(_TRANSFERS if dist.get_rank() < 2 else 0):
        if dist.get_rank() == 0:
            time.sleep(arguments.forward_ms / 1e3)
            moments_s.append(time.perf_counter())
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
            moments_s.append(time.perf_counter())
    return moments_s


def _floats(kb: float) -> int:
    return int(kb * 1024) // 4


def serve(arguments: argparse.Namespace) -> None:
    if arguments.rank == "byteps":
        import byteps_py as bps

        bps.init()
    dist.init_process_group(arguments.rank)
    steps: dict[tuple[str, int], Step] = {}
    with orders(dist.get_rank()) as words:
        for word, answer in words:
            if word == "transfer":
                answer([dist.get_rank(), transfers(arguments)])
                continue
            name, micro_batches, begin_s = word.split()
            key = name, int(micro_batches)
            if key not in steps:
                steps[key] = new_step(*key, arguments)
            call, waits = steps[key]
            waits.forwards_s.clear()
            waits.backwards_s.clear()
            time.sleep(max(0.0, float(begin_s) - time.perf_counter()))
            call()
            end_s = time.perf_counter() - float(begin_s)
            answer([end_s, sum(waits.forwards_s), sum(waits.backwards_s)])
    dist.destroy_process_group()


# ---- the benchmark -----------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """The median step of a turn. ``durations``: the mean waits of that step, and the transfer of the round."""

    step_s: float
    simulated_s: float
    durations: Durations


@dataclass(slots=True)
class Seen:
    """The turns of one contender with one backend and number of micro-batches."""

    turns: list[Turn] = field(default_factory=list)
    cost: Cost = field(default_factory=new_cost)


Key = tuple[int, str, str]  # (micro-batches, contender, backend)


def started(backend: str, arguments: argparse.Namespace) -> Job:
    layout = Layout([LoopbackHost(0)], ranks=arguments.workers)
    program = [__file__, "--rank", backend]
    for option in ("forward_ms", "backward_ms", "kb"):
        program += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    start = torch_job if backend == "gloo" else our_job
    return start(backend, layout, program, {"PYTHONPATH": str(Path(__file__).parents[1])})


def run(arguments: argparse.Namespace) -> dict[Key, Seen]:
    seen: dict[Key, Seen] = defaultdict(Seen)
    with contextlib.ExitStack() as stack:
        jobs = {backend: started(backend, arguments) for backend in BACKENDS}
        for job in jobs.values():
            stack.callback(job.close)
            job.meet()
        for micro_batches in arguments.micro_batches:
            programs = {
                name: CONTENDERS[name].program(arguments.workers, micro_batches) for name in arguments.contenders
            }
            for turn in range(-1, arguments.rounds):  # the first one is a warm-up
                for backend, job in jobs.items():
                    p2p_s = transfer_s(job)
                    for name, program in programs.items():
                        if program is not None:
                            found = seen[micro_batches, name, backend] if turn >= 0 else Seen()
                            take(job, name, program, p2p_s, arguments.steps if turn >= 0 else 1, found)
    return seen


def take(job: Job, name: str, program: Program, p2p_s: float, steps: int, found: Seen) -> None:
    """One turn."""
    taken: list[Turn] = []
    with charged(job, found.cost, steps):
        for _ in range(steps):
            answers = job.tell(f"{name} {program.micro_batches} {time.perf_counter() + _AHEAD_S!r}")
            taken.append(turn_of(program, answers, p2p_s))
    found.turns.append(sorted(taken, key=lambda turn: turn.step_s)[(len(taken) - 1) // 2])


def turn_of(program: Program, answers: Sequence[Any], p2p_s: float) -> Turn:
    """``answers``: of the ranks, for one step."""
    ends_s, *waits_s = zip(*answers, strict=True)
    forward_s, backward_s = (sum(each) / (program.micro_batches * program.stages) for each in waits_s)
    durations = Durations(forward_s, backward_s, p2p_s)
    return Turn(max(ends_s), simulate(program, durations).makespan, durations)


def transfer_s(job: Job) -> float:
    begun_s, arrived_s = (moments_s for _, moments_s in sorted(job.tell("transfer"))[:2])
    return statistics.median(end - begin for begin, end in zip(begun_s, arrived_s, strict=True))


def show(arguments: argparse.Namespace, seen: dict[Key, Seen]) -> list[dict[str, Any]]:
    print(
        f"{arguments.workers} workers, forward {arguments.forward_ms:g} ms, backward {arguments.backward_ms:g} ms, "
        f"{arguments.kb:g} KB; medians of {arguments.rounds} rounds of {arguments.steps} steps, (spread)\n"
        f"{'m':>3} {'contender':18}{'backend':8}{'step':>20}{'simulated':>12}{'ratio':>8}{'transfer':>11}{'CPU':>10}"
        f"{'/1F1B':>8}{'simulated':>11}"
    )
    rows = []
    for (micro_batches, name, backend), found in seen.items():
        row = row_of(found)
        reference = seen.get((micro_batches, _REFERENCE, backend))
        if reference is not None:
            other = row_of(reference)
            row["to_1f1b"] = row["step_s"] / other["step_s"]
            row["simulated_to_1f1b"] = row["simulated_s"] / other["simulated_s"]
        rows.append({"m": micro_batches, "contender": name, "backend": backend, **row})
        spread = max(row["rounds_s"]) / min(row["rounds_s"])
        step, simulated = f"{row['step_s'] * 1e3:.1f} ms ×{spread:4.2f}", f"{row['simulated_s'] * 1e3:.1f} ms"
        transfer, cpu = f"{row['p2p_s'] * 1e6:.0f} µs", f"{row['cpu_s'] * 1e3:.1f} ms"
        beside = f"{row['to_1f1b']:8.3f}{row['simulated_to_1f1b']:11.3f}" if reference is not None else ""
        print(
            f"{micro_batches:3d} {name:18}{backend:8}{step:>20}{simulated:>12}{row['ratio']:8.3f}"
            f"{transfer:>11}{cpu:>10}{beside}",
            flush=True,
        )
    return rows


def row_of(found: Seen) -> dict[str, Any]:
    turns = found.turns
    return {
        "step_s": statistics.median(turn.step_s for turn in turns),
        "rounds_s": [turn.step_s for turn in turns],
        "simulated_s": statistics.median(turn.simulated_s for turn in turns),
        "ratio": statistics.median(turn.step_s / turn.simulated_s for turn in turns),
        "ratios": [turn.step_s / turn.simulated_s for turn in turns],
        "forward_s": statistics.median(turn.durations.forward for turn in turns),
        "backward_s": statistics.median(turn.durations.backward for turn in turns),
        "p2p_s": statistics.median(turn.durations.p2p for turn in turns),
        "cpu_s": statistics.median(found.cost["all"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--forward-ms", type=float, default=10.0, help="of a micro-batch on a worker")
    parser.add_argument("--backward-ms", type=float, default=20.0)
    parser.add_argument("--kb", type=float, default=64.0, help="of a micro-batch between stages")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of one turn")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        serve(arguments)
        return
    rows = show(arguments, run(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
