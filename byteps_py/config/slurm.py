"""The step of SLURM's srun that a process runs in: which of its nodes train, which only sum, and where they meet.

A job of one kind of nodes trains on all of them. In a heterogeneous job, the last group of a step trains, and the
groups before it lend their processors:

    srun -p cpu -N2 bpslaunch : -p gpu -N4 --ntasks-per-node=8 python train.py

Each process finds the whole of it in its own environment, so nothing has to be exported. Pure; any thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_NODES = 65_535
#: Two ports for each job: torch.distributed's, and the scheduler's above it. Below those that systems give out.
_FIRST_PORT = 16_384
_JOBS_WITH_OWN_PORTS = 8_000
#: What SLURM calls a group of a heterogeneous job, and what it called it at first. srun of 22.05 sets only the latter.
_GROUPS = ("HET", "PACK")


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """One step.

    Attributes:
        job: the job's id; of a heterogeneous job, that of its first component.
        nodes: names of the step's nodes.
        sizes: the number of tasks of each.
        node: the index of this one.
        first_trainer: the index of the first node that trains; those before it lend.
    """

    job: str
    nodes: tuple[str, ...]
    sizes: tuple[int, ...]
    node: int
    first_trainer: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> SlurmStep | None:
        """The step of this process; None outside of a step, or if its variables are not what srun sets. A batch script
        is no step.

        >>> step = SlurmStep.of({
        ...     "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "c[1-2],g1", "SLURM_STEP_TASKS_PER_NODE": "1(x2),4",
        ...     "SLURM_NODEID": "2", "SLURM_HET_SIZE": "2",
        ...     "SLURM_JOB_NODELIST_HET_GROUP_0": "c[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "g1"})
        >>> step.num_workers, step.num_servers, step.worker_id, step.scheduler
        (1, 2, 0, ('g1', 16399))
        """
        nodes = expand(environ.get("SLURM_STEP_NODELIST", ""))
        sizes = [int(size) for size in tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) if _is_number(size)]
        job, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_NODEID", "")
        if not nodes or len(sizes) != len(nodes) or not _is_number(job) or not _is_number(node):
            return None
        if int(node) >= len(nodes):
            return None
        first = _first_of_last_group(nodes, _groups(environ))
        return cls(job, tuple(nodes), tuple(sizes), int(node), first)

    @property
    def trains(self) -> bool:
        """True if this node trains."""
        return self.node >= self.first_trainer

    @property
    def num_workers(self) -> int:
        return len(self.nodes) - self.first_trainer

    @property
    def num_servers(self) -> int:
        """Each task of a node that lends is a server."""
        return sum(self.sizes[: self.first_trainer])

    @property
    def worker_id(self) -> int:
        return self.node - self.first_trainer

    @property
    def scheduler(self) -> tuple[str, int]:
        """The scheduler's host and port: the first node that trains, and a port that follows from the job's id."""
        return self.nodes[self.first_trainer], scheduler_port(self.job)


def scheduler_port(job: str) -> int:
    """The port of the scheduler of the job with this id."""
    return _FIRST_PORT + 2 * (int(job) % _JOBS_WITH_OWN_PORTS) + 1


def secret_name(environ: Mapping[str, str], job: str = "") -> str:
    """The name of the secret of the job with this id, by default the one to which this process belongs; empty if it
    belongs to none."""
    job = job or environ.get("SLURM_JOB_ID", "")
    return f"slurm/{job}" if _is_number(job) else ""


def _groups(environ: Mapping[str, str]) -> list[list[str]]:
    """The nodes of each group of a heterogeneous job; empty for another job."""
    size = environ.get("SLURM_HET_SIZE", "")
    if not _is_number(size):
        return []
    texts = [
        next((text for word in _GROUPS if (text := environ.get(f"SLURM_JOB_NODELIST_{word}_GROUP_{index}"))), "")
        for index in range(min(int(size), _MOST_NODES))
    ]
    return [expand(text) for text in texts]


def _first_of_last_group(nodes: Sequence[str], groups: Sequence[Sequence[str]]) -> int:
    """A step has its groups' nodes one after the other, of each group some or all."""
    at, first = 0, 0
    for index, node in enumerate(nodes):
        while at < len(groups) and node not in groups[at]:
            at, first = at + 1, index
    return first if at < len(groups) else 0


def expand(text: str) -> list[str]:
    """The hosts of one of SLURM's lists; empty if it is none.

    >>> expand("c[1-2],g[08-10,12]x,login")
    ['c1', 'c2', 'g08x', 'g09x', 'g10x', 'g12x', 'login']
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        parts = [_numbers(part[1:-1]) if part.startswith("[") else [part] for part in re.split(r"(\[[^\]]*\])", item)]
        hosts += ["".join(words) for words in itertools.islice(itertools.product(*parts), _MOST_NODES)]
    return hosts if len(hosts) <= _MOST_NODES else []


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if match is None:
            return []
        low, high = int(match[1]), int(match[2] or match[1])
        numbers += [str(number).zfill(len(match[1])) for number in range(low, min(high, low + _MOST_NODES) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[str]:
    """``2(x3),1`` is ``2, 2, 2, 1``; any text of another form is an empty list."""
    sizes: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            return []
        sizes += [match[1]] * min(int(match[2] or 1), _MOST_NODES - len(sizes))
    return sizes


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,10}", text) is not None
