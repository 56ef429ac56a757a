"""The batch of a step in micro-batches: cut along the first dimension, or given as ``MicroBatches``. Any thread."""

from __future__ import annotations

from typing import Any

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.trees import flatten, unflatten


class MicroBatches(list[Any]):
    """A batch that is cut already: one entry for each micro-batch, a tensor, or tuples, lists and dicts of tensors. The
    entries may differ in shape. ``Pipeline.step`` takes any other batch, also a list, for one value that it cuts.

        loss = pipe.step(MicroBatches([short, longer]), MicroBatches([0, 1]), loss_function)

    >>> cut(MicroBatches(["first", "second"]), 2, "inputs")
    ['first', 'second']
    """


def cut(value: Any, parts: int, what: str) -> list[Any]:
    """``value`` in ``parts`` equal parts: all tensors in it are cut along their first dimension, and other objects go
    to each part. MicroBatches are cut already. Raises UsageError. ``what``: for the message."""
    if isinstance(value, MicroBatches):
        if len(value) != parts:
            raise UsageError(f"{what}: {len(value)} micro-batches were given, and the pipeline has {parts}")
        return list(value)
    tensors, structure = flatten(value)
    for tensor in tensors:
        if not tensor.dim() or tensor.shape[0] % parts:
            size = f"a first dimension of {tensor.shape[0]}" if tensor.dim() else "no dimension"
            raise UsageError(
                f"{what}: a tensor with {size} can't be cut into {parts} equal parts; give a multiple, or "
                "bps.parallel.MicroBatches with one entry for each part"
            )
    pieces = [tensor.chunk(parts) for tensor in tensors]
    return [unflatten([piece[part] for piece in pieces], structure) for part in range(parts)]


def parts_of(batch: Any, micro_batches: int, each: int, what: str) -> list[Any]:
    """The parts of a batch: ``each`` of every micro-batch. Raises UsageError."""
    pieces = cut(batch, micro_batches, what)
    return pieces if each == 1 else [part for piece in pieces for part in cut(piece, each, f"half of the {what}")]
