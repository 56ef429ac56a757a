"""`bps placement`: what each machine would hold of a model, and how near the optimum that is. Starts nothing."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byteps_py.placement.plan import Plan


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = subparsers.add_parser(
        "placement",
        help="show what each machine would hold of a model",
        description="Work out where the partitions of a model's gradients (float32) would be summed.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="NAME", help="a well-known model: resnet50, vgg16, bert-large, gpt2")
    source.add_argument("--shapes", metavar="FILE", help='your own: a JSON file of rows ["name", [shape]]')
    parser.add_argument("-n", type=int, required=True, help="GPU machines (they train)")
    parser.add_argument("-k", type=int, default=0, help="CPU machines (they only sum); default 0")
    parser.add_argument("--partition-bytes", type=int, metavar="B", help="largest partition; default 4 MB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigurationError or UsageError for arguments that make no cluster or no model."""
    from byteps_py.placement.models import entries, load_model, read_shapes
    from byteps_py.placement.plan import plan

    shapes = load_model(arguments.model) if arguments.model is not None else read_shapes(arguments.shapes)
    tensors = entries(shapes)
    worked_out = plan(tensors, arguments.n, arguments.k, _partition_bytes(arguments.partition_bytes))
    if arguments.json:
        print(json.dumps(_as_json(worked_out)))
    else:
        model = arguments.model if arguments.model is not None else arguments.shapes
        print(_as_text(worked_out, model, len(tensors), sum(tensor.nbytes for tensor in tensors)))
    return 0


def _partition_bytes(given: int | None) -> int:
    from byteps_py.errors import ConfigurationError
    from byteps_py.settings import Settings

    if given is None:
        return Settings().max_partition_bytes
    try:  # the rules for the variable that a real cluster reads
        return Settings.from_env({"BYTEPS_PARTITION_BYTES": str(given)}).max_partition_bytes
    except ConfigurationError as error:
        raise ConfigurationError(f"--partition-bytes {given}: {error}") from error


def _as_json(plan: Plan) -> dict[str, Any]:
    optimum = plan.optimum
    rows = zip(_kinds(plan), plan.held, plan.shares, optimum.shares, strict=True)
    return {
        "n": optimum.n,
        "k": optimum.k,
        "servers": [
            {"kind": kind, "bytes": held, "share": float(share), "formula_share": float(formula)}
            for kind, held, share, formula in rows
        ],
        "time_over_optimum": float(plan.time_over_optimum),
    }


def _as_text(plan: Plan, model: str, tensors: int, nbytes: int) -> str:
    optimum = plan.optimum
    lines = [
        f"{model}: {nbytes:,} bytes in {tensors} tensors, n = {optimum.n} GPU machines, k = {optimum.k} CPU machines"
    ]
    if optimum.n == 1:
        return "\n".join([*lines, "One GPU machine needs no network: nothing is sent and no server holds anything."])
    lines += ["", f"{'server':>6}  {'kind':4}  {'bytes':>15}  {'share':>8}  {'formula':>8}  {'ratio':>6}"]
    rows = zip(_kinds(plan), plan.held, plan.shares, optimum.shares, strict=True)
    for number, (kind, held, share, formula) in enumerate(rows):
        ratio = f"{float(share / formula):.4f}" if formula else "–"
        lines.append(f"{number:>6}  {kind:4}  {held:>15,}  {float(share):>8.4%}  {float(formula):>8.4%}  {ratio:>6}")
    lines += [
        "",
        f"partitions              {plan.partitions}",
        f"optimum time            {float(optimum.time):.4f} M/B  ({optimum.time})",
        f"gain over ring          {_gain(optimum.gain_over_ring)}",
        f"gain over servers only  {_gain(optimum.gain_over_servers_only)}",
        f"time over optimum       {float(plan.time_over_optimum):.4f}",
    ]
    idle = optimum.k - optimum.cpu_machines_used
    if idle:
        lines.append(f"{idle} of {optimum.k} CPU machines hold nothing: more than n = {optimum.n} help no more.")
    if not optimum.gpu_weight:
        lines.append("GPU machines hold nothing: with k ≥ n the CPU machines take it all.")
    return "\n".join(lines)


def _gain(gain: Any) -> str:
    return "–" if gain is None else f"{float(gain):.3f}"


def _kinds(plan: Plan) -> list[str]:
    return ["cpu"] * plan.optimum.k + ["gpu"] * plan.optimum.n
