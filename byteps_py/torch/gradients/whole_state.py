"""Whole tensors, put together from pieces that lie elsewhere: the state_dict of an optimizer whose states are in parts.

    source                                   a piece                               where
    the ranks of a hosted optimizer          elements that a rank owns, gathered   hosted/states.py
    servers that keep copies of its states   a partition, read when it is needed   held_state
    the owners of a sharded optimizer        a whole tensor, broadcast             sharding/sharded_optimizer.py
    the files of a checkpoint                indices of one dimension              parallel/checkpoint/stored_pieces.py

A source says which elements its pieces have before any is read. Elements that no piece has, or that two pieces have,
are refused by name. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from byteps_py.errors import ProtocolError
from byteps_py.kernels.update_rules import Method, UpdateRule
from byteps_py.shadow import Restorable, RestorablePartition, ShadowReader
from byteps_py.torch.gradients.hosted.rules import MASTER, counts_steps, moment_names


def cover_fault(wanted: range, pieces: Iterable[range], what: str = "elements {} to {}") -> str:
    """The reason why ``pieces`` don't have each of ``wanted`` exactly once; "" if they do.

    >>> cover_fault(range(9), [range(6, 9), range(4)]), cover_fault(range(9), [range(6), range(4, 9)])
    ('elements 4 to 5 are missing', 'elements 4 to 5 are there twice')
    """
    at = wanted.start
    inside = sorted((max(each.start, at), min(each.stop, wanted.stop)) for each in pieces)
    for low, high in [*((low, high) for low, high in inside if low < high), (wanted.stop, wanted.stop)]:
        if low > at:
            return f"{what.format(at, low - 1)} are missing"
        if low < at:
            return f"{what.format(low, min(at, high) - 1)} are there twice"
        at = high
    return ""


def chunks_fault(stored: TensorStorageMetadata) -> str:
    """The reason why the chunks of a tensor in a checkpoint are not the whole tensor; "" if they are. Chunks that
    overlap are refused when they are saved."""
    count, there = stored.size.numel(), sum(chunk.sizes.numel() for chunk in stored.chunks)
    return "" if there == count else f"the files have {there} of its {count} elements"


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Elements of a whole tensor, in order, that one source has; perhaps others before and behind them, too.
    ``read_into(elements, target)`` writes some of them to a flat tensor, in its dtype."""

    elements: range
    read_into: Callable[[range, torch.Tensor], Any]

    @classmethod
    def of(cls, first: int, values: torch.Tensor) -> StatePiece:
        """The piece that begins with element ``first`` and has these ``values``."""
        return cls(
            range(first, first + len(values)),
            lambda elements, target: target.copy_(values[elements.start - first : elements.stop - first]),
        )


class WholeTensor:
    """A tensor whose elements are read from ``pieces`` when they are asked for. ``name``: for errors.

    ``tensor[a:b]`` is a flat tensor of these elements. A deep copy is a torch.Tensor of all. Raises ProtocolError
    unless the pieces have each element once; reading raises what their sources raise.

    >>> parts = [StatePiece.of(2, torch.tensor([2.0, 3.0])), StatePiece.of(0, torch.tensor([0.0, 1.0]))]
    >>> WholeTensor("exp_avg of 'weight'", (2, 2), torch.float64, parts).read()
    tensor([[0., 1.],
            [2., 3.]], dtype=torch.float64)
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[StatePiece]) -> None:
        self.name, self.shape, self.dtype, self._pieces = name, torch.Size(shape), dtype, pieces
        if fault := cover_fault(range(self.shape.numel()), (piece.elements for piece in pieces)):
            raise ProtocolError(f"{name}, of shape {list(shape)}: {fault}")

    def to(self, dtype: torch.dtype) -> WholeTensor:
        """The same tensor in another dtype."""
        return self if dtype is self.dtype else WholeTensor(self.name, self.shape, dtype, self._pieces)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def placeholder(self) -> torch.Tensor:
        """A tensor of this shape and dtype without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __getitem__(self, elements: slice) -> torch.Tensor:
        wanted = range(elements.start, elements.stop)
        found = torch.empty(len(wanted), dtype=self.dtype, device="cpu")
        for piece in self._pieces:
            here = range(max(wanted.start, piece.elements.start), min(wanted.stop, piece.elements.stop))
            if here:
                piece.read_into(here, found[here.start - wanted.start : here.stop - wanted.start])
        return found

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Indices ``start`` to ``stop`` of the first dimension."""
        row = self.shape[1:].numel()
        return self[start * row : stop * row].view(stop - start, *self.shape[1:])

    def read(self) -> torch.Tensor:
        """All elements."""
        return self[0 : self.shape.numel()].view(self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.read()


@dataclass(frozen=True, slots=True)
class WholeState:
    """A parameter and its states: ``tensors``, by their names in a state_dict, the master first.

    ``rule``: of its steps, of which it has made ``steps``. ``dtype``: the parameter's. ``is_rounded``: the parameter is
    not its master, though it has as many bits.
    """

    rule: UpdateRule
    steps: int
    dtype: torch.dtype
    tensors: Mapping[str, WholeTensor]
    is_rounded: bool = False

    @property
    def parameter(self) -> WholeTensor:
        """The parameter: its master, rounded."""
        return self.tensors[MASTER].to(self.dtype)

    @property
    def entries(self) -> dict[str, Any]:
        """The entries of a state_dict, where tensors are WholeTensors. Empty before the first step, except for Adagrad,
        which has states from the beginning."""
        if not self.steps and self.rule.method is not Method.ADAGRAD:
            return {}
        counted = {"step": torch.tensor(float(self.steps), device="cpu")} if counts_steps(self.rule) else {}
        return counted | {
            name: tensor
            for name, tensor in self.tensors.items()
            if name != MASTER or self.is_rounded or tensor.dtype is not self.dtype
        }


# ---- from servers that keep copies -----------------------------------------------------------------------------------


def held_state(reader: ShadowReader, found: Restorable, name: str) -> WholeState:
    """The state of the parameter ``name`` in a step that other machines hold. Raises ProtocolError, LookupError,
    TypeError or ValueError if the step's record is damaged."""
    tensor, first, shape, dtype_name, steps = found.common["params"][name]
    parts, kinds, dtype = found.tensors[tensor], found.common["kinds"][tensor], dtype_named(dtype_name)
    if not parts:  # it has no elements, so no server knows of its steps
        return WholeState(UpdateRule(Method.SGD), 0, dtype, {MASTER: WholeTensor(repr(name), shape, dtype, [])})
    rule = parts[0].kind.rule
    if (needed := [MASTER, *moment_names(rule)]) != kinds:
        raise ProtocolError(f"{name!r} has the states {kinds} in the record, and {needed} on the servers")
    state_dtype = torch.float64 if parts[0].kind.state_itemsize == 8 else torch.float32
    tensors = {}
    for number, kind in enumerate(kinds):
        pieces = [_held_piece(reader, part, number, first) for part in parts]
        tensors[kind] = WholeTensor(f"{kind} of {name!r}", shape, state_dtype, pieces)
    return WholeState(rule, steps, dtype, tensors)


def _held_piece(reader: ShadowReader, part: RestorablePartition, state: int, first: int) -> StatePiece:
    """The elements in ``part`` of the parameter that begins with element ``first`` of its tensor of gradients."""
    dtype = torch.float64 if part.kind.state_itemsize == 8 else torch.float32

    def read_into(elements: range, target: torch.Tensor) -> None:
        values = target if target.dtype is dtype else torch.empty(len(elements), dtype=dtype, device="cpu")
        in_tensor = range(elements.start + first, elements.stop + first)
        reader.read_into(part, state, in_tensor, values.numpy().data.cast("B"))
        if values is not target:
            target.copy_(values)

    return StatePiece(range(part.elements.start - first, part.elements.stop - first), read_into)


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch prints as ``name``. Raises ProtocolError if there is none."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"{name!r} is no dtype")
    return found
