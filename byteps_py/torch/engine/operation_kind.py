"""What an operation of a group is: all members must call the same."""

from __future__ import annotations

from dataclasses import dataclass

from byteps_py.tensors import DType, Op


@dataclass(frozen=True, slots=True)
class OperationKind:
    """The facts on which members must agree. ``root``: a global rank, or -1. ``shape``: of the contribution."""

    op: Op
    dtype: DType
    shape: tuple[int, ...]
    average: bool = False
    root: int = -1
    scatters: bool = False
    terms: str = ""

    def __str__(self) -> str:
        op = "average" if self.average else self.op.name.lower()
        op = f"scattered {op}" if self.scatters else op
        root = f" from rank {self.root}" if self.root >= 0 else ""
        terms = f" ({self.terms})" if self.terms else ""
        return f"{op} of {self.dtype.name.lower()}{list(self.shape)}{root}{terms}"
