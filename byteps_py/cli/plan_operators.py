"""`bps plan operators`: a division of its own for each operator of a model, by FlexFlow's search. Starts nothing."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.plan_cluster import add_cluster_choice, chosen_cluster
from byteps_py.cli.plan_model import add_inputs, traced

if TYPE_CHECKING:
    from byteps_py.tools.plan.operators.operator_graph import OperatorGraph
    from byteps_py.tools.plan.operators.strategy_search import FoundStrategy


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
        print(json.dumps(_as_json(found)))
    else:
        print(_as_text(found, cluster.memory_gb))
    return 0


def _graph(arguments: argparse.Namespace) -> OperatorGraph:
    from byteps_py.tools.plan.operators.operator_graph import graph_of, read_graph

    if arguments.graph is not None:
        return read_graph(arguments.graph)
    costs = traced(arguments)
    samples = int(arguments.input[0].rpartition("=")[2].partition("x")[0].partition(":")[0])
    return graph_of(costs, samples)


def _as_json(found: FoundStrategy) -> dict[str, Any]:
    pairs = zip(found.graph.operators, found.strategy, strict=True)
    return {
        "step_s": found.step_s,
        "optimal": found.is_optimal,
        "tried": found.tried,
        "others_s": found.others,
        "fullest_device_bytes": found.most_bytes,
        "strategy": [{"operator": operator.name, **asdict(division)} for operator, division in pairs],
    }


def _as_text(found: FoundStrategy, memory_gb: float) -> str:
    how = "the fastest of all strategies" if found.is_optimal else "the fastest that random walks found"
    lines = [f"{1e3 * found.step_s:,.3f} ms a step: {how}; {found.tried:,} were simulated"]
    for name, step_s in found.others.items():
        time = "does not fit in memory" if step_s is None else f"{1e3 * step_s:,.3f} ms"
        lines.append(f"{name}: {time}")
    lines.append(f"fullest device: {found.most_bytes / 1e9:,.1f} GB of {memory_gb:,.1f} GB")
    rows = list(_rows(found))
    width = max(len(names) for names, _ in rows)
    return "\n".join([*lines, "", *(f"{names:<{width}}  {division}" for names, division in rows)])


def _rows(found: FoundStrategy) -> Iterator[tuple[str, str]]:
    """Operators that follow each other and are divided alike, and how."""
    pairs = zip(found.graph.operators, found.strategy, strict=True)
    for division, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        names = [operator.name for operator, _ in run]
        more = f" to {names[-1]} ({len(names)})" if len(names) > 1 else ""
        yield f"{names[0]}{more}", str(division)
