"""Which ranks of recorded machines sum among themselves, for each value of BYTEPS_LOCAL_SUM."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recorded_machines import from_sysfs, from_xml

from byteps_py.topology import nvlink, sysfs
from byteps_py.topology.choice import choose
from byteps_py.topology.local_plan import LocalStrategy
from byteps_py.topology.local_sums import LocalSumPlan, agree, as_values, of_values, plan_local_sums
from byteps_py.topology.machine_topology import MachineTopology, NumaNode, PciDevice

ALL = (tuple(range(8)),)
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def recorded(name: str, folder: Path) -> MachineTopology:
    if name == "aws-g5":
        return sysfs.complete(from_xml("aws-g5-48xl"), from_sysfs("aws-g5", folder))
    if name in ("workstation", "hidden-vm", "no-gpu"):
        return from_sysfs(name, folder)
    return nvlink.implied(from_xml(name))


@pytest.mark.parametrize(
    ("name", "strategy", "groups", "root", "exact"),
    [
        (
            "paper-pcie",
            LocalStrategy.CPU_ASSISTED,
            HALVES,
            None,
            "2 groups of GPUs, which rounds sums in another order",
        ),
        ("paper-nvlink", LocalStrategy.REDUCE_BROADCAST, ALL, 2, ""),
        ("aws-p4d-24xl", LocalStrategy.NVLINK, ALL, None, ""),
        ("aws-p4de-24xl", LocalStrategy.NVLINK, ALL, None, ""),
        ("aws-g5", LocalStrategy.HOST_SUM, (), None, "a link to the processor of its own"),
        ("workstation", LocalStrategy.HOST_SUM, (), None, "a link to the processor of its own"),
        ("hidden-vm", LocalStrategy.HOST_SUM, (), None, "hides which devices share a link"),
        ("no-gpu", LocalStrategy.NO_GPU, (), None, "the machine has no GPU"),
    ],
)
def test_recorded_machines(
    name: str,
    strategy: LocalStrategy,
    groups: tuple[tuple[int, ...], ...],
    root: int | None,
    exact: str,
    tmp_path: Path,
) -> None:
    """``exact``: why no ranks sum among themselves with that value; empty: they do."""
    chosen = choose(recorded(name, tmp_path))
    size = len(chosen.plan.topology.gpus) or 4
    auto = plan_local_sums(chosen, size, "auto")
    assert (auto.strategy, auto.groups, auto.root) == (strategy, groups, root)
    plan = plan_local_sums(chosen, size, "exact")
    assert exact in plan.reason
    assert plan.groups == (() if exact else groups)
    assert not plan_local_sums(chosen, size, "host").groups
    assert of_values(as_values(auto)) == auto
    for rank in range(size) if groups else ():
        holders = auto.holders(rank)
        assert (rank in holders) == (root in (None, rank))
        assert len(holders) == (len(groups) if holders else 0)


def test_slices_of_groups_that_are_not_alike() -> None:
    tops = [
        PciDevice(
            f"ffff:ff:0{s}.0", "0x060400", "", "", 8.0, 16,
            tuple(PciDevice(f"0000:{s + 1}{g}:00.0", "0x030200", "0x10de", "", 8.0, 16) for g in range(gpus)),
        )
        for s, gpus in enumerate((2, 3))
    ]  # fmt: skip
    plan = plan_local_sums(choose(MachineTopology((NumaNode(0, devices=tuple(tops)),))), 5, "auto")
    assert not plan.groups
    assert "groups of 2 and 3 GPUs" in plan.reason


def test_ranks_without_a_gpu_of_their_own() -> None:
    plan = plan_local_sums(choose(from_xml("paper-pcie")), 4, "auto")
    assert "4 ranks on 8 GPUs" in plan.reason
    assert not plan.groups


def test_machines_with_other_groups() -> None:
    one = LocalSumPlan(LocalStrategy.CPU_ASSISTED, "", HALVES)
    other = LocalSumPlan(LocalStrategy.CPU_ASSISTED, "", ((0, 2, 4, 6), (1, 3, 5, 7)))
    assert agree({"machine 0": one, "machine 1": one}) is one
    found = agree({"machine 0": one, "machine 1": one, "machine 2": other})
    assert "machine 0 and machine 2 sum by cpu-assisted in different groups" in found.reason
    assert not found.groups


@pytest.mark.parametrize(
    "values", [[], ["cpu-assisted", "", 3, None], ["by hand", "", [], None], ["nvlink", "", [["a"]], None]]
)
def test_what_is_no_plan(values: list[object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        of_values(values)
