"""torch's dtypes and those of the wire: which correspond, and checks of tensors: of the user's, and of other ranks'
messages about sparse ones (COO), before they are used. Any thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from byteps_py.errors import MismatchError, UsageError
from byteps_py.tensors import DType

WIRE = {
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.uint8: DType.UINT8,
}
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SUPPORTED = ", ".join(dtype.name.lower() for dtype in DType)


def wire_dtype(dtype: torch.dtype, name: str | None) -> DType:
    """The wire's code of ``dtype``. Raises UsageError that names the supported dtypes."""
    try:
        return WIRE[dtype]
    except KeyError:
        who = f"tensor {name!r}" if name else "the tensor"
        raise UsageError(f"{who} has dtype {dtype}, which can't be reduced; supported are {SUPPORTED}") from None


def check_are_tensors(tensors: Iterable[object], name: str | None) -> None:
    """Raises UsageError for an object that is no tensor."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            who = f"tensor {name!r}" if name else "the tensor"
            raise UsageError(
                f"{who} is a {type(tensor).__name__}, and only a torch.Tensor can be communicated: "
                "torch.as_tensor() makes one of numbers, broadcast_object() and allgather_object() take any object"
            )


def check_dense(tensor: torch.Tensor, name: str | None) -> None:
    """Raises UsageError for an object that is no tensor, for a sparse one, and for one on a device other than cpu and
    cuda."""
    check_are_tensors((tensor,), name)
    who = f"tensor {name!r}" if name else "the tensor"
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{who} is sparse ({tensor.layout}), and only dense tensors can be reduced; use sparse=False in the "
            "layer that made it, or tensor.to_dense()"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{who} lies on device {tensor.device}; supported are cpu and cuda")


def check_result(tensor: torch.Tensor, name: str | None, takes_views: bool = False) -> None:
    """Raises UsageError for a tensor to which no result can be written: several elements have one address, or (unless
    ``takes_views``) it is a negated or conjugated view. Checked before the operation begins, because the other ranks
    would wait for the rest of it."""
    if tensor.layout is not torch.strided:
        return  # reported by check_dense, where sparse tensors are not supported
    is_view = not takes_views and (tensor.is_neg() or tensor.is_conj())
    if not is_view and (tensor.is_contiguous() or not _overlaps(tensor)):
        return
    who = f"tensor {name!r}" if name else "the tensor"
    if is_view:
        what = "a negated view" if tensor.is_neg() else "a conjugated view"
        raise UsageError(
            f"{who} is {what} of another one, to which no result can be written; give the operation a tensor of its "
            "own: tensor.resolve_neg().resolve_conj() or tensor.clone()"
        )
    raise UsageError(
        f"{who}, of shape {list(tensor.shape)} and strides {list(tensor.stride())}, has several elements at one "
        "address, so that no result can be written to it; call .contiguous() or .clone() before the operation"
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """True if several elements have one address."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                break  # it may overlap
            reach += (size - 1) * stride
    else:
        return False
    if torch._debug_has_internal_overlap(tensor) == 1:
        return True
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return len(places.unique()) < tensor.numel()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, as flat uint8. Shares memory with a contiguous ``tensor``."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a dtype of the same width that the wire has, for operations that only copy bits. Shares memory
    unless ``tensor`` is a conjugated view."""
    tensor = tensor.detach()
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype in WIRE else tensor.view(_SAME_WIDTH[tensor.itemsize])


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the bytes lie in the host's memory, in logical order and without gaps."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


# ---- sparse tensors: torch does not check indices, and with one outside of the shape it would write outside of its
# memory

_REMEDY = "give the same shape on every rank"


def check_dimensions(what: str, rank: int, dimensions: int, shape: Sequence[int]) -> None:
    """Raises MismatchError if a tensor of ``shape`` can't have this many sparse dimensions."""
    if not 0 <= dimensions <= len(shape):
        raise MismatchError(
            f"{what}: rank {rank} has {dimensions} sparse dimensions, of a shape {list(shape)}; {_REMEDY}"
        )


def check_count(what: str, rank: int, count: int, dimensions: int, shape: Sequence[int]) -> None:
    """Raises MismatchError if a tensor of ``shape`` can't have this many elements. Call it before memory is
    allocated."""
    most = math.prod(shape[:dimensions])
    if not 0 <= count <= most:
        raise MismatchError(
            f"{what}: rank {rank} has {count} elements in {dimensions} sparse dimensions, where a shape {list(shape)} "
            f"has at most {most}; {_REMEDY}"
        )


def check_indices(what: str, rank: int, indices: torch.Tensor, shape: Sequence[int]) -> None:
    """``indices``: [dimension, element]. Raises MismatchError if one is outside of ``shape``."""
    if not indices.numel():
        return
    least, most = torch.aminmax(indices, dim=1)
    for dimension, (low, high) in enumerate(zip(least.tolist(), most.tolist(), strict=True)):
        if low < 0 or high >= shape[dimension]:
            raise MismatchError(
                f"{what}: rank {rank} has index {low if low < 0 else high} in dimension {dimension} of a shape "
                f"{list(shape)}; {_REMEDY}"
            )
