"""States of parameters that other machines hold, read when they are asked for. The training thread calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.shadow import RestorablePart, ShadowReader


class StoredElements:
    """One state of one parameter.

    ``parts``: of the tensor of gradients, in order. ``state``: the state's number; ``first``: the parameter's first
    element in the tensor. ``elements[a:b]`` is a tensor of these elements. A deep copy is a tensor of all.
    """

    def __init__(
        self, reader: ShadowReader, parts: Sequence[RestorablePart], state: int, first: int, shape: tuple[int, ...]
    ) -> None:
        self._reader, self._parts, self._state, self._first = reader, parts, state, first
        self.shape = torch.Size(shape)
        self.dtype = torch.float64 if parts and parts[0].kind.state_itemsize == 8 else torch.float32

    def __getitem__(self, elements: slice) -> torch.Tensor:
        wanted = range(self._first + elements.start, self._first + elements.stop)
        found = torch.empty(len(wanted), dtype=self.dtype, device="cpu")
        view = found.numpy().data.cast("B") if len(wanted) else memoryview(b"")
        for part in self._parts:
            here = range(max(wanted.start, part.elements.start), min(wanted.stop, part.elements.stop))
            if here:
                size = found.element_size()
                place = slice((here.start - wanted.start) * size, (here.stop - wanted.start) * size)
                self._reader.read_into(part, self._state, here, view[place])
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self[0 : self.shape.numel()].view(self.shape)


def elements_of(state: torch.Tensor | StoredElements, elements: slice) -> torch.Tensor:
    """Elements of a parameter's state, which may be stored elsewhere."""
    return state[elements] if isinstance(state, StoredElements) else state.detach().reshape(-1)[elements]
