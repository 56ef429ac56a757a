"""Who runs on which CPUs: recorded machines with two nodes, and this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.recorded_machines import from_sysfs, from_xml

from byteps_py.topology.machine_reader import read_machine, used
from byteps_py.topology.machine_topology import MachineTopology, NumaNode
from byteps_py.topology.numa_pinning import PinningPlan, pin_this_process, plan_pinning

FIRST, SECOND = frozenset((*range(16), *range(32, 48))), frozenset((*range(16, 32), *range(48, 64)))
ALL = FIRST | SECOND


def test_ranks_keep_to_their_gpus_and_services_to_the_network_card() -> None:
    plan = plan_pinning(from_xml("paper-pcie"), 8, 4, ALL)
    assert plan.ranks == (FIRST,) * 4 + (SECOND,) * 4
    assert (plan.services, plan.slot_node) == (FIRST, 0)
    assert plan.reason == "each rank on the NUMA node of its GPU; services on node 0, which has the network card"


def test_ranks_without_gpus_of_their_own_are_spread(tmp_path: Path) -> None:
    machine = from_sysfs("no-gpu", tmp_path)
    assert plan_pinning(machine, 3, 4, ALL).ranks == (FIRST, FIRST, SECOND)
    assert plan_pinning(machine, 1, 4, ALL).ranks == (FIRST,)
    assert plan_pinning(from_xml("paper-pcie"), 9, 4, ALL).ranks == (FIRST,) * 5 + (SECOND,) * 4


def test_a_rank_uses_the_gpu_of_its_number_among_those_that_are_visible() -> None:
    machine = from_xml("paper-pcie")
    assert plan_pinning(machine, 2, 4, ALL).ranks == (FIRST, FIRST)
    assert plan_pinning(used(machine, "6,7"), 2, 4, ALL).ranks == (SECOND, SECOND)
    assert plan_pinning(used(machine, "3,4"), 2, 4, ALL).ranks == (FIRST, SECOND)


def test_services_keep_to_the_interface_that_a_job_uses(tmp_path: Path) -> None:
    machine = from_sysfs("no-gpu", tmp_path)
    assert plan_pinning(machine, 2, 4, ALL).services == FIRST  # of the faster one
    assert plan_pinning(used(machine, None, "eno1"), 2, 4, ALL).services == SECOND
    assert used(machine, None, "lo") == machine


def test_a_machine_without_a_known_network_card() -> None:
    """Services go where the fewest ranks are."""
    machine = MachineTopology((NumaNode(0, tuple(sorted(FIRST))), NumaNode(1, tuple(sorted(SECOND)))))
    plan = plan_pinning(machine, 1, 4, ALL)
    assert (plan.ranks, plan.services) == ((FIRST,), SECOND)


def test_only_cpus_that_a_process_may_use() -> None:
    """A launcher may have given it some of each node."""
    plan = plan_pinning(from_xml("paper-pcie"), 8, 2, (0, 1, 16, 17))
    assert plan.ranks == (frozenset({0, 1}),) * 4 + (frozenset({16, 17}),) * 4
    assert plan.services == {0, 1}


def test_services_with_more_threads_than_a_node_has_cpus() -> None:
    plan = plan_pinning(from_xml("paper-pcie"), 8, 4, (0, 1, 16, 17))
    assert plan.ranks
    assert (plan.services, plan.slot_node) == (frozenset(), None)
    assert "node 0 has fewer CPUs than the 4 threads of a service" in plan.reason


@pytest.mark.parametrize(
    ("machine", "allowed", "reason"),
    [
        (MachineTopology((NumaNode(0, (0, 1)),)), (0, 1), "this machine has one NUMA node"),
        (MachineTopology((NumaNode(0), NumaNode(1))), (0, 1), "this machine has one NUMA node, as far as it says"),
        (from_xml("paper-pcie"), (0, 1, 32), "these processes may use one NUMA node only"),
    ],
)
def test_where_there_is_no_choice(machine: MachineTopology, allowed: tuple[int, ...], reason: str) -> None:
    plan = plan_pinning(machine, 8, 4, allowed)
    assert plan == PinningPlan(plan.reason)
    assert reason in plan.reason


def test_a_process_with_threads_is_pinned() -> None:
    """This machine's CPUs, as two nodes: all threads of the process follow, those that run already, too."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this process may use one CPU only")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    told, own, other = done.stdout.splitlines()
    assert told.startswith("this process is pinned to ")
    assert "ranks in equal parts" in told
    assert own == other == str(cpus[len(cpus) // 2 :])
    assert sorted(os.sched_getaffinity(0)) == cpus


PROGRAM = """
import os, threading
from byteps_py.topology.machine_topology import MachineTopology, NumaNode
from byteps_py.topology.numa_pinning import pin_this_process
cpus = tuple(sorted(os.sched_getaffinity(0)))
half = len(cpus) // 2
machine = MachineTopology((NumaNode(0, cpus[:half]), NumaNode(1, cpus[half:])))
go, seen = threading.Event(), []
thread = threading.Thread(target=lambda: (go.wait(30), seen.append(sorted(os.sched_getaffinity(0)))))
thread.start()
print(pin_this_process(1, 2, 1, lambda: machine))
go.set()
thread.join()
print(sorted(os.sched_getaffinity(0)))
print(*seen)
"""


def test_services_that_a_pinned_rank_starts_are_not_pinned_like_it() -> None:
    """A rank of torchrun starts its machine's services again for each session; they choose their own CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this process may use one CPU only")
    done = subprocess.run([sys.executable, "-c", STARTER], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [str(cpus), str(cpus[:1])]


STARTER = """
import os, subprocess, sys
from byteps_py.session.service import starting
starting._cpus_before.update(os.sched_getaffinity(0))
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
with starting._unpinned():
    subprocess.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"])
print(sorted(os.sched_getaffinity(0)), flush=True)
"""


def test_this_machine_is_left_as_it_is_if_it_has_one_node() -> None:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        pytest.skip("this machine has several NUMA nodes")
    before = os.sched_getaffinity(0)
    assert pin_this_process(None, 1, 1, read_machine).startswith("nothing is pinned: ")
    assert os.sched_getaffinity(0) == before
