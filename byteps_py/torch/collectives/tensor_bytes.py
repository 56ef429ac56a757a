"""Tensors as bytes, or as one flat tensor: contributions and results. Pure; any thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from byteps_py.errors import UsageError
from byteps_py.session.peers import Span
from byteps_py.torch.collectives.dtypes import as_bytes, check_result, is_plain

#: The tensors sent to each member, or received from it, concatenated.
Pieces = Sequence[Sequence[torch.Tensor]]


class ResultBuffer:
    """``memory``: flat uint8, for the bytes of a result. It is the tensor's own memory, or, if that has gaps, a
    buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        check_writable(tensor)
        self._tensor = tensor.detach()
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self._beside = self._tensor if is_plain else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.memory = self._beside.view(-1).view(torch.uint8)

    def deliver(self) -> None:
        """All bytes have arrived: copy them to the tensor, if they are in a buffer."""
        if self._beside is not self._tensor:
            self._tensor.copy_(self._beside)


def check_writable(tensor: torch.Tensor) -> None:
    """Raises UsageError for a tensor of which several elements have one address: see check_result."""
    check_result(tensor, None, takes_views=True)


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of all tensors. Raises UsageError if they are on several devices."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UsageError(f"tensors of one operation lie on {', '.join(sorted(map(str, devices)))}; move them to one")
    return devices.pop() if devices else torch.device("cpu")


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order, as flat uint8. A copy if memory does not hold them so."""
    return as_bytes(tensor.resolve_conj().resolve_neg())


def nbytes_of(tensor: torch.Tensor) -> int:
    """The size of the elements in bytes."""
    return tensor.numel() * tensor.itemsize


def span(tensor: torch.Tensor) -> Span:
    """The span of a plain tensor."""
    return tensor.data_ptr(), tensor.nbytes


def spans(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """The spans of plain tensors."""
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def total(spans: Sequence[Span]) -> int:
    """The total size in bytes."""
    return spans[0][1] if len(spans) == 1 else sum([nbytes for _, nbytes in spans])


def contiguous(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, copied where they are not contiguous in the host's memory."""
    return [tensor if is_plain(tensor) else tensor.contiguous() for tensor in tensors]


def concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors as one flat tensor."""
    return tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])


def split_into(whole: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of a flat tensor to ``targets``."""
    first = 0
    for target in targets:
        target.copy_(whole[first : first + target.numel()].view(target.shape))
        first += target.numel()


def end_to_end(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Each tensor with its offset in elements, if all are concatenated."""
    places = []
    first = 0
    for tensor in tensors:
        places.append((first, tensor))
        first += tensor.numel()
    return places


def places_of(pieces: Pieces) -> list[tuple[int, torch.Tensor]]:
    """``end_to_end`` of all members' tensors."""
    return end_to_end(list(itertools.chain.from_iterable(pieces)))


def ranges_of(pieces: Pieces) -> tuple[tuple[int, int], ...]:
    """(offset, length) in elements of each member's tensors, if all are concatenated."""
    ranges = []
    first = 0
    for piece in pieces:
        count = sum(tensor.numel() for tensor in piece)
        ranges.append((first, count))
        first += count
    return tuple(ranges)
