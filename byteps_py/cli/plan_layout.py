"""`bps plan layout`: the fastest ways to divide a model among the GPUs of a cluster, with their costs. Starts
nothing."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.plan_cluster import add_cluster_choice, chosen_cluster
from byteps_py.cli.plan_model import add_inputs, traced

if TYPE_CHECKING:
    from byteps_py.tools.plan.calibration import StepTimeModel
    from byteps_py.tools.plan.cluster import Cluster
    from byteps_py.tools.plan.layout_cost import JobLayout
    from byteps_py.tools.plan.layout_plan import LayoutPlan

_WIDTH = 100


def add_layout(plans: Any) -> None:
    """Add the command to `bps plan`."""
    parser = add_command(
        plans,
        "layout",
        help="the fastest layouts that fit in memory, and their costs",
        description="Work out memory and step time of each layout in which parallelize_model can train a Llama-like "
        "model, and print the fastest ones that fit: mesh, schedule, micro-batch, recomputation, sharded or hosted "
        "states. "
        "docs/explanation/cost-models.md has the formulas.",
        example="bps plan layout --cluster h100 --machines 8 --model llama3-70b --batch-tokens 4M --sequence 8K",
    )
    add_cluster_choice(parser)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", metavar="NAME", help="as in `bps plan size`")
    models.add_argument(
        "--module", metavar="MODULE:FUNCTION", help="or a decoder of torch, as in `bps plan model`, with --input"
    )
    add_inputs(parser)
    parser.add_argument("--batch-tokens", required=True, metavar="T", help="as in `bps plan size`")
    parser.add_argument("--sequence", required=True, metavar="S", help="as in `bps plan size`")
    parser.add_argument(
        "--calibrated", metavar="MODEL.json", help="written by `bps plan calibrate`; default: the cluster's rates"
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="also plan pipelines whose weights are some updates late, with bps.parallel.Pipeline: pipedream, "
        "pipedream-2bw",
    )
    parser.add_argument(
        "--shadow",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="COPIES",
        help="plan for hosted states with shadows on other machines; COPIES: what BYTEPS_SHADOW_COPIES will be, "
        "default 1",
    )
    parser.add_argument("--count", type=int, default=5, metavar="N", help="layouts to print; default 5")
    parser.add_argument(
        "--emit", metavar="FILE", help="write the arguments of Mesh and ParallelOptions for the first one there"
    )
    add_json(parser)
    parser.set_defaults(handler=run_layout)


def run_layout(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises UsageError if an input is wrong, or if nothing fits in memory."""
    from byteps_py.errors import UsageError
    from byteps_py.tools.plan.layout_cost import PlanJob
    from byteps_py.tools.plan.layout_plan import plan_layouts
    from byteps_py.tools.plan.sizing import parse_count
    from byteps_py.tools.plan.sizing_job import SizingJob, load_model

    if arguments.count < 1:
        raise UsageError(f"--count={arguments.count}: at least one layout is printed")
    cluster = chosen_cluster(arguments)
    if arguments.module is None and (arguments.input or arguments.dtype):
        raise UsageError("--input and --dtype say how a --module is traced; the shapes of a --model are known")
    costs = traced(arguments) if arguments.module is not None else None
    model = load_model(arguments.model) if costs is None else costs.decoder_shape()
    tokens, sequence = parse_count(arguments.batch_tokens), parse_count(arguments.sequence)
    job = SizingJob(cluster.gpus, tokens, sequence, model, _size_options(cluster))
    plan = plan_layouts(
        PlanJob(model, cluster, job.sequences, job.sequence, arguments.shadow, arguments.stale),
        _times(arguments.calibrated, cluster),
        arguments.count,
    )
    if arguments.emit is not None:
        try:
            Path(arguments.emit).write_text(program_of(plan.best[0].layout), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--emit={arguments.emit}: {error.strerror}") from error
    if arguments.json:
        found = {"calibrated": arguments.calibrated is not None}
        print(json.dumps(plan.as_json() | found | ({} if costs is None else {"model": asdict(model)})))
        return 0
    print(_as_text(plan))
    if costs is not None:
        print(*_wrapped(f"Planned as {json.dumps(asdict(model))}: from the module, which has {costs.parameters:,} "
                        "parameters; as a JSON file, this is a --model."))  # fmt: skip
        if costs.uncosted:
            print(*_wrapped(list(costs.remarks())[-1]))
    if arguments.calibrated is None:
        print(*_wrapped("Times follow from the cluster's rates alone; `bps plan calibrate` takes measured steps."))
    return 0


def _size_options(cluster: Cluster) -> Any:
    from byteps_py.tools.plan.sizing_job import SizeOptions

    return SizeOptions(cluster.gpus_per_machine, 1e9 * cluster.memory_gb)


def _times(path: str | None, cluster: Cluster) -> StepTimeModel:
    from byteps_py.errors import UsageError
    from byteps_py.tools.plan.calibration import StepTimeModel, read_model

    if path is None:
        return StepTimeModel(cluster.hardware, {})
    found = read_model(path)
    if found.hardware.gpus_per_machine != cluster.gpus_per_machine:
        raise UsageError(
            f"{path} was calibrated on machines of {found.hardware.gpus_per_machine} GPUs, and those of the cluster "
            f"have {cluster.gpus_per_machine}: calibrate with --gpus-per-machine {cluster.gpus_per_machine}"
        )
    return found


def program_of(layout: JobLayout) -> str:
    """A Python file with the arguments of Mesh and ParallelOptions, or of Pipeline."""
    from byteps_py.tools.plan.layout_plan import mesh_of, options_of

    sequences = layout.micro_batch * layout.micro_batches
    use = (
        "    options = ParallelOptions(plan=…, autocast=torch.bfloat16, **OPTIONS)\n"
        "    training = parallelize_model(model, mesh, loss, optimizer, options)\n"
    )
    if layout.is_stale:
        use = "    pipe = Pipeline(model, mesh=mesh, **OPTIONS)  # pipe.step gets the optimizer\n"
    return (
        f'"""{layout}: by `bps plan layout`.\n\n'
        f"Each data-parallel rank has {sequences} sequences of a step, which are cut along their first dimension:\n\n"
        "    mesh = Mesh(**MESH)\n"
        f"{use}"
        '"""\n\n'
        f"MESH = {_literal(mesh_of(layout))}\n"
        f"OPTIONS = {_literal(options_of(layout))}\n"
    )


def _literal(values: Mapping[str, object]) -> str:
    """As `ruff format` would write it."""
    pairs = (f'"{name}": {json.dumps(value) if isinstance(value, str) else value}' for name, value in values.items())
    return "{" + ", ".join(pairs) + "}"


def _as_text(plan: LayoutPlan) -> str:
    lines = ["      step     memory  layout"]
    lines += [f"{each.step_ms / 1e3:>8,.3f} s {each.memory.total / 1e9:>6,.1f} GB  {each.layout}" for each in plan.best]
    lines.append("")
    for reason in plan.reasons:
        lines += _wrapped(reason)
    lines += _wrapped(
        f"{len(plan.fitting) + len(plan.too_large):,} layouts are possible; {len(plan.fitting):,} of them fit."
    )
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return ["\n".join(textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))]
