"""BYTEPS_NONFINITE=raise for collectives that add: checks a rank's input before it is sent.

Like NCCL's TORCH_NCCL_NAN_CHECK. A check inside the sum would cost nothing, but sums that members of one machine add
themselves, and the pieces of a scattered sum, are seen by one member only, and all members must learn the guilty rank.
The rank with the values raises and, if the script does not catch the error, ends; then the other ranks raise an error
with its message. Minima, maxima and products are not checked: they may be infinite on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from byteps_py.errors import NonFiniteInputError, UnsupportedError
from byteps_py.tensors import NonFinite, Op
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.group_collectives import Reduction
from byteps_py.torch.collectives.members import Members


def check_mode(mode: NonFinite) -> None:
    """Raises UnsupportedError for BYTEPS_NONFINITE=skip."""
    if mode is NonFinite.SKIP:
        raise UnsupportedError(
            "a collective of torch.distributed can't leave out a step, which is your optimizer's: use "
            "BYTEPS_NONFINITE=raise or allow, or byteps_py's DistributedOptimizer without init_process_group"
        )


class InputCheck:
    """The check of one group. Threads call it in the order of the group's operations."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._wanted = nonfinite.wanted(members.context) is NonFinite.RAISE
        self._sums = itertools.count(1)

    def check(self, what: str, tensors: Sequence[torch.Tensor], how: Reduction) -> None:
        """Raises NonFiniteInputError if any of ``tensors`` is not finite and they are to be added."""
        if not self._wanted or how.op is not Op.SUM or how.fold is not None or not _is_floating(tensors[0]):
            return
        number = next(self._sums)
        for position, tensor in enumerate(tensors):
            if not nonfinite.is_finite(tensor):
                name = what if len(tensors) == 1 else f"{what}, tensor {position}"
                ranks = ", ".join(map(str, self._members.ranks))
                raise NonFiniteInputError(
                    f"NaN or infinity from rank {self._members.ranks[self._members.position]}, sum {number} of the "
                    f"process group of ranks {ranks}: {nonfinite.where(name, tensor)}, of shape {list(tensor.shape)}; "
                    "look at the batch and the loss there. BYTEPS_NONFINITE=allow lets the values pass, which a "
                    "GradScaler needs"
                )


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
