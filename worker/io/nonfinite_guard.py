"""Which ranks are to blame for a sum that is NaN or infinite, as far as this machine can tell: guarded tensors only.

``reduce`` runs on a pool thread, or on the loop's; the rest on the loop's.

    several ranks here  ─ their sum's kernel says which of them ─► in the PUSH, for the server to pass on
    one rank here       ─ nothing is looked at: it can only be that rank ─► the same
    no other machine    ─ the kernel says which ─► the round's result
"""

from __future__ import annotations

from byteps_py.rank_bits import OVERFLOW, of_rank
from byteps_py.runtime import Kernels
from byteps_py.tensors import Checks
from byteps_py.worker.core.tensor import Compute, Part


class NonFiniteGuard:
    """``size``: ranks in the job."""

    def __init__(self, first_rank: int, size: int) -> None:
        self._first_rank = first_rank
        self._size = size

    @staticmethod
    def reduce(kernels: Kernels, compute: Compute) -> None:
        """Run the kernel, and look at the result in the same pass."""
        part = compute.part
        compute.report = kernels.reduce_checked(
            Checks.FINITE,
            compute.op,
            part.tensor.spec.dtype,
            compute.inputs,
            compute.outputs,
            part.count,
            compute.divisor,
        )

    def note(self, compute: Compute) -> None:
        """The kernel has run: draw conclusions from what it has found."""
        report, compute.report = compute.report, None
        if report is None:
            return
        tensor = compute.part.tensor
        blame = OVERFLOW if report.overflowed else 0
        for i in report.poisoned:
            blame |= of_rank(self._first_rank + tensor.slots[i].local_rank, self._size)
        if tensor.is_alone:
            tensor.blame |= blame
        else:  # what is finite here may become infinite there
            compute.part.blames[tensor.round % 2] = blame or OVERFLOW

    def of_push(self, part: Part, round_: int) -> int:
        """The ranks to blame if this machine's contribution to a round is not finite; never 0."""
        if part.tensor.contributions:
            return part.blames[round_ % 2] or OVERFLOW
        return of_rank(self._first_rank, self._size)  # its input is the contribution: it is the only one here
