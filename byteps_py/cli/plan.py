"""`bps plan`: plans for training jobs. `bps plan size`: the sizes of a mesh, with their reasons. `bps plan memory`: the
memory of sharded states. `bps plan calibrate` and `predict`: the time of a step, after a table of measured ones. The
other plans are in plan_inputs.py and plan_divisions.py. Starts nothing."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.plan_divisions import add_layout, add_operators
from byteps_py.cli.plan_inputs import add_cluster, add_model

if TYPE_CHECKING:
    from byteps_py.tools.plan.sizing import SizePlan

_WIDTH = 100
_SHOWN_PROBLEMS = 5


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = subparsers.add_parser(
        "plan", help="plan how a model is divided among GPUs", description="Plan how a model is divided among GPUs."
    )
    plans = parser.add_subparsers(title="plans", metavar="PLAN", required=True)
    _add_size(plans)
    _add_memory(plans)
    _add_calibrate(plans)
    _add_predict(plans)
    add_cluster(plans)
    add_layout(plans)
    add_model(plans)
    add_operators(plans)


def _add_size(plans: Any) -> None:
    parser = add_command(
        plans,
        "size",
        help="the sizes of tensor, context, pipeline and data parallelism",
        description="Work out the sizes of tensor (tp), context (cp), pipeline (pp) and data parallelism (dp) for a "
        "transformer, by the rules by which Llama 3 was divided.",
        example="bps plan size --gpus 64 --batch-tokens 4M --sequence 8K --model llama3-8b",
    )
    parser.add_argument("--gpus", required=True, metavar="N", help="GPUs of the whole job")
    parser.add_argument(
        "--batch-tokens",
        required=True,
        metavar="T",
        help="tokens of a step, over all GPUs; K, M and G stand for 2^10, 2^20 and 2^30",
    )
    parser.add_argument("--sequence", required=True, metavar="S", help="tokens of a sequence, likewise")
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="llama3-8b, llama3-70b, llama3-405b; or a JSON file (NAME.json) with the keys layers, hidden, heads, "
        "kv_heads, ffn and vocabulary",
    )
    parser.add_argument("--gpus-per-machine", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--memory-gb", type=float, default=80.0, metavar="GB", help="of each GPU, in units of 10^9 bytes; default 80"
    )
    add_json(parser)
    parser.set_defaults(handler=run_size)


def run_size(arguments: argparse.Namespace) -> int:
    """Print the sizes. Raises UsageError if the numbers do not go together, or if nothing fits in memory."""
    from byteps_py.errors import UsageError
    from byteps_py.tools.plan.sizing import SizeOptions, parse_count, plan_size

    counts = {}
    for name in ("gpus", "batch_tokens", "sequence"):
        try:
            counts[name] = parse_count(getattr(arguments, name))
        except UsageError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {error}") from error
    if not 0 < arguments.memory_gb < float("inf"):
        raise UsageError(f"--memory-gb={arguments.memory_gb:g}: a number above 0 is needed")
    options = SizeOptions(arguments.gpus_per_machine, arguments.memory_gb * 1e9)
    plan = plan_size(counts["gpus"], counts["batch_tokens"], counts["sequence"], arguments.model, options)
    print(json.dumps(plan.as_json()) if arguments.json else _as_text(plan))
    return 0


def _add_memory(plans: Any) -> None:
    parser = add_command(
        plans,
        "memory",
        help="the memory of parameters, gradients and optimizer states, for each stage of ZeRO",
        description="Print the bytes of parameters, gradients and Adam's states on each rank for the stages of ZeRO: "
        "16 bytes a parameter, in mixed precision (2 + 2 + 12) and in float32 (4 + 4 + 8), without "
        "activations.",
        example="bps plan memory --parameters 7.5B --sharding 64",
    )
    parser.add_argument(
        "--parameters", required=True, metavar="P", help="of the model; K, M and B stand for 10^3, 10^6 and 10^9"
    )
    parser.add_argument(
        "--sharding", required=True, type=int, metavar="N", help="ranks that share states (of one copy of the model)"
    )
    add_json(parser)
    parser.set_defaults(handler=run_memory)


def run_memory(arguments: argparse.Namespace) -> int:
    """Print the table. Raises UsageError for numbers that make no sense."""
    from byteps_py.tools.plan.formulas import stage_table

    rows = stage_table(_parameter_count(arguments.parameters), arguments.sharding)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for row in rows:
        print(f"stage {row.stage}  {row.rank_bytes / 1e9:>10,.2f} GB a rank  {row.name}")
    return 0


def _parameter_count(text: str) -> float:
    from byteps_py.errors import UsageError

    factor = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1.0)
    try:
        return float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        raise UsageError(f"--parameters: {text!r} is no number; 7.5B is 7.5 · 10^9") from None


def _add_calibrate(plans: Any) -> None:
    parser = add_command(
        plans,
        "calibrate",
        help="fit a model of step times to a table of measured steps",
        description="Fit a model of step times to measured steps of GPT-like models, and write it to a file. It is "
        "fitted to the rows from which the others can be told best; the others show how well that worked. "
        "docs/explanation/cost-models.md has the formulas.",
        example="bps plan calibrate steps.csv --rows 100 --out model.json",
    )
    parser.add_argument(
        "steps",
        metavar="STEPS.csv",
        help="columns: # GPUs, global batch, micro batch, hidden size, attention heads, # layers, sequence length, "
        "tensor parallelism, data parallelism, pipeline parallelism, iteration time (ms); perhaps vocabulary, model "
        "chunks, recomputation (none, selective, full), sequence parallelism (yes, no)",
    )
    parser.add_argument("--rows", type=int, default=100, metavar="N", help="rows to fit to, at most; default 100")
    parser.add_argument("--out", required=True, metavar="MODEL.json", help="the file to write")
    parser.add_argument("--gpus-per-machine", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--peak-tflops", type=float, default=312.0, metavar="T", help="of a GPU, by its data sheet; default 312 (A100)"
    )
    add_json(parser)
    parser.set_defaults(handler=run_calibrate)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Write the model, and print how far its predictions are from measured times. Raises UsageError if the table can't
    be used, or if the model can't be written."""
    from byteps_py.tools.plan.calibration import calibrate, prediction_error, write_model
    from byteps_py.tools.plan.step_table import read_steps
    from byteps_py.tools.plan.step_time import Hardware

    rows = read_steps(arguments.steps)
    hardware = Hardware(arguments.gpus_per_machine, arguments.peak_tflops * 1e12)
    model = calibrate(rows, arguments.rows, hardware)
    write_model(arguments.out, model)
    lines = {line for fit in model.fits.values() for line in fit.lines}
    good = [row for row in rows if not row.problem]
    measured = [(row.line, row.layout, row.measured_ms) for row in good if row.layout and row.measured_ms is not None]
    times = model.predict([layout for _, layout, _ in measured])
    errors = {}
    for name, is_of in (("fitted", True), ("others", False)):
        pairs = [
            (time, seen) for time, (line, _, seen) in zip(times, measured, strict=True) if (line in lines) is is_of
        ]
        if pairs:
            errors[name] = prediction_error([time for time, _ in pairs], [seen for _, seen in pairs])
    problems = [row.problem for row in rows if row.problem]
    if arguments.json:
        kinds = {kind: list(fit.lines) for kind, fit in model.fits.items()}
        found = {name: asdict(error) for name, error in errors.items()}
        print(json.dumps({"lines": kinds, "errors": found, "problems": problems}))
        return 0
    for kind, fit in model.fits.items():
        print(f"fitted to {len(fit.lines)} rows of jobs on {kind}")
    for name, error in errors.items():
        which = "these rows" if name == "fitted" else f"the {error.rows} other rows"
        print(f"predictions of {which} are off by {error.mean:.1%} on average, {error.worst:.1%} at most")
    _print_problems(problems, "left out")
    print(f"written: {arguments.out}")
    return 0


def _add_predict(plans: Any) -> None:
    parser = add_command(
        plans,
        "predict",
        help="predict the time of a step for each row of a table",
        description="Predict the milliseconds of a step for each row of a table, and compare them with measured ones "
        "where it has them.",
        example="bps plan predict model.json steps.csv",
    )
    parser.add_argument("model", metavar="MODEL.json", help="what `bps plan calibrate` has written")
    parser.add_argument("steps", metavar="STEPS.csv", help="a table as `bps plan calibrate` reads")
    add_json(parser)
    parser.set_defaults(handler=run_predict)


def run_predict(arguments: argparse.Namespace) -> int:
    """Print the predictions, in the order of the rows. Raises UsageError if a file can't be used. A row with a hole has
    its problem instead of a prediction."""
    from byteps_py.tools.plan.calibration import prediction_error, read_model
    from byteps_py.tools.plan.step_table import read_steps

    model, rows = read_model(arguments.model), read_steps(arguments.steps)
    layouts = [row.layout for row in rows if row.layout]
    times = iter(model.predict(layouts))
    found: list[dict[str, Any]] = []
    for row in rows:
        problem = row.problem
        if row.layout and not model.covers(row.layout):
            kind = model.kind_of(row.layout)
            guess = f"no row of a job on {kind} was measured; the rates of its links are guesses"
            problem = f"{problem}; {guess}" if problem else f"line {row.line}: {guess}"
        predicted = next(times) if row.layout else None
        found.append(
            {"predicted_ms": predicted, "measured_ms": row.measured_ms} | ({"problem": problem} if problem else {})
        )
    if arguments.json:
        print(json.dumps(found))
        return 0
    print("line  predicted ms  measured ms   error")
    for row, entry in zip(rows, found, strict=True):
        predicted, measured = entry["predicted_ms"], entry["measured_ms"]
        cells = [f"{value:>12,.1f}" if value else " " * 11 + "-" for value in (predicted, measured)]
        error = f"{predicted / measured - 1:+.1%}" if predicted and measured else "-"
        print(f"{row.line:>4}  {cells[0]} {cells[1]} {error:>7}")
    both = [entry for entry in found if entry["predicted_ms"] and entry["measured_ms"]]
    if both:
        error_of_all = prediction_error(*([entry[name] for entry in both] for name in ("predicted_ms", "measured_ms")))
        print(
            f"off by {error_of_all.mean:.1%} on average, {error_of_all.worst:.1%} at most, "
            f"over {error_of_all.rows} measured rows"
        )
    _print_problems([entry["problem"] for entry in found if "problem" in entry], "with a problem")
    return 0


def _print_problems(problems: list[str], what: str) -> None:
    if problems:
        print(f"{len(problems)} row{'s' * (len(problems) > 1)} {what}:")
        for problem in problems[:_SHOWN_PROBLEMS]:
            print("\n".join(_wrapped(problem)))
        if len(problems) > _SHOWN_PROBLEMS:
            print(f"- and {len(problems) - _SHOWN_PROBLEMS} more; --json has all of them")


def _as_text(plan: SizePlan) -> str:
    lines = [f"tp {plan.tp}, cp {plan.cp}, pp {plan.pp}, dp {plan.dp}", ""]
    for reason in plan.reasons:
        lines += _wrapped(reason)
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
