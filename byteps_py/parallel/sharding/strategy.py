"""The settings of sharding, with the names of Paddle's ``sharding_configs``. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from byteps_py.errors import UsageError
from byteps_py.parallel.sharding.owners import cut_by_anchors, cut_by_size

_DEGREES = ("mp_degree", "sharding_degree", "pp_degree", "dp_degree")
MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Strategy:
    """How parameters, gradients and states are divided among ranks. Names and defaults are Paddle's, so
    ``Strategy(**sharding_configs)`` reads its dictionary.

    Raises UsageError for a value that makes no sense.

    >>> Strategy(sharding_degree=2, dp_degree=2).check_world_size(8)
    Traceback (most recent call last):
    ...
    byteps_py.errors.UsageError: mp_degree 1 · sharding_degree 2 · pp_degree 1 · dp_degree 2 = 4, but there are 8 ranks
    """

    #: Ranks that share the states of one copy of the model. 1: parameters are not sharded.
    sharding_degree: int = 8
    #: Copies of a sharding group: hybrid data parallelism. Broadcasts stay inside a sharding group, and an owner sums
    #: its gradients with the owners of the other copies.
    dp_degree: int = 1
    #: Tensor-parallel ranks (Megatron's model parallelism).
    mp_degree: int = 1
    #: Workers of a pipeline.
    pp_degree: int = 1
    #: Backward passes of a step. Their gradients are averaged.
    gradient_merge_acc_step: int = 1
    #: Keep the optimizer's states (moments) in host memory between steps: prefetch, compute, offload, by segments.
    optimize_offload: bool = False
    #: A segment closes once it has so many MB (2^20 bytes) of parameters.
    segment_broadcast_MB: float = 32.0  # noqa: N815  Paddle's name
    #: What cuts segments: their size, or ``segment_anchors``.
    sharding_segment_strategy: Literal["segment_broadcast_MB", "segment_anchors"] = "segment_broadcast_MB"
    #: Names of modules or parameters with which segments begin.
    segment_anchors: Sequence[str] = ()
    #: Sum over copies (dp) once, when the optimizer steps, instead of in every backward pass.
    pp_allreduce_in_optimize: bool = False

    def __post_init__(self) -> None:
        for name in (*_DEGREES, "gradient_merge_acc_step"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name}={value!r}: use a whole number of at least 1")
        for name in ("optimize_offload", "pp_allreduce_in_optimize"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name}={getattr(self, name)!r}: use True or False")
        size = self.segment_broadcast_MB
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
            raise UsageError(f"segment_broadcast_MB={size!r}: use a number of megabytes above 0")
        if self.sharding_segment_strategy not in ("segment_broadcast_MB", "segment_anchors"):
            raise UsageError(
                f"sharding_segment_strategy={self.sharding_segment_strategy!r}: use 'segment_broadcast_MB' or "
                "'segment_anchors'"
            )
        if isinstance(self.segment_anchors, str):
            raise UsageError(f"segment_anchors={self.segment_anchors!r}: use a list of names")
        if self.segment_anchors and self.sharding_segment_strategy != "segment_anchors":
            raise UsageError("segment_anchors are given: set sharding_segment_strategy='segment_anchors', too")
        if not self.segment_anchors and self.sharding_segment_strategy == "segment_anchors":
            raise UsageError("sharding_segment_strategy='segment_anchors' needs segment_anchors: names of modules")
        object.__setattr__(self, "segment_anchors", tuple(self.segment_anchors))

    @property
    def world_size(self) -> int:
        """The product of the degrees."""
        return self.mp_degree * self.sharding_degree * self.pp_degree * self.dp_degree

    def check_world_size(self, ranks: int) -> None:
        """Raise UsageError if the degrees do not multiply to ``ranks``."""
        if self.world_size != ranks:
            product = " · ".join(f"{name} {getattr(self, name)}" for name in _DEGREES)
            raise UsageError(f"{product} = {self.world_size}, but there are {ranks} ranks")

    def segments(self, names: Sequence[str], sizes_bytes: Sequence[int]) -> list[tuple[int, int]]:
        """The segments of parameters with these names and sizes: see owners.py. Raises UsageError."""
        if self.sharding_segment_strategy == "segment_anchors":
            return cut_by_anchors(names, self.segment_anchors)
        return cut_by_size(sizes_bytes, self.segment_broadcast_MB * MEGABYTE)
