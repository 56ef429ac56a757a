"""The newest checkpoint that `bps checkpoint` has written, into a hosted optimizer and its model.

Each rank reads all of it, from a folder that all ranks reach. The training thread calls, on all ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from byteps_py.checkpoint_files import METADATA, CheckpointFiles
from byteps_py.checkpoint_folder import checkpoint_path, checkpoint_steps
from byteps_py.errors import BytePSError, CheckpointError, UsageError
from byteps_py.system.log import logger
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.gradients.hosted.buffers import ModelBuffers
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import MASTER, moment_names, rule_of
from byteps_py.torch.gradients.hosted.states import check_state
from byteps_py.torch.gradients.hosted.stepper import HostedStepper
from byteps_py.torch.gradients.stepper import WrappedOptimizer
from byteps_py.torch.operations.objects import allgather_object, broadcast_object, unpickled

_MODEL, _STATE, _GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
_CONSTANTS = "constants."


def load_newest(
    model: torch.nn.Module, optimizer: HostedOptimizerMixin, shadow: ShadowedSteps, path: str | os.PathLike[str]
) -> int | None:
    """Load the newest checkpoint in the folder ``path``. Returns its step; None if there is none.

    Raises UsageError if it is of another model or optimizer, CheckpointError if it can't be read here: the
    same error on all ranks, and nothing has changed.
    """
    session, stepper = contexts.current().session, optimizer._stepper
    newest: int | CheckpointError | None = None
    if session.rank == 0:
        try:
            newest = max(checkpoint_steps(Path(path)), default=None)
        except CheckpointError as error:
            newest = error
    newest = broadcast_object(newest, name=f"{stepper.name}.newest")
    if newest is None:
        return None
    if isinstance(newest, CheckpointError):
        raise newest
    failure: BytePSError | None = None
    try:
        checkpoint = _StoredCheckpoint(Path(path), newest)
        ModelBuffers(model).check(checkpoint.values(_CONSTANTS))
        loaded = _read(checkpoint, model, stepper, session.rank)
        calls = int(checkpoint.values("calls").get("", newest))
    except BytePSError as error:
        failure = error
    raise_together(failure, f"{stepper.name}.loaded")
    loaded.give(model, optimizer, shadow)
    shadow.go_on(newest, calls)
    shadow.buffers = ModelBuffers(model, checkpoint.names(_MODEL))
    return calls


def raise_together(failure: BytePSError | None, name: str) -> None:
    """All ranks call it: if one of them has failed, all raise. ``name``: of what they exchange."""
    told = None if failure is None else (type(failure), str(failure))
    for rank, found in enumerate(allgather_object(told, name=name)):
        if found is not None:
            raise failure or found[0](f"rank {rank}: {found[1]}")


class _StepFiles(CheckpointFiles):
    """Of a step in ``folder``. ``names_older``: errors name the newest older step that is intact."""

    def __init__(self, folder: Path, step: int, names_older: bool = True) -> None:
        super().__init__(checkpoint_path(folder, step))
        self._folder, self._step, self._names_older = folder, step, names_older

    def read_intact(self) -> Metadata:
        """Raises CheckpointError if a file is not as it was written. Without a manifest, damage shows only where a file
        is too short, or can't be read."""
        _, manifest = self.read()
        with self.explained("read"):
            if manifest is not None:
                self.verify(manifest.files, manifest)
            elif self._names_older:
                logger.warning("the checkpoint %s has no manifest: its files are not verified", self.path)
            ends: dict[str, int] = {}
            try:
                metadata: Metadata = FileSystemReader(self.path).read_metadata()
                for one in metadata.storage_data.values():
                    ends[one.relative_path] = max(ends.get(one.relative_path, 0), one.offset + one.length)
            except OSError:
                raise
            except Exception as error:  # of what is no pickle, anything
                raise self.damaged(METADATA, f"it can't be read ({type(error).__name__}: {error})") from error
            for name, end in ends.items():
                size = (self.path / name).stat().st_size if (self.path / name).exists() else 0
                if size < end:
                    raise self.damaged(name, f"it has {size} bytes, and had at least {end}")
        return metadata

    def failure(self, error: OSError, what: str) -> CheckpointError:
        """See CheckpointFiles."""
        return CheckpointError(f"{super().failure(error, what)}{self._others()}")

    def _others(self) -> str:
        older = next((step for step in self._older() if _is_intact(self._folder, step)), None)
        return "" if older is None else f". Step {older} there is intact: move {self.path.name} away to go on from it"

    def _older(self) -> list[int]:
        """The steps before this one, the newest first."""
        if not self._names_older:
            return []
        try:
            return [step for step in reversed(checkpoint_steps(self._folder)) if step < self._step]
        except CheckpointError:
            return []


def _is_intact(folder: Path, step: int) -> bool:
    try:
        _StepFiles(folder, step, names_older=False).read_intact()
    except CheckpointError:
        return False
    return True


class _StoredCheckpoint:
    """The entries of a checkpoint, by name. Raises CheckpointError if it can't be read."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = checkpoint_path(folder, step)
        self._files = _StepFiles(folder, step)
        self._entries = self._files.read_intact().state_dict_metadata

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
            except (CheckpointException, Exception) as error:  # of damaged data, anything
                why = f"it can't be read ({type(error).__name__}: {error})"
                raise self._files.damaged(f"the entry {min(found)!r}, or one beside it", why) from error
        return {name.removeprefix(prefix): value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a checkpoint has for this rank."""

    weights: Mapping[str, Any]
    buffers: Mapping[str, Any]
    optimizer: dict[str, Any]
    extra: Any

    def give(self, model: torch.nn.Module, optimizer: HostedOptimizerMixin, shadow: ShadowedSteps) -> None:
        """Nothing is left to be refused."""
        optimizer.load_state_dict(self.optimizer)
        model.load_state_dict(self.weights, strict=False)
        if self.extra is not None:
            shadow.extra = self.extra
        if self.buffers:
            model.load_state_dict(self.buffers, strict=False)


def _read(checkpoint: _StoredCheckpoint, model: torch.nn.Module, stepper: HostedStepper, rank: int) -> _Loaded:
    """Read and check all of it. Raises UsageError, CheckpointError."""
    params, own_groups = stepper.wrapped.params, stepper.wrapped.groups
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
    if len(groups) != len(own_groups):
        raise UsageError(
            f"restore(): {checkpoint.path} is of another optimizer, with {len(groups)} param_groups instead of "
            f"{len(own_groups)}"
        )
    strangers = {name for group in groups for name in group["params"]} - set(names.values())
    if strangers:
        raise UsageError(
            f"restore(): {checkpoint.path} is of another model: the optimizer here does not have its parameter "
            f"{min(strangers)!r}"
        )
    weights = checkpoint.values(_MODEL)
    buffers = checkpoint.values(f"buffers.{rank}.")
    _check_values(checkpoint, model, {**weights, **buffers})
    state = {}
    for param, name in names.items():
        if entries := checkpoint.values(f"{_STATE}{name}."):
            number = stepper.groups.group_of[param]
            _check_entries(checkpoint, stepper.wrapped, param, entries, {**own_groups[number], **groups[number]})
            state[places[param]] = entries
    numbers = [
        {**saved, "params": [places[param] for param in group["params"]]}
        for saved, group in zip(groups, own_groups, strict=True)
    ]
    extra = checkpoint.values(f"extra.{rank}").get("")
    if extra is not None:
        extra = unpickled(bytes(extra))  # who may write to the folder may change the weights, too
    return _Loaded(weights, buffers, {"state": state, "param_groups": numbers}, extra)


def _check_values(checkpoint: _StoredCheckpoint, model: torch.nn.Module, found: Mapping[str, Any]) -> None:
    """Raises UsageError for a tensor that the model does not have, or has in another shape."""
    own = model.state_dict(keep_vars=True)
    for name, value in found.items():
        there = own.get(name)
        if not isinstance(there, torch.Tensor) or there.shape != value.shape:
            has = f"has it in shape {list(there.shape)}" if isinstance(there, torch.Tensor) else "does not have it"
            raise UsageError(
                f"restore(): {checkpoint.path} is of another model: it has {name!r} of shape {list(value.shape)}, and "
                f"the model here {has}"
            )


def _check_entries(
    checkpoint: _StoredCheckpoint,
    wrapped: WrappedOptimizer,
    param: torch.nn.Parameter,
    entries: Mapping[str, Any],
    group: dict[str, Any],
) -> None:
    """Raises UsageError for states of another optimizer. ``group``: with the numbers that are about to be loaded."""
    rule, name = rule_of(wrapped.optimizer, group), wrapped.names[param]
    check_state(rule, param, entries, repr(name))
    if strange := set(entries) - {*moment_names(rule), "step", MASTER}:
        raise UsageError(
            f"restore(): {checkpoint.path} is of another optimizer: the state of {name!r} has {min(strange)!r} there, "
            f"which {type(wrapped.optimizer).__name__} does not have"
        )


def _groups(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The param_groups, from entries such as "0.lr"."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in entries.items():
        number, _, key = name.partition(".")
        found.setdefault(int(number), {})[key] = value
    return [found[number] for number in sorted(found)]
