"""Layers whose parameters lie on several ranks: column- and row-parallel linear layers, a vocabulary-parallel
embedding, and norms of a part of the sequence. parallel_plan.py makes them from the layers of a model.

A column-parallel layer computes some of the output features on each rank, a row-parallel layer adds up the results of
ranks, each from some of the input features: in a pair of both, only f and g communicate (regions.py).

Each layer has ``sharded_parameters``: for each parameter that lies in parts on the ranks, its dimension of the parts.
One thread.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import Group, rank_in, size_of
from byteps_py.parallel.tensor.regions import (
    collect_along,
    copy_among,
    copy_to_ranks,
    gather_along,
    reduce_from_ranks,
    reduce_scatter_along,
)
from byteps_py.parallel.tensor.shard import Blocks, Shard, vocabulary_shard
from byteps_py.torch.collectives import parameter_owners


class KeepsGroup:
    """A mixin: a deep copy has the same process group."""

    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.group)] = self.group
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


class ParallelLayer(KeepsGroup, nn.Module):
    """A layer on the ranks of ``group``."""

    def __init__(self, group: Group, sequence_dim: int | None) -> None:
        super().__init__()
        self.group, self.sequence_dim = group, sequence_dim
        parameter_owners.announce_layer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        parameter_owners.announce_layer(self)

    def parts(self) -> Iterator[torch.Tensor]:
        """The parameters that are parts of larger ones; see parameter_owners.py."""
        yield from (self.get_parameter(name) for name in self.sharded_parameters())

    def ranks_of_parts(self) -> Sequence[int]:
        """The global ranks that have them."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    def sharded_parameters(self) -> Mapping[str, Shard]:
        """The parameters that lie in parts on the ranks."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """See nn.Module: ``to`` and ``to_empty`` call it. Memory that is not initialized may hold nan; no one sets
        padding."""
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.zero_padding()
        return result

    def zero_padding(self) -> None:
        """Set the indices of parameters that are padding to 0."""
        for name, shard in self.sharded_parameters().items():
            parameter = self.get_parameter(name)
            if shard.size < shard.local and not parameter.is_meta:
                with torch.no_grad():
                    own, first = local_part(parameter, shard.dim)
                    place = max(0, shard.size - first)
                    if place < own.shape[shard.dim]:
                        own.narrow(shard.dim, place, own.shape[shard.dim] - place).zero_()


class ColumnParallelLinear(ParallelLayer):
    """y = x Aᵀ + b, of which each rank computes some of the output features.

    The input has the shape (…, in_features), the same on all ranks (with ``sequence_dim``: each rank's part of the
    sequence); the output is (…, out_features / ranks).

    Args:
        linear: the whole layer, the same on all ranks. Its weights are cut.
        group: the ranks.
        sequence_dim: the dimension along which ranks have parts of the input (sequence parallelism); None: they have
            all of it.
        shares_input: the input is that of a region (SharedInput in parallel_plan.py), which has communicated already.
        vocabulary: the output features are tokens: they are padded, see ``padded_vocabulary``.
        gather_output: all ranks get all output features.
        shard: the output features of this rank; default: as many on each rank, one rank's behind the other's.

    Raises UsageError if the number of ranks does not divide the output features.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: Group,
        *,
        sequence_dim: int | None = None,
        shares_input: bool = False,
        vocabulary: bool = False,
        gather_output: bool = False,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(group, sequence_dim)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.shares_input, self.gather_output = shares_input, gather_output
        self._shard = shard or _shard_of(0, self.out_features, group, vocabulary)
        self.weight = _cut(linear.weight, self._shard)
        self.bias = None if linear.bias is None else _cut(linear.bias, self._shard)

    def sharded_parameters(self) -> Mapping[str, Shard]:
        """The rows of the weight, and the bias."""
        return dict.fromkeys(("weight",) if self.bias is None else ("weight", "bias"), self._shard)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.shares_input:
            tensor = enter(tensor, self.group, self.sequence_dim)
        weight, bias = (copy_among(one, self.group, self._shard.copied()) for one in (self.weight, self.bias))
        output = functional.linear(tensor, weight, bias)
        if self.gather_output:
            output = collect_along(output, self.group, -1)[..., : self.out_features]
        return output

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features} over {size_of(self.group)} ranks, columns"


class RowParallelLinear(ParallelLayer):
    """y = x Aᵀ + b, for which each rank has some of the input features: the output of a column-parallel layer.

    The input has the shape (…, in_features / ranks), the output (…, out_features), the same on all ranks, or with
    ``sequence_dim`` each rank's part of it along this dimension. The bias is added after the sum. ``shard``: the input
    features of this rank; default: as many on each rank, one rank's behind the other's.

    Raises UsageError if the number of ranks does not divide the input features.
    """

    def __init__(
        self, linear: nn.Linear, group: Group, *, sequence_dim: int | None = None, shard: Shard | None = None
    ) -> None:
        super().__init__(group, sequence_dim)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._shard = shard or _shard_of(1, self.in_features, group, False)
        self.weight = _cut(linear.weight, self._shard)
        self.bias = linear._parameters["bias"]

    def sharded_parameters(self) -> Mapping[str, Shard]:
        """The columns of the weight; the bias is whole on each rank."""
        return {"weight": self._shard}

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        output = leave(functional.linear(tensor, self.weight), self.group, self.sequence_dim)
        if self.bias is None:
            return output
        return output + (self.bias if self.sequence_dim is None else copy_to_ranks(self.bias, self.group))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features} over {size_of(self.group)} ranks, rows"


class VocabularyParallelEmbedding(ParallelLayer):
    """An embedding, of which each rank has the rows of some tokens. See ``padded_vocabulary``.

    The input has the shape (…) of integer ids, the same on all ranks; the output is (…, embedding_dim), the same on all
    ranks, or with ``sequence_dim`` each rank's part. Raises UsageError for ids beyond the vocabulary (on a CUDA device
    the assertion of the device fails later).
    """

    def __init__(self, embedding: nn.Embedding, group: Group, *, sequence_dim: int | None = None) -> None:
        super().__init__(group, sequence_dim)
        if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
            raise UsageError(
                "a vocabulary-parallel embedding has no max_norm, sparse or scale_grad_by_freq: make the embedding "
                "without them"
            )
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self._shard = _shard_of(0, self.num_embeddings, group, True)
        self.weight = _cut(embedding.weight, self._shard)

    def sharded_parameters(self) -> Mapping[str, Shard]:
        """The rows of the weight."""
        return {"weight": self._shard}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        check_ids(ids, self.num_embeddings)
        rows = self.weight.shape[0]
        local = ids - rank_in(self.group) * rows
        is_elsewhere = (local < 0) | (local >= rows)
        padding = self.padding_idx
        if padding is not None:
            padding -= rank_in(self.group) * rows
            padding = padding if 0 <= padding < rows else None
        output = functional.embedding(local.masked_fill(is_elsewhere, 0), self.weight, padding)
        output = output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return leave(output, self.group, self.sequence_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim} over {size_of(self.group)} ranks"


class SummedGradients(KeepsGroup):
    """A mixin: a layer that each rank uses on its own tokens or heads, with parameters that are the same on all ranks.
    Their gradients are summed over the ranks. ``sum_gradients`` makes the classes."""

    summed: tuple[str, ...]  # in an order that is the same on all ranks: that of their sums

    def forward(self, *arguments: Any, **others: Any) -> Any:
        """The layer's, with parameters as copies whose gradients are summed."""
        own: dict[str, nn.Parameter | None] = self.__dict__["_parameters"]
        for name in self.summed:
            parameter = own.get(name)
            if parameter is not None:
                self.__dict__[name] = copy_to_ranks(parameter, self.group)
        try:
            return super().forward(*arguments, **others)  # type: ignore[misc]
        finally:
            for name in self.summed:
                self.__dict__.pop(name, None)


def sum_gradients(module: nn.Module, names: tuple[str, ...], group: Group) -> None:
    """Change ``module`` in place: gradients of these parameters of its own are summed over the ranks of ``group``."""
    kind = type(module)
    module.__class__ = type(f"SummedGradients{kind.__name__}", (SummedGradients, kind), {})
    module.__dict__.update(group=group, summed=names)


def sequence_parallel(module: nn.Module, group: Group) -> nn.Module:
    """Change ``module`` in place: its inputs are parts of the sequence from now on. For layers that treat each token
    alone (norms, linear layers, dropout), with parameters of their own and no submodules' ones. Raises UsageError."""
    if any(True for child in module.children() for _ in child.parameters()):
        raise UsageError(f"{type(module).__name__} has submodules with parameters: name those in the plan instead")
    sum_gradients(module, tuple(name for name, _ in module.named_parameters(recurse=False)), group)
    return module


def enter(tensor: torch.Tensor, group: Group, sequence_dim: int | None) -> torch.Tensor:
    """f: the input of a region of columns."""
    return copy_to_ranks(tensor, group) if sequence_dim is None else gather_along(tensor, group, sequence_dim)


def leave(tensor: torch.Tensor, group: Group, sequence_dim: int | None) -> torch.Tensor:
    """g: the output of a region of rows."""
    if sequence_dim is None:
        return reduce_from_ranks(tensor, group)
    return reduce_scatter_along(tensor, group, sequence_dim)


def check_ids(ids: torch.Tensor, vocabulary: int) -> None:
    """Raises UsageError for ids that are no tokens."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise UsageError(f"token ids must be integers, not {ids.dtype}: use ids.long()")
    if not ids.numel() or ids.is_meta:
        return
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < vocabulary)).all())
        return
    least, most = (int(one) for one in torch.aminmax(ids))
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise UsageError(
            f"the token id {wrong} is not in the vocabulary of {vocabulary} (0 to {vocabulary - 1}): use the tokenizer "
            "that the model was made for, or a larger vocabulary"
        )


def local_part(tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    """The local part of a DTensor that FSDP2 has cut into chunks, and its beginning along ``dim``; other tensors are
    local."""
    first, length = 0, tensor.shape[dim] if tensor.dim() else 0
    if not isinstance(tensor, DTensor):
        return tensor, first
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_shard(dim):
            chunk = -(-length // tensor.device_mesh.size(mesh_dim))
            before = min(length, chunk * tensor.device_mesh.get_local_rank(mesh_dim))
            first, length = first + before, min(chunk, length - before)
    return tensor.to_local(), first


def _cut(parameter: torch.Tensor, shard: Shard) -> nn.Parameter:
    """The rank's part, with the attributes that others have given the parameter."""
    own = nn.Parameter(shard.cut(parameter.detach()), parameter.requires_grad)
    own.__dict__.update(copy.copy(parameter.__dict__))
    return own


def _shard_of(dim: int, length: int, group: Group, is_vocabulary: bool) -> Shard:
    if is_vocabulary:
        return vocabulary_shard(length, size_of(group), rank_in(group))
    return Blocks.of(length, None, None).shard(dim, size_of(group), rank_in(group), 0)
