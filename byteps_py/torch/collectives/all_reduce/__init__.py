"""All-reduces: the ways in which the members of a group add their tensors. The router chooses one for every sum.

    AllReduce ┬ ServiceAllReduce    the communication service, and the summation servers behind it (service.py)
              ├ OneShotAllReduce    small: each member sends its tensor to all others (one_shot.py)
              ├ LocalGroupAllReduce large, on GPUs: groups of them add slices, the services their sums (local_groups.py)
              └ QueuedAllReduce     large: each member adds a share of the tensor (large.py), with one of
                                    ├ SharedMemoryAllReduce   on one machine (shared_memory.py)
                                    ├ DirectAllReduce         over connections (direct.py)
                                    └ HierarchicalAllReduce   on each machine, then over connections (hierarchical.py)

The result has the same bits on every way, except with several groups of GPUs on a machine.
NegotiatedAllReduce (negotiated.py) is for sums by name, for which any rank may be late: ranks vote
whether they add a round themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from byteps_py.torch.collectives.work import Call, OperationKind, Work

Tensors = Sequence[torch.Tensor]


class GroupSum(NamedTuple):
    """A sum of the tensors of all members of a group.

    ``contributions``: this member's tensors, concatenated, in the wire's dtype. ``targets``: where their sums go: as
    many tensors of the same sizes, or none; if the ``kind`` scatters, one tensor for this member's even share.
    ``place``: of its kind, on which all members have agreed, or will agree in ``agreement``. ``fallback`` begins the
    same sum through the service. ``is_awaited``: the caller is about to wait.
    """

    call: Call
    kind: OperationKind
    contributions: Tensors
    targets: Tensors
    place: int
    fallback: Callable[[], Work]
    is_awaited: bool = False
    agreement: Work | None = None


class AllReduce(Protocol):
    """One way to add, for one group. Any thread; sums run in the order of the calls."""

    def begin(self, what: GroupSum) -> Work:
        """Begin a sum. Raises UsageError and the error that has ended the group."""

    def finish(self) -> None:
        """Complete all sums under way. Raises StallError."""
