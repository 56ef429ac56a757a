"""`bps plan cluster`: the cluster that a plan is for, from a file, a machine or a running job; and the options by which
other commands take one. Starts nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import WRONG_INPUT, add_command, add_json
from byteps_py.cli.job_choice import add_timeout, chosen_settings

if TYPE_CHECKING:
    from byteps_py.tools.plan.cluster import Cluster, ClusterFacts

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
