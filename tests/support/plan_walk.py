"""Carries a LocalPlan out on arrays in place of GPUs: only what a transfer carries arrives."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from byteps_py.topology.local_plan import MEMORY, LinkTransfer, LocalPlan, LocalStrategy

Vector = NDArray[np.int64]


def sums_after(plan: LocalPlan, gradients: dict[str, Vector]) -> dict[str, Vector]:
    """What each GPU has in the end. Raises AssertionError if a step lacks a transfer that it needs, or memory does not
    have the sum of all when the network needs it."""
    steps = {step.name: step.transfers for step in plan.steps}
    expected = sum(gradients.values())
    if plan.strategy is LocalStrategy.REDUCE_BROADCAST:
        held = dict(gradients)
        for each in reversed(steps["reduce to one GPU"]):  # the farthest first
            held[each.target] = held[each.target] + held.pop(each.source)
        [copy] = steps["copy to memory"]
        assert np.array_equal(held[copy.source], expected)
        reached = {each.target: held[copy.source] for each in steps["copy to the GPU"]}
        for each in steps["broadcast from it"]:
            reached[each.target] = reached[each.source]
        return reached
    memory: list[Vector] = []
    for group in plan.gpu_groups:
        sliced = {gpu: np.split(gradients[gpu], len(group)) for gpu in group}
        inside = [each for each in steps.get("reduce-scatter", ()) if each.source in group]
        own = {gpu: _reduced(group, inside, gpu, sliced) for gpu in group}
        copied = {each.source for each in steps["copy to memory"] if each.target == MEMORY}
        memory.append(np.concatenate([own[gpu] for gpu in group if gpu in copied]))
    assert len(memory) == 1 or "sum by the processor" in steps
    total: Vector = np.sum(memory, axis=0)
    assert np.array_equal(total, expected)
    results = {}
    for group in plan.gpu_groups:
        slices = np.split(total, len(group))
        back = {each.target for each in steps["copy to the GPUs"]}
        inside = [each for each in steps.get("all-gather", ()) if each.source in group]
        have = {gpu: {number: slices[number]} if gpu in back else {} for number, gpu in enumerate(group)}
        if _is_ring(group, inside):
            following = {each.source: each.target for each in inside}
            for _ in range(len(group) - 1):
                have = {following[gpu]: {**have[following[gpu]], **have[gpu]} for gpu in group}
        else:
            mine = {gpu: dict(parts) for gpu, parts in have.items()}
            for each in inside:
                have[each.target].update(mine[each.source])
        results |= {gpu: np.concatenate([have[gpu][number] for number in range(len(group))]) for gpu in group}
    return results


def _is_ring(group: tuple[str, ...], transfers: list[LinkTransfer]) -> bool:
    return len(group) > 2 and len(transfers) == len(group)


def _reduced(
    group: tuple[str, ...], transfers: list[LinkTransfer], owner: str, sliced: dict[str, list[Vector]]
) -> Vector:
    """``owner``'s slice, summed over all from whom it arrives."""
    number = group.index(owner)
    if not _is_ring(group, transfers):
        senders = {each.source for each in transfers if each.target == owner}
        return sum((sliced[gpu][number] for gpu in senders), start=sliced[owner][number])
    following = {each.source: each.target for each in transfers}
    at = following[owner]  # the slice starts at the GPU behind its owner, and grows on its way round
    summed = sliced[at][number]
    while at != owner:
        at = following[at]
        summed = summed + sliced[at][number]
    return summed
