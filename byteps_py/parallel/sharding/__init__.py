"""Sharded states: parameters, gradients and optimizer states that each have one owner (``bps.sharding``).

strategy                            who owns what, and what is broadcast together, by Paddle's rules (pure)
sharded_model, sharded_optimizer    the function and the optimizer that a training script uses
segments, gathering                 the memory of parameters; when they are broadcast and freed
gradient_owners                     gradients on their way to their owners
offload                             optimizer states in host memory
rank_memory                         memory that is taken once, for long-lived tensors and for communication; a tally
activation_partition                saved inputs divided among tensor-parallel ranks

Names are imported when they are first used: the rules need no torch. `bps plan memory` has the formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.sharding.activation_partition import partitioned_checkpoint as partitioned_checkpoint
    from byteps_py.parallel.sharding.rank_memory import (
        FusedBuffer as FusedBuffer,
        MemoryTally as MemoryTally,
        TensorArena as TensorArena,
        tally_memory as tally_memory,
    )
    from byteps_py.parallel.sharding.sharded_model import ShardOptions as ShardOptions, shard as shard
    from byteps_py.parallel.sharding.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from byteps_py.parallel.sharding.strategy import (
        Strategy as Strategy,
        assign_owners as assign_owners,
        cut_by_anchors as cut_by_anchors,
        cut_by_size as cut_by_size,
        sharding_groups as sharding_groups,
    )

import_lazily(__name__)
