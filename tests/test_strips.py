"""In which order a rank writes a large tensor: each byte once, and owners in turn."""

from __future__ import annotations

import pytest

from byteps_py.strips import STRIP_BYTES, Strips
from byteps_py.tensors import DType, TensorSpec
from byteps_py.worker.scatter import pieces

SIZE = 3


def spec(rows: int, scatters: bool) -> TensorSpec:
    return TensorSpec("g", DType.FLOAT32, (rows, 1 << 10), scatters=scatters)


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 1000, 1537, 4096])
def test_every_byte_is_written_once(rows: int, scatters: bool) -> None:
    strips = sorted(Strips(spec(rows, scatters), SIZE))
    ends = [offset + length for offset, length in strips]
    assert [offset for offset, _ in strips] == [0, *ends[:-1]]
    assert ends[-1] == spec(rows, scatters).nbytes
    assert all(length <= STRIP_BYTES for _, length in strips)


@pytest.mark.parametrize("limit", [64 << 10, 1 << 20, 3 << 20])
@pytest.mark.parametrize("rows", [1, 3, 1000, 1537, 4096])
def test_a_part_is_there_when_it_is_said_to_be(rows: int, limit: int) -> None:
    """Not before, as far as strips tell; and parts come in that order."""
    what = spec(rows, True)
    firsts = [what.piece(position, SIZE)[0] * 4 for position in range(SIZE)]
    history, there = [], 0
    written = [0] * SIZE  # of each piece
    for offset, length in Strips(what, SIZE):
        owner = max(position for position in range(SIZE) if firsts[position] <= offset)
        history.append((there, owner, written[owner], length))
        there, written[owner] = there + length, written[owner] + length
    before = 0
    for offset, length, owner in pieces(what, SIZE, limit):
        said = Strips(what, SIZE).written(owner, offset + length - firsts[owner])
        assert before < said
        before = said
        (actual,) = (
            at + offset + length - firsts[owner] - from_
            for at, position, from_, strip in history
            if position == owner and from_ < offset + length - firsts[owner] <= from_ + strip
        )
        assert said == actual
