"""The styles by which a plan describes the change of a layer; parallel_plan.py carries them out."""

from __future__ import annotations

from collections.abc import Sequence as Counts
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A linear layer of which each rank computes some of the output features.

    Attributes:
        units: the output features are so many equal blocks that stay whole, as attention heads. The ranks must divide
            them. Fewer key and value heads than ranks are held by several ranks each, which sum their gradients.
        vocabulary: the output features are tokens, and are padded.
        gather_output: all ranks get all output features.
        parts: of a fused layer, whose outputs lie one behind the other: each part is cut by itself. A number of equal
            parts (``units`` are those of each part), or the sizes of the parts: their features, or their numbers of
            heads, which then stay whole. 1: the layer is not fused, or has its parts together for each unit.

    >>> gate_and_up = Column(parts=2)
    >>> gpt2_attention = Column(parts=3, units=12)  # q, k and v, of 12 heads each
    >>> phi3_attention = Column(parts=(32, 8, 8))  # q of 32 heads, k and v of 8 heads
    >>> megatron_attention = Column(parts=1, units=8)  # q, k and v of the first key head, then those of the second, …
    """

    units: int | None = None
    vocabulary: bool = False
    gather_output: bool = False
    parts: int | Counts[int] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A linear layer for which each rank has some of the input features, as behind a Column. ``parts``: as those of a
    Column, if the input is the output of several Columns, one behind the other."""

    parts: int | Counts[int] | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedding of which each rank has the rows of some tokens."""


@dataclass(frozen=True, slots=True)
class SharedInput:
    """A module whose first argument goes to several Columns inside it, and nowhere else: it is communicated once for
    all of them. ``x + f(x)`` belongs outside: the first training step refuses it."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """A layer that treats each token alone, such as a norm, or a parameter by its own name. With sequence parallelism
    it gets a part of the sequence; without, it is one that the plan does not name."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """A layer, or a parameter by its own name, that stays whole on each rank.

    ``sum_gradients``: each rank uses it on heads, features or tokens of its own, as a norm of queries; False: all ranks
    use it on the same values.
    """

    sum_gradients: bool


Style = Column | Row | Embedding | SharedInput | Sequence | Replicated
