"""A large tensor is written piece by piece, each byte once and owners in turn; and so its result is taken."""

from __future__ import annotations

import itertools
import random

import pytest

from byteps_py.tensors import DType, TensorSpec
from byteps_py.wire.chunks import CHUNK_BYTES, Arriving, TensorChunks, chunk_at
from byteps_py.worker.core.scatter import pieces

SIZE = 3


def spec(rows: int, scatters: bool) -> TensorSpec:
    return TensorSpec("g", DType.FLOAT32, (rows, 1 << 10), scatters=scatters)


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 1000, 1537, 4096])
def test_every_byte_is_written_once(rows: int, scatters: bool) -> None:
    chunks = sorted(TensorChunks(spec(rows, scatters), SIZE))
    ends = [offset + length for offset, length in chunks]
    assert [offset for offset, _ in chunks] == [0, *ends[:-1]]
    assert ends[-1] == spec(rows, scatters).nbytes
    assert all(length <= CHUNK_BYTES for _, length in chunks)


@pytest.mark.parametrize("limit", [64 << 10, 1 << 20, 3 << 20])
@pytest.mark.parametrize("rows", [1, 3, 1000, 1537, 4096])
def test_a_part_is_there_when_it_is_said_to_be(rows: int, limit: int) -> None:
    """Not before, as far as chunks tell; and parts come in that order."""
    what = spec(rows, True)
    firsts = [what.piece(position, SIZE)[0] * 4 for position in range(SIZE)]
    history, there = [], 0
    written = [0] * SIZE  # of each piece
    for offset, length in TensorChunks(what, SIZE):
        owner = max(position for position in range(SIZE) if firsts[position] <= offset)
        history.append((there, owner, written[owner], length))
        there, written[owner] = there + length, written[owner] + length
    before = 0
    for offset, length, owner in pieces(what, SIZE, limit):
        said = TensorChunks(what, SIZE).written(owner, offset + length - firsts[owner])
        assert before < said
        before = said
        (actual,) = (
            at + offset + length - firsts[owner] - from_
            for at, position, from_, chunk in history
            if position == owner and from_ < offset + length - firsts[owner] <= from_ + chunk
        )
        assert said == actual


@pytest.mark.parametrize("seed", range(30))
def test_a_chunk_of_a_result_is_there_with_its_last_byte(seed: int) -> None:
    rng = random.Random(seed)
    nbytes = rng.randint(1, 5 * CHUNK_BYTES)
    arriving = Arriving(nbytes)
    for _ in range(2):
        cuts = sorted({0, nbytes, *(rng.randint(0, nbytes) for _ in range(rng.randint(0, 12)))})
        ranges = list(itertools.pairwise(cuts))
        rng.shuffle(ranges)
        there: set[int] = set()
        for number, (begin, end) in enumerate(ranges):
            there.update(arriving.add(begin, end - begin))
            come = ranges[: number + 1]
            for chunk in range(-(-nbytes // CHUNK_BYTES)):
                first, length = chunk_at(chunk, nbytes)
                covered = sum(max(0, min(e, first + length) - max(b, first)) for b, e in come)
                assert (chunk in there) == (covered == length)
        arriving.begin()
