"""The groups that collectives are tried on, and what their members give."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from backend.common import rank, size, values

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
OTHER_DTYPES = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16)
_groups: list[tuple[dist.ProcessGroup, list[int]]] = []


def groups() -> Iterator[tuple[dist.ProcessGroup, list[int], int]]:
    """(group, its ranks, position in it) of the world and of all sub-groups of this rank."""
    if not _groups:
        _groups.append((dist.group.WORLD, list(range(size()))))  # type: ignore[arg-type]
        if size() > 2:
            for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3], [2]):
                group = dist.new_group(ranks)
                if rank() in ranks:
                    _groups.append((group, ranks))
    for group, ranks in _groups:
        yield group, ranks, ranks.index(rank())


def given(ranks: list[int], *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """What each of ``ranks`` gives."""
    return [values(100 * seed + r, *shape, dtype=dtype) for r in ranks]


def pair() -> list[int]:
    """This rank's and its neighbour's, who are one group of ``groups()``."""
    return [rank() & ~1, rank() | 1]


def groups_of_two() -> dist.ProcessGroup:
    return next(group for group, ranks, _ in groups() if ranks == pair())
