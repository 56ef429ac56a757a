"""Which ranks of a machine sum among themselves before the services do, and in which order sums are then taken.

``choice`` says which way is best for a machine's GPUs; ``plan_local_sums`` says it for ranks, as ``BYTEPS_LOCAL_SUM``
permits. Pure; any thread.

    host   each rank copies all to memory, and the services add: the machine's ranks in order, rounded once
    exact  the choice where it gives the same bits: all ranks of the machine are one group, which adds in their order
    auto   the choice. With several groups each adds its ranks in order and rounds once, and the machine adds the
           groups' sums in order: every rank has the same bits, but others than with ``host``
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from byteps_py.topology.choice import LocalChoice
from byteps_py.topology.local_plan import LocalStrategy
from byteps_py.wording import count_text

#: The values of BYTEPS_LOCAL_SUM.
MODES = ("host", "exact", "auto")


@dataclass(frozen=True, slots=True)
class LocalSumPlan:
    """How the ranks of a machine sum.

    Attributes:
        reason: a clause: why so.
        groups: the local ranks that sum among themselves, each group in the order in which it adds; empty: none do.
        root: the local rank that has the sum of the only group; None: each rank of a group has a slice of its sum.
    """

    strategy: LocalStrategy
    reason: str
    groups: tuple[tuple[int, ...], ...] = ()
    root: int | None = None

    @property
    def keeps_order(self) -> bool:
        """Sums have the bits that they have without groups."""
        return len(self.groups) < 2

    def group_of(self, local_rank: int) -> tuple[int, ...]:
        """The group of a local rank. Raises StopIteration if there is none."""
        return next(group for group in self.groups if local_rank in group)

    def holders(self, local_rank: int) -> tuple[int, ...]:
        """The local ranks that hand the same part of the tensor to the services as ``local_rank``, in order; empty: it
        hands nothing over.

        >>> plan = LocalSumPlan(LocalStrategy.CPU_ASSISTED, "", ((0, 1), (2, 3)))
        >>> plan.holders(1), plan.holders(2)
        ((1, 3), (0, 2))
        """
        if self.root is not None:
            return (self.root,) if local_rank == self.root else ()
        place = self.group_of(local_rank).index(local_rank)
        return tuple(sorted(group[place] for group in self.groups))


def plan_local_sums(choice: LocalChoice, local_size: int, mode: str) -> LocalSumPlan:
    """The plan for ``local_size`` ranks, of which the Nth has the Nth GPU by bus id. ``mode``: one of MODES.

    >>> from byteps_py.topology.choice import choose
    >>> from byteps_py.topology.machine_topology import MachineTopology, NumaNode
    >>> plan_local_sums(choose(MachineTopology((NumaNode(0),))), 2, "auto").reason
    'the machine has no GPU, and the processor sums what is in memory'
    """
    plan = choice.plan
    gpus = sorted(gpu.bus_id for gpu in plan.topology.gpus)
    if mode == "host":
        return _host("BYTEPS_LOCAL_SUM=host: sums are made by the processor on every machine")
    if plan.strategy in (LocalStrategy.NO_GPU, LocalStrategy.HOST_SUM):
        return LocalSumPlan(plan.strategy, choice.reasons[0])
    if local_size != len(gpus):
        ranks = count_text(local_size, "rank")
        return _host(f"{ranks} on {count_text(len(gpus), 'GPU')}: GPUs sum where each has a rank of its own")
    groups = tuple(sorted(tuple(sorted(map(gpus.index, group))) for group in plan.gpu_groups))
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        counts = " and ".join(map(str, sorted(sizes)))
        return _host(f"groups of {counts} GPUs: their slices are not alike, so the processor sums")
    found = LocalSumPlan(plan.strategy, choice.reasons[0], groups, gpus.index(plan.root) if plan.root else None)
    if mode == "exact" and not found.keeps_order:
        return _host(
            f"{plan.strategy} adds in {len(groups)} groups of GPUs, which rounds sums in another order: "
            "BYTEPS_LOCAL_SUM=auto permits it"
        )
    return found


def lines_of(choice: LocalChoice, local_size: int) -> list[str]:
    """Sentences that say, for each value of BYTEPS_LOCAL_SUM, how this machine sums.

    >>> from byteps_py.topology.choice import choose
    >>> from byteps_py.topology.machine_topology import MachineTopology, NumaNode
    >>> lines_of(choose(MachineTopology((NumaNode(0),))), 2)
    ['this one']
    """
    exact, auto = (plan_local_sums(choice, local_size, mode) for mode in ("exact", "auto"))
    if choice.plan.strategy in (LocalStrategy.NO_GPU, LocalStrategy.HOST_SUM):
        return ["this one"]
    lines = ["host-sum, as BYTEPS_LOCAL_SUM=host, its default, says"]
    if not auto.groups:
        return [*lines, f"with BYTEPS_LOCAL_SUM=auto, too: {auto.reason}"]
    how = f"{auto.strategy}, for sums of torch.distributed on CUDA"
    if exact.groups:
        return [*lines, f"with BYTEPS_LOCAL_SUM=exact: {how}; sums have the same bits"]
    return [
        *lines,
        f"with BYTEPS_LOCAL_SUM=auto: {how}; sums have the same bits on all ranks, and others than by host-sum",
    ]


def agree(plans: dict[str, LocalSumPlan]) -> LocalSumPlan:
    """The plan for all machines of a group of ranks, by their names: that which all have, otherwise ``host-sum``.

    >>> one = LocalSumPlan(LocalStrategy.ONE_SWITCH, "one switch", ((0, 1),))
    >>> agree({"machine 0": one, "machine 1": LocalSumPlan(LocalStrategy.HOST_SUM, "no")}).reason
    'machine 0 sums by one-switch and machine 1 by host-sum: machines of one job sum alike'
    """
    (first_name, first), *others = plans.items()
    for name, plan in others:
        if (plan.strategy, plan.groups, plan.root) != (first.strategy, first.groups, first.root):
            how = f"{first_name} sums by {first.strategy} and {name} by {plan.strategy}"
            if plan.strategy is first.strategy:
                how = f"{first_name} and {name} sum by {plan.strategy} in different groups"
            return _host(f"{how}: machines of one job sum alike")
    return first


def as_values(plan: LocalSumPlan) -> list[object]:
    """``plan`` as plain values, for JSON."""
    return list(dataclasses.astuple(plan))


def of_values(values: list[object]) -> LocalSumPlan:
    """The plan of ``as_values``. Raises TypeError and ValueError for other values.

    >>> plan = LocalSumPlan(LocalStrategy.ONE_SWITCH, "one switch", ((0, 1),))
    >>> of_values(as_values(plan)) == plan
    True
    """
    strategy, reason, groups, root = values
    if not isinstance(groups, list | tuple):
        raise TypeError(f"no groups: {groups!r}")
    found = tuple(tuple(int(rank) for rank in group) for group in groups)
    return LocalSumPlan(LocalStrategy(str(strategy)), str(reason), found, None if root is None else int(str(root)))


def _host(reason: str) -> LocalSumPlan:
    return LocalSumPlan(LocalStrategy.HOST_SUM, reason)
