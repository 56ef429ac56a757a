"""The functions of ``horovod.torch`` and ``byteps.torch``: the names, arguments and gradients of torch/operations.

allreduce, collectives ─ differentiable        api: the job        sync_batch_norm
"""
