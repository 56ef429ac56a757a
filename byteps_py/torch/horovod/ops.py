"""Reduce operations: Average, Sum, Min, Max, Product and Adasum. Any thread.

BytePS has a module of this name with the functions of the package; ``from …ops import push_pull`` works here too.
"""

from __future__ import annotations

import enum
import importlib
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Op
from byteps_py.torch.collectives.dtypes import check_are_tensors

#: The functions in BytePS's module of this name. They are defined in api.py, which imports this module.
_BYTEPS_FUNCTIONS = frozenset(
    {
        *("init", "shutdown", "suspend", "resume", "rank", "size", "local_rank", "local_size"),
        *("declare", "poll", "synchronize", "get_pushpull_speed"),
        *("push_pull", "push_pull_async", "push_pull_inplace", "push_pull_async_inplace"),
    }
)


def __getattr__(name: str) -> Any:
    if name not in _BYTEPS_FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("byteps_py.torch"), name)


class ReduceOp(enum.Enum):
    """How an operation combines the ranks' tensors."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    @property
    def wire_op(self) -> Op:
        """The service's operation. Raises UsageError for Adasum, which takes several of them."""
        if self is ReduceOp.ADASUM:
            raise UsageError("op=Adasum is not supported here, only in allreduce and DistributedOptimizer")
        return Op.SUM if self is ReduceOp.AVERAGE else Op[self.name]


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


def which_op(average: bool, op: ReduceOp | None) -> ReduceOp:
    """The operation that the two arguments of push_pull name. Raises UsageError if they contradict each other."""
    if op is None:
        return Average if average else Sum
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op must be one of Average, Sum, Min, Max, Product, got {op!r}")
    if op is Average and not average:
        raise UsageError("average=False contradicts op=Average; give one of them")
    return op


def tensor_list(tensors: Any) -> list[torch.Tensor]:
    """The tensors of a group. Raises UsageError for a single tensor, whose rows are not a group, and for what is no
    tensor."""
    if isinstance(tensors, torch.Tensor):
        raise UsageError("a group is a list of tensors, got one tensor")
    check_are_tensors(tensors, None)
    return list(tensors)
