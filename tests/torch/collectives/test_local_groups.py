"""Sums of which groups of a machine's ranks make a part: bit for bit those of the order that the plan says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_values
from support.clusters import ROOT, bpslaunch
from support.recorded_machines import from_sysfs, from_xml
from support.stand_in_device import Site, StandInDevice
from support.stand_in_ranks import DeviceCluster, OnStreams
from support.threaded import ThreadedCluster, combine, contract, wide
from torch._C._distributed_c10d import Store

from byteps_py.errors import ConfigurationError, MismatchError, StallError, UsageError
from byteps_py.tensors import Op
from byteps_py.topology import nvlink
from byteps_py.topology.choice import choose
from byteps_py.topology.local_plan import LocalStrategy
from byteps_py.topology.local_sums import LocalSumPlan, plan_local_sums
from byteps_py.topology.machine_topology import MachineTopology
from byteps_py.torch.collectives.all_reduce.local_groups import LocalGroupAllReduce, agreed_plan, connect
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.context import current
from byteps_py.torch.collectives.group_collectives import GroupCollectives, Reduction
from byteps_py.torch.collectives.group_work import CallLog, GroupContext
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.work import Call

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)


@functools.cache
def values(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch_values.values(rank, dtype, (count,))


def reference(parts: Sequence[torch.Tensor], machines: int, plan: LocalSumPlan, average: bool) -> torch.Tensor:
    """In the order that docs/explanation/inside-a-machine.md states: each group's ranks in order, a machine's groups in
    order, the machines in order; rounded after each."""
    size = len(parts) // machines
    sums = []
    for machine in range(machines):
        own = parts[machine * size : (machine + 1) * size]
        sums.append(combine(Op.SUM, [combine(Op.SUM, [own[rank] for rank in group]) for group in plan.groups]))
    total = combine(Op.SUM, sums)
    return (total.to(wide(total.dtype)) / len(parts)).to(total.dtype) if average else total


def members_of(cluster: ThreadedCluster, rank: int) -> Members:
    context = current()
    return Members(context, context.session, tuple(range(cluster.size)), rank, "group")


def group_of(members: Members, store: Store) -> GroupContext:
    return GroupContext(members.session, 20.0, CallLog(members, store), 5.0)


def sums_of(machines: int, plan: LocalSumPlan, dtype: torch.dtype, count: int) -> list[list[torch.Tensor]]:
    """Three sums, one of them an average, all under way at once, on every rank."""
    size = sum(map(len, plan.groups))
    cluster = ThreadedCluster((size,) * machines)
    store = dist.HashStore()

    def main(rank: int) -> list[torch.Tensor]:
        members = members_of(cluster, rank)
        group_context = group_of(members, store)
        local = LocalGroupAllReduce(members, group_context, store, plan)
        collectives = GroupCollectives(members, group_context, Completer(), None, None, local)
        tensors = [values(rank + 100 * i, dtype, count).clone() for i in range(3)]
        works = []
        for i, tensor in enumerate(tensors):
            average = i == 1 and dtype.is_floating_point
            half = count // 2
            outputs = [tensor[:half], tensor[half:]] if i == 2 else [tensor]
            kind = Reduction(average=average)
            works.append(_begin_here(collectives, local, Call("all_reduce", outputs, 20.0), outputs, kind))
        for work in works:
            work.wait()
        collectives.finish()
        local.close()
        return tensors

    return cluster.run(main)


def _begin_here(
    collectives: GroupCollectives, local: LocalGroupAllReduce, call: Call, tensors: list[torch.Tensor], how: Reduction
) -> Any:
    """As GroupCollectives does for tensors on a device."""
    from byteps_py.torch.collectives.all_reduce import GroupSum

    kind, _ = collectives._kind(how, tensors, False)
    place, agreement = collectives._service.agreed_place(kind), None
    if place is None:
        place, agreement = collectives._service.agree(call.what, kind, 20.0)
    return local.begin(GroupSum(call, kind, tensors, tensors, place, lambda: pytest.fail("no"), False, agreement))


PLANS = {
    "one group": LocalSumPlan(LocalStrategy.ONE_SWITCH, "", ((0, 1, 2),)),
    "two groups": LocalSumPlan(LocalStrategy.CPU_ASSISTED, "", ((0, 1), (2, 3))),
    "interleaved groups": LocalSumPlan(LocalStrategy.NVLINK, "", ((0, 2), (1, 3))),
    "a root": LocalSumPlan(LocalStrategy.REDUCE_BROADCAST, "", ((0, 1, 2, 3),), 2),
}


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_sums_have_the_bits_of_the_stated_order(name: str, machines: int) -> None:
    plan = PLANS[name]
    for dtype, count in [*((dtype, 1003) for dtype in DTYPES), (torch.float32, 1)]:
        found = sums_of(machines, plan, dtype, count)
        for i in range(3):
            parts = [values(rank + 100 * i, dtype, count) for rank in range(len(found))]
            average = i == 1 and dtype.is_floating_point
            want = reference(parts, machines, plan, average)
            assert all(torch.equal(tensors[i], want) for tensors in found), (dtype, count, i)
            if plan.keeps_order:
                sizes = (len(parts) // machines,) * machines
                assert torch.equal(want, contract(parts, sizes, average=average))


@pytest.mark.parametrize("name", ["paper-pcie", "paper-nvlink", "aws-p4d-24xl"])
def test_sums_of_recorded_machines(name: str, tmp_path: Path) -> None:
    """Two of them, with a rank for each of their 8 GPUs."""
    plan = plan_local_sums(choose(recorded(name, tmp_path)), 8, "auto")
    for dtype in (torch.float32, torch.bfloat16):
        found = sums_of(2, plan, dtype, 1003)
        for i in range(3):
            parts = [values(rank + 100 * i, dtype, 1003) for rank in range(16)]
            want = reference(parts, 2, plan, i == 1)
            assert all(torch.equal(tensors[i], want) for tensors in found)


def test_groups_round_in_another_order() -> None:
    """Why several groups have to be asked for."""
    plan = PLANS["two groups"]
    parts = [values(rank, torch.float32, 1003) for rank in range(4)]
    assert not torch.equal(reference(parts, 1, plan, False), contract(parts, (4,)))


# ---- on a stand-in for the device ------------------------------------------------------------------------------------


COUNT = 70_000


def collectives_on(
    cluster: DeviceCluster, store: Store, plan: LocalSumPlan, rank: int, device: StandInDevice
) -> tuple[GroupCollectives, LocalGroupAllReduce]:
    members = members_of(cluster, rank)
    group_context = group_of(members, store)

    def connected(store: Store, place: int, size: int, _: torch.device) -> Any:
        return OnStreams(connect(store, place, size, torch.device("cpu")), device)

    local = LocalGroupAllReduce(members, group_context, store, plan, connected)
    return GroupCollectives(members, group_context, Completer(), None, None, local), local


def run_on_devices(plan: LocalSumPlan, drop: Site | None = None) -> tuple[list[list[torch.Tensor]], DeviceCluster]:
    """The caller computes on its stream before and after, and goes on while sums are under way."""
    cluster = DeviceCluster((sum(map(len, plan.groups)),) * 2, drop=drop)
    store = dist.HashStore()

    def main(rank: int, device: StandInDevice) -> list[torch.Tensor]:
        collectives, local = collectives_on(cluster, store, plan, rank, device)
        found = []
        with device.using(device.new_stream(device.device)):
            tensors = [device.tensor(values(rank + 100 * i, torch.float32, COUNT)) for i in range(3)]
            works = []
            for tensor in tensors:
                # Each rank sends a temporary tensor, which nobody holds once the sum is over.
                works.append(collectives.reduce(Call("all_reduce", [tensor], 20.0), [tensor], Reduction(factor=2.0)))
                assert type(works[-1]).__name__ == "LocalSumWork"
            works[-1].done.wait(20.0)
            while local._gathers._is_served:
                works[-1].done.wait(0.001)
            for work, tensor in zip(works, tensors, strict=True):
                work.wait()
                found.append((tensor + 1).cpu())
        collectives.finish()
        local.close()
        return found

    return cluster.on_devices(main), cluster


@pytest.mark.parametrize("name", PLANS)
def test_sums_of_a_device_are_ordered(name: str) -> None:
    plan = PLANS[name]
    results, cluster = run_on_devices(plan)
    assert not cluster.races, "\n".join(cluster.races)
    for i in range(3):
        parts = [values(rank + 100 * i, torch.float32, COUNT) * 2 for rank in range(cluster.size)]
        want = reference(parts, 2, plan, False) + 1
        assert all(torch.equal(found[i], want) for found in results)


@pytest.mark.parametrize("name", PLANS)
def test_sums_take_little_memory_of_the_device(name: str) -> None:
    """Two slices of each sum under way, or two tensors on a root; and three tensors more, however many there are."""
    plan = PLANS[name]
    cluster = DeviceCluster((sum(map(len, plan.groups)),) * 2)
    store = dist.HashStore()
    sums = 6

    def main(rank: int, device: StandInDevice) -> int:
        collectives, local = collectives_on(cluster, store, plan, rank, device)
        tensors = [device.tensor(values(rank, torch.float32, COUNT)) for _ in range(sums)]
        before = device.most_bytes = device.used_bytes
        works = [collectives.reduce(Call("all_reduce", [each], 20.0), [each], Reduction()) for each in tensors]
        for work in works:
            work.wait()
        collectives.finish()
        local.close()
        return device.most_bytes - before

    most = max(cluster.on_devices(main)) / (4 * COUNT)
    slices = 2 if plan.root is not None else 2 / len(plan.groups[0])
    assert most < sums * slices + 3 + 0.01


def test_each_call_that_orders_them_is_needed() -> None:
    plans = [PLANS["one group"], PLANS["a root"]]
    calls = {"record_event", "record_stream", "wait_event"}  # those of NCCL are not the product's
    found = {site for plan in plans for site in run_on_devices(plan)[1].sites if site.file == "local_groups.py"}
    seen = [site for site in found if site.call in calls]
    assert {site.call for site in seen} == calls
    missed = [site for site in seen if not any(run_on_devices(plan, site)[1].races for plan in plans)]
    assert not missed, "\n".join(map(str, missed))


# ---- agreement -------------------------------------------------------------------------------------------------------


def recorded(name: str, folder: Path) -> MachineTopology:
    return from_sysfs(name, folder) if name == "workstation" else nvlink.implied(from_xml(name))


def agreed(machines: Sequence[int], mode: str, topologies: Sequence[MachineTopology], some: bool = False) -> Any:
    cluster = ThreadedCluster(machines, local_sum=mode)
    store = dist.HashStore()

    def main(rank: int) -> LocalSumPlan:
        members = members_of(cluster, rank)
        if some:
            members = Members(members.context, members.session, (0, cluster.size - 1), min(rank, 1), "some")
        return agreed_plan(members, store, 5.0, lambda: topologies[members.session.machine_index])

    found = cluster.run(main) if not some else [main_of_first(cluster, main)]
    assert len(set(found)) == 1
    return found[0]


def main_of_first(cluster: ThreadedCluster, main: Any) -> LocalSumPlan:
    from byteps_py.torch.collectives.context import use

    with use(cluster.context(0)) as context:
        try:
            plan: LocalSumPlan = main(0)
            return plan
        finally:
            context.close()


def test_machines_agree(tmp_path: Path) -> None:
    pcie, joined = recorded("paper-pcie", tmp_path), recorded("paper-nvlink", tmp_path)
    halves = ((0, 1, 2, 3), (4, 5, 6, 7))
    plan = agreed((8, 8), "auto", (pcie, pcie))
    assert (plan.strategy, plan.groups, plan.root) == (LocalStrategy.CPU_ASSISTED, halves, None)
    assert "BYTEPS_LOCAL_SUM=auto permits it" in agreed((8, 8), "exact", (pcie, pcie)).reason
    plan = agreed((8, 8), "exact", (joined, joined))
    assert (plan.strategy, plan.groups, plan.root) == (LocalStrategy.REDUCE_BROADCAST, (tuple(range(8)),), 2)
    differs = agreed((8, 8), "auto", (pcie, joined))
    assert differs.strategy is LocalStrategy.HOST_SUM
    assert "machine 0 sums by cpu-assisted and machine 1 by reduce-broadcast" in differs.reason
    assert "4 ranks on 8 GPUs" in agreed((4, 4), "auto", (pcie, pcie)).reason
    assert "has not all ranks of its machines" in agreed((8, 8), "auto", (pcie, pcie), some=True).reason
    assert not agreed((8, 8), "host", (pcie, pcie)).groups


def test_a_machine_that_does_not_say_its_plan(tmp_path: Path) -> None:
    """BYTEPS_LOCAL_SUM is not the same everywhere."""
    cluster = ThreadedCluster((1, 1), local_sum="auto")
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))

    def main(rank: int) -> None:
        if rank == 0:
            agreed_plan(members_of(cluster, rank), store, 0.1, lambda: recorded("workstation", tmp_path))

    with pytest.raises(StallError, match="set BYTEPS_LOCAL_SUM=auto on all ranks"):
        cluster.run(main)


def test_what_does_not_go_together() -> None:
    with pytest.raises(ConfigurationError, match="BYTEPS_LOCAL_SUM=auto is not for --elastic"):
        ThreadedCluster((1,), local_sum="auto", elastic=True).context(0)

    def main(rank: int) -> None:
        current().join()

    with pytest.raises(UsageError, match=r"join\(\) does not go together with BYTEPS_LOCAL_SUM=exact"):
        ThreadedCluster((2,), local_sum="exact").run(main)


def test_ranks_that_call_different_sums() -> None:
    """They are told so, and can go on."""
    plan = LocalSumPlan(LocalStrategy.ONE_SWITCH, "", ((0, 1),))
    cluster = ThreadedCluster((2,))
    store = dist.HashStore()

    def main(rank: int) -> torch.Tensor:
        members = members_of(cluster, rank)
        group_context = group_of(members, store)
        local = LocalGroupAllReduce(members, group_context, store, plan)
        collectives = GroupCollectives(members, group_context, Completer(), None, None, local)
        wrong, right = torch.ones(3 + rank), torch.ones(5)
        work = _begin_here(collectives, local, Call("all_reduce", [wrong], 20.0), [wrong], Reduction())
        with pytest.raises(MismatchError):
            work.wait()
        _begin_here(collectives, local, Call("all_reduce", [right], 20.0), [right], Reduction()).wait()
        collectives.finish()
        local.close()
        return right

    assert all(torch.equal(found, torch.full((5,), 2.0)) for found in cluster.run(main))


def test_processes_agree() -> None:
    """This machine has no GPU: they say so, and sum as always."""
    run = bpslaunch(
        ["-np", "2"],
        ["-m", "backend", "reductions.all_reduce"],
        timeout_s=60,
        PYTHONPATH=str(ROOT / "tests" / "programs"),
        PYTHONWARNINGS="ignore",
        BYTEPS_LOCAL_SUM="auto",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "BYTEPS_LOCAL_SUM=auto: ranks (0, 1) sum by " in run.stdout + run.stderr
