"""Arithmetic on memory: ``reduce`` sums contributions in one pass, ``engine.Engine`` runs such work in threads."""

from byteps_py.kernels.reduction import prepare, reduce

__all__ = ["prepare", "reduce"]
