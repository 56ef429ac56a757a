"""Which processors the processes of a machine run on, where it has several NUMA nodes (BYTEPS_NUMA_ON).

A rank runs on the node of its GPU; the services, and so their threads, on that of the network card. The communication
service makes the pages of all ranks' slots, so these lie on the services' node. ``plan_pinning`` decides, and is pure;
``pin_this_process`` carries out one process's part. Any thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from byteps_py.config.settings import Settings
from byteps_py.errors import TopologyError
from byteps_py.system.log import logger
from byteps_py.topology.machine_reader import read_used
from byteps_py.topology.machine_topology import MachineTopology, NumaNode

#: Summing threads of a service, as far as a command that looks at another machine knows.
MOST_DEFAULT_THREADS = 4
_Cpus = frozenset[int]


@dataclass(frozen=True, slots=True)
class PinningPlan:
    """The processors of each process of a machine; none if there is no choice.

    Attributes:
        reason: a sentence: why it is so, or why nothing is pinned.
        ranks: the CPUs of each local rank; empty if nothing is pinned.
        services: the CPUs of the communication service and of the summation service, and of all their threads; empty if
            they are not pinned.
        slot_node: the number of the node on which slots and arenas lie; None if the kernel decides.
    """

    reason: str
    ranks: tuple[_Cpus, ...] = ()
    services: _Cpus = frozenset()
    slot_node: int | None = None


def plan_pinning(machine: MachineTopology, local_size: int, threads: int, allowed: Collection[int]) -> PinningPlan:
    """The plan for ``local_size`` ranks and services with ``threads`` summing threads each, on the CPUs ``allowed``.

    >>> machine = MachineTopology((NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7))))
    >>> [sorted(cpus) for cpus in plan_pinning(machine, 2, 4, range(8)).ranks]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    >>> plan_pinning(machine, 2, 4, range(4)).reason
    'nothing is pinned: these processes may use one NUMA node only'
    """
    usable = {node.number: cpus for node in machine.nodes if (cpus := frozenset(node.cpus).intersection(allowed))}
    if len([node for node in machine.nodes if node.cpus]) < 2:
        return PinningPlan("nothing is pinned: this machine has one NUMA node, as far as it says")
    if len(usable) < 2:
        return PinningPlan("nothing is pinned: these processes may use one NUMA node only")
    numbers = sorted(usable)
    of_gpus = [_node_of(machine, bus_id).number for bus_id in sorted(gpu.bus_id for gpu in machine.gpus)]
    has_gpus = local_size <= len(of_gpus) and set(of_gpus[:local_size]) <= usable.keys()
    spread = [numbers[rank * len(numbers) // local_size] for rank in range(local_size)]
    of_ranks = of_gpus[:local_size] if has_gpus else spread
    how = "each rank on the NUMA node of its GPU" if has_gpus else "ranks in equal parts on the NUMA nodes"
    of_nics = [number for nic in machine.nics if (number := _node_of(machine, nic.bus_id).number) in usable]
    services = of_nics[0] if of_nics else min(numbers, key=lambda number: (of_ranks.count(number), number))
    where = f"services on node {services}, {'which has the network card' if of_nics else 'which has the fewest ranks'}"
    cpus = usable[services]
    if len(cpus) < threads:
        where = f"services on all nodes: node {services} has fewer CPUs than the {threads} threads of a service"
        cpus = frozenset()
    ranks = tuple(usable[number] for number in of_ranks)
    return PinningPlan(f"{how}; {where}", ranks, cpus, services if cpus else None)


def pin_this_process(local_rank: int | None, local_size: int, threads: int, read: Callable[[], MachineTopology]) -> str:
    """Pin this process with all its threads: as local rank ``local_rank``, or as a service if that is None. Threads and
    processes that it starts later inherit it. ``threads``: see ``plan_pinning``. ``read``: reads the machine with what
    the job uses; it may raise TopologyError.

    Returns a sentence about what was done. What a machine does not say, or the system does not permit, leaves the
    process as it is.
    """
    try:
        plan = plan_pinning(read(), local_size, threads, os.sched_getaffinity(0))
    except TopologyError as error:
        return f"nothing is pinned: {error}"
    cpus = plan.services if local_rank is None else plan.ranks[local_rank] if plan.ranks else frozenset()
    if not cpus:
        return plan.reason
    try:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cpus)
    except OSError as error:
        return f"nothing is pinned: the system does not permit it ({error.strerror})"
    return f"this process is pinned to {len(cpus)} CPUs: {plan.reason}"


def pin_as_set(settings: Settings, local_rank: int | None, threads: int) -> None:
    """``pin_this_process`` for a process with these settings; the log has the sentence."""
    read = functools.partial(read_used, os.environ, settings.interface or settings.interfaces.partition(",")[0].strip())
    logger.info("%s", pin_this_process(local_rank, settings.local_size, threads, read))


def _node_of(machine: MachineTopology, bus_id: str) -> NumaNode:
    return next(node for node in machine.nodes for top in node.devices for each in top.walk() if each.bus_id == bus_id)
