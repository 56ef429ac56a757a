"""Optimizers that torch does not have. They work alone, and with DistributedOptimizer, also hosted."""

from byteps_py.torch.optim.lamb import LAMB

__all__ = ["LAMB"]
