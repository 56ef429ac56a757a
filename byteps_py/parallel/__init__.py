"""Parallel training.

    DistributedDataParallel    as in ``byteps.torch.parallel``
    mesh, mesh_layout          the dimensions of ranks
    tensor/                    tensor and sequence parallelism
    context/                   context parallelism
    fsdp                       gathered parameters of FSDP2, once in each machine's memory; its gradients, compressed
    sharding/                  parameters, gradients and optimizer states that each have one owner
    pipe/                      pipelines
    multimodal/                pipelines of text models that attend to images
    checkpoint/                checkpoints of models in parts, and whether copies are equal
    parallelize                all dimensions of a mesh at once, with the optimizer, loss scaling and clipping
    gradients                  norms of models in parts
    gradient_scaling           GradScalers of models in parts
    float32_gradients          accumulation of 16-bit gradients in float32
    collectives                those that several dimensions use

``numerics``, which compares two runs bit by bit, is in byteps_py/tools. Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel import (
        checkpoint as checkpoint,
        context as context,
        fsdp as fsdp,
        mesh as mesh,
        multimodal as multimodal,
        sharding as sharding,
        tensor as tensor,
    )
    from byteps_py.parallel.checkpoint.copies import check_copies as check_copies
    from byteps_py.parallel.gradients import clip_grad_norm_ as clip_grad_norm_
    from byteps_py.parallel.mesh import Mesh as Mesh
    from byteps_py.parallel.parallelize import (
        ParallelOptions as ParallelOptions,
        ParallelTraining as ParallelTraining,
        parallelize_model as parallelize_model,
    )
    from byteps_py.parallel.pipe.pipeline import Pipeline as Pipeline
    from byteps_py.parallel.pipe.skips import pop as pop, stash as stash
    from byteps_py.parallel.pipe.split import split as split
    from byteps_py.parallel.pipe.step_data import MicroBatches as MicroBatches
    from byteps_py.tools import numerics as numerics
    from byteps_py.torch.gradients.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel

import_lazily(__name__)
