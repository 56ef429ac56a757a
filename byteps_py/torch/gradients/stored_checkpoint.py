"""The newest checkpoint that `bps checkpoint` has written, into a hosted optimizer and its model.

Each rank reads all of it, from a folder that all ranks reach. The training thread calls, on all ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from byteps_py.checkpoint_folder import checkpoint_path, checkpoint_steps
from byteps_py.errors import CheckpointError, UsageError
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.gradients.hosted_optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.stored_buffers import ModelBuffers
from byteps_py.torch.horovod.objects import broadcast_object, unpickled

_MODEL, _STATE, _GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
_CONSTANTS = "constants."


def load_newest(model: torch.nn.Module, optimizer: HostedOptimizerMixin, path: str | os.PathLike[str]) -> int | None:
    """Load the newest checkpoint in the folder ``path``. Returns its step; None if there is none.

    Raises UsageError if it is of another model or optimizer, CheckpointError if it can't be read here.
    """
    session = contexts.current().session
    newest: int | CheckpointError | None = None
    if session.rank == 0:
        try:
            newest = max(checkpoint_steps(Path(path)), default=None)
        except CheckpointError as error:
            newest = error
    newest = broadcast_object(newest, name=f"{optimizer._name}.newest")
    if newest is None:
        return None
    if isinstance(newest, CheckpointError):
        raise newest
    checkpoint = _StoredCheckpoint(checkpoint_path(Path(path), newest))
    ModelBuffers(model).check(checkpoint.values(_CONSTANTS))
    _load(checkpoint, model, optimizer)
    shadow = optimizer._shadowed_steps
    calls = int(checkpoint.values("calls").get("", newest))
    shadow.go_on(newest, calls)
    if (extra := checkpoint.values(f"extra.{session.rank}").get("")) is not None:
        shadow.extra = unpickled(bytes(extra))  # who may write to the folder may change the weights, too
    if buffers := checkpoint.values(f"buffers.{session.rank}."):
        model.load_state_dict(buffers, strict=False)
    shadow.buffers = ModelBuffers(model, checkpoint.names(_MODEL))
    return calls


class _StoredCheckpoint:
    """The entries of a checkpoint, by name. Raises CheckpointError if it can't be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._entries = FileSystemReader(path).read_metadata().state_dict_metadata
        except OSError as error:
            raise self._failure(error) from error

    def shape(self, name: str) -> torch.Size | None:
        """Of a tensor; None if there is no such tensor."""
        entry = self._entries.get(name)
        return entry.size if isinstance(entry, TensorStorageMetadata) else None

    def names(self, prefix: str) -> set[str]:
        """The rest of the names that begin with ``prefix``."""
        return {name.removeprefix(prefix) for name in self._entries if name.startswith(prefix)}

    def values(self, prefix: str) -> dict[str, Any]:
        """All entries whose names begin with ``prefix``, by the rest of their names."""
        found: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in self._entries.items()
            if name.startswith(prefix)
        }
        if found:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist=True says so, too
                    state_dict_loader.load(found, storage_reader=FileSystemReader(self.path), no_dist=True)
            except (CheckpointException, OSError) as error:
                raise self._failure(error) from error
        return {name.removeprefix(prefix): value for name, value in found.items()}

    def _failure(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self.path} can't be read here, and all ranks need it: {error}")


def _load(checkpoint: _StoredCheckpoint, model: torch.nn.Module, optimizer: HostedOptimizerMixin) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = {param: place for place, param in enumerate(params)}
    names = {param: name for name, param in model.named_parameters() if param in places}
    for param, name in names.items():
        shape = checkpoint.shape(_MODEL + name)
        if shape is not None and shape != param.shape:
            raise UsageError(
                f"restore(): {checkpoint.path} is of another model: parameter {name!r} has shape {list(shape)} there, "
                f"and {list(param.shape)} here"
            )
    groups = _groups(checkpoint.values(_GROUPS))
    if len(groups) != len(optimizer.param_groups):
        raise UsageError(
            f"restore(): {checkpoint.path} is of another optimizer, with {len(groups)} param_groups instead of "
            f"{len(optimizer.param_groups)}"
        )
    strangers = {name for group in groups for name in group["params"]} - set(names.values())
    if strangers:
        raise UsageError(
            f"restore(): {checkpoint.path} is of another model: the optimizer here does not have its parameter "
            f"{min(strangers)!r}"
        )
    model.load_state_dict(checkpoint.values(_MODEL), strict=False)
    state = {}
    for param, name in names.items():
        if entries := checkpoint.values(f"{_STATE}{name}."):
            state[places[param]] = entries
    numbers = [
        {**saved, "params": [places[param] for param in group["params"]]}
        for saved, group in zip(groups, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": numbers})


def _groups(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param_groups, from entries such as "0.lr"."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in entries.items():
        number, _, key = name.partition(".")
        found.setdefault(int(number), {})[key] = value
    return [found[number] for number in sorted(found)]
