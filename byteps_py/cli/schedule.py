"""`bps schedule`: a chart of a pipeline schedule, and its figures. Starts nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.errors import UsageError

if TYPE_CHECKING:
    from byteps_py.parallel.pipe.program import Program
    from byteps_py.parallel.pipe.simulator import ScheduleTimeline, Span

NAMES = ("gpipe", "dapple", "interleaved", "chimera", "gems", "pipedream", "pipedream-2bw")
#: Larger schedules take minutes and gigabytes. Passes: forward passes of all stages and micro-batches.
MOST_WORKERS, MOST_PASSES = 500, 100_000


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "schedule",
        help="show the chart and the figures of a pipeline schedule",
        description="Simulate one step of a pipeline schedule: each worker carries out its list of actions in order.",
        example="bps schedule interleaved -p 4 -m 8 --chunks 2",
    )
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(NAMES)}; 1f1b is dapple")
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
    parser.add_argument("--forward", type=float, default=1.0, metavar="T", help="time of a forward pass; default 1")
    parser.add_argument("--backward", type=float, default=2.0, metavar="T", help="of a backward pass; default 2")
    parser.add_argument("--p2p", type=float, default=0.0, metavar="T", help="of a transfer between workers; default 0")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a chart there, too")
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the chart. Raises UsageError if there is no such schedule for these numbers."""
    from byteps_py.parallel.pipe.schedules import make
    from byteps_py.parallel.pipe.simulator import Durations, simulate
    from byteps_py.tools.schedule_chart import svg_chart, text_chart

    options = {
        name: value
        for name in ("chunks", "consecutive", "pipes", "more", "warmup")
        if (value := getattr(arguments, name)) is not None
    }
    for name in ("forward", "backward", "p2p"):
        value = getattr(arguments, name)
        if not 0 <= value < float("inf") or (name != "p2p" and not value):
            raise UsageError(f"--{name}={value:g}: a time {'of at least' if name == 'p2p' else 'above'} 0 is needed")
    _check_size(arguments.p, arguments.m, arguments.chunks or 2 if arguments.name == "interleaved" else 1)
    program = make(arguments.name, arguments.p, arguments.m, **options)
    timeline = simulate(program, Durations(arguments.forward, arguments.backward, arguments.p2p))
    if timeline.makespan == float("inf"):
        raise UsageError("the makespan is too large a number: give smaller times")
    if arguments.svg is not None:
        try:
            arguments.svg.write_text(svg_chart(timeline), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg={arguments.svg}: {error.strerror}") from error
    print(json.dumps(_as_json(timeline)) if arguments.json else f"{text_chart(timeline)}\n\n{_figures(timeline)}")
    return 0


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
