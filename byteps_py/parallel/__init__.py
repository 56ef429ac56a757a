"""Parallel training of a module, as in ``byteps.torch.parallel``: ``bps.parallel.DistributedDataParallel``."""

from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
