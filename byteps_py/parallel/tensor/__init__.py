"""Tensor and sequence parallelism: each layer of a model is computed by several ranks.

regions           f, g and their forms for sequence parallelism: communication that autograd knows
shard             the indices of a parameter that a rank has
layers            linear layers, embeddings and norms whose parameters or inputs lie on several ranks
parallel_plan     parallelize: the style of each layer of a model, by name; SharedInput; the parameters that stay whole
planned_layers    Column and the other styles; the change of each layer, decided before anything changes; layers with
                  additions are refused, and fused ones that would be cut in the wrong places
cross_entropy     the loss of logits whose columns lie on several ranks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.tensor.cross_entropy import (
        CrossEntropyOptions as CrossEntropyOptions,
        parallel_cross_entropy as parallel_cross_entropy,
    )
    from byteps_py.parallel.tensor.layers import (
        ColumnParallelLinear as ColumnParallelLinear,
        RowParallelLinear as RowParallelLinear,
        VocabularyParallelEmbedding as VocabularyParallelEmbedding,
        sequence_parallel as sequence_parallel,
    )
    from byteps_py.parallel.tensor.parallel_plan import (
        parallelize as parallelize,
        sharded_parameters as sharded_parameters,
        tensor_parallel_group as tensor_parallel_group,
    )
    from byteps_py.parallel.tensor.planned_layers import (
        Column as Column,
        Embedding as Embedding,
        Replicated as Replicated,
        Row as Row,
        Sequence as Sequence,
        SharedInput as SharedInput,
        Style as Style,
    )
    from byteps_py.parallel.tensor.regions import (
        collect_along as collect_along,
        copy_to_ranks as copy_to_ranks,
        gather_along as gather_along,
        reduce_from_ranks as reduce_from_ranks,
        reduce_scatter_along as reduce_scatter_along,
        split_along as split_along,
    )
    from byteps_py.parallel.tensor.shard import Shard as Shard, padded_vocabulary as padded_vocabulary

import_lazily(__name__)
