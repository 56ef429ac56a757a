"""The cluster that a plan is for: machines, GPUs, memory, links, summation servers. It is a JSON file, or is made from
what is known of machines: the figures of `bps doctor --json`, of a running job, data sheets, and a short measurement.
What no source tells is named, and can be given. Pure, apart from reading files and ``measure_rates``; any thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.tools.plan.sizing_job import object_of, read_json
from byteps_py.tools.plan.step_time import Hardware
from byteps_py.wording import shown


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal machines. A processor that computes without a GPU counts as one: a core, with its share of the memory.

    Raises UsageError for a number that is not above 0 where one is needed: a link of rate 0 reaches nothing.

    >>> Cluster(8, 8, 80, 989, 3350, 450, 400).gpus
    64
    """

    machines: int
    gpus_per_machine: int
    #: Of a GPU, in units of 10⁹ bytes, for states and activations.
    memory_gb: float
    #: Of a GPU, with 2-byte numbers, in units of 10¹² FLOP/s.
    peak_tflops: float
    #: Of a GPU's memory, in units of 10⁹ bytes a second.
    memory_gb_per_s: float
    #: Between GPUs of a machine, in one direction, likewise.
    machine_gb_per_s: float
    #: Of a machine's links to others, all together, in one direction, likewise. One machine needs none.
    network_gb_per_s: float | None = None
    #: CPU machines that only sum gradients, with links as fast as the others'.
    servers: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "network_gb_per_s" and value is None:
                continue
            least = 0 if each.name == "servers" else 1
            if each.type == "int" and (type(value) is not int or value < least):
                raise UsageError(f"{each.name}={value!r}: a whole number of at least {least} is needed")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise UsageError(f"{each.name}={value!r}: a number above 0 is needed")
            if each.name != "servers" and not value:
                is_rate = each.name.endswith("_per_s")
                remedy = "nothing moves at this rate; measure it, or plan without it" if is_rate else "it is needed"
                raise UsageError(f"{each.name} is 0: {remedy}")
        if self.machines > 1 and self.network_gb_per_s is None:
            raise UsageError(
                f"network_gb_per_s is missing: {self.machines} machines need a network; say how much a machine's links "
                "carry, in 10^9 bytes a second"
            )

    @property
    def gpus(self) -> int:
        """Of all machines."""
        return self.machines * self.gpus_per_machine

    @property
    def hardware(self) -> Hardware:
        """For the formulas of step_time."""
        return Hardware(
            self.gpus_per_machine,
            self.peak_tflops * 1e12,
            self.memory_gb_per_s * 1e9,
            self.machine_gb_per_s * 1e9,
            (self.network_gb_per_s or self.machine_gb_per_s) * 1e9,
        )


#: Machines by their data sheets: DGX A100 (80 GB) and DGX H100, with a link of 200 or 400 Gbit/s for each GPU.
KNOWN = {
    "a100": Cluster(1, 8, 80, 312, 2039, 300, 200),
    "h100": Cluster(1, 8, 80, 989, 3350, 450, 400),
}


def load_cluster(name: str, machines: int | None = None) -> Cluster:
    """``name``: of a known machine, or of a file (".json", or with a slash). ``machines``: how many; default: one, or
    what the file says. Raises UsageError."""
    if not name.endswith(".json") and "/" not in name:
        if name not in KNOWN:
            raise UsageError(
                f"unknown machine {shown(name)!r}: known ones are {', '.join(KNOWN)}; for others, give a JSON file "
                f"(NAME.json) with {', '.join(field.name for field in fields(Cluster))}; or here, for this machine; or "
                "HOST:PORT of a job's scheduler"
            )
        return replace(KNOWN[name], machines=machines or 1)
    found = read_cluster(name)
    return found if machines is None else replace(found, machines=machines)


def read_cluster(path: str) -> Cluster:
    """The cluster of a JSON file: an object with the attributes of Cluster. Raises UsageError."""
    return cluster_of(read_json(path), path)


def cluster_of(found: Any, path: str) -> Cluster:
    """The cluster of such a file's content. Raises UsageError."""
    return object_of(found, path, Cluster, "cluster")


#: Words of names that nvidia-smi says -> the machine whose data sheet has such a GPU, with its links.
_SHEETS = {"A100-SXM4": "a100", "H100 80GB HBM3": "h100"}
_RATES = ("peak_tflops", "memory_gb_per_s", "machine_gb_per_s")
_REMEDIES = {
    "memory_gb": "of a GPU, or a core's share of its machine's memory",
    "peak_tflops": "by the data sheet of a GPU; --measure finds that of cores",
    "memory_gb_per_s": "by the data sheet of a GPU; --measure finds that of cores",
    "machine_gb_per_s": "between two GPUs of a machine; --measure finds that of cores",
    "network_gb_per_s": "of all links of a machine together; a running job has measured it",
    "gpus_per_machine": "GPUs, or ranks without one",
    "machines": "how many",
}


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Attributes of a Cluster as far as they are known, by name, each with where it is from; and remarks."""

    values: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def known(self, source: str, **values: float) -> ClusterFacts:
        """The same with these values, which replace others."""
        return ClusterFacts(self.values | values, self.sources | dict.fromkeys(values, source), self.remarks)

    @property
    def missing(self) -> list[str]:
        """Attributes that a plan needs and that are not known. One machine needs no network."""
        needed = [one.name for one in fields(Cluster) if one.default is MISSING]
        if self.values.get("machines", 1) > 1:
            needed.append("network_gb_per_s")
        return [name for name in needed if name not in self.values]

    def cluster(self) -> Cluster:
        """The cluster. Raises UsageError that names what is missing, and how to give it."""
        if self.missing:
            listed = "; ".join(f"--set {name}=… ({_REMEDIES[name]})" for name in self.missing)
            raise UsageError(f"the cluster lacks {', '.join(self.missing)}: give {listed}")
        whole = {one.name for one in fields(Cluster) if one.type == "int"}
        return Cluster(**{name: int(value) if name in whole else value for name, value in self.values.items()})  # type: ignore[arg-type]


def facts_of(cluster: Cluster, source: str) -> ClusterFacts:
    """All that a cluster has."""
    values = {one.name: getattr(cluster, one.name) for one in fields(Cluster)}
    return ClusterFacts().known(source, **{name: value for name, value in values.items() if value is not None})


def facts_of_findings(findings: Sequence[Mapping[str, Any]], source: str) -> ClusterFacts:
    """The findings of `bps doctor --json`: of one machine, or, with a running job, of all that are like it. Raises
    UsageError if they are no findings, or if the machines of the job are of different sizes."""
    try:
        figures = {name: value for each in findings for name, value in each["figures"].items()}
    except (TypeError, KeyError, AttributeError):
        raise UsageError(
            f"{shown(source)} has no figures: a list of `bps doctor --json` of this version is needed"
        ) from None
    facts = ClusterFacts()
    if figures.get("most_ranks") != figures.get("fewest_ranks"):
        raise UsageError(
            f"machines of this job have {figures['fewest_ranks']} to {figures['most_ranks']} ranks, and a plan is for "
            "equal machines: write a cluster file for those that are"
        )
    gpus, ranks = int(figures.get("gpus", 0)), figures.get("most_ranks")
    if ranks is not None:
        facts = facts.known("the job", machines=figures["gpu_machines"], servers=figures["cpu_machines"])
        facts = facts.known("ranks of the job", gpus_per_machine=ranks)
        if "slowest_link_mbit" in figures and figures["gpu_machines"] > 1:
            rate = figures["slowest_link_mbit"] / 8e3
            facts = facts.known("the slowest link of the job's machines", network_gb_per_s=rate)
    elif gpus or "cores" in figures:
        facts = facts.known("this one", machines=1)
        facts = facts.known("GPUs" if gpus else "cores", gpus_per_machine=gpus or max(1, int(figures["cores"])))
    return _with_processors(facts, figures, gpus)


def _with_processors(facts: ClusterFacts, figures: Mapping[str, Any], gpus: int) -> ClusterFacts:
    """Memory and rates, of GPUs or of cores."""
    count = facts.values.get("gpus_per_machine", 1)
    if gpus:
        name = str(figures.get("gpu_name", ""))
        if "gpu_memory_bytes" in figures:
            facts = facts.known(name, memory_gb=figures["gpu_memory_bytes"] / 1e9)
        sheet = next((KNOWN[known] for words, known in _SHEETS.items() if words in name), None)
        if sheet is not None:
            facts = facts.known(f"data sheet of {name}", **{each: getattr(sheet, each) for each in _RATES})
    elif "memory_free_bytes" in figures:
        share = figures["memory_free_bytes"] / 1e9 / count
        facts = facts.known("free memory, shared by its ranks", memory_gb=share)
        if "most_ranks" in figures:
            remark = (
                "The memory that the running job uses is not counted as free: --set memory_gb=… says another value."
            )
            facts = ClusterFacts(facts.values, facts.sources, (*facts.remarks, remark))
    return facts


def changed(facts: ClusterFacts, settings: Sequence[str]) -> ClusterFacts:
    """With values that a user gives, as ``peak_tflops=0.1``. Raises UsageError."""
    names = [one.name for one in fields(Cluster)]
    for text in settings:
        name, sign, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            sign = ""
            number = 0.0
        if not sign or name not in names:
            raise UsageError(f"--set {shown(text)}: give NAME=NUMBER; names are {', '.join(names)}")
        facts = facts.known("given", **{name: int(number) if number.is_integer() else number})
    return facts


def measure_rates(clock: Callable[[], float] = time.perf_counter) -> Iterator[tuple[str, float]]:
    """Of all cores of this machine together: float32 products in units of 10^12 FLOP/s, and traffic of copies in
    units of 10^9 bytes a second. Takes about half a second."""
    size, copied = 1024, 64 << 20
    one = np.ones((size, size), np.float32)
    source, target = np.ones(copied, np.uint8), np.zeros(copied, np.uint8)

    def best_of(call: Callable[[], object]) -> float:
        call()  # pages and threads are there from now on
        times = []
        for _ in range(5):
            began = clock()
            call()
            times.append(clock() - began)
        return min(times)

    yield "peak_tflops", 2 * size**3 / best_of(lambda: one @ one) / 1e12
    yield "memory_gb_per_s", 2 * copied / best_of(lambda: np.copyto(target, source)) / 1e9


def with_measured_cores(facts: ClusterFacts, rates: Mapping[str, float]) -> ClusterFacts:
    """With the rates of ``measure_rates``, of which each rank has its share. Between two ranks of a machine, a byte is
    written once and read once."""
    ranks = facts.values.get("gpus_per_machine", 1)
    return facts.known(
        "measured here, in float32",
        peak_tflops=rates["peak_tflops"] / ranks,
        memory_gb_per_s=rates["memory_gb_per_s"] / ranks,
        machine_gb_per_s=rates["memory_gb_per_s"] / 2 / ranks,
    )
