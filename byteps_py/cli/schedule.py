"""`bps schedule`: a chart of a pipeline schedule, and its figures; or the best order for given stages. Starts
nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from byteps_py.cli.command import add_command, add_json
from byteps_py.errors import UsageError

if TYPE_CHECKING:
    from byteps_py.parallel.pipe.program import Program
    from byteps_py.parallel.pipe.schedule_search import FoundSchedule
    from byteps_py.parallel.pipe.simulator import Durations, ScheduleTimeline, Span

NAMES = ("gpipe", "dapple", "interleaved", "chimera", "gems", "pipedream", "pipedream-2bw")
#: Larger schedules take minutes and gigabytes. Passes: forward passes of all stages and micro-batches.
MOST_WORKERS, MOST_PASSES = 500, 100_000
_Number = TypeVar("_Number", int, float)


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "schedule",
        help="show the chart and the figures of a pipeline schedule",
        description="Simulate one step of a pipeline schedule: each worker carries out its list of actions in order. "
        "NAME search finds the shortest order for stages of different speed, within the memory of each worker.",
        example="bps schedule interleaved -p 4 -m 8 --chunks 2",
    )
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(NAMES)}; 1f1b is dapple; or search")
    parser.add_argument("-p", type=int, required=True, metavar="P", help="workers")
    parser.add_argument("-m", type=int, required=True, metavar="M", help="micro-batches of a step")
    parser.add_argument("--chunks", type=int, metavar="V", help="interleaved: stages of each worker; default 2")
    parser.add_argument(
        "--consecutive",
        type=int,
        metavar="K",
        help="interleaved: micro-batches of a round; default the smaller of P, M",
    )
    parser.add_argument("--pipes", type=int, metavar="2F", help="chimera: copies of the model; default 2")
    parser.add_argument(
        "--more", choices=("direct", "doubling", "halving"), help="chimera: arrangement of more micro-batches than P"
    )
    parser.add_argument("--warmup", choices=("A", "B"), help="dapple: p - r forward passes (A), or 2 (p - r) - 1 (B)")
    parser.add_argument(
        "--forward",
        type=_times,
        default=(1.0,),
        metavar="T",
        help="time of a forward pass, or T,T,… of each stage's; 1",
    )
    parser.add_argument("--backward", type=_times, default=(2.0,), metavar="T", help="of a backward pass, likewise; 2")
    parser.add_argument(
        "--p2p", type=_times, default=(0.0,), metavar="T", help="of a transfer, or from each stage to the next; 0"
    )
    parser.add_argument(
        "--memory", type=_counts, metavar="K", help="search: micro-batches that a worker can hold, or K,K,… of each one"
    )
    parser.add_argument(
        "--states", type=int, metavar="N", help="search: states to look at, at most; default 50000, some seconds"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a chart there, too")
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the chart. Raises UsageError if there is no such schedule for these numbers."""
    from byteps_py.parallel.pipe.schedules import make
    from byteps_py.parallel.pipe.simulator import simulate
    from byteps_py.tools.schedule_chart import svg_chart, text_chart

    options = {
        name: value
        for name in ("chunks", "consecutive", "pipes", "more", "warmup")
        if (value := getattr(arguments, name)) is not None
    }
    for name in ("forward", "backward", "p2p"):
        for value in getattr(arguments, name):
            if not 0 <= value < float("inf") or (name != "p2p" and not value):
                least = "of at least" if name == "p2p" else "above"
                raise UsageError(f"--{name}={value:g}: a time {least} 0 is needed")
    _check_size(arguments.p, arguments.m, arguments.chunks or 2 if arguments.name == "interleaved" else 1)
    found = None
    if arguments.name == "search":
        found = _search(arguments, options)
        program = found.program
    elif arguments.memory is not None or arguments.states is not None:
        raise UsageError(f"--memory and --states are for search; {arguments.name} is as it is")
    else:
        program = make(arguments.name, arguments.p, arguments.m, **options)
    timeline = simulate(program, _durations(arguments, program.stages))
    if timeline.makespan == float("inf"):
        raise UsageError("the makespan is too large a number: give smaller times")
    if arguments.svg is not None:
        try:
            arguments.svg.write_text(svg_chart(timeline), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg={arguments.svg}: {error.strerror}") from error
    if arguments.json:
        more = {} if found is None else {"bound": found.bound, "optimal": found.is_optimal, "states": found.states}
        print(json.dumps(_as_json(timeline) | more))
        return 0
    print(f"{text_chart(timeline)}\n\n{_figures(timeline)}")
    if found is not None:
        print(f"{'no order is shorter than:':<47} {found.bound:g}{', this one is optimal' * found.is_optimal}")
    return 0


def _search(arguments: argparse.Namespace, options: dict[str, Any]) -> FoundSchedule:
    from byteps_py.parallel.pipe.schedule_search import MOST_STATES, StageTimes, search

    if options:
        raise UsageError(f"--{next(iter(options))} is for other schedules than search")
    if arguments.p < 1:
        raise UsageError(f"-p={arguments.p}: at least one worker is needed")
    durations = _durations(arguments, arguments.p)
    held = _of_each("memory", arguments.memory, arguments.p) if arguments.memory else ()
    times = StageTimes(durations.stage_forward, durations.stage_backward, durations.hops, held)
    return search(times, arguments.m, MOST_STATES if arguments.states is None else arguments.states)


def _durations(arguments: argparse.Namespace, stages: int) -> Durations:
    from byteps_py.parallel.pipe.simulator import Durations

    return Durations(
        stage_forward=_of_each("forward", arguments.forward, stages),
        stage_backward=_of_each("backward", arguments.backward, stages),
        hops=_of_each("p2p", arguments.p2p, stages - 1),
    )


def _of_each(name: str, values: tuple[_Number, ...], number: int) -> tuple[_Number, ...]:
    if len(values) not in (1, number):
        raise UsageError(f"--{name} has {len(values)} numbers: give one, or {number}")
    return values if len(values) == number else values * number


def _times(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, or numbers with commas between them") from None


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, or some with commas between") from None


def _check_size(workers: int, micro_batches: int, chunks: int) -> None:
    passes = workers * micro_batches * chunks
    if workers > MOST_WORKERS or passes > MOST_PASSES:
        stages = f"{chunks} stages for each of {workers} workers" if chunks > 1 else f"{workers} workers"
        raise UsageError(
            f"{stages} and {micro_batches} micro-batches are too many to simulate: at most {MOST_WORKERS:,} workers, "
            f"and {MOST_PASSES:,} forward passes (workers x stages x micro-batches) are; draw a smaller step, whose "
            "chart repeats itself"
        )


def _as_json(timeline: ScheduleTimeline) -> dict[str, Any]:
    program = timeline.program
    return {
        "schedule": program.name,
        "p": len(program.workers),
        "m": program.micro_batches,
        "makespan": timeline.makespan,
        "idle": timeline.idle,
        "peak_in_flight": program.peak_in_flight(),
        "weight_versions": list(program.weight_versions),
        "bubble_ratio": timeline.bubble_ratio,
        "warmup": list(program.warmup),
        "order": [[_entry(program, span) for span in spans] for spans in timeline.spans],
    }


def _entry(program: Program, span: Span) -> dict[str, Any]:
    """The entry of one action. ``micro_batches``: if there are several; ``half``: of a micro-batch, if it is one."""
    action, each = span.action, program.parts_of_micro_batch
    micro_batches = sorted({part // each for part in action.parts})
    entry: dict[str, Any] = {
        "op": action.kind.value,
        "pipe": action.pipe,
        "stage": action.stage,
        "micro_batch": micro_batches[0],
        "start": span.start,
        "end": span.end,
    }
    if len(micro_batches) > 1:
        entry["micro_batches"] = micro_batches
    if len(action.parts) < each:
        entry["half"] = action.parts[0] % each
    return entry


def _figures(timeline: ScheduleTimeline) -> str:
    program = timeline.program
    of = "computing time" if program.idle_of_ideal else "the makespan"
    rows = {
        "makespan": f"{timeline.makespan:g}",
        "bubble ratio": f"{100 * timeline.bubble_ratio:.2f} % of {of}",
        "idle": _row(timeline.idle),
        "peak of micro-batches in flight": _row(program.peak_in_flight()),
        "forward passes before the first backward pass": _row(program.warmup),
        "weight versions": _row(program.weight_versions),
    }
    return "\n".join(f"{name + ':':<47} {value}" for name, value in rows.items())


def _row(values: Any) -> str:
    return " ".join(f"{value:g}" for value in values)
