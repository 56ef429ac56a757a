"""Spans: when each rank came to each operation between ranks, and when it went on. Columns, a row for each.

A collective has one row for each rank of its group. A message has two: the sender's, whose operation begins with
"send", and the receiver's, which begins with "recv", in a group of these two ranks. Times are seconds on the clock of
the rank: those of two ranks are never compared. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]

#: Dimensions of a mesh from the outermost to the innermost: communication is rarest in the first.
DIMENSIONS = ("dp", "pp", "cp", "tp")
#: Their names elsewhere.
_ALIASES = {
    "dp": ("dp", "data", "replicate", "shard", "fsdp", "hsdp", "ddp", "sharding"),
    "pp": ("pp", "pipe", "pipeline", "stage"),
    "cp": ("cp", "context", "sequence", "sp"),
    "tp": ("tp", "tensor", "model", "mp"),
}


def dimension_of(description: str) -> str:
    """The dimension that a group's description names; empty if it names none.

    >>> dimension_of("mesh_tp"), dimension_of("DATA_PARALLEL_GROUP"), dimension_of("default_pg")
    ('tp', 'dp', '')
    """
    words = "".join(letter if letter.isalpha() else " " for letter in description.lower()).split()
    for dimension, aliases in _ALIASES.items():
        if any(word in aliases for word in words):
            return dimension
    return ""


class SpanGroup(NamedTuple):
    """Ranks that communicate with each other. ``dimension``: of the mesh; empty if it is not known."""

    name: str
    dimension: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spans:
    """See the module.

    Attributes:
        groups: the rows' groups.
        operations: the names of the rows' operations.
        step: of the training; any numbers that are the same on all ranks.
        group: index into ``groups``.
        rank: whose row it is.
        sequence: number of the operation in its group and direction, the same on all of its ranks.
        operation: index into ``operations``.
        bytes: of the rank's tensor.
        enqueued_s: when the program called it.
        started_s: when the rank was there.
        ended_s: when it had the result.
        hosts: the machines of ranks, as far as they are known.
        notes: what is missing, and what could not be read, in sentences.
        has_own_times: the time between two rows of a rank is its own work. Not so where programs only enqueue.
    """

    groups: Sequence[SpanGroup]
    operations: Sequence[str]
    step: Integers
    group: Integers
    rank: Integers
    sequence: Integers
    operation: Integers
    bytes: Integers
    enqueued_s: Times
    started_s: Times
    ended_s: Times
    hosts: Mapping[int, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    has_own_times: bool = True


_COLUMNS = ("step", "group", "rank", "sequence", "operation", "bytes", "enqueued_s", "started_s", "ended_s")


def select(spans: Spans, rows: npt.NDArray[np.bool_] | Integers, notes: Sequence[str] = ()) -> Spans:
    """Some rows, with more notes."""
    from dataclasses import replace

    columns = {name: getattr(spans, name)[rows] for name in _COLUMNS}
    return replace(spans, **columns, notes=(*spans.notes, *notes))
