"""`bps numerics`: the first difference of a recorded run from a reference, and the rounding errors of sums in bfloat16.
Starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json

if TYPE_CHECKING:
    from byteps_py.tools.numerics.precision import AccumulationError


def add_parser(subparsers: Any) -> None:
    """Add the commands to `bps`."""
    parser = subparsers.add_parser(
        "numerics",
        help="find the first tensor that differs from a reference run; measure errors of accumulation",
        description="Debug the numerics of parallel training.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_compare(commands)
    _add_precision(commands)


def _add_compare(commands: Any) -> None:
    parser = add_command(
        commands,
        "compare",
        help="compare a recorded run with a reference, bit by bit",
        description="Compare the records of bps.parallel.numerics.Recorder, tensor by tensor and step by step.",
        example="bps numerics compare records/reference records/run",
        exits={0: "equal", 1: "different", 2: "the records can't be compared"},
    )
    parser.add_argument("reference", type=Path, metavar="REFERENCE", help="folder of the reference's records")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run's records")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="E",
        help="largest relative error of a tensor that does not count as a difference; default 0: every bit",
    )
    parser.add_argument("--modules", default="*", metavar="PATTERN", help="compare modules with such names only")
    add_json(parser)
    parser.set_defaults(handler=compare_runs)


def _add_precision(commands: Any) -> None:
    parser = add_command(
        commands,
        "precision",
        help="measure the error of accumulation in bfloat16 and in float32",
        description="Measure relative errors against float64, of real gradients of a small seeded model on this "
        "processor: micro-batch accumulation, data-parallel reduce-scatter, cross-attention's image gradients.",
        example="bps numerics precision --counts 2,8",
    )
    parser.add_argument(
        "--counts",
        type=_counts,
        default=[2, 8, 32],
        metavar="N,N,…",
        help="micro-batches, ranks, cross-attention layers; default 2,8,32",
    )
    parser.add_argument("--hidden", type=int, default=64, metavar="H", help="the model's width; default 64")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples; default 0")
    add_json(parser)
    parser.set_defaults(handler=measure)


def compare_runs(arguments: argparse.Namespace) -> int:
    """Print the first difference. Raises UsageError if the records can't be compared."""
    from byteps_py.tools.numerics.comparison import compare

    result = compare(arguments.reference, arguments.run, arguments.tolerance, arguments.modules)
    print(json.dumps(result.as_json()) if arguments.json else result.as_text())
    return 0 if result.is_equal else 1


def measure(arguments: argparse.Namespace) -> int:
    """Print each error as soon as it is measured. Raises UsageError for counts or a width that can't be measured."""
    from byteps_py.tools.numerics.precision import accumulation_errors

    errors = accumulation_errors(arguments.counts, arguments.hidden, arguments.seed)
    if arguments.json:
        print(json.dumps([_as_json(error) for error in errors]))
        return 0
    for line in _as_lines(errors):
        print(line, flush=True)  # the next one takes seconds
    return 0


def _counts(text: str) -> list[int]:
    try:
        return [int(count) for count in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes integers with commas between them, got {text!r}") from None


def _as_json(error: AccumulationError) -> dict[str, Any]:
    return {
        "buffer": error.buffer,
        "terms": error.terms,
        "bfloat16": error.bfloat16,
        "rounded_once": error.rounded,
        "float32": error.float32,
    }


def _as_lines(errors: Iterable[AccumulationError]) -> Iterator[str]:
    """A table, a line as soon as there is an error for it."""
    yield "Relative error of a sum of bfloat16 gradients, against float64:"
    yield ""
    yield f"{'buffer':<32} {'terms':>5}  {'bfloat16':>9}  {'rounded once':>12}  {'float32':>9}  {'gain':>7}"
    for error in errors:
        gain = f"{error.gain:>7.0f}" if error.float32 else f"{'exact':>7}"
        yield (
            f"{error.buffer:<32} {error.terms:>5}  {error.bfloat16:>9.2e}  {error.rounded:>12.2e}  "
            f"{error.float32:>9.2e}  {gain}"
        )
