"""The placement table's rules as properties, also while servers join and leave."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st
from support.placement import BATCH, MB, PARTITION_BYTES, WEIGHTS, as_batch, check_table, model_table

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.placement.packing import MIN_CUT_BYTES, min_cut_bytes
from byteps_py.placement.placement_plan import entries, known_models, load_model
from byteps_py.placement.placement_table import MARGIN, PlacementTable
from byteps_py.placement.shares import Optimum
from byteps_py.tensors import PAGE_BYTES, key_of, split

# ---- the table's rules -------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, st.lists(BATCH, max_size=4), PARTITION_BYTES)
def test_every_byte_is_held_once(weights, batches, partition_bytes):
    table = PlacementTable([(100 + i, w) for i, w in enumerate(weights)], partition_bytes)
    known: dict[int, tuple[int, int]] = {}
    for batch in batches:
        table.add(as_batch(batch))
        known |= batch
        check_table(table, known)


@settings(max_examples=80, deadline=None)
@given(WEIGHTS, BATCH.filter(lambda b: any(count for count, _ in b.values())), PARTITION_BYTES)
def test_the_fullest_is_over_its_share_by_less_than_a_small_piece(weights, batch, partition_bytes):
    table = PlacementTable(enumerate(weights), partition_bytes)
    table.add(as_batch(batch))
    shares = {i: Fraction(table.nbytes * w, sum(weights)) for i, w in enumerate(weights) if w}
    # What is shorter than two smallest cuts, and a page, isn't cut; it goes where it weighs least.
    uncut = 2 * min_cut_bytes(partition_bytes, len(shares)) + PAGE_BYTES + 1
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


@pytest.mark.parametrize(
    ("partition_bytes", "servers", "parts"), [(8 * MB, 2, 1), (4 * MB, 2, 2), (MB // 8, 2, 8), (8 * MB, 4, 2)]
)
def test_a_tensor_is_not_cut_where_links_carry_it_in_less_time_than_a_message_costs(partition_bytes, servers, parts):
    table = PlacementTable([(i, 1) for i in range(servers)], partition_bytes)
    table.add([(key_of("bias"), MB, 4)])
    assert len(table.partitions(key_of("bias"))) == parts


def test_tensors_that_enter_one_by_one_stay_even_and_in_few_parts():
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


# ---- servers come and go -----------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.integers(0, 12), st.integers(0, 20), min_size=1, max_size=10).filter(lambda w: any(w.values())),
    st.dictionaries(st.integers(0, 12), st.integers(0, 20), min_size=1, max_size=10).filter(lambda w: any(w.values())),
    BATCH,
)
def test_rebalance_moves_only_what_must(old, new, batch):
    table = PlacementTable(old.items(), MB)
    table.add(as_batch(batch))
    before = {key: table.partitions(key) for key in batch}
    moves = table.rebalance(new.items())
    check_table(table, batch)

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
    table.add(as_batch(first))
    copy = PlacementTable.restore(json.loads(json.dumps(table.snapshot())))
    for each in (table, copy):
        each.rebalance(enumerate(new))
        each.add(as_batch(second))
    assert copy.snapshot() == table.snapshot()
    assert copy.nbytes == table.nbytes


@pytest.mark.parametrize("model", known_models())
def test_a_lost_server_moves_its_own_partitions_only(model):
    table = model_table(model, 8, 4)
    tensors = entries(load_model(model))
    lost = {(t.key, i) for t in tensors for i, p in enumerate(table.partitions(t.key)) if p.server == 2}
    weights = Optimum(8, 3).server_weights  # one CPU machine died
    moves = table.rebalance(zip([0, 1, *range(3, 12)], weights, strict=True))
    assert {(m.key, m.index) for m in moves} == lost
    assert all(m.source == 2 for m in moves)


@pytest.mark.parametrize("model", known_models())
@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 4), (16, 15), (32, 16)])
def test_nothing_moves_where_nothing_changed(model, n, k):
    table = model_table(model, n, k)
    assert table.rebalance(table.servers) == []


def test_a_new_server_gets_its_share_and_little_else_moves():
    table = model_table("bert-large", 8, 3)
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
