"""`bps plan`: plans for training jobs. `bps plan size`: the sizes of a mesh, with their reasons. `bps plan memory`: the
memory of sharded states. Starts nothing."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json

if TYPE_CHECKING:
    from byteps_py.tools.plan.sizing import SizePlan

_WIDTH = 100


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = subparsers.add_parser(
        "plan", help="plan how a model is divided among GPUs", description="Plan how a model is divided among GPUs."
    )
    plans = parser.add_subparsers(title="plans", metavar="PLAN", required=True)
    _add_size(plans)
    _add_memory(plans)


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


def _as_text(plan: SizePlan) -> str:
    lines = [f"tp {plan.tp}, cp {plan.cp}, pp {plan.pp}, dp {plan.dp}", ""]
    for reason in plan.reasons:
        lines += _wrapped(reason)
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
