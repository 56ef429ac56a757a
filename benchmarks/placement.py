"""How even placement is: the fullest machine and the time of one reduction, with bounded loads and with plain hash.

    python benchmarks/placement.py                 # the tables of benchmarks/results/placement.md
    python benchmarks/placement.py --per-tensor    # every tensor declared on its own, not all in one batch

Nothing is measured here: the figures follow from the table's arithmetic and are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from byteps_py.placement.placement_plan import Plan, entries, known_models, load_model, plain_hash_plan, plan
from byteps_py.placement.placement_table import Entry, PlacementTable
from byteps_py.placement.shares import Optimum

GRID = [(n, k) for n in (2, 4, 8, 16, 32, 64) for k in sorted({0, n // 4, n // 2, n - 1, n})]
MODELS = {name: entries(load_model(name)) for name in known_models()}


def evenness(partition_bytes: int) -> None:
    """Print the three tables of the documentation."""
    plans = {
        (name, n, k): (plan(tensors, n, k, partition_bytes), plain_hash_plan(tensors, n, k, partition_bytes))
        for name, tensors in MODELS.items()
        for n, k in GRID
    }
    table("Fullest machine relative to its share", plans, lambda p: f"{float(p.fullest):.3f}")
    table("Time of one reduction relative to the optimum", plans, lambda p: f"{float(p.time_over_optimum):.3f}")
    table("Partitions", plans, lambda p: f"{p.partitions:,}")


def table(title: str, plans: dict[tuple[str, int, int], tuple[Plan, Plan]], cell: Callable[[Plan], str]) -> None:
    """Print one Markdown table, a row per (n, k), a column per model: ours / plain hash."""
    print(f"{title}: bounded loads / plain hash\n")
    print("| n | k | " + " | ".join(MODELS) + " |")
    print("|---|---|" + "---|" * len(MODELS))
    for n, k in GRID:
        cells = (" / ".join(map(cell, plans[name, n, k])) for name in MODELS)
        print(f"| {n} | {k} | " + " | ".join(cells) + " |")
    print()


def per_tensor(partition_bytes: int) -> None:
    """Print what it costs to declare tensors one by one: partitions, and the fullest machine."""
    print("Partitions and fullest machine: one batch / one tensor at a time\n")
    print("| n | k | " + " | ".join(MODELS) + " |")
    print("|---|---|" + "---|" * len(MODELS))
    for n, k in GRID:
        cells = []
        for tensors in MODELS.values():
            batch = fill([tensors], Optimum(n, k), partition_bytes)
            single = fill([[tensor] for tensor in tensors], Optimum(n, k), partition_bytes)
            cells.append(f"{batch[0]:,} / {single[0]:,}, {batch[1]:.3f} / {single[1]:.3f}")
        print(f"| {n} | {k} | " + " | ".join(cells) + " |")


def fill(batches: list[list[Entry]], optimum: Optimum, partition_bytes: int) -> tuple[int, float]:
    """Number of partitions, and the fullest server's load relative to its share."""
    weights = optimum.server_weights
    placed = PlacementTable(enumerate(weights), partition_bytes)
    for batch in batches:
        placed.add(batch)
    fullest = max(placed.load(i) * sum(weights) / (placed.nbytes * weight) for i, weight in enumerate(weights))
    return sum(len(placed.partitions(tensor.key)) for batch in batches for tensor in batch), fullest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition-bytes", type=int, default=4 << 20)
    parser.add_argument("--per-tensor", action="store_true")
    arguments = parser.parse_args()
    (per_tensor if arguments.per_tensor else evenness)(arguments.partition_bytes)
