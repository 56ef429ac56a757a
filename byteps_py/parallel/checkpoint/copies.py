"""Checks, by checksums, that the ranks' copies of a model are still equal. One thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from byteps_py.errors import MismatchError
from byteps_py.parallel.checkpoint.contents import MODEL, ModelContents
from byteps_py.parallel.checkpoint.ranks import Ranks
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.wording import ranks_text

#: A part of a tensor, as a name for people, and the checksum of its values.
_Sums = dict[str, int]


def check_copies(model: nn.Module | Pipeline, group: dist.ProcessGroup | None = None) -> None:
    """Raise MismatchError, on all ranks, if parameters or buffers differ that should be equal on several ranks.

    Ranks that hold the same part of the same parameter should: data-parallel copies, ranks that tensor parallelism does
    not cut a parameter for, copies of a pipeline's stages. The first parameter that differs is named, with the ranks.
    ``checkpoint.save`` does the same for parameters. Statistics of BatchNorm differ between data-parallel copies until
    they are broadcast; if that is meant, save and load go on.

    Args:
        model: of this rank: cut by ``tensor.parallelize``, FSDP2, both or none; or a pipeline. All ranks call it.
        group: the ranks that compare; default: all.

    >>> check_copies(nn.Linear(2, 2))  # one process has one copy
    """
    ranks = Ranks.of(group)
    contents = ranks.together(lambda: ModelContents.of(model))
    found = ranks.together(lambda: _sums(contents, contents.values))
    if (text := _first_difference(ranks, found)) is not None:
        raise MismatchError(
            f"copies of the model differ: {text}. A gradient was not summed over all ranks that hold it, or a rank has "
            "changed or loaded its values alone. Load a checkpoint, or broadcast the values of one rank"
        )


def check_saved(ranks: Ranks, contents: ModelContents) -> str | None:
    """Check parameters as ``check_copies`` does. Returns a sentence about the first buffer that differs; None if none
    does."""
    sums = ranks.together(lambda: _sums(contents, contents.parameters))
    if (text := _first_difference(ranks, sums)) is not None:
        raise MismatchError(
            f"copies of the model differ: {text}. Nothing was saved: nobody knows which is right. A gradient was not "
            "summed over all ranks that hold it, or a rank has changed or loaded its values alone"
        )
    return _first_difference(ranks, ranks.together(lambda: _sums(contents, contents.buffers)))


def _sums(contents: ModelContents, names: Iterable[str]) -> _Sums:
    found: _Sums = {}
    chosen = set(names)
    for name, value in contents.values.items():
        if name in chosen and isinstance(value, torch.Tensor):
            what = "parameter" if name in contents.parameters else "buffer"
            for key, one in contents.pieces(MODEL + name, name, value).items():
                part = _region_text(key.removeprefix(MODEL + name)) + _chunk_text(one)
                found[f"{what} {name!r}{part}"] = _checksum(one)
    return found


def _region_text(region: str) -> str:
    if not region:
        return ""
    dim, start, stop = region.removeprefix("@").split(":")
    return f" (indices {start} to {int(stop) - 1} of dimension {dim})"


def _chunk_text(value: torch.Tensor) -> str:
    """The part of a DTensor that this rank has, in words."""
    if not isinstance(value, DTensor):
        return ""
    offsets = [list(one.offsets) for one in value.__create_chunk_list__()]
    return f" (from {offsets} on)"


def _checksum(value: torch.Tensor) -> int:
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    flat = local.detach().contiguous().cpu().reshape(-1)
    seed = xxhash.xxh3_64_intdigest(f"{tuple(local.shape)} {local.dtype}".encode())
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy(), seed=seed) if flat.numel() else seed


def _first_difference(ranks: Ranks, sums: Mapping[str, int]) -> str | None:
    """The text about the first difference, the same on all ranks."""
    if ranks.size == 1:
        return None
    keys = {xxhash.xxh3_64_intdigest(name.encode()): name for name in sums}
    own = np.array([list(keys), list(sums.values())], dtype=np.uint64)
    gathered = ranks.gathered_on_first(own)
    found: tuple[int, dict[int, list[int]]] | None = None
    if gathered is not None and ranks.rank == 0:
        found = _compare(gathered)
    found = ranks.from_first(found)
    if found is None:
        return None
    key, holders = found
    name = next(one for one in ranks.gathered(keys.get(key)) if one is not None)
    groups = [
        f"{ranks_text(ranks.names[place] for place in places)} {'have' if len(places) > 1 else 'has'} {value:016x}"
        for value, places in holders.items()
    ]
    return f"{name}: {', '.join(groups)} (checksums)"


def _compare(gathered: Iterable[Any]) -> tuple[int, dict[int, list[int]]] | None:
    """The first key with different values, and the ranks that have each."""
    values: dict[int, int] = {}
    different: int | None = None
    arrays = list(gathered)
    order: dict[int, int] = {}
    for array in arrays:
        for key, value in zip(array[0].tolist(), array[1].tolist(), strict=True):
            order.setdefault(key, len(order))
            is_other = values.setdefault(key, value) != value
            if is_other and (different is None or order[key] < order[different]):
                different = key
    if different is None:
        return None
    holders: dict[int, list[int]] = {}
    for rank, array in enumerate(arrays):
        for key, value in zip(array[0].tolist(), array[1].tolist(), strict=True):
            if key == different:
                holders.setdefault(value, []).append(rank)
    return different, holders
