"""Sharded states: parameters, gradients and optimizer states that each have one owner (``bps.sharding``).

owners, strategy                 who owns what, and what is broadcast together, by Paddle's rules (pure)
sharded_model, sharded_optimizer       the function and the optimizer that a training script uses
segments, gathering              the memory of parameters; when they are broadcast and freed
gradient_owners, fused_buffer    gradients on their way to their owners, through a buffer of constant size
offload, side_stream             optimizer states in host memory
whole_states                     state dicts of all parameters
arena, activation_partition      ZeRO-R: long-lived tensors in one block; saved inputs divided among TP ranks
memory                           formulas (pure); memory_tally: what a rank really holds

Names are imported when they are first used: the formulas need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import importer

if TYPE_CHECKING:
    from byteps_py.parallel.sharding.activation_partition import partitioned_checkpoint
    from byteps_py.parallel.sharding.arena import TensorArena
    from byteps_py.parallel.sharding.fused_buffer import FusedBuffer
    from byteps_py.parallel.sharding.memory_tally import MemoryTally, tally_memory
    from byteps_py.parallel.sharding.owners import assign_owners, cut_by_anchors, cut_by_size, sharding_groups
    from byteps_py.parallel.sharding.sharded_model import ShardOptions, shard
    from byteps_py.parallel.sharding.sharded_optimizer import ShardedOptimizer
    from byteps_py.parallel.sharding.strategy import Strategy

_HOMES = {
    "FusedBuffer": "fused_buffer",
    "MemoryTally": "memory_tally",
    "ShardOptions": "sharded_model",
    "ShardedOptimizer": "sharded_optimizer",
    "Strategy": "strategy",
    "TensorArena": "arena",
    "assign_owners": "owners",
    "cut_by_anchors": "owners",
    "cut_by_size": "owners",
    "partitioned_checkpoint": "activation_partition",
    "shard": "sharded_model",
    "sharding_groups": "owners",
    "tally_memory": "memory_tally",
}

__all__ = [
    "FusedBuffer",
    "MemoryTally",
    "ShardOptions",
    "ShardedOptimizer",
    "Strategy",
    "TensorArena",
    "assign_owners",
    "cut_by_anchors",
    "cut_by_size",
    "partitioned_checkpoint",
    "shard",
    "sharding_groups",
    "tally_memory",
]

__getattr__ = importer(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
