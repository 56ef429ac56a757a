"""Tensor and sequence parallelism: each layer of a model is computed by several ranks.

regions         f, g and their forms for sequence parallelism: communication that autograd knows
shard           which indices of a parameter a rank has
layers          linear layers, embeddings and norms whose parameters or inputs lie on several ranks
styles          how a plan says what becomes of a layer
plan            parallelize: the style of each layer of a model, by name
planned_layers  what becomes of each layer, decided before anything changes; layers with additions are refused
whole_parameters which parameters that stay whole have partial gradients
fused_layers    layers of several parts that a plan would cut in the wrong places
cross_entropy   the loss of logits whose columns lie on several ranks
"""

from byteps_py.parallel.tensor.cross_entropy import CrossEntropyOptions, parallel_cross_entropy
from byteps_py.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    sequence_parallel,
)
from byteps_py.parallel.tensor.plan import parallelize, sharded_parameters, tensor_parallel_group
from byteps_py.parallel.tensor.regions import (
    collect_along,
    copy_to_ranks,
    gather_along,
    reduce_from_ranks,
    reduce_scatter_along,
    split_along,
)
from byteps_py.parallel.tensor.shard import Shard, padded_vocabulary
from byteps_py.parallel.tensor.styles import Column, Embedding, Replicated, Row, Sequence, SharedInput, Style

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "CrossEntropyOptions",
    "Embedding",
    "Replicated",
    "Row",
    "RowParallelLinear",
    "Sequence",
    "Shard",
    "SharedInput",
    "Style",
    "VocabularyParallelEmbedding",
    "collect_along",
    "copy_to_ranks",
    "gather_along",
    "padded_vocabulary",
    "parallel_cross_entropy",
    "parallelize",
    "reduce_from_ranks",
    "reduce_scatter_along",
    "sequence_parallel",
    "sharded_parameters",
    "split_along",
    "tensor_parallel_group",
]
