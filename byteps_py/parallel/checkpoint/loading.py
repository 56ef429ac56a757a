"""``load``: each rank reads and checks all it needs; if all ranks could, they change the model and the optimizer.

The tensors that are read are kept in host memory until then, as large as this rank's part. One thread."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from byteps_py.checkpoint_files import METADATA, CheckpointFiles, Manifest
from byteps_py.errors import BytePSError, CheckpointError, UsageError
from byteps_py.parallel.checkpoint.contents import MODEL, OPTIMIZER, ModelContents, OptimizerStates, States, contents_of
from byteps_py.parallel.checkpoint.ranks import Ranks
from byteps_py.parallel.checkpoint.saving import finish_earlier
from byteps_py.parallel.checkpoint.stored_pieces import StoredNames, StoredPiece, bare
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.system.log import logger


def load(
    model: nn.Module | Pipeline,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint of ``save``, perhaps one of another layout. See ``save`` for the arguments.

    The model and the states of the optimizer are then as they were saved: a parameter without states there has none.
    Hyperparameters of ``optimizer`` stay. Or all ranks raise the same error, and nothing has changed. Each rank needs
    room for its part in host memory meanwhile.

    Raises CheckpointError if there is no checkpoint, or it is damaged or can't be read here; UsageError if the model or
    the optimizer is another one: other names, shapes or dtypes, more or fewer of them.
    """
    ranks = Ranks.of(group)
    finish_earlier(Path(path).absolute())
    found = ranks.together(lambda: _Found.read(path))
    if len(set(ranks.gathered(found.save_id))) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints at {path}: name a folder that all ranks reach, as on a shared file system"
        )
    contents, states = ranks.together(lambda: _parts_of(model, optimizer, ranks, found))
    if states is not None:
        states.finish()
    staged = ranks.together(lambda: _Staged.planned(found, contents, states))
    _check_all_used(ranks, found, staged.used, states is not None)
    ranks.together(lambda: _verify(found, ranks))
    ranks.together(lambda: staged.fill(found))
    loaded = ranks.together(lambda: staged.states(found, contents, states))
    others = {name: value for name, value in contents.values.items() if name in staged.others(contents)}
    try:
        ranks.together(lambda: contents.load_others(staged.others(contents)))
    except BaseException:
        contents.load_others(others)
        raise
    if states is not None:
        states.load(loaded)
    staged.write(contents)


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint, before its data is read."""

    files: CheckpointFiles
    metadata: Metadata
    manifest: Manifest | None
    names: StoredNames
    save_id: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> _Found:
        files = CheckpointFiles(path)
        packed, manifest = files.read()
        try:
            metadata = pickle.loads(packed)
            entries = metadata.state_dict_metadata
        except Exception as error:  # any error, for bytes that are no pickle
            raise files.damaged(METADATA, f"it can't be read ({type(error).__name__})") from error
        if manifest is None:
            logger.warning("the checkpoint %s has no manifest: its files are not verified", path)
        save_id = manifest.save_id if manifest is not None else ""
        return cls(files, metadata, manifest, StoredNames.of(entries, os.fspath(path)), save_id)


def _parts_of(
    model: nn.Module | Pipeline, optimizer: torch.optim.Optimizer | None, ranks: Ranks, found: _Found
) -> tuple[ModelContents, OptimizerStates | None]:
    contents, states = contents_of(model, optimizer, ranks)
    manifest = found.manifest
    if manifest is None or states is None:
        return contents, states
    if manifest.optimizer is None:
        raise UsageError(f"{found.files.path}: no optimizer was saved there: load the model without one")
    if manifest.optimizer and not set(manifest.optimizer) & set(states.family):
        raise UsageError(
            f"{found.files.path}: the states are of {manifest.optimizer[0]}, and the optimizer here is "
            f"{states.family[0]}. Load into such an optimizer, or load the model without one"
        )
    return contents, states


@dataclass(slots=True)
class _Staged:
    """The entries that were read, in host memory: ``tensors`` by (name in the checkpoint), as this rank has them;
    ``objects``."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    pieces: list[StoredPiece] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    #: (parameter, entry) of the optimizer's states.
    entries: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def planned(cls, found: _Found, contents: ModelContents, states: OptimizerStates | None) -> _Staged:
        staged, names = cls(), found.names
        own_tensors = contents.tensor_names
        for name, value in contents.values.items():
            key = MODEL + name
            if name in own_tensors and isinstance(value, torch.Tensor):
                names.check(key, contents.whole_shape(name, value), value.dtype)
                staged._tensor(names, contents, key, name, value.dtype)
            else:
                staged._as_stored(names, key)
        for name in states.steps() if states is not None else ():
            staged.entries[name] = names.entries(name)
            parameter = contents.parameters[name]
            for entry in staged.entries[name]:
                key = f"{OPTIMIZER}{name}.{entry}"
                is_like = names.is_tensor(key) and names.shape(key) == contents.whole_shape(name, parameter)
                if is_like and parameter.dim():
                    staged._tensor(names, contents, key, name, names.dtype(key))
                elif names.is_tensor(key) and names.shape(key) and contents.is_cut(name):
                    raise UsageError(
                        f"{names.path}: the state {entry!r} of {name!r} has the shape {names.shape(key)} there, and "
                        "the parameter is cut here: such a state can't be cut"
                    )
                else:
                    staged._as_stored(names, key)
        return staged

    def _tensor(self, names: StoredNames, contents: ModelContents, key: str, name: str, dtype: torch.dtype) -> None:
        """Plan a tensor that is cut as the model's value ``name``."""
        value = contents.values.get(name, contents.parameters.get(name))
        if isinstance(value, DTensor):
            chunks = value.__create_chunk_list__()
            local, chunk = value.to_local(), chunks[0] if chunks else None
        else:
            local = value
            chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
        target = torch.zeros_like(local, dtype=dtype, device="cpu", requires_grad=False)
        self.tensors[key] = target
        self.used.add(key)
        if chunk is not None and target.numel():
            self.pieces += names.pieces(key, target, chunk, contents.shards.get(name))

    def _as_stored(self, names: StoredNames, key: str) -> None:
        """Plan a value that is read as it is there."""
        if not names.is_tensor(key):
            self.objects[key] = None
        else:
            shape = names.shape(key)
            target = torch.empty(shape, dtype=names.dtype(key), device="cpu")
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
            self.tensors[key] = target
            self.pieces += names.pieces(key, target, chunk)
        self.used.add(key)

    def fill(self, found: _Found) -> None:
        """Read. Raises CheckpointError."""
        planner = _Reading(found.metadata, self.pieces, self.objects)
        reader = FileSystemReader(found.files.path)
        reader.set_up_storage_reader(found.metadata, False)
        try:
            reader.read_data(LoadPlan(planner.items), planner).wait()
        except BytePSError:
            raise
        except OSError as error:
            raise found.files.failure(error, "read") from error
        except Exception as error:  # of damaged data, anything
            raise found.files.damaged("its data", f"it can't be read ({type(error).__name__}: {error})") from error

    def states(self, found: _Found, contents: ModelContents, states: OptimizerStates | None) -> States:
        """The optimizer's states, where they belong. Raises UsageError if the optimizer can't go on with them, or tied
        parameters have different values."""
        first: dict[int, str] = {}
        for name, parameter in contents.parameters.items():
            other = first.setdefault(id(parameter), name)
            both = [self.tensors[MODEL + one] for one in (name, other) if MODEL + one in self.tensors]
            if len(both) == 2 and not _same(*both):
                raise UsageError(
                    f"{found.files.path}: {other!r} and {name!r} are one parameter here, and have different values "
                    "there"
                )
        made: States = {}
        if states is None:
            return made
        for name, entries in self.entries.items():
            made[name] = own = {}
            for entry in entries:
                key = f"{OPTIMIZER}{name}.{entry}"
                if key in self.objects:
                    own[entry] = self.objects[key]
                    continue
                tensor = self.tensors[key]
                parameter = contents.parameters[name]
                tensor = tensor.to(states.device_of(name, entry, not tensor.dim()))
                if isinstance(parameter, DTensor) and tensor.dim():
                    tensor = DTensor.from_local(
                        tensor,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                own[entry] = tensor
        states.check(made, os.fspath(found.files.path))
        return made

    def others(self, contents: ModelContents) -> dict[str, Any]:
        """Values of the state dict that are no parameters and buffers: of get_extra_state, and of hooks."""
        own_tensors = contents.tensor_names
        return {
            name: self.objects[MODEL + name] if MODEL + name in self.objects else self.tensors[MODEL + name]
            for name in contents.values
            if name not in own_tensors
        }

    @torch.no_grad()
    def write(self, contents: ModelContents) -> None:
        """Change the model's parameters and buffers."""
        own_tensors = contents.tensor_names
        for name, value in contents.values.items():
            if name in own_tensors and isinstance(value, torch.Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                local.copy_(self.tensors[MODEL + name])


class _Reading(DefaultLoadPlanner):
    """Says where the parts of ``items`` go, of stored tensors and objects."""

    def __init__(self, metadata: Metadata, pieces: Sequence[StoredPiece], objects: dict[str, Any]) -> None:
        super().__init__()
        self._objects = objects
        self._targets: dict[int, torch.Tensor] = {}
        self.items: list[ReadItem] = []
        for one in pieces:
            stored: Any = metadata.state_dict_metadata[one.key]
            for item in create_read_items_for_chunk_list(one.key, stored, [one.chunk]):
                target = one.target
                for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                    target = target.narrow(dim, start, length)
                self._targets[id(item)] = target
                self.items.append(item)
        none = torch.Size((0,))
        self.items += [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), none, MetadataIndex(key), none, none) for key in objects
        ]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See LoadPlanner."""
        self._objects[read_item.dest_index.fqn] = torch.load(value, weights_only=False, map_location="cpu")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """See LoadPlanner."""
        return self._targets[id(read_item)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """See LoadPlanner."""


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def _check_all_used(ranks: Ranks, found: _Found, used: set[str], with_optimizer: bool) -> None:
    """Raise UsageError, on all ranks, if the checkpoint has entries for which no rank has a place."""
    wanted = sorted(name for name in found.names.names if with_optimizer or not name.startswith(OPTIMIZER))
    own = sum(1 << place for place, name in enumerate(wanted) if name in used)
    union = 0
    for each in ranks.gathered(own):
        union |= each
    left = [name for place, name in enumerate(wanted) if not union >> place & 1]
    if left:
        what = f"the optimizer's state {bare(left[0])!r}" if left[0].startswith(OPTIMIZER) else repr(bare(left[0]))
        raise UsageError(
            f"{found.files.path}: {what} has no place here"
            + (f", nor have {len(left) - 1} others" if len(left) > 1 else "")
            + ": it is of another model or optimizer, a larger one. Nothing was loaded"
        )


def _verify(found: _Found, ranks: Ranks) -> None:
    """This rank's share of the files."""
    if found.manifest is not None:
        found.files.verify(sorted(found.manifest.files)[ranks.rank :: ranks.size], found.manifest)
