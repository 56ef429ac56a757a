"""Arithmetic on memory: ``reduce`` sums contributions in one pass, ``engine.Engine`` runs such work in threads."""

from byteps_py.kernels.reduction import Report, bind, prepare, reduce, reduce_checked

__all__ = ["Report", "bind", "prepare", "reduce", "reduce_checked"]
