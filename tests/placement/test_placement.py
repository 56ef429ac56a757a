"""Placement: the formulas; how tensors are cut and hashed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st
from support.placement import MB, model_table

from byteps_py.errors import UsageError
from byteps_py.placement.packing import Intervals
from byteps_py.placement.placement_plan import entries, load_model
from byteps_py.placement.placement_table import PlacementTable
from byteps_py.placement.shares import Optimum, carried, reduction_time, time_over_optimum
from byteps_py.tensors import PAGE_BYTES, split

# ---- formulas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "time", "over_ring", "over_servers"),
    [  # the design's table
        (2, 1, 1.0, 1.0, 2.0),
        (4, 0, 1.5, 1.0, None),
        (4, 2, 1.2, 1.25, 1.667),
        (4, 4, 1.0, 1.5, 1.0),
        (8, 4, 1.273, 1.375, 1.571),
        (32, 16, 1.319, 1.469, 1.516),
    ],
)
def test_optimum_is_the_designs_table(n, k, time, over_ring, over_servers):
    best = Optimum(n, k)
    assert round(float(best.time), 3) == time
    assert round(float(best.gain_over_ring), 3) == over_ring
    if over_servers is None:
        assert best.gain_over_servers_only is None
    else:
        assert round(float(best.gain_over_servers_only), 3) == over_servers


@pytest.mark.parametrize("n", range(2, 20))
def test_shares_add_up_and_carry_the_same_everywhere(n):
    for k in range(n + 4):
        best = Optimum(n, k)
        used = min(k, n)
        assert len(best.weights) == k + n
        assert sum(best.weights) == best.interval == n * n + used * n - 2 * used
        assert sum(best.shares) == 1
        assert best.shares[:used] == (Fraction(2 * (n - 1), best.interval),) * used
        assert best.shares[used:k] == (0,) * (k - used)  # CPU machines beyond n hold nothing
        assert best.shares[k:] == (Fraction(n - used, best.interval),) * n
        loads = carried(n, best.shares[:k], best.shares[k:])
        assert {load for load in loads if load} == {best.time}  # the optimum: nobody waits for anybody
        assert time_over_optimum(n, best.shares[:k], best.shares[k:]) == 1


def test_more_cpu_machines_than_gpu_machines_help_no_more():
    assert Optimum(4, 9).time == Optimum(4, 4).time == 1
    assert Optimum(4, 9).gain_over_servers_only == 1
    assert Optimum(4, 4).gpu_weight == 0
    assert Optimum(4, 9).server_weights == (6, 6, 6, 6)


def test_one_machine_needs_no_network():
    best = Optimum(1, 2)
    assert (best.weights, best.server_weights, best.time) == ((0, 0, 0), (), 0)
    assert best.gain_over_ring is None
    assert best.gain_over_servers_only is None
    assert carried(1, [0, 0], [5]) == [0, 0, 0]
    assert time_over_optimum(1, [0, 0], [5]) == 1


@pytest.mark.parametrize(("n", "k"), [(0, 0), (-1, 2), (2, -1)])
def test_impossible_clusters_are_refused(n, k):
    with pytest.raises(UsageError, match="machines"):
        Optimum(n, k)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 9), st.integers(0, 9))
def test_no_other_shares_are_faster(data, n, k):
    amounts = st.integers(0, 1000)
    cpu = data.draw(st.lists(amounts, min_size=k, max_size=k))
    gpu = data.draw(st.lists(amounts, min_size=n, max_size=n))
    if sum(cpu) + sum(gpu):
        assert reduction_time(n, cpu, gpu) >= Optimum(n, k).time


def test_servers_on_cpu_machines_only_take_n_over_k():
    assert reduction_time(6, [10, 10], [0] * 6) == 3
    assert Optimum(6, 2).gain_over_servers_only == 3 / Optimum(6, 2).time


def test_carried_wants_every_gpu_machine():
    with pytest.raises(UsageError, match="3 GPU machines"):
        carried(3, [1], [1, 1])


# ---- cutting and hashing -----------------------------------------------------------------------------------


@given(st.integers(0, 3 * MB), st.sampled_from([1, 7, 100, 4096, 65536, MB]), st.sampled_from([1, 2, 4, 8, 3]))
def test_split_covers_each_byte_once(nbytes, partition_bytes, itemsize):
    nbytes -= nbytes % itemsize
    nbytes = min(nbytes, 2000 * partition_bytes * itemsize // itemsize * itemsize)
    nbytes -= nbytes % itemsize
    pieces = split(nbytes, partition_bytes, itemsize)
    assert [0, *(o + n for o, n in pieces)] == [*(o for o, _ in pieces), nbytes]
    assert all(0 < length <= max(partition_bytes, itemsize) and not length % itemsize for _, length in pieces)
    if partition_bytes % PAGE_BYTES == 0 and PAGE_BYTES % itemsize == 0:
        assert all(offset % PAGE_BYTES == 0 for offset, _ in pieces)
        assert len(pieces) == -(-nbytes // partition_bytes)


def test_hash_values_are_spread_by_weight_and_cpu_machines_come_first():
    best = Optimum(4, 2)
    intervals = Intervals(best.server_weights)
    assert intervals.total == 20
    hits = Counter(next(intervals.probes(key, 0)) for key in range(20_000))
    for server, weight in enumerate(best.server_weights):
        assert hits[server] == pytest.approx(20_000 * weight / 20, rel=0.06)


def test_hash_is_the_same_on_every_platform_and_in_every_version():
    # Two versions in one job would place tensors differently: a change here must raise the protocol's version.
    digest = hashlib.sha256(json.dumps(model_table("resnet50", 8, 4).snapshot()).encode()).hexdigest()
    assert digest == GOLDEN_DIGEST


GOLDEN_DIGEST = "66e3234156e44239fa0b8070735aea656562642883865b99c8b1ef3b6d649643"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_parties_agree_whatever_their_hash_seed(seed):
    program = (
        "import json, random, sys\n"
        "from byteps_py.placement.placement_plan import entries, load_model\n"
        "from byteps_py.placement.placement_table import PlacementTable\n"
        "table = PlacementTable([(9, 14), (4, 14), (7, 4), (1, 4), (5, 4)], 1 << 20)\n"
        "tensors = entries(load_model('resnet50'))\n"
        "random.shuffle(tensors)\n"  # the order within a batch is nobody's business
        "table.add(tensors)\n"
        "moves = table.rebalance([(9, 5), (4, 5), (1, 5), (8, 9)])\n"
        "table.add([(3, 1 << 22, 4)])\n"
        "assert 'torch' not in sys.modules and 'grpc' not in sys.modules\n"
        "print(json.dumps([table.snapshot(), [str(m) for m in moves]]))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    assert output.returncode == 0, output.stderr.decode()

    table = PlacementTable([(9, 14), (4, 14), (7, 4), (1, 4), (5, 4)], 1 << 20)
    table.add(entries(load_model("resnet50")))
    moves = table.rebalance([(9, 5), (4, 5), (1, 5), (8, 9)])
    table.add([(3, 1 << 22, 4)])
    assert json.loads(output.stdout) == [table.snapshot(), [str(m) for m in moves]]
