"""Measuring the PCIe tree of a virtual machine that hides it: the tree that made the rates is found again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.recorded_machines import from_sysfs, from_xml

from byteps_py.errors import TopologyError
from byteps_py.topology.bandwidth_probe import infer, plan_probes
from byteps_py.topology.choice import choose
from byteps_py.topology.local_plan import LocalStrategy
from byteps_py.topology.machine_topology import MachineTopology, NumaNode


def hidden(machine: MachineTopology) -> MachineTopology:
    """The same devices as a virtual machine would show them."""
    devices = tuple(each for each in machine.devices if each in machine.gpus or each in machine.nics)
    return MachineTopology((NumaNode(0, devices=devices),), machine.nvlinks, is_pcie_hidden=True)


def measured(machine: MachineTopology, disturbance: float = 0.0) -> dict[tuple[str, ...], tuple[float, ...]]:
    """What probes would find on the real machine: a link that several use gives each an equal part."""
    found = {}
    for number, probe in enumerate(plan_probes(hidden(machine)).probes):
        ways = [machine.way_to_memory(device) for device in probe.devices]
        uses = [link for way in ways for link in way]
        rates = [min(machine.rates[link] / uses.count(link) for link in way) for way in ways]
        found[probe.devices] = tuple(
            rate * (1 - disturbance * ((number * 7 + at) % 5) / 4) for at, rate in enumerate(rates)
        )
    return found


@pytest.mark.parametrize("disturbance", [0.0, 0.1])
@pytest.mark.parametrize("name", ["paper-pcie", "paper-nvlink", "aws-p4d-24xl"])
def test_the_switches_are_found_again(name: str, disturbance: float) -> None:
    machine = from_xml(name)
    found = infer(hidden(machine), measured(machine, disturbance))

    def groups(of: MachineTopology) -> set[tuple[frozenset[str], frozenset[str]]]:
        return {
            (frozenset(gpu.bus_id for gpu in each.gpus), frozenset(nic.bus_id for nic in each.nics))
            for each in of.groups
        }

    assert groups(found) == groups(machine)
    assert (found.switches_with_nic, found.switches_without_nic) == (
        machine.switches_with_nic,
        machine.switches_without_nic,
    )
    assert choose(found).plan.strategy is choose(machine).plan.strategy
    assert not found.is_pcie_hidden


def test_a_machine_whose_devices_share_nothing(tmp_path: Path) -> None:
    machine = from_sysfs("hidden-vm", tmp_path)
    chosen = choose(infer(machine, measured(machine)))
    assert (chosen.plan.strategy, chosen.probes) == (LocalStrategy.HOST_SUM, None)
    assert "has a link to the processor of its own" in chosen.reasons[0]


def test_the_plan_says_what_how_much_and_how_long(tmp_path: Path) -> None:
    machine = from_sysfs("hidden-vm", tmp_path)
    plan = plan_probes(machine)
    gpus, [nic] = [gpu.bus_id for gpu in machine.gpus], [nic.bus_id for nic in machine.nics]
    pairs = {*itertools.combinations(gpus, 2), *((gpu, nic) for gpu in gpus)}
    assert {probe.devices for probe in plan.probes} == {(each,) for each in (*gpus, nic)} | pairs
    moved = sum(probe.nbytes * probe.repeats for probe in plan.probes)  # of two at once, both at the whole rate
    assert plan.expected_s >= 8e-9 * moved / 105
    assert "0000:00:04.0" in "\n".join(plan.lines())


def test_rates_that_are_missing_or_fit_no_tree(tmp_path: Path) -> None:
    machine = from_sysfs("hidden-vm", tmp_path)
    whole = measured(machine)
    first, second, third, _ = (gpu.bus_id for gpu in machine.gpus)
    with pytest.raises(TopologyError, match=f"no rate for {first}"):
        infer(machine, {})
    for bad in ((0.0,), (float("nan"),), (float("inf"),), (1.0, 2.0)):
        with pytest.raises(TopologyError, match="no rate for"):
            infer(machine, {**whole, (second,): bad})
    odd = {**whole, (first, second): (50.0, 50.0), (second, third): (50.0, 50.0)}
    with pytest.raises(TopologyError, match="fit no PCIe tree"):
        infer(machine, odd)
