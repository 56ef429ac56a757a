"""`bps plan layout`: the fastest ways to divide a model among the GPUs of a cluster, with their costs. `bps plan
operators`: a division of its own for each operator of a model, by FlexFlow's search. Starts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.plan_inputs import add_cluster_choice, add_inputs, chosen_cluster, traced

if TYPE_CHECKING:
    from byteps_py.tools.plan.calibration import StepTimeModel
    from byteps_py.tools.plan.cluster import Cluster
    from byteps_py.tools.plan.layout_cost import JobLayout
    from byteps_py.tools.plan.layout_plan import LayoutPlan
    from byteps_py.tools.plan.operators.operator_graph import OperatorGraph
    from byteps_py.tools.plan.operators.strategy_search import FoundStrategy

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


def add_operators(plans: Any) -> None:
    """Add the command to `bps plan`."""
    parser = add_command(
        plans,
        "operators",
        help="how each operator of a model is divided best, by itself (FlexFlow)",
        description="Search how each operator of a model is divided best: by samples, by an attribute as tokens, by "
        "channels with their parameters, and on which devices (FlexFlow's SOAP space). A step is simulated as a graph "
        "of tasks; small spaces are tried whole, others by a random walk (MCMC). parallelize_model does not train such "
        "strategies: they say how far a layout is from what is possible, and why.",
        example="bps plan operators --cluster h100 --module my_package.model:build --input 8x2048:int64",
    )
    add_cluster_choice(parser)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--module", metavar="MODULE:FUNCTION", help="as in `bps plan model`, with --input")
    models.add_argument("--graph", metavar="FILE.json", help="a graph of operators, as --write-graph writes it")
    add_inputs(parser)
    parser.add_argument("--proposals", type=int, default=1000, metavar="N", help="changes of each walk; default 1000")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random walk; default 0")
    parser.add_argument("--write-graph", metavar="FILE.json", help="write the graph of operators there, too")
    add_json(parser)
    parser.set_defaults(handler=run_operators)


def run_operators(arguments: argparse.Namespace) -> int:
    """Print the strategy. Raises UsageError if an input is wrong, or if nothing fits in memory."""
    from byteps_py.errors import UsageError
    from byteps_py.tools.plan.operators.strategy import DeviceTopology
    from byteps_py.tools.plan.operators.strategy_search import SearchOptions, search_strategy

    cluster, graph = chosen_cluster(arguments), _graph(arguments)
    if arguments.write_graph is not None:
        try:
            Path(arguments.write_graph).write_text(json.dumps(graph.as_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--write-graph={arguments.write_graph}: {error.strerror}") from error
    options = SearchOptions(arguments.proposals, seed=arguments.seed)
    found = search_strategy(graph, DeviceTopology(cluster), options)
    if arguments.json:
        print(json.dumps(_strategy_json(found)))
    else:
        print(_strategy_text(found, cluster.memory_gb))
    return 0


def _graph(arguments: argparse.Namespace) -> OperatorGraph:
    from byteps_py.tools.plan.operators.operator_graph import graph_of, read_graph

    if arguments.graph is not None:
        return read_graph(arguments.graph)
    costs = traced(arguments)
    samples = int(arguments.input[0].rpartition("=")[2].partition("x")[0].partition(":")[0])
    return graph_of(costs, samples)


def _strategy_json(found: FoundStrategy) -> dict[str, Any]:
    pairs = zip(found.graph.operators, found.strategy, strict=True)
    return {
        "step_s": found.step_s,
        "optimal": found.is_optimal,
        "tried": found.tried,
        "others_s": found.others,
        "fullest_device_bytes": found.most_bytes,
        "strategy": [{"operator": operator.name, **asdict(division)} for operator, division in pairs],
    }


def _strategy_text(found: FoundStrategy, memory_gb: float) -> str:
    how = "the fastest of all strategies" if found.is_optimal else "the fastest that random walks found"
    lines = [f"{1e3 * found.step_s:,.3f} ms a step: {how}; {found.tried:,} were simulated"]
    for name, step_s in found.others.items():
        time = "does not fit in memory" if step_s is None else f"{1e3 * step_s:,.3f} ms"
        lines.append(f"{name}: {time}")
    lines.append(f"fullest device: {found.most_bytes / 1e9:,.1f} GB of {memory_gb:,.1f} GB")
    rows = list(_strategy_rows(found))
    width = max(len(names) for names, _ in rows)
    return "\n".join([*lines, "", *(f"{names:<{width}}  {division}" for names, division in rows)])


def _strategy_rows(found: FoundStrategy) -> Iterator[tuple[str, str]]:
    """Operators that follow each other and are divided alike, and how."""
    pairs = zip(found.graph.operators, found.strategy, strict=True)
    for division, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        names = [operator.name for operator, _ in run]
        more = f" to {names[-1]} ({len(names)})" if len(names) > 1 else ""
        yield f"{names[0]}{more}", str(division)
