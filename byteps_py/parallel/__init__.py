"""Parallel training.

    DistributedDataParallel    as in ``byteps.torch.parallel``
    mesh/                      the dimensions of ranks, and how many to give each
    tensor/                    tensor and sequence parallelism
    context/                   context parallelism
    fsdp/                      gathered parameters of FSDP2, once in each machine's memory
    pipe/                      pipelines
    multimodal/                pipelines of text models that attend to images
    checkpoint/                checkpoints of models in parts, and whether copies are equal
    parallelize                all dimensions of a mesh at once, with the optimizer, loss scaling and clipping
    gradients                  norms of models in parts
    gradient_scaling           GradScalers of models in parts
    numerics/                  comparing two runs bit by bit

Classes that need torch are imported when they are first used: `bps schedule` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import importer

if TYPE_CHECKING:
    from byteps_py.parallel import checkpoint, context, fsdp, mesh, multimodal, numerics, sharding, tensor
    from byteps_py.parallel.checkpoint.copies import check_copies
    from byteps_py.parallel.gradients import clip_grad_norm_
    from byteps_py.parallel.mesh.device_mesh import Mesh
    from byteps_py.parallel.parallelize import ParallelOptions, ParallelTraining, parallelize_model
    from byteps_py.parallel.pipe.micro_batches import MicroBatches
    from byteps_py.parallel.pipe.pipeline import Pipeline
    from byteps_py.parallel.pipe.skips import pop, stash
    from byteps_py.parallel.pipe.split import split
    from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel

_HOMES = {
    "DistributedDataParallel": "byteps_py.torch.gradients.distributed_data_parallel",
    "Mesh": "byteps_py.parallel.mesh.device_mesh",
    "MicroBatches": "byteps_py.parallel.pipe.micro_batches",
    "ParallelOptions": "byteps_py.parallel.parallelize",
    "ParallelTraining": "byteps_py.parallel.parallelize",
    "Pipeline": "byteps_py.parallel.pipe.pipeline",
    "check_copies": "byteps_py.parallel.checkpoint.copies",
    "clip_grad_norm_": "byteps_py.parallel.gradients",
    "parallelize_model": "byteps_py.parallel.parallelize",
    "pop": "byteps_py.parallel.pipe.skips",
    "split": "byteps_py.parallel.pipe.split",
    "stash": "byteps_py.parallel.pipe.skips",
}

#: Imported when they are first used: ``bps.parallel.tensor.parallelize(…)``.
_MODULES = frozenset({"checkpoint", "context", "fsdp", "mesh", "multimodal", "numerics", "sharding", "tensor"})

__all__ = [
    "DistributedDataParallel",
    "Mesh",
    "MicroBatches",
    "ParallelOptions",
    "ParallelTraining",
    "Pipeline",
    "check_copies",
    "checkpoint",
    "clip_grad_norm_",
    "context",
    "fsdp",
    "mesh",
    "multimodal",
    "numerics",
    "parallelize_model",
    "pop",
    "sharding",
    "split",
    "stash",
    "tensor",
]


__getattr__ = importer(__name__, {**_HOMES, **dict.fromkeys(_MODULES, "")})
