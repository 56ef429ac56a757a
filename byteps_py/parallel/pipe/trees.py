"""Values that stages exchange: tensors, and tuples, lists and dicts of such values and of plain Python objects. Any
thread.

A value is described in JSON when it travels: nothing that comes from another rank is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from byteps_py.errors import UsageError


class _Leaf(NamedTuple):
    """The place of a tensor in a structure."""

    place: int


def flatten(value: Any) -> tuple[list[torch.Tensor], Any]:
    """(tensors, structure): ``unflatten`` makes ``value`` of them again. Structures can be compared.

    >>> tensors, structure = flatten({"x": torch.zeros(2), "scale": 3})
    >>> unflatten(tensors, structure)
    {'x': tensor([0., 0.]), 'scale': 3}
    """
    tensors: list[torch.Tensor] = []

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            return _Leaf(len(tensors) - 1)
        return _rebuild(item, walk)

    return tensors, walk(value)


def unflatten(tensors: Sequence[torch.Tensor | None], structure: Any) -> Any:
    """The value of which ``flatten`` made these."""

    def walk(item: Any) -> Any:
        return tensors[item.place] if isinstance(item, _Leaf) else _rebuild(item, walk)

    return walk(structure)


def _rebuild(item: Any, walk: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {key: walk(entry) for key, entry in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(walk, item))
    if isinstance(item, (tuple, list)):
        return type(item)(map(walk, item))
    return item


class TensorFacts(NamedTuple):
    """A tensor without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """The size of the content."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Signature:
    """A value without the content of its tensors: sender and receiver need the same one."""

    structure: Any
    tensors: tuple[TensorFacts, ...]


_PLAIN = (str, int, float, bool, type(None))
_TENSOR, _TUPLE, _LIST, _DICT = "tensor", "tuple", "list", "dict"
_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def described(structure: Any) -> Any:
    """``structure`` as JSON has it. Raises UsageError for objects that it does not know."""
    if isinstance(structure, _Leaf):
        return {_TENSOR: structure.place}
    if type(structure) is dict and all(type(key) in _PLAIN for key in structure):
        return {_DICT: [[key, described(entry)] for key, entry in structure.items()]}
    if type(structure) in (tuple, list):
        return {_TUPLE if type(structure) is tuple else _LIST: [described(entry) for entry in structure]}
    if type(structure) in _PLAIN:
        return structure
    raise UsageError(
        f"a value between stages has a {type(structure).__name__} in it; it may have tensors, tuples, lists, dicts, "
        "str, int, float, bool and None"
    )


def encode(signature: Signature) -> bytes:
    """Encode a value for ``decode`` on another rank. Raises UsageError as ``described`` does."""
    tensors = [[str(one.dtype).removeprefix("torch."), one.shape, one.requires_grad] for one in signature.tensors]
    return json.dumps([described(signature.structure), tensors]).encode()


def decode(text: bytes) -> Signature:
    """The signature that ``encode`` described."""

    def walk(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        ((kind, content),) = item.items()
        if kind == _TENSOR:
            return _Leaf(content)
        if kind == _DICT:
            return {key: walk(entry) for key, entry in content}
        entries = [walk(entry) for entry in content]
        return tuple(entries) if kind == _TUPLE else entries

    structure, tensors = json.loads(text)
    facts = (TensorFacts(_DTYPES[dtype], tuple(shape), requires) for dtype, shape, requires in tensors)
    return Signature(walk(structure), tuple(facts))
