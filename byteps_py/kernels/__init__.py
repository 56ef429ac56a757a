"""Arithmetic on memory: ``reduce`` sums contributions in one pass, ``ThreadPool`` runs such work."""

from byteps_py.kernels.optimizer_steps import bind_step, prepare_step
from byteps_py.kernels.reduction import Report, bind, prepare, reduce, reduce_checked, square_sum

__all__ = [
    "Report",
    "bind",
    "bind_step",
    "prepare",
    "prepare_step",
    "reduce",
    "reduce_checked",
    "square_sum",
]
