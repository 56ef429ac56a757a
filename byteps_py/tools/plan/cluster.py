"""The cluster that a plan is for, as a JSON file: machines, GPUs, memory, links, summation servers. Reads files and
does nothing else; any thread."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "network_gb_per_s" and value is None:
                continue
            least = 0 if field.name == "servers" else 1
            if field.type == "int" and (type(value) is not int or value < least):
                raise UsageError(f"{field.name}={value!r}: a whole number of at least {least} is needed")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise UsageError(f"{field.name}={value!r}: a number above 0 is needed")
            if field.name != "servers" and not value:
                is_rate = field.name.endswith("_per_s")
                remedy = "nothing moves at this rate; measure it, or plan without it" if is_rate else "it is needed"
                raise UsageError(f"{field.name} is 0: {remedy}")
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
