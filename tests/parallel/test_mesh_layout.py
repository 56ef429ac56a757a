"""The places of ranks in a mesh: pure arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from byteps_py.errors import UsageError
from byteps_py.parallel.mesh_layout import LLAMA_ORDER, PADDLE_ORDER, MeshLayout, span_warning


def layout_of(world: int, order: Any = LLAMA_ORDER, **sizes: int) -> MeshLayout:
    return MeshLayout.of(world, {"tp": 1, "cp": 1, "pp": 1, "dp": None, **sizes}, order)


def test_dp_is_the_rest_unless_another_size_is() -> None:
    assert layout_of(8, tp=2).sizes == (2, 1, 1, 4)
    assert layout_of(8, cp=2, pp=-1).sizes == (1, 2, 4, 1)
    assert layout_of(8, "paddle", sharding=-1, tp=2).size("sharding") == 4
    with pytest.raises(UsageError, match=r"cp=3 does not divide the 8 ranks, so pp=-1 has no size"):
        layout_of(8, cp=3, pp=-1)


def test_llama_3_in_131k_sequences() -> None:
    layout = layout_of(16384, tp=8, cp=16, pp=16)
    assert layout.sizes == (8, 16, 16, 8)
    assert layout.ranks(0, ("tp",)) == tuple(range(8))
    assert layout.ranks(0, ("cp",)) == tuple(range(0, 128, 8))
    assert layout.ranks(0, ("pp",)) == tuple(range(0, 2048, 128))
    assert layout.ranks(0, ("dp",)) == tuple(range(0, 16384, 2048))
    assert len(layout.ranks(5000, ("dp", "cp"))) == 128


def test_paddle_s_groups() -> None:
    layout = layout_of(4, "paddle", sharding=2)
    assert layout.order == PADDLE_ORDER
    assert layout.groups(("sharding",)) == [(0, 1), (2, 3)]
    assert layout.groups(("dp",)) == [(0, 2), (1, 3)]
    assert layout.groups(("dp", "sharding")) == [(0, 1, 2, 3)]


@pytest.mark.parametrize("order", ["llama", "paddle", *itertools.islice(itertools.permutations(LLAMA_ORDER), 0, 24, 5)])
@pytest.mark.parametrize("sizes", [{"tp": 2, "cp": 3, "pp": 2}, {"tp": 4, "dp": 3}, {"cp": 12}])
def test_groups_divide_the_ranks(order: Any, sizes: dict[str, int]) -> None:
    layout = layout_of(24, order, **{"pp": -1, "dp": 2, **sizes} if "pp" not in sizes else sizes)
    for count in (1, 2, 3):
        for names in itertools.combinations(layout.order, count):
            groups = layout.groups(names)
            assert sorted(itertools.chain(*groups)) == list(range(24))
            assert {len(group) for group in groups} == {math.prod(map(layout.size, names))}
            for group in groups:
                for rank in group:
                    assert layout.ranks(rank, names) == group
                others = [{k: v for k, v in layout.coordinates(rank).items() if k not in names} for rank in group]
                assert all(other == others[0] for other in others)
    assert [layout.rank_at(layout.coordinates(rank)) for rank in range(24)] == list(range(24))


@pytest.mark.parametrize(
    ("world", "arguments", "texts"),
    [
        (8, {"tp": 3}, ["tp=3 does not divide the 8 ranks", "tp=1 or 2 or 4 or 8", "a multiple of 3 ranks"]),
        (8, {"tp": 2, "pp": 2, "dp": 4}, ["tp=2 · pp=2 · dp=4 = 16", "8 ranks", "tp=1; pp=1; dp=2", "start 16 ranks"]),
        (8, {"tp": 3, "cp": 3, "dp": 4}, ["tp=3 · cp=3 · dp=4 = 36", "change two sizes or more"]),
        (2, {"dp": 1}, ["a mesh of size 1, but there are 2 ranks", "dp=2"]),
        (8, {"tp": -1, "dp": -1}, ["tp=-1, dp=-1", "only one size"]),
        (8, {"pp": 0}, ["pp=0", "at least 1"]),
        (8, {"cp": 2.0}, ["cp=2.0", "whole number"]),
        (8, {"tp": True}, ["tp=True", "whole number"]),
        (8, {"sharding": 2}, ["no 'sharding'", "order='paddle'"]),
        (8, {"order": "megatron"}, ["order='megatron'", "'paddle'"]),
        (8, {"order": ("tp", "pp", "dp")}, ["order=('tp', 'pp', 'dp')", "cp"]),
        (8, {"order": ("tp", "tp", "cp", "pp", "dp")}, ["once"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(world: int, arguments: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        layout_of(world, **arguments)
    assert all(text in str(caught.value) for text in texts), str(caught.value)


@pytest.mark.parametrize(("names", "text"), [((), "once"), (("tp", "tp"), "once"), (("ep",), "no dimension 'ep'")])
def test_names_that_are_no_group(names: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        layout_of(8, tp=2).ranks(0, names)


def test_a_rank_outside() -> None:
    with pytest.raises(UsageError, match="rank 8 is not in a mesh of ranks 0 to 7"):
        layout_of(8).coordinates(8)


def test_groups_that_span_machines() -> None:
    """Machines need not have equally many ranks."""
    layout = layout_of(8, tp=2)
    assert layout.spanning("tp", [0, 0, 0, 0, 1, 1, 1, 1]) == ()
    assert layout.spanning("tp", [0, 0, 0, 1, 1, 1, 1, 1]) == (2, 3)
    assert layout.spanning("pp", list(range(8))) == ()
    text = span_warning((2, 3), [0, 0, 0, 1])
    assert "ranks 2-3 spans 2 machines" in text
    assert "8·b·s·h·(t-1)/t = 4·b·s·h words" in text


def test_a_picture_of_16_ranks_fits_on_a_page() -> None:
    lines = layout_of(16, tp=4, cp=2, pp=2).picture([rank // 4 for rank in range(16)]).splitlines()
    assert lines == [
        "16 ranks: tp 4, cp 2, pp 2, dp 1, from inner to outer",
        "           cp 0                    cp 1",
        "           tp 0  tp 1  tp 2  tp 3  tp 0  tp 1  tp 2  tp 3",
        "dp 0 pp 0     0     1     2     3     4     5     6     7   machines 0-1",
        "dp 0 pp 1     8     9    10    11    12    13    14    15   machines 2-3",
    ]


@pytest.mark.parametrize("sizes", [{"tp": 8, "cp": 16, "pp": 16}, {"tp": 1024}, {"pp": 16384, "dp": 1}, {}], ids=str)
def test_a_picture_of_a_large_mesh_is_cut(sizes: dict[str, int]) -> None:
    lines = layout_of(16384, **sizes).picture().splitlines()
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 130
    assert "…" in "".join(lines)
