"""Placement: the formulas, the table's rules as properties, evenness on real models."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byteps_py.errors import ConfigurationError, ProtocolError, UsageError
from byteps_py.placement.models import entries, known_models, load_model, read_shapes
from byteps_py.placement.packing import MIN_CUT_BYTES, Intervals
from byteps_py.placement.plan import plain_hash_plan, plan
from byteps_py.placement.shares import Optimum, carried, reduction_time, time_over_optimum
from byteps_py.placement.table import MARGIN, PlacementTable
from byteps_py.tensors import PAGE_BYTES, key_of, split

MB = 1 << 20


# ---- formulas ------------------------------------------------------------------------------------------------


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


# ---- cutting and hashing -------------------------------------------------------------------------------------


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
    digest = hashlib.sha256(json.dumps(_model_table("resnet50", 8, 4).snapshot()).encode()).hexdigest()
    assert digest == GOLDEN_DIGEST


GOLDEN_DIGEST = "6bc9022b73f3e4018315f31bc38e615561e40df0f9f8c3f8b80d5012c49b6699"


def _model_table(model: str, n: int, k: int, partition_bytes: int = 4 * MB) -> PlacementTable:
    table = PlacementTable(enumerate(Optimum(n, k).server_weights), partition_bytes)
    table.add(entries(load_model(model)))
    return table


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_parties_agree_whatever_their_hash_seed(seed):
    program = (
        "import json, random, sys\n"
        "from byteps_py.placement.models import entries, load_model\n"
        "from byteps_py.placement.table import PlacementTable\n"
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


# ---- the table's rules ---------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=10).filter(any)
TENSOR = st.tuples(st.integers(0, 1 << 20), st.sampled_from([1, 2, 4, 8]))
BATCH = st.dictionaries(st.integers(0, (1 << 64) - 1), TENSOR, max_size=12)
PARTITION_BYTES = st.sampled_from([65536, MB, 100_000])


def _batch(tensors: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(key, count * itemsize, itemsize) for key, (count, itemsize) in tensors.items()]


def _check(table: PlacementTable, tensors: dict[int, tuple[int, int]]) -> None:
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


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, st.lists(BATCH, max_size=4), PARTITION_BYTES)
def test_every_byte_is_held_once(weights, batches, partition_bytes):
    table = PlacementTable([(100 + i, w) for i, w in enumerate(weights)], partition_bytes)
    known: dict[int, tuple[int, int]] = {}
    for batch in batches:
        table.add(_batch(batch))
        known |= batch
        _check(table, known)


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, BATCH.filter(lambda b: any(count for count, _ in b.values())), PARTITION_BYTES)
def test_the_fullest_is_over_its_share_by_less_than_a_small_piece(weights, batch, partition_bytes):
    table = PlacementTable(enumerate(weights), partition_bytes)
    table.add(_batch(batch))
    shares = {i: Fraction(table.nbytes * w, sum(weights)) for i, w in enumerate(weights) if w}
    # What is shorter than two smallest cuts, and a page, isn't cut; it goes where it weighs least.
    uncut = 2 * MIN_CUT_BYTES + PAGE_BYTES + 1
    most = 1 + Fraction(uncut) / min(shares.values())
    assert max(table.load(i) / share for i, share in shares.items()) <= most


def test_twenty_five_parts_on_twelve_servers_are_even():
    table = PlacementTable([(i, 1) for i in range(12)], 4 * MB)
    table.add([(key_of("fc"), 100 * MB, 4)])
    loads = [table.load(i) for i in range(12)]
    assert max(loads) <= 1.005 * 100 * MB / 12
    assert len(table.partitions(key_of("fc"))) <= 25 + 12  # one cut per server at most


def test_a_tensor_of_few_bytes_per_server_is_still_spread():
    table = PlacementTable([(i, 1) for i in range(128)], 4 * MB)
    table.add([(5, 1_900_000, 4)])
    assert max(table.load(i) for i in range(128)) <= 2 * MIN_CUT_BYTES


def test_tensors_that_come_one_by_one_stay_even_and_in_few_parts():
    tensors = entries(load_model("bert-large"))
    table = PlacementTable(enumerate(Optimum(8, 4).server_weights), 4 * MB)
    for tensor in tensors:
        table.add([tensor])
    bound = 1 + 1 / MARGIN + 0.001
    for server, weight in table.servers:
        assert table.load(server) <= bound * table.nbytes * weight / 88 + 1
    uncut = sum(len(split(t.nbytes, 4 * MB, 4)) for t in tensors)
    assert sum(len(table.partitions(t.key)) for t in tensors) < 1.5 * uncut


def test_adding_a_key_again():
    table = PlacementTable([(0, 1), (1, 1)], 4096)
    table.add([(1, 8192, 4), (2, 8192, 4)])
    before = table.snapshot()
    table.add([(1, 8192, 4)])
    assert table.snapshot() == before  # the same size: nothing happens
    table.add([(1, 20_000, 8), (1, 16_384, 4)])  # of two in one batch the last counts
    assert sum(p.length for p in table.partitions(1)) == 16_384
    assert table.nbytes == 16_384 + 8192
    table.add([(1, 0, 4)])
    assert table.partitions(1) == ()
    assert table.nbytes == 8192


@pytest.mark.parametrize("entry", [(1, 10, 4), (1, -4, 4), (1, 4, 0), (-1, 4, 4), (1 << 64, 4, 4)])
def test_impossible_tensors_change_nothing(entry):
    table = PlacementTable([(0, 1)], 4096)
    with pytest.raises(UsageError, match="key"):
        table.add([(7, 8, 4), entry])
    assert table.snapshot() == PlacementTable([(0, 1)], 4096).snapshot()


@pytest.mark.parametrize(
    ("servers", "message"),
    [([(1, 1), (1, 2)], "distinct"), ([(1, 0)], "weights"), ([], "weights"), ([(1, -1), (2, 2)], "weights")],
)
def test_impossible_servers_are_refused(servers, message):
    with pytest.raises(UsageError, match=message):
        PlacementTable(servers, 4096)
    table = PlacementTable([(5, 1)], 4096)
    table.add([(1, 8, 4)])
    before = table.snapshot()
    with pytest.raises(UsageError, match=message):
        table.rebalance(servers)
    assert table.snapshot() == before


def test_unknown_questions_are_refused():
    table = PlacementTable([(0, 1)], 4096)
    table.add([(1, 8, 4)])
    with pytest.raises(UsageError, match="0x2 is not in"):
        table.partitions(2)
    for index in (1, -1):
        with pytest.raises(UsageError, match="has 1 partitions"):
            table.owner(1, index)
    with pytest.raises(UsageError, match="server 3"):
        table.load(3)
    with pytest.raises(UsageError, match="partition_bytes"):
        PlacementTable([(0, 1)], 0)


# ---- servers come and go -------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.integers(0, 12), st.integers(0, 20), min_size=1, max_size=10).filter(lambda w: any(w.values())),
    st.dictionaries(st.integers(0, 12), st.integers(0, 20), min_size=1, max_size=10).filter(lambda w: any(w.values())),
    BATCH,
)
def test_rebalance_moves_only_what_must(old, new, batch):
    table = PlacementTable(old.items(), MB)
    table.add(_batch(batch))
    before = {key: table.partitions(key) for key in batch}
    moves = table.rebalance(new.items())
    _check(table, batch)

    changed = set()
    received: Counter[int] = Counter()
    for key, parts in before.items():
        now = table.partitions(key)
        assert [p[:2] for p in now] == [p[:2] for p in parts]  # cuts never change
        for index, (was, is_) in enumerate(zip(parts, now, strict=True)):
            if was.server != is_.server:
                changed.add((key, index, was.server, is_.server))
                received[is_.server] += is_.length
    assert {(m.key, m.index, m.source, m.target) for m in moves} == changed
    assert moves == sorted(moves)

    total, whole = table.nbytes, sum(new.values())
    for move in moves:
        if new.get(move.source, 0):  # it could have stayed: then its server would hold too much
            stayed = table.load(move.source) - received[move.source]
            share = total * new[move.source] / whole
            assert stayed + table.partitions(move.key)[move.index].length > share * (1 + 1 / MARGIN)


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, WEIGHTS, BATCH, BATCH)
def test_a_restored_table_goes_on_the_same(old, new, first, second):
    table = PlacementTable(enumerate(old), 65536)
    table.add(_batch(first))
    copy = PlacementTable.restore(json.loads(json.dumps(table.snapshot())))
    for each in (table, copy):
        each.rebalance(enumerate(new))
        each.add(_batch(second))
    assert copy.snapshot() == table.snapshot()
    assert copy.nbytes == table.nbytes


@pytest.mark.parametrize("model", known_models())
def test_a_lost_server_moves_its_own_partitions_only(model):
    table = _model_table(model, 8, 4)
    tensors = entries(load_model(model))
    lost = {(t.key, i) for t in tensors for i, p in enumerate(table.partitions(t.key)) if p.server == 2}
    weights = Optimum(8, 3).server_weights  # one CPU machine died
    moves = table.rebalance(zip([0, 1, *range(3, 12)], weights, strict=True))
    assert {(m.key, m.index) for m in moves} == lost
    assert all(m.source == 2 for m in moves)


@pytest.mark.parametrize("model", known_models())
@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 4), (16, 15), (32, 16)])
def test_nothing_moves_where_nothing_changed(model, n, k):
    table = _model_table(model, n, k)
    assert table.rebalance(table.servers) == []


def test_a_new_server_gets_its_share_and_little_else_moves():
    table = _model_table("bert-large", 8, 3)
    weights = Optimum(8, 4).server_weights
    moves = table.rebalance(zip([0, 1, 2, 50, *range(3, 11)], weights, strict=True))
    new_share = table.nbytes * weights[3] / sum(weights)
    assert table.load(50) == pytest.approx(new_share, rel=0.12)
    assert all(move.target == 50 for move in moves)
    for server, weight in table.servers:
        assert table.load(server) <= 1.04 * table.nbytes * weight / sum(weights)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("servers"),
        lambda s: s["servers"].append(s["servers"][0]),
        lambda s: s["tensors"].append(s["tensors"][0]),
        lambda s: s["tensors"][0][3].pop(),
        lambda s: s["tensors"][0][3][0].__setitem__(2, 77),
        lambda s: s["tensors"][0][3].append([8, 0, 0]),
        lambda s: s["tensors"][0].__setitem__(0, "x"),
        lambda s: s.__setitem__("tensors", None),
    ],
)
def test_a_damaged_snapshot_is_refused(damage):
    table = PlacementTable([(0, 1)], 4096)
    table.add([(1, 8, 4)])
    snapshot = table.snapshot()
    damage(snapshot)
    with pytest.raises(ProtocolError, match=r"snapshot|cover"):
        PlacementTable.restore(snapshot)


# ---- real models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("bert-large", 391, 335_141_888),
        ("gpt2", 148, 124_439_808),
    ],
)
def test_models_have_their_published_sizes(model, tensors, parameters):
    shapes = load_model(model)
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for _, shape in shapes) == parameters
    assert len({key_of(name) for name, _ in shapes}) == tensors


def test_models_file_is_what_its_generator_writes():
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("models_generator", root / "benchmarks" / "models.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert (root / "byteps_py" / "placement" / "models.json").read_text() == generator.text()


GRID = [(n, k) for n in (2, 3, 4, 7, 8, 16, 31, 48, 64) for k in sorted({0, 1, n // 4, n // 2, n - 1, n, n + 3})]


@pytest.mark.parametrize("model", known_models())
def test_real_models_are_even_on_every_cluster(model):
    tensors = entries(load_model(model))
    nbytes = sum(t.nbytes for t in tensors)
    for n, k in GRID:
        ours = plan(tensors, n, k, 4 * MB)
        assert sum(ours.held) == nbytes, (n, k)
        assert all(bool(held) == bool(weight) for held, weight in zip(ours.held, ours.optimum.weights, strict=True))
        assert ours.time_over_optimum <= 1.02, (n, k)
        assert ours.fullest <= 1.02, (n, k)
        uncut = sum(len(split(t.nbytes, 4 * MB, 4)) for t in tensors)
        assert ours.partitions <= uncut + 2 * len(ours.optimum.server_weights), (n, k)


@pytest.mark.parametrize("model", known_models())
def test_bounded_loads_beat_plain_hash(model):
    tensors = entries(load_model(model))
    for n, k in GRID:
        ours, plain = plan(tensors, n, k, 4 * MB), plain_hash_plan(tensors, n, k, 4 * MB)
        assert ours.time_over_optimum <= plain.time_over_optimum * Fraction(1001, 1000), (n, k)  # rounding
    few = plan(tensors[:1], 8, 4, 4 * MB), plain_hash_plan(tensors[:1], 8, 4, 4 * MB)
    assert few[0].fullest < few[1].fullest


def test_partitions_of_a_large_cluster_hold_no_more_than_asked():
    for partition_bytes in (64 << 10, 1 << 20):
        table = _model_table("resnet50", 64, 32, partition_bytes)
        parts = [p for t in entries(load_model("resnet50")) for p in table.partitions(t.key)]
        assert max(p.length for p in parts) <= partition_bytes


# ---- a user's own list ---------------------------------------------------------------------------------------


def test_shapes_are_read(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text('[["w", [3, 4]], ["scale", []]]')
    assert read_shapes(str(path)) == [("w", (3, 4)), ("scale", ())]
    assert entries(read_shapes(str(path)), 2) == [(key_of("w"), 24, 2), (key_of("scale"), 2, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "list of"),
        ("[]", "no elements"),
        ('[["w", [0]]]', "no elements"),
        ('[["w", [1]], ["w", [2]]]', "'w' is listed twice"),
        ('[["w", [1]], ["v", [-1]]]', "row 2"),
        ('[["w", [true]]]', "row 1"),
        ('[["w"]]', "row 1"),
        ("[[1, [2]]]", "row 1"),
    ],
)
def test_malformed_shapes_are_refused(tmp_path, text, message):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_shapes(str(path))


def test_missing_files_and_models_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nothing\.json can't be read"):
        read_shapes(str(tmp_path / "nothing.json"))
    with pytest.raises(ConfigurationError, match="resnet50, vgg16, bert-large, gpt2"):
        load_model("alexnet")
