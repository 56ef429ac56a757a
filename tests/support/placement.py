"""Tables of placements for tests: of any servers and tensors, and of real models."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from byteps_py.placement.placement_plan import entries, load_model
from byteps_py.placement.placement_table import PlacementTable
from byteps_py.placement.shares import Optimum
from byteps_py.tensors import PAGE_BYTES

MB = 1 << 20


WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any)
TENSOR = st.tuples(st.integers(0, 1 << 20), st.sampled_from([1, 2, 4, 8]))
BATCH = st.dictionaries(st.integers(0, (1 << 64) - 1), TENSOR, max_size=12)
PARTITION_BYTES = st.sampled_from([65536, MB, 100_000])


def as_batch(tensors: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(key, count * itemsize, itemsize) for key, (count, itemsize) in tensors.items()]


def check_table(table: PlacementTable, tensors: dict[int, tuple[int, int]]) -> None:
    """Every byte is held once, by a server of the table with a weight; loads are what they say."""
    weights = dict(table.servers)
    loads = Counter()
    for key, (count, itemsize) in tensors.items():
        parts = table.partitions(key)
        assert [0, *(p.offset + p.length for p in parts)] == [*(p.offset for p in parts), count * itemsize]
        for index, part in enumerate(parts):
            assert 0 < part.length <= table.partition_bytes
            assert part.offset % itemsize == 0
            if table.partition_bytes % PAGE_BYTES == 0:
                assert part.offset % PAGE_BYTES == 0
            assert weights[part.server] > 0
            assert table.owner(key, index) == part.server
            loads[part.server] += part.length
    assert all(table.load(server) == loads[server] for server in weights)
    assert table.nbytes == sum(loads.values())


def model_table(model: str, n: int, k: int, partition_bytes: int = 4 * MB) -> PlacementTable:
    table = PlacementTable(enumerate(Optimum(n, k).server_weights), partition_bytes)
    table.add(entries(load_model(model)))
    return table
