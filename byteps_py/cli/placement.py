"""`bps placement`: how much each machine would hold of a model, and how close that is to the optimum. Starts
nothing."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json

if TYPE_CHECKING:
    from fractions import Fraction

    from byteps_py.placement.link_optimum import LinkOptimum
    from byteps_py.placement.placement_plan import Plan


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "placement",
        help="show what each machine would hold of a model",
        description="Work out where the partitions of a model's gradients (float32) would be summed.",
        example="bps placement --model bert-large -n 8 -k 4",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="NAME", help="a well-known model: resnet50, vgg16, bert-large, gpt2")
    source.add_argument("--shapes", metavar="FILE", help='your own: a JSON file of rows ["name", [shape]]')
    machines = parser.add_mutually_exclusive_group(required=True)
    machines.add_argument("-n", type=int, help="GPU machines (they train); their links, and CPU machines', are equal")
    machines.add_argument(
        "--gpu-mbit", type=_rates, metavar="R,R,…", help="the rate of every GPU machine's link instead, in Mbit/s"
    )
    parser.add_argument("-k", type=int, default=0, help="CPU machines (they only sum); default 0")
    parser.add_argument("--cpu-mbit", type=_rates, default=[], metavar="R,R,…", help="with --gpu-mbit: CPU machines'")
    parser.add_argument("--partition-bytes", type=int, metavar="B", help="largest partition; default 8 MB")
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigurationError or UsageError if the arguments describe no valid cluster or model."""
    from byteps_py.errors import UsageError
    from byteps_py.placement.link_optimum import LinkOptimum
    from byteps_py.placement.placement_plan import entries, load_model, plan, read_shapes

    if (arguments.cpu_mbit and arguments.gpu_mbit is None) or (arguments.k and arguments.gpu_mbit is not None):
        raise UsageError("-n goes with -k (equal links), --gpu-mbit with --cpu-mbit (a rate for each)")
    n, k, links = arguments.n, arguments.k, None
    if arguments.gpu_mbit is not None:
        n, k = len(arguments.gpu_mbit), len(arguments.cpu_mbit)
        links = LinkOptimum(arguments.cpu_mbit, arguments.gpu_mbit)
    shapes = load_model(arguments.model) if arguments.model is not None else read_shapes(arguments.shapes)
    tensors = entries(shapes)
    worked_out = plan(tensors, n, k, _partition_bytes(arguments.partition_bytes), links)
    if arguments.json:
        print(json.dumps(_as_json(worked_out)))
    else:
        model = arguments.model if arguments.model is not None else arguments.shapes
        print(_as_text(worked_out, model, len(tensors), sum(tensor.nbytes for tensor in tensors)))
    return 0


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes numbers with commas between them, got {text!r}") from None


def _partition_bytes(given: int | None) -> int:
    from byteps_py.config.settings import Settings
    from byteps_py.errors import ConfigurationError

    if given is None:
        return Settings().max_partition_bytes
    try:  # the same rules as for the variable of a real cluster
        return Settings.from_env({"BYTEPS_PARTITION_BYTES": str(given)}).max_partition_bytes
    except ConfigurationError as error:
        raise ConfigurationError(f"--partition-bytes {given}: {error}") from error


def _as_json(plan: Plan) -> dict[str, Any]:
    optimum = plan.optimum
    rows = zip(_kinds(plan), plan.held, plan.shares, plan.best_shares, strict=True)
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
    from byteps_py.wording import count_text

    optimum = plan.optimum
    lines = [
        f"{model}: {nbytes:,} bytes in {count_text(tensors, 'tensor')}, n = {count_text(optimum.n, 'GPU machine')}, "
        f"k = {count_text(optimum.k, 'CPU machine')}"
    ]
    if plan.links is not None and optimum.n > 1:
        return "\n".join([*lines, *_explain_links(plan, plan.links, nbytes)])
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


def _explain_links(plan: Plan, links: LinkOptimum, nbytes: int) -> list[str]:
    """The table for links of different rates: how much each machine would carry, for how long, and which link
    limits."""
    from byteps_py.placement.shares import carried

    seconds = 8 * nbytes / 1e6  # for one Mbit/s
    rates = (*links.cpu, *links.gpu)
    busy = [float(load / rate) for load, rate in zip(carried(len(links.gpu), *_split(plan)), rates, strict=True)]
    lines = ["", f"server  kind  {'Mbit/s':>8}  {'bytes':>15}  {'share':>8}  {'optimal':>8}  link busy s"]
    rows = zip(_kinds(plan), rates, plan.held, plan.shares, links.shares, busy, strict=True)
    for number, (kind, rate, held, share, best, time) in enumerate(rows):
        lines.append(
            f"{number:>6}  {kind:4}  {float(rate):>8g}  {held:>15,}  {float(share):>8.4%}  {float(best):>8.4%}  "
            f"{time * seconds:>11.3f}"
        )
    slowest = min(links.gpu)
    lines += [
        "",
        f"partitions              {plan.partitions}",
        f"optimum time            {float(links.time) * seconds:.3f} s",
        f"formula's shares        {float(links.time_of(plan.optimum.shares)) * seconds:.3f} s  (they assume equal "
        "links)",
        f"time over optimum       {float(plan.time_over_optimum):.4f}",
    ]
    if links.time == 1 / slowest:
        limit = f"{float(slowest):g} Mbit/s"
        lines.append(f"The limit is a GPU machine's link of {limit}: it takes that long for the model alone.")
    else:
        lines.append("All links of servers are busy all the time: no other shares are faster.")
    return lines


def _split(plan: Plan) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    return plan.shares[: plan.optimum.k], plan.shares[plan.optimum.k :]


def _gain(gain: Any) -> str:
    return "–" if gain is None else f"{float(gain):.3f}"


def _kinds(plan: Plan) -> list[str]:
    return ["cpu"] * plan.optimum.k + ["gpu"] * plan.optimum.n
