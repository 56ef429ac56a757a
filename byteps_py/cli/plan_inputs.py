"""The inputs of other plans, and the options by which commands take them. `bps plan cluster`: the cluster that a plan
is for, from a file, a machine or a running job. `bps plan model`: what each layer of a model costs, from a forward pass
on the meta device. Starts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import WRONG_INPUT, add_command, add_json
from byteps_py.cli.job_choice import add_timeout, chosen_settings

if TYPE_CHECKING:
    from byteps_py.tools.plan.cluster import Cluster, ClusterFacts
    from byteps_py.tools.plan.model_costs import LayerCost, ModelCosts

_SOURCES = (
    "a100, h100 (machines of 8); FILE.json, of a cluster or of `bps doctor --json`; HOST:PORT of a running job's "
    "scheduler; or here: this machine"
)
_KEYS = (
    "machines, gpus_per_machine, memory_gb, peak_tflops, memory_gb_per_s, machine_gb_per_s, network_gb_per_s (of a "
    "machine's links together), servers (CPU machines that sum)"
)


def add_cluster(plans: Any) -> None:
    """Add the command to `bps plan`."""
    parser = add_command(
        plans,
        "cluster",
        help="the cluster that a plan is for, from a machine or a running job",
        description="Print what is known of a cluster: machines, GPUs or ranks, memory, rates, links as they were "
        "measured; where each value is from, and what is missing. A running job tells its machines and its links; "
        "memory and rates are those of this machine, if it is one of the job's.",
        example="bps plan cluster here --measure --out cluster.json",
        exits={2: f"{WRONG_INPUT}; or a value of the cluster is missing"},
    )
    parser.add_argument("source", metavar="SOURCE", help=_SOURCES)
    add_changes(parser)
    parser.add_argument("--out", metavar="FILE", help="write the cluster there, for --cluster FILE")
    add_json(parser)
    parser.set_defaults(handler=run_cluster)


def add_cluster_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a cluster."""
    parser.add_argument("--cluster", required=True, metavar="SOURCE", help=f"{_SOURCES}. A file has {_KEYS}")
    add_changes(parser)


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add the options that complete a cluster."""
    parser.add_argument("--machines", type=int, metavar="N", help="how many; default: what is known, or 1")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", help="a value of the cluster, as peak_tflops=0.1"
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure the rates of this machine's cores, for half a second"
    )
    add_timeout(parser)


def chosen_cluster(arguments: argparse.Namespace) -> Cluster:
    """The cluster of the command line. Raises UsageError; it names what is missing."""
    return chosen_facts(arguments, arguments.cluster).cluster()


def chosen_facts(arguments: argparse.Namespace, source: str) -> ClusterFacts:
    """The known facts of it. Raises UsageError, and what a scheduler's query raises."""
    from byteps_py.errors import UsageError
    from byteps_py.tools.plan import cluster

    if arguments.machines is not None and arguments.machines < 1:
        raise UsageError(f"--machines={arguments.machines}: at least one is needed")
    facts = _facts_of_source(source, arguments.timeout)
    if arguments.measure:
        facts = cluster.with_measured_cores(facts, dict(cluster.measure_rates()))
    if arguments.machines is not None:
        facts = facts.known("given", machines=arguments.machines)
    return cluster.changed(facts, arguments.set)


def _facts_of_source(source: str, timeout_s: float) -> ClusterFacts:
    from byteps_py.tools.plan.cluster import cluster_of, facts_of, facts_of_findings, load_cluster
    from byteps_py.tools.plan.sizing_job import read_json

    if source == "here":
        return facts_of_findings(_of_this_machine(), "this machine")
    if re.fullmatch(r".+:\d+", source) and "/" not in source:
        return facts_of_findings(_of_job(source, timeout_s), f"the job at {source}")
    if not source.endswith(".json") and "/" not in source:
        return facts_of(load_cluster(source), source)
    found = read_json(source)  # once: it may be a pipe
    is_doctors = isinstance(found, list)
    return facts_of_findings(found, source) if is_doctors else facts_of(cluster_of(found, source), source)


def _of_this_machine() -> list[Mapping[str, Any]]:
    from byteps_py.doctor.machine_checks import check_machine

    return [finding.as_json() for finding in check_machine(os.environ)]


def _of_job(address: str, timeout_s: float) -> list[Mapping[str, Any]]:
    from byteps_py.doctor.link_checks import job_figures
    from byteps_py.scheduler import query
    from byteps_py.system.machine import machine_id

    settings = chosen_settings(argparse.Namespace(scheduler=address))
    status = query.to_dict(query.status(settings, timeout_s))
    is_here = machine_id(settings) in {member["machine_id"] for member in status["members"]}
    return [*(_of_this_machine() if is_here else []), {"figures": job_figures(status)}]


def run_cluster(arguments: argparse.Namespace) -> int:
    """Print the cluster. Raises UsageError, also if something is missing: after that what is known is printed."""
    from byteps_py.errors import UsageError

    facts = chosen_facts(arguments, arguments.source)
    missing = facts.missing
    if arguments.out is not None and not missing:
        try:
            Path(arguments.out).write_text(json.dumps(asdict(facts.cluster()), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out={arguments.out}: {error.strerror}") from error
    if arguments.json:
        print(json.dumps({"cluster": facts.values, "sources": facts.sources, "missing": missing}))
    else:
        for name, value in facts.values.items():
            print(f"{name:<17} {value:>12,.6g}  {facts.sources[name]}")
        for remark in facts.remarks:
            print(f"- {remark}")
    facts.cluster()
    return 0


_WIDTH = 100
_COLUMNS = ("parameters", "FLOPs", "activations")


def add_model(plans: Any) -> None:
    """Add the command to `bps plan`."""
    parser = add_command(
        plans,
        "model",
        help="parameters, FLOPs and activations of each layer of a model",
        description="Build a model on the meta device, where tensors have no values, run its forward pass there, and "
        "print what each layer costs: parameters, FLOPs of the forward pass, and the bytes that its backward pass "
        "needs. Takes seconds and no memory, however large the model is; needs torch. Operators without a formula of "
        "FLOPs are listed.",
        example="bps plan model --module my_package.model:build --input 1x2048:int64",
    )
    parser.add_argument(
        "--module", required=True, metavar="MODULE:FUNCTION", help="the function, without arguments, that makes the "
        "nn.Module; or MODEL.py:FUNCTION, or a call as 'model.py:build(layers=4)'",
    )  # fmt: skip
    add_inputs(parser)
    parser.add_argument("--stages", type=int, metavar="P", help="also cut the layers into P stages of a pipeline")
    add_json(parser)
    parser.set_defaults(handler=run_model)


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a module is traced."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SIZE[:TYPE]",
        help="of an input of the forward pass, as 1x2048:int64, or with its name, as ids=1x2048:int64; the type is "
        "float32 by default; may be given several times",
    )
    parser.add_argument("--dtype", metavar="TYPE", help="of the module, as bfloat16; default: its own")


def traced(arguments: argparse.Namespace) -> ModelCosts:
    """The costs of the module that the command line names. Raises UsageError."""
    from byteps_py.errors import UsageError

    try:
        from byteps_py.tools.plan.module_trace import InputSize, load_factory, parse_dtype, trace_model
    except ImportError as error:
        raise UsageError(f"--module needs torch on this machine ({error}): pip install 'byteps_py[torch]'") from error
    if not arguments.input:
        raise UsageError("--input is missing: give the sizes of the forward pass's inputs, as --input 1x2048:int64")
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    return trace_model(load_factory(arguments.module), [InputSize.parse(text) for text in arguments.input], dtype)


def run_model(arguments: argparse.Namespace) -> int:
    """Print the layers. Raises UsageError if the model can't be traced, or cut."""
    costs = traced(arguments)
    stages = costs.cut(arguments.stages) if arguments.stages is not None else []
    if arguments.json:
        cuts = {"stages": [[stage.start, stage.stop] for stage in stages]} if stages else {}
        print(json.dumps(costs.as_json() | cuts))
        return 0
    rows = list(_rows(costs))
    width = max(len(row[0]) for row in rows)
    print(f"{'layer':<{width}}  {'parameters':>16}  {'FLOPs':>9}  {'activations':>12}")
    for name, cells in rows:
        print(f"{name:<{width}}  {cells[0]:>16}  {cells[1]:>9}  {cells[2]:>12}")
    print()
    for number, stage in enumerate(stages):
        layers = costs.layers[stage.start : stage.stop]
        share = sum(layer.flops for layer in layers) / max(1, costs.flops)
        names = shown_range(layers[0].name, layers[-1].name)
        print(_wrapped(f"Stage {number}: {names}, {share:.0%} of the FLOPs."))
    for remark in costs.remarks():
        print(_wrapped(remark))
    print(
        _wrapped(f"A step computes {amount(costs.step_flops)}FLOPs: a backward pass twice as many as a forward pass.")
    )
    return 0


def _rows(costs: ModelCosts) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Equal layers in one row, then all together."""
    place = 0
    for _, run in itertools.groupby(costs.layers, key=_alike):
        layers = list(run)
        first = layers[0]
        name = f"{len(layers)} x {first.kind}, {shown_range(first.name, layers[-1].name)}, each"
        yield (name if len(layers) > 1 else f"{first.name or '(itself)'} {first.kind}"), _cells(first)
        place += len(layers)
    total = (f"{costs.parameters:,}", amount(costs.flops), f"{costs.activation_bytes / 1e6:,.1f} MB")
    yield "all", total


def _alike(layer: LayerCost) -> tuple[Any, ...]:
    return (layer.kind, layer.parameters, layer.flops, layer.activation_bytes, bool(layer.name))


def _cells(layer: LayerCost) -> tuple[str, str, str]:
    return f"{layer.parameters:,}", amount(layer.flops), f"{layer.activation_bytes / 1e6:,.1f} MB"


def shown_range(first: str, last: str) -> str:
    """Names of layers in text; the model itself has none."""
    return (first or "the model itself") if first == last else f"{first or 'the model itself'} to {last}"


def amount(value: float) -> str:
    """With a prefix of the SI.

    >>> amount(1.5e12), amount(0)
    ('1.50 T', '0 ')
    """
    for power, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= power:
            return f"{value / power:.2f} {prefix}"
    return f"{value:g} "


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
