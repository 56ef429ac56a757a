"""Which way to sum is best on a machine, and why.

Two principles (BytePS, OSDI 2020, section 4.2): never copy from GPU to GPU across PCIe switches, and keep the link that
the NIC uses as free as possible. Sn switches have GPUs and a NIC, Sg have GPUs only:

    no GPU, or one               nothing to choose
    PCIe hidden, no NVLink       host-sum, until rates are measured (``bandwidth_probe``)
    NVLink connects all GPUs     Sn > 0 and Sg > 0: reduce to a GPU away from the NIC; else reduce-scatter
    no NVLink, one switch        reduce-scatter in it
    no NVLink, several           reduce-scatter in each, and the processor sums across them

The times of all ways that are possible are compared, too: the reason says so where another one is faster than the
rule's. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from byteps_py.topology import local_plan
from byteps_py.topology.bandwidth_probe import ProbePlan, plan_probes
from byteps_py.topology.local_plan import LocalPlan
from byteps_py.topology.machine_topology import DeviceKind, MachineTopology
from byteps_py.wording import count_text

#: A way must be faster than the rule's by this part to be preferred.
_MARGIN = 0.01


@dataclass(frozen=True, slots=True)
class LocalChoice:
    """The way to sum that is best on a machine.

    Attributes:
        plan: the chosen way.
        reasons: sentences.
        others: the other ways that are possible, the fastest first.
        probes: what to measure to choose better; None if the topology is known.
    """

    plan: LocalPlan
    reasons: tuple[str, ...]
    others: tuple[LocalPlan, ...] = ()
    probes: ProbePlan | None = None

    def as_json(self, nbytes: float) -> dict[str, Any]:
        """As plain values, with times for ``nbytes`` bytes in each GPU."""
        return {
            "strategy": str(self.plan.strategy),
            "root": self.plan.root or None,
            "gpu_groups": [list(group) for group in self.plan.gpu_groups],
            "reasons": list(self.reasons),
            "seconds": self.plan.seconds(nbytes),
            "steps": [
                {
                    "name": step.name,
                    "transfers": [
                        {
                            "source": each.source,
                            "target": each.target,
                            "bytes": float(each.share) * nbytes,
                            "links": [f"{link.source} > {link.target}" for link in each.links],
                        }
                        for each in step.transfers
                    ],
                }
                for step in self.plan.steps
            ],
            "others": {str(plan.strategy): plan.seconds(nbytes) for plan in self.others},
            "probes": None if self.probes is None else self.probes.as_json(),
        }


def choose(topology: MachineTopology) -> LocalChoice:
    """The best way to sum, with the reasons for it. Raises TopologyError for a machine with more than 64 GPUs.

    >>> from byteps_py.topology.machine_topology import NumaNode
    >>> choose(MachineTopology((NumaNode(0),))).plan.strategy.value
    'no-gpu'
    """
    gpus = topology.gpus
    if not gpus:
        unknown = sum(each.kind is DeviceKind.UNKNOWN for each in topology.devices)
        why = f"none of {unknown} devices is known to be a GPU" if unknown else "the machine has no GPU"
        return LocalChoice(local_plan.no_gpu(topology), (f"{why}, and the processor sums what is in memory",))
    topology.check()
    now = local_plan.host_sum(topology)
    if len(gpus) == 1:
        return LocalChoice(now, ("the machine has one GPU, so nothing is summed before the network",))
    if topology.is_pcie_hidden:
        return _choose_blind(topology, now)
    plan, reasons = _by_rule(topology)
    others = sorted((each for each in _possible(topology, now) if each.strategy is not plan.strategy), key=_seconds)
    if others and others[0].seconds(1e9) < plan.seconds(1e9) * (1 - _MARGIN):
        faster = others[0]
        why = f"{faster.strategy} is faster here than {plan.strategy}, which the rule says: {_compared(faster, plan)}"
        others = sorted([plan, *others[1:]], key=_seconds)
        return LocalChoice(faster, (*reasons[:1], why), tuple(others))
    return LocalChoice(plan, reasons, tuple(others))


def _by_rule(topology: MachineTopology) -> tuple[LocalPlan, tuple[str, ...]]:
    """The way that the principles say, and why."""
    with_nic, without = topology.switches_with_nic, topology.switches_without_nic
    counts = f"Sn = {with_nic} and Sg = {without} (PCIe switches with GPUs and a NIC, and with GPUs only)"
    groups = [group for group in topology.groups if group.gpus]
    is_asymmetric = with_nic > 0 and without > 0
    if topology.nvlinks and len(local_plan.nvlink_groups(topology)) == 1:
        over_nvlink = local_plan.nvlink(topology)
        if is_asymmetric or over_nvlink is None:
            root = _best_root(topology)
            why = "the NIC shares the link of its switch with that switch's GPUs: all reduce over NVLink to one away"
            if not is_asymmetric:
                why = "there is no way round all GPUs over NVLink: all reduce to one"
            return root, (f"{counts}: {why} ({root.root}), and get the sum from it",)
        why = "NVLink connects all GPUs, and each switch has as much to carry: each GPU copies its slice of the sum"
        return over_nvlink, (f"{counts}: {why}",)
    islands = local_plan.nvlink(topology) if topology.nvlinks else None
    plan = local_plan.cpu_assisted(topology)
    if islands is not None and islands.seconds(1e9) < plan.seconds(1e9):
        names = count_text(len(islands.gpu_groups), "group")
        why = f"NVLink connects {names} of GPUs, which sum first; the processor sums across them"
        return islands, (f"{counts}: {why}",)
    if max(len(group.gpus) for group in groups) == 1:
        why = f"each of {len(groups)} GPUs has a link to the processor of its own: nothing is gained between GPUs"
        return local_plan.host_sum(topology), (f"{counts}: {why}",)
    if len(groups) == 1:
        why = "all GPUs are below one switch: they sum in it, and its link to the processor carries each sum once"
        return plan, (f"{counts}: {why}",)
    sums = "GPUs sum in their switch, and the processor across switches, so that no copy goes from switch to switch"
    if is_asymmetric:
        sums += "; without NVLink, GPUs beside the NIC have no other way to the processor than the NIC's link"
    return plan, (f"{counts}: {sums}", _about_brute_force(topology, plan))


def _choose_blind(topology: MachineTopology, now: LocalPlan) -> LocalChoice:
    """Whatever the PCIe tree is like, NVLink does not use it."""
    probes = plan_probes(topology)
    why = "the machine is virtual and hides which devices share a link"
    over_nvlink = local_plan.nvlink(topology) if len(local_plan.nvlink_groups(topology)) == 1 else None
    if over_nvlink is not None:
        how = "NVLink connects all GPUs, so each copies only its slice of the sum"
        return LocalChoice(over_nvlink, (f"{why}; {how}",), (now,), probes)
    return LocalChoice(now, (f"{why}: until rates are measured, each GPU copies all",), (), probes)


def _possible(topology: MachineTopology, now: LocalPlan) -> list[LocalPlan]:
    plans = [now, local_plan.nvlink(topology)]
    if any(len(group.gpus) > 1 for group in topology.groups):
        plans.append(local_plan.cpu_assisted(topology))
    if topology.nvlinks and len(local_plan.nvlink_groups(topology)) == 1:
        plans.append(_best_root(topology))
    return [plan for plan in plans if plan is not None]


def _best_root(topology: MachineTopology) -> LocalPlan:
    """The plan whose root shares no link with a NIC, if there is such a GPU; near a NIC's processor; the fastest."""
    nic_nodes = {group.node.number for group in topology.groups if group.nics}
    ranked: list[tuple[tuple[bool, float, bool], int, LocalPlan]] = []
    for group in topology.groups:
        for gpu in group.gpus:
            plan = local_plan.reduce_broadcast(topology, gpu.bus_id)
            if plan is not None:
                key = (bool(group.nics), plan.seconds(1e9), group.node.number not in nic_nodes)
                ranked.append((key, len(ranked), plan))
    return min(ranked)[-1]


def _about_brute_force(topology: MachineTopology, plan: LocalPlan) -> str:
    share = local_plan.best_brute_force(topology)
    if not share:
        return "sums would not be faster if each GPU copied a part to memory as a whole instead"
    mixed = local_plan.cpu_assisted(topology, share)
    gain = plan.seconds(1e9) / mixed.seconds(1e9) - 1
    times = local_plan.cpu_assisted(topology, type(share)(1)).copied / plan.copied
    return (
        f"if each GPU copied {share} to memory as a whole instead, sums would be {gain:.0%} faster, but what is copied "
        f"so takes {float(times):g} times the memory traffic: it is not done"
    )


def _compared(a: LocalPlan, b: LocalPlan) -> str:
    return f"{a.seconds(1e9) * 1e3:.1f} and {b.seconds(1e9) * 1e3:.1f} ms for 1 GB"


def _seconds(plan: LocalPlan) -> float:
    return plan.seconds(1e9)
