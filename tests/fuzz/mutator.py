"""Makes inputs: well-formed ones, with some bytes changed in the ways that break parsers."""

from __future__ import annotations

import random
from collections.abc import Sequence

_EDGES = (7, 8, 15, 16, 31, 32, 63, 64)  # of whole numbers, in bits
_NUMBERS = (0, 1, 2, 1 << 40, *((1 << bits) - by for bits in _EDGES for by in (0, 1)))


class Mutator:
    """``seeds``: well-formed inputs. One thread."""

    def __init__(self, seeds: Sequence[bytes], seed: int) -> None:
        self._seeds = [bytes(each) for each in seeds]
        self._random = random.Random(seed)

    def next(self) -> bytes:
        rnd = self._random
        if rnd.random() < 0.05:
            return rnd.randbytes(rnd.choice((0, 1, 2, 8, 76, 77, 100, 300)))
        data = bytearray(rnd.choice(self._seeds))
        for _ in range(rnd.choice((0, 1, 1, 1, 2, 2, 3, 8))):
            self._change(data)
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        rnd = self._random
        at = rnd.randrange(len(data) + 1)
        how = rnd.random()
        if how < 0.3 and at < len(data):
            data[at] ^= 1 << rnd.randrange(8)
        elif how < 0.5 and at < len(data):
            data[at] = rnd.randrange(256)
        elif how < 0.75:
            width = rnd.choice((1, 2, 4, 8))
            number = (rnd.choice(_NUMBERS) & ((1 << 8 * width) - 1)).to_bytes(width, rnd.choice(("little", "big")))
            data[at : at + width] = number
        elif how < 0.82:
            del data[at:]
        elif how < 0.88:
            del data[at : at + rnd.randrange(1, 9)]
        elif how < 0.94:
            data[at:at] = rnd.randbytes(rnd.randrange(1, 9))
        else:  # the end of another
            other = rnd.choice(self._seeds)
            data[at:] = other[rnd.randrange(len(other) + 1) :]
