"""Headers: the 128 bytes that describe a tensor to the other ranks before its data travel. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from byteps_py.errors import MismatchError, ProtocolError, UsageError

Words = npt.NDArray[np.int64]

#: int64 words of a header: kind and number of tensors, dtype, number of dimensions, rows, the other dimensions.
WORDS = 16
NBYTES = WORDS * 8
_FIXED = 4
#: The word with the number of rows.
ROWS = 3
_KIND_BITS = 8
MAX_DIMENSIONS = WORDS - _FIXED + 1

#: The code of a dtype or kind is its index here: only append.
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
    torch.uint32, torch.uint64,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
KINDS = ("allgather", "alltoall")
#: The most rows of one rank, even if they are empty: the rows of all ranks must fit 64 bits, received splits 32.
_MAX_ROWS = {"allgather": 1 << 46, "alltoall": (1 << 31) - 1}


def header(
    kind: str, tensor: torch.Tensor, name: str | None, rows: int | None = None, number_of_tensors: int = 1
) -> list[int]:
    """The header of ``tensor``, or of ``rows`` rows of it.

    number_of_tensors: in its group. Raises UsageError for a tensor without dimensions, with too many dimensions, or of
    an unknown dtype.
    """
    which = f"tensor {name!r}" if name else "the tensor"
    if tensor.dim() == 0:
        raise UsageError(f"{kind}: {which} has no first dimension, along which to concatenate; give tensor.reshape(1)")
    if tensor.dim() > MAX_DIMENSIONS:
        raise UsageError(f"{kind}: {which} has {tensor.dim()} dimensions, more than {MAX_DIMENSIONS}; reshape it")
    if tensor.dtype not in _CODES:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UsageError(f"{kind}: {which} has dtype {tensor.dtype}; supported are {supported}")
    shape = tensor.shape
    words = [
        KINDS.index(kind) + (number_of_tensors << _KIND_BITS),
        _CODES[tensor.dtype],
        tensor.dim(),
        shape[0] if rows is None else rows,
        *shape[1:],
    ]
    return words + [0] * (WORDS - len(words))


def check_numbers(name: str, members: Sequence[int], headers: Words) -> None:
    """Raises MismatchError, the same on every rank, if ranks pass different numbers of tensors.

    headers: [position in members, word], of each rank's first tensor.
    """
    numbers = (headers[:, 0] >> _KIND_BITS).tolist()
    if len(set(numbers)) > 1:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, number in zip(members, numbers, strict=True):
            ranks_by_text.setdefault(f"a group of {number}", []).append(rank)
        raise MismatchError(
            f"tensor {name!r}: Mismatched number of tensors: {_gave(ranks_by_text)}; give the same number on every rank"
        )


def check(kind: str, name: str, members: Sequence[int], headers: Words) -> None:
    """Raises MismatchError, the same on every rank, if ranks pass different dtypes or dimensions, except the first
    dimension. Raises ProtocolError for an impossible number of rows.

    headers: [position in members, tensor, word].
    """
    rows = headers[:, :, ROWS]
    for position, tensor in np.argwhere((rows < 0) | (rows > _MAX_ROWS[kind]))[:1]:
        raise ProtocolError(f"tensor {name!r}: rank {members[position]} announces {rows[position, tensor]} rows")
    differs = headers != headers[:1]
    differs[:, :, ROWS] = False  # rows
    if not differs.any():
        return
    differing = np.argwhere(differs.any(axis=2))
    number = min(int(tensor) for _, tensor in differing)
    there = [int(position) for position, tensor in differing if tensor == number]
    first, other = headers[0, number], headers[there[0], number]
    ranks_by_text: dict[str, list[int]] = {}
    for position, rank in enumerate(members):
        ranks_by_text.setdefault(_describe(headers[position, number]), []).append(rank)
    which = f", number {number} of its group" if headers.shape[1] > 1 else ""
    raise MismatchError(
        f"tensor {name!r}{which}: {_difference(kind, first, other)}: {_gave(ranks_by_text)}; give the same dtype and "
        "the same dimensions, except the first, on every rank"
    )


def rows_of(headers: Words) -> list[list[int]]:
    """The first dimension of each tensor: [position in members][tensor]."""
    rows: list[list[int]] = headers[:, :, ROWS].tolist()
    return rows


def _difference(kind: str, one: Words, other: Words) -> str:
    if one[1] != other[1]:
        return "Mismatched data types"
    return f"Mismatched {kind} tensor shapes"


def _describe(words: Words) -> str:
    kind, dtype, dimensions = int(words[0]) & ((1 << _KIND_BITS) - 1), int(words[1]), int(words[2])
    shape = ", ".join(["*", *(str(int(word)) for word in words[_FIXED : _FIXED + dimensions - 1])])
    kind_name = KINDS[kind] if kind < len(KINDS) else "?"
    dtype_name = str(_DTYPES[dtype]).removeprefix("torch.") if 0 <= dtype < len(_DTYPES) else "?"
    return f"{kind_name} of {dtype_name}[{shape}]"


def _gave(ranks_by_text: dict[str, list[int]]) -> str:
    return "; ".join(f"{_ranks(ranks)} gave {what}" for what, ranks in list(ranks_by_text.items())[:6])


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
