"""Saves a model in parts and its optimizer, so that ranks in another layout can go on: other numbers of tensor-parallel
ranks, other stages and schedules of a pipeline, with FSDP2 or without, and other numbers of ranks.

The format is torch.distributed.checkpoint's. The names are those that parameters have in the whole model. A parameter
that tensor-parallel ranks have cut is saved as its pieces: "model.0.weight@0:512:1024" are the indices 512 to 1023 of
dimension 0. The padding of a vocabulary is not saved. Each rank reads the pieces that overlap with its own.

All ranks call the functions. One thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.parallel.sharding.sharded_optimizer import ShardedOptimizer
from byteps_py.parallel.tensor.plan import sharded_parameters
from byteps_py.parallel.tensor.shard import Shard

_MODEL, _OPTIMIZER = "model.", "optimizer."


def save(
    model: nn.Module | Pipeline,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the parameters and buffers of ``model`` to the directory ``path``, which all ranks reach, and the state of
    ``optimizer``.

        save(model, "checkpoint/1000", optimizer)

    Args:
        model: the part of this rank: cut by ``tensor.parallelize``, FSDP2, both or none; or a pipeline.
        path: of a directory; a checkpoint there is replaced.
        optimizer: of this rank's parameters; a ZeroRedundancyOptimizer, and that of ``sharding.shard``, too.
        group: the ranks that call this; default: all.
    """
    parts = _Parts.of(model)
    state: dict[str, Any] = {}
    for name, tensor in parts.tensors.items():
        state |= parts.saved(_MODEL + name, name, tensor)
    if optimizer is not None:
        for name, parameter in parts.parameters.items():
            for entry, value in _local(optimizer).state.get(parameter, {}).items():
                state |= parts.saved(f"{_OPTIMIZER}{name}.{entry}", name, value)
    state_dict_saver.save(state, checkpoint_id=path, process_group=group)


def load(
    model: nn.Module | Pipeline,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint of ``save``, perhaps one of another layout. Hyperparameters of ``optimizer`` stay. Raises
    UsageError if the model has other parameters, and the errors of torch.distributed.checkpoint. See ``save``."""
    reader = FileSystemReader(path)
    stored = _Stored.of(reader.read_metadata().state_dict_metadata, path)
    parts = _Parts.of(model)
    targets = {_MODEL + name: (name, tensor) for name, tensor in parts.tensors.items()}
    found: dict[nn.Parameter, dict[str, Any]] = {}
    if optimizer is not None:
        held = {id(one) for each in _local(optimizer).param_groups for one in each["params"] if _owns(optimizer, one)}
        for name, parameter in parts.parameters.items():
            if id(parameter) in held:
                found[parameter] = entries = {}
                for entry in stored.entries(f"{_OPTIMIZER}{name}."):
                    key = f"{_OPTIMIZER}{name}.{entry}"
                    entries[entry] = stored.empty(key, parameter)
                    targets[key] = name, entries[entry]
    with torch.no_grad():
        pieces = {key: stored.pieces(key, tensor, parts.shards.get(name)) for key, (name, tensor) in targets.items()}
        state = {one.key: one.tensor for each in pieces.values() for one in each}
        state_dict_loader.load(state, storage_reader=reader, process_group=group)
        for key, (_, tensor) in targets.items():
            _fill(tensor, pieces[key])
    if optimizer is not None:
        for parameter, entries in found.items():
            if entries:
                _local(optimizer).state[parameter] = entries


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of a model on this rank."""

    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, nn.Parameter]
    shards: Mapping[str, Shard]

    @classmethod
    def of(cls, model: nn.Module | Pipeline) -> _Parts:
        named = dict(model.named_parameters(remove_duplicate=False))
        if isinstance(model, Pipeline):
            return cls(model.state_dict(), named, model.sharded_parameters())
        return cls(model.state_dict(), named, sharded_parameters(model))

    def saved(self, key: str, name: str, value: Any) -> dict[str, Any]:
        """The entries that this rank writes of the parameter ``name``, or of its optimizer's state."""
        shard = self.shards.get(name)
        if shard is None or not isinstance(value, torch.Tensor) or not value.dim():
            return {key: value}
        dim = shard.dim
        # One span without padding is the tensor itself: narrow() would gather an FSDP2 parameter.
        return {
            f"{key}@{dim}:{start}:{stop}": value if stop - start == shard.local else value.narrow(dim, at, stop - start)
            for start, stop, at in shard.pieces()
        }


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stored tensor that this rank reads, and where it goes: ``length`` indices of ``dim``, from ``source`` in it to
    ``target`` in the own tensor. ``dim`` None: all of it."""

    key: str
    tensor: Any
    dim: int | None = None
    source: int = 0
    target: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class _Stored:
    """The tensors of a checkpoint: for each name its pieces, as (dim, start, stop) -> (key, metadata); None: whole."""

    tensors: Mapping[str, Mapping[tuple[int, int, int] | None, tuple[str, Any]]]
    path: str

    @classmethod
    def of(cls, metadata: Mapping[str, Any], path: str | os.PathLike[str]) -> _Stored:
        tensors: dict[str, dict[tuple[int, int, int] | None, tuple[str, Any]]] = {}
        for key, one in metadata.items():
            name, at, region = key.rpartition("@")
            if at:
                dim, start, stop = (int(each) for each in region.split(":"))
                tensors.setdefault(name, {})[dim, start, stop] = key, one
            else:
                tensors.setdefault(key, {})[None] = key, one
        return cls(tensors, os.fspath(path))

    def entries(self, prefix: str) -> Iterator[str]:
        """The entries of the optimizer's state."""
        return (name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix))

    def empty(self, name: str, parameter: nn.Parameter) -> Any:
        """The place for an entry of the optimizer's state: like the parameter, or a scalar."""
        _, one = next(iter(self.tensors[name].values()))
        if not isinstance(one, TensorStorageMetadata):
            return None
        # Scalars such as Adam's count of steps stay on the CPU.
        if not one.size:
            return torch.empty((), dtype=one.properties.dtype, device="cpu")
        return torch.zeros_like(parameter, dtype=one.properties.dtype, requires_grad=False)

    def pieces(self, name: str, tensor: Any, shard: Shard | None) -> list[_Piece]:
        """The pieces that cover ``tensor``, the part ``shard`` of the whole. Raises UsageError."""
        if name not in self.tensors:
            raise UsageError(f"{self.path}: there is no {_bare(name)!r}: it is of another model")
        stored = self.tensors[name]
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            key, _ = stored[None]
            return [_Piece(key, tensor)]
        shape = list(tensor.shape)
        if shard is not None:
            shape[shard.dim] = shard.length
        self._check(name, shape)
        if None in stored:
            key, one = stored[None]
            if shard is None:
                return [_Piece(key, tensor)]
            whole = torch.empty(one.size, dtype=one.properties.dtype, device="cpu")
            return [_Piece(key, whole, shard.dim, start, at, stop - start) for start, stop, at in shard.pieces()]
        found = []
        for region, (key, one) in sorted((region, each) for region, each in stored.items() if region is not None):
            dim, start, stop = region
            read = torch.empty(one.size, dtype=one.properties.dtype, device="cpu")
            for first, last, at in [(0, shape[dim], 0)] if shard is None else shard.pieces():
                low, high = max(start, first), min(stop, last)
                if low < high:
                    found.append(_Piece(key, read, dim, low - start, at + low - first, high - low))
        return found

    def _check(self, name: str, shape: list[int]) -> None:
        stored = self.tensors[name]
        regions = [region for region in stored if region is not None]
        _, one = next(iter(stored.values()))
        there = list(one.size)
        if regions:
            there[regions[0][0]] = max(stop for _, _, stop in regions)
        if there != shape:
            raise UsageError(f"{self.path}: {_bare(name)!r} has the shape {tuple(there)} there, {tuple(shape)} here")


def _fill(tensor: Any, pieces: list[_Piece]) -> None:
    """Copy what has been read to where it belongs."""
    if len(pieces) == 1 and pieces[0].tensor is tensor:
        return
    own = tensor
    if isinstance(tensor, DTensor):
        own = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for one in pieces:
        if one.dim is not None:
            own.narrow(one.dim, one.target, one.length).copy_(one.tensor.narrow(one.dim, one.source, one.length))
    if isinstance(tensor, DTensor):
        mine = distribute_tensor(own, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(mine.to_local())


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of this rank's own parameters: that inside a ZeroRedundancyOptimizer."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _owns(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether this rank steps ``parameter``: a ShardedOptimizer has parameters that other ranks own."""
    return not isinstance(optimizer, ShardedOptimizer) or optimizer.owns(parameter)


def _bare(name: str) -> str:
    return name.removeprefix(_MODEL).removeprefix(_OPTIMIZER)
