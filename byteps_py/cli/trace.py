"""`bps trace`: what recorded and running trainings say. Starts nothing."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.dump import collect_recordings
from byteps_py.cli.job_choice import add_job_choice, add_timeout, chosen_settings
from byteps_py.errors import UsageError

_SHOWN = 5
_STATUS_S = 5.0
_JOB = re.compile(r"[^/]+:\d{1,5}")  # a scheduler's address


def add_parser(subparsers: Any) -> None:
    """Add the commands to `bps`."""
    parser = subparsers.add_parser(
        "trace", help="find out who is slow in a recorded training, and what it costs",
        description="Read recorded trainings.",
    )  # fmt: skip
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = add_command(
        commands,
        "what-if",
        help="how long a step would take if every operation took its usual time",
        description="Compute the steps of a trace anew, as if some or all operations took their type's usual time. The "
        "trace has a row for each operation: dp_rank, stage, step, optype, start_ts, duration (seconds), seq_id, mc, "
        "gmc.",
        example="bps trace what-if trace.parquet --json",
        exits={2: "the trace can't be read, or has no whole step"},
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=".parquet (needs pyarrow) or .csv")
    add_json(parser)
    parser.set_defaults(handler=what_if)
    parser = add_command(
        commands,
        "slow-rank",
        help="which rank makes the others wait, why, and what it costs",
        description="Read dumps of flight recorders (pickle or JSON), or traces of torch.profiler, one file for each "
        "rank; or what the flight recorders of a running job hold now, as bps dump collects it. Names the rank, its "
        "machine, the reason, and the share of a step that it costs. Clocks need not agree.",
        example="bps trace slow-rank dumps/",
        exits={2: "no file can be read, or nothing in them can be compared"},
    )
    parser.add_argument(
        "source", nargs="?", default="", metavar="DIR|FILE|HOST:PORT",
        help="what all ranks have left behind, or the scheduler of a running job; default: the job of --scheduler",
    )  # fmt: skip
    add_job_choice(parser)
    add_timeout(parser, 30.0)
    add_json(parser)
    parser.set_defaults(handler=slow_rank)
    parser = add_command(
        commands,
        "summary",
        help="what bound each step of a job, and how much communication was exposed",
        description="Read the one trace of a job, which BYTEPS_TRACE_ON=1 writes. Says for each step how long it took, "
        "how much of it the ranks waited for communication, and what bound it: the rank that computes longest, or the "
        "stage that was at work while all ranks waited.",
        example="bps trace summary trace.json",
        exits={2: "the file can't be read, is cut off, or was written by another version"},
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="trace.json")
    add_json(parser)
    parser.set_defaults(handler=summary)


def summary(arguments: argparse.Namespace) -> int:
    """Print what bound each step. Raises UsageError."""
    from byteps_py.tools.trace_summary import read_cluster_trace, summarize

    found = summarize(read_cluster_trace(arguments.file))
    if arguments.json:
        print(json.dumps(asdict(found)))
        return 0
    rows = [("step", "time ms", "communication ms", "exposed ms", "exposed", "bound by")]
    for step in found.steps:
        share = step.exposed_s / step.duration_s if step.duration_s else 0.0
        rows.append((str(step.step), f"{step.duration_s * 1e3:.1f}", f"{step.communication_s * 1e3:.1f}",
                     f"{step.exposed_s * 1e3:.1f}", f"{share:.0%}", f"{step.bound_by} on {step.where}"))  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in range(5)]
    for row in rows:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[5]]))
    total_s = sum(step.duration_s for step in found.steps)
    exposed_s = sum(step.exposed_s for step in found.steps)
    print(f"\n{len(found.steps)} steps, {total_s:.3f} s, {exposed_s:.3f} s of these exposed communication; ranks "
          f"handed over {found.nbytes / 1e6:.1f} MB; clocks known to within {found.clock_error_us:.0f} µs")  # fmt: skip
    for stage, by_process in sorted(found.stages.items()):
        for who, at_work_s in sorted(by_process.items(), key=lambda each: -each[1]):
            print(f"  {stage:<18} {at_work_s * 1e3:10.1f} ms  {who}")
    for remark in found.remarks:
        print(f"note: {remark}")
    return 0


def slow_rank(arguments: argparse.Namespace) -> int:
    """Print who is slow. Raises UsageError, and RendezvousError if the job does not answer."""
    from byteps_py.tools.slow_rank import as_json, find_slow_ranks, sentences
    from byteps_py.tools.span_files import read_spans, spans_of_recordings

    if arguments.source and (_JOB.fullmatch(arguments.source) is None or Path(arguments.source).exists()):
        found = find_slow_ranks(read_spans(Path(arguments.source)))
        print(json.dumps(as_json(found)) if arguments.json else "\n".join(sentences(found)))
        return 0
    from byteps_py.scheduler import query

    if arguments.source and arguments.scheduler:
        raise UsageError(f"there are two jobs: {arguments.source} and --scheduler={arguments.scheduler}; name one")
    arguments.scheduler = arguments.source or arguments.scheduler
    settings = chosen_settings(arguments)
    named = list(query.status(settings, min(arguments.timeout, _STATUS_S)).slow)  # says soon if nobody is there
    recordings, missing = collect_recordings(settings, arguments.timeout)
    found = find_slow_ranks(spans_of_recordings(recordings, missing))
    if arguments.json:
        print(json.dumps({**as_json(found), "named_by_scheduler": named}))
    else:
        print("\n".join([*sentences(found), *(f"the scheduler has named: {each}" for each in named)]))
    return 0


def what_if(arguments: argparse.Namespace) -> int:
    """Print the analysis. Raises UsageError."""
    from byteps_py.tools.what_if import read_trace, what_if as analyze

    found = analyze(read_trace(arguments.file))
    if arguments.json:
        workers = [{"dp_rank": dp, "stage": stage, "slowdown": cost} for (dp, stage), cost in found.worst_workers]
        print(
            json.dumps(
                {
                    "slowdown": found.slowdown, "m_w": found.m_w, "m_s": found.m_s, "worst_workers": workers,
                    "step_s": found.step_s, "ideal_s": found.ideal_s, "by_dp_rank": found.by_copy,
                    "by_stage": found.by_stage, "by_operation": found.by_operation, "steps": found.steps,
                    "left_out": found.left_out,
                }
            )
        )  # fmt: skip
        return 0
    print(
        f"{found.steps} steps: {found.step_s:.3f} s each; {found.ideal_s:.3f} s if every operation took its usual time"
    )
    print(f"slowdown {found.slowdown:.3f}: {1 - 1 / found.slowdown:.1%} of the time is lost")
    print(f"the slowest workers explain {found.m_w:.0%} of that, the last stage {found.m_s:.0%}\n")
    print("left if all others took their usual time:")
    for (dp, stage), cost in found.worst_workers[:_SHOWN]:
        print(f"  {f'dp {dp}, stage {stage}':<32} {cost:.3f}")
    for kind, cost in sorted(found.by_operation.items(), key=lambda each: -each[1])[:_SHOWN]:
        print(f"  {kind:<32} {cost:.3f}")
    for step, why in found.left_out.items():
        print(f"step {step} is left out: {why}")
    return 0
