"""Whole-parameter owners, segments and strategies (pure), and the formulas and commands about memory."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from support.paper_formulas import bert_sizes, whole_owner_bytes

from byteps_py.cli.__main__ import main
from byteps_py.errors import UsageError
from byteps_py.parallel.mesh_layout import MeshLayout
from byteps_py.parallel.sharding.rank_memory import FusedBuffer, TensorArena, cut_chunks
from byteps_py.parallel.sharding.strategy import Strategy, assign_owners, cut_by_anchors, cut_by_size, sharding_groups
from byteps_py.tools.plan.formulas import stage_table

ROOT = Path(__file__).parents[2]
SIZES = st.lists(st.integers(0, 10**9), min_size=1, max_size=40)


def test_owners_as_paddle_gives_them() -> None:
    assert assign_owners([1, 2, 3, 4], 2) == [0, 0, 0, 1]
    assert assign_owners([4, 4, 4, 4], 4) == [0, 0, 1, 2]
    assert assign_owners([], 3) == []


@given(SIZES, st.integers(1, 12))
def test_every_parameter_has_one_owner(sizes: list[int], ranks: int) -> None:
    owners = assign_owners(sizes, ranks)
    assert len(owners) == len(sizes)
    assert owners == sorted(owners)
    assert {owner in range(ranks) for owner in owners} == {True}
    for rank in range(ranks):  # at most its share, and what was begun before and completes it
        held = [size for size, owner in zip(sizes, owners, strict=True) if owner == rank]
        assert sum(held[:-1]) * ranks <= 2 * sum(sizes) + ranks * max(sizes)


@given(SIZES, st.integers(1, 12))
def test_owners_follow_the_rule_as_written(sizes: list[int], ranks: int) -> None:
    total, given_away, device, expected = sum(sizes), 0, 0, []
    for size in sizes:
        if given_away > Fraction(total * (device + 1), ranks):
            device += 1
        expected.append(device)
        given_away += size
    assert assign_owners(sizes, ranks) == expected


def cut(sizes: list[int], size: float) -> list[list[int]]:
    return [sizes[start:stop] for start, stop in cut_by_size(sizes, size)]


def test_segments_by_size() -> None:
    assert cut([10, 20, 30, 8, 8, 40, 4, 4], 32) == [[10, 20], [30, 8, 8], [40, 4, 4]]
    assert cut([1], 32) == [[1]]
    assert cut([], 32) == []


@given(SIZES, st.integers(1, 10**9))
def test_segments_are_complete_and_minimal(sizes: list[int], size: int) -> None:
    segments = cut(sizes, size)
    assert sum(segments, []) == sizes  # noqa: RUF017
    for segment in segments[1:]:
        assert sum(segment) >= size
    for segment in segments:
        assert sum(segment[1:]) < size


def test_segments_by_anchors() -> None:
    names = ["a.weight", "a.bias", "b.0.weight", "b.1.weight", "c"]
    assert cut_by_anchors(names, ["b.1", "c"]) == [(0, 3), (3, 4), (4, 5)]
    assert cut_by_anchors(names, ["a"]) == [(0, 5)]
    for anchors, text in (
        ([], "needs segment_anchors"),
        (["d"], "'d' names no parameter"),
        (["b", "b.0"], "'b' and 'b.0' begin at the same"),
    ):
        with pytest.raises(UsageError, match=text):
            cut_by_anchors(names, anchors)


@given(st.integers(1, 8), st.integers(1, 8))
def test_groups_are_those_of_the_mesh(sharding: int, dp: int) -> None:
    layout = MeshLayout.of(sharding * dp, {"sharding": sharding, "dp": dp, "tp": 1, "cp": 1, "pp": 1}, "paddle")
    shards, copies = sharding_groups(sharding, dp)
    assert sorted({layout.ranks(rank, ("sharding",)) for rank in range(sharding * dp)}) == shards
    assert sorted({layout.ranks(rank, ("dp",)) for rank in range(sharding * dp)}) == copies


def test_groups_of_the_specification() -> None:
    assert sharding_groups(2, 2) == ([(0, 1), (2, 3)], [(0, 2), (1, 3)])


def test_a_strategy_of_paddle() -> None:
    configs: dict[str, Any] = {
        "sharding_segment_strategy": "segment_broadcast_MB",
        "segment_broadcast_MB": 32,
        "sharding_degree": 2,
        "dp_degree": 2,
    }
    strategy = Strategy(**configs)
    strategy.check_world_size(4)
    assert (strategy.gradient_merge_acc_step, strategy.mp_degree, strategy.optimize_offload) == (1, 1, False)
    with pytest.raises(UsageError, match="sharding_degree 2 · pp_degree 1 · dp_degree 2 = 4, but there are 6 ranks"):
        strategy.check_world_size(6)
    assert strategy.segments(["a", "b"], [2**25, 2**25]) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"sharding_degree": 0}, "sharding_degree=0"),
        ({"dp_degree": 1.5}, "dp_degree=1.5"),
        ({"gradient_merge_acc_step": True}, "gradient_merge_acc_step=True"),
        ({"segment_broadcast_MB": 0}, "segment_broadcast_MB=0"),
        ({"segment_broadcast_MB": float("nan")}, "segment_broadcast_MB=nan"),
        ({"optimize_offload": "yes"}, "optimize_offload='yes'"),
        ({"sharding_segment_strategy": "size"}, "sharding_segment_strategy='size'"),
        ({"sharding_segment_strategy": "segment_anchors"}, "needs segment_anchors"),
        ({"segment_anchors": ["a"]}, "set sharding_segment_strategy"),
        ({"segment_anchors": "a"}, "use a list of names"),
    ],
    ids=str,
)
def test_a_strategy_that_makes_no_sense(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Strategy(**arguments)


# ---- memory ------------------------------------------------------------------------------------------------------


def test_the_vectors_of_zero() -> None:
    rows = stage_table(7.5e9, 64)
    assert [round(row.rank_bytes / 1e9, 2) for row in rows] == [120.0, 31.41, 16.64, 1.88]
    assert [row.sent_elements / 7.5e9 for row in rows] == [2, 2, 2, 3]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 9))
def test_owners_hold_all_bytes_once(sizes: list[int], ranks: int) -> None:
    assert sum(whole_owner_bytes(sizes, ranks)) == 16 * sum(sizes)


def test_bert_large() -> None:
    """The table of docs/howto/sharding.md: the fullest rank beside 16Ψ/N, in MB."""
    sizes = bert_sizes(24, 1024)
    assert sum(sizes) == 335_141_888
    rows = [(ranks, 16 * sum(sizes) / ranks, max(whole_owner_bytes(sizes, ranks))) for ranks in (1, 2, 4, 8, 16)]
    page = (ROOT / "docs" / "howto" / "sharding.md").read_text()
    for ranks, even, fullest in rows:
        assert f"| {ranks} | {even / 1e6:,.0f} | {fullest / 1e6:,.0f} |" in page


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", "--parameters", "7.5B", "--sharding", "64"]) == 0
    text = capsys.readouterr().out
    for gigabytes in ("120.00", "31.41", "16.64", "1.88"):
        assert f"{gigabytes} GB" in text, text
    assert main(["plan", "memory", "--parameters", "7.5e9", "--sharding", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in found] == [0, 1, 2, 3]
    assert [round(row["rank_bytes"] / 1e9, 2) for row in found] == [120.0, 31.41, 16.64, 1.88]


@pytest.mark.parametrize(
    ("parameters", "sharding", "text"),
    [("lots", "2", "--parameters: 'lots'"), ("0", "2", "use numbers above 0"), ("1B", "0", "use numbers above 0")],
)
def test_wrong_numbers(capsys: pytest.CaptureFixture[str], parameters: str, sharding: str, text: str) -> None:
    assert main(["plan", "memory", "--parameters", parameters, "--sharding", sharding]) == 2
    assert text in capsys.readouterr().err


def test_formulas_need_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nimport byteps_py as bps\n"
        "print(bps.sharding.assign_owners([1, 2], 2))\n"
        "from byteps_py.cli.__main__ import main\nsys.exit(main())"
    )
    arguments = ["plan", "memory", "--parameters", "1B", "--sharding", "2"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("[0, 0]\n")


# ---- memory that is used again -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 17))
def test_chunks_hold_all_elements_once(sizes: list[int], capacity: int) -> None:
    found: list[list[int]] = [[] for _ in sizes]
    for chunk in cut_chunks(sizes, capacity):
        assert 0 < sum(part.stop - part.start for part in chunk) <= capacity
        offset = 0
        for part in chunk:
            assert part.offset == offset
            found[part.tensor] += range(part.start, part.stop)
            offset += part.stop - part.start
    assert found == [list(range(size)) for size in sizes]


def test_a_buffer_of_constant_size() -> None:
    """Tensors of any size go through it, in order, and its memory stays the same."""
    device = torch.device("cpu")
    buffer = FusedBuffer(128, device)
    tensors = [torch.arange(100.0, device=device), None, torch.full((3, 3), 7.0, device=device)]
    sizes = [100, 5, 9]
    received = [torch.full((size,), -1.0, device=device) for size in sizes]
    addresses = set()

    def receive(chunk: torch.Tensor, parts: Any) -> None:
        addresses.add(chunk.data_ptr())
        for part in parts:
            values = chunk[part.offset : part.offset + part.stop - part.start]
            received[part.tensor][part.start : part.stop] = values

    buffer.send(tensors, sizes, torch.float32, lambda chunk: None, receive)
    buffer.wait()
    assert torch.equal(received[0], torch.arange(100.0, device=device))
    assert received[1].tolist() == [0.0] * 5
    assert received[2].tolist() == [7.0] * 9
    assert len(addresses) == 2
    with pytest.raises(UsageError, match="too small"):
        FusedBuffer(8, device)


def test_an_arena() -> None:
    arena = TensorArena(256, torch.device("cpu"))
    tensors = [arena.take((16,), torch.float32) for _ in range(4)]
    assert [one.data_ptr() - arena.memory.data_ptr() for one in tensors] == [0, 64, 128, 192]
    with pytest.raises(UsageError, match="has 0 left, and a tensor of shape \\(1,\\) needs 64"):
        arena.take((1,), torch.float32)
    for one in tensors:
        arena.give_back(one)
    assert arena.take((16,), torch.float32).data_ptr() == arena.memory.data_ptr()
    with pytest.raises(UsageError, match="must have been taken"):
        arena.give_back(torch.ones(1, device="cpu"))
