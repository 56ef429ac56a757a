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

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.sharding.activation_partition import partitioned_checkpoint as partitioned_checkpoint
    from byteps_py.parallel.sharding.arena import TensorArena as TensorArena
    from byteps_py.parallel.sharding.fused_buffer import FusedBuffer as FusedBuffer
    from byteps_py.parallel.sharding.memory_tally import MemoryTally as MemoryTally
    from byteps_py.parallel.sharding.memory_tally import tally_memory as tally_memory
    from byteps_py.parallel.sharding.owners import assign_owners as assign_owners
    from byteps_py.parallel.sharding.owners import cut_by_anchors as cut_by_anchors
    from byteps_py.parallel.sharding.owners import cut_by_size as cut_by_size
    from byteps_py.parallel.sharding.owners import sharding_groups as sharding_groups
    from byteps_py.parallel.sharding.sharded_model import ShardOptions as ShardOptions
    from byteps_py.parallel.sharding.sharded_model import shard as shard
    from byteps_py.parallel.sharding.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from byteps_py.parallel.sharding.strategy import Strategy as Strategy

import_lazily(__name__)
