"""A restarted job goes on from the last step that other machines hold, or from the newest checkpoint: ``bps.restore``.

    rank 0: which step can be delivered ─► all ranks ─► parameters, param_groups, what the user has attached
    at the next step: each rank reads the states of the elements that it owns

States are read late, and in part, since no rank may have room for all of them. The training thread calls.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from byteps_py.checkpoint_files import METADATA, CheckpointFiles, checkpoint_path, checkpoint_steps
from byteps_py.errors import BytePSError, CheckpointError, UsageError
from byteps_py.shadow.record import Attachment
from byteps_py.system.log import logger
from byteps_py.system.terminal import ProgressBar
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.group_history import history_of
from byteps_py.torch.gradients.hosted.held_step import (
    StepToRestore,
    agree_on_calls,
    held_step,
    none_held,
    raise_together,
    take_states,
)
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.hosted.replication import ModelBuffers, ShadowedSteps, tensors_of
from byteps_py.torch.gradients.hosted.rules import MASTER, moment_names, rule_of
from byteps_py.torch.gradients.hosted.states import check_state
from byteps_py.torch.gradients.hosted.stepper import HostedStepper
from byteps_py.torch.gradients.stepper import WrappedOptimizer
from byteps_py.torch.gradients.whole_state import chunks_fault
from byteps_py.torch.operations.broadcasts import broadcast_object, unpickled

#: How names of a checkpoint's entries begin.
_MODEL, _STATE, _GROUPS = "model.", "optimizer.state.", "optimizer.param_groups."
_CONSTANTS = "constants."


def restore(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: str | os.PathLike[str] | None = None
) -> int | None:
    """Go on from the last step that summation servers hold of an earlier run of this job; None if they hold nothing.

    optimizer: of ``DistributedOptimizer(…, shadow=True)``, before its first step. Its parameters, states and
    param_groups, the model's buffers and ``optimizer.shadow_extra`` are as they were at the end of that step's
    ``optimizer.step()``, bit for bit, on every rank. Returns how often ``step()`` was called: also calls that made no
    step, because gradients were not finite, have used up their batch. From now on the model's buffers travel with each
    step.

    path: a folder of checkpoints that `bps checkpoint` has written, which all ranks reach. If the servers hold nothing,
    the newest one there is loaded. Each rank then needs memory for all states for a while.

    All ranks call it. Raises UsageError if the optimizer is not shadowed, has stepped already, if the model's buffers
    are more than can travel with each step, or if what is held is of another model or optimizer; CommunicationError if
    servers hold a part of the states, but of no step all of them; CheckpointError if a rank can't read the checkpoint.

    >>> import torch, byteps_py as bps
    >>> def train(model: torch.nn.Module, steps: int) -> None:
    ...     optimizer = bps.DistributedOptimizer(
    ...         torch.optim.AdamW(model.parameters()), model.named_parameters(), shadow=True
    ...     )
    ...     for step in range(bps.restore(model, optimizer) or 0, steps):
    ...         optimizer.shadow_extra = torch.get_rng_state()
    ...         ...
    """
    if not isinstance(optimizer, HostedOptimizerMixin) or optimizer._stepper.shadow is None:
        raise UsageError("restore() takes the optimizer of DistributedOptimizer(…, shadow=True)")
    stepper, shadow = optimizer._stepper, optimizer._stepper.shadow
    if stepper.states.are_made:
        raise UsageError("restore() comes before the optimizer's first step")
    _check_parameters(model, stepper)
    context = contexts.current()
    if (history := history_of(context)) is not None:
        history.restored()
    shadow.model, shadow.buffers = model, ModelBuffers(model)
    shadow.check_size()
    was_catching_up, context.is_catching_up = context.is_catching_up, False
    with held_step(shadow) as held:
        if held is not None:
            attached, buffers = _read_attached(model, shadow, held)
            take_states(stepper, shadow, held, with_numbers=True)
            if attached.extra:  # only this job's ranks, which are authenticated, have written it
                shadow.extra = unpickled(attached.extra)
            if buffers:
                model.load_state_dict(buffers, strict=False)
                shadow.buffers = ModelBuffers(model, attached.buffers)
            if context.settings.max_restarts:
                agree_on_calls(shadow)
                stepper.reducer.is_skipped = shadow.skips > 0
    if held is None:
        if was_catching_up:
            raise none_held()
        return _load_newest(model, optimizer, shadow, path) if path is not None else None
    context.session.note_synced()
    logger.info("going on from step %d, which other machines held", shadow.step)
    context.go_on_from(shadow.calls)
    return shadow.calls


def _read_attached(
    model: torch.nn.Module, shadow: ShadowedSteps, held: StepToRestore
) -> tuple[Attachment, dict[str, torch.Tensor]]:
    """The attachment of this rank to the step, and the buffers in it. If one rank can't read its own, all raise."""
    record = held.found.records.get(contexts.current().session.rank)
    attached, buffers = Attachment(b"", {}), dict[str, torch.Tensor]()
    failure: BytePSError | None = None
    try:
        if record is not None:
            attached = Attachment.unpack(held.reader.read_attached(record))
        buffers = tensors_of(attached.buffers)
        ModelBuffers(model).check(attached.constants)
    except BytePSError as error:
        failure = error
    raise_together(failure, f"{shadow.name}.attached")
    return attached, buffers


def _check_parameters(model: torch.nn.Module, stepper: HostedStepper) -> None:
    mine = set(model.parameters())
    strangers = [name for param, name in stepper.wrapped.names.items() if param not in mine]
    if strangers:
        raise UsageError(f"restore(): parameter {strangers[0]!r} of the optimizer is not one of the model's")


# ---- from a checkpoint that `bps checkpoint` has written: each rank reads all of it ---------------------------------


def _load_newest(
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
    newest = broadcast_object(newest, name=f"{shadow.name}.newest")
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
    raise_together(failure, f"{shadow.name}.loaded")
    optimizer.load_state_dict(loaded.optimizer)
    model.load_state_dict(loaded.weights, strict=False)
    if loaded.extra is not None:
        shadow.extra = loaded.extra
    if loaded.buffers:
        model.load_state_dict(loaded.buffers, strict=False)
    shadow.go_on(newest, calls)
    shadow.buffers = ModelBuffers(model, checkpoint.names(_MODEL))
    return calls


class _StepFiles(CheckpointFiles):
    """The files of a step in ``folder``. ``names_older``: errors name the newest older step that is intact."""

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
        try:
            older = [step for step in checkpoint_steps(self._folder) if step < self._step] if self._names_older else []
        except CheckpointError:
            return ""
        intact = next((step for step in reversed(older) if _is_intact(self._folder, step)), None)
        return "" if intact is None else f". Step {intact} there is intact: move {self.path.name} away to go on from it"


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
        for name, entry in self._entries.items():
            if isinstance(entry, TensorStorageMetadata) and (fault := chunks_fault(entry)):
                raise self._files.damaged(f"the entry {name!r}", fault)

    def shape(self, name: str) -> torch.Size | None:
        """The shape of a tensor; None if there is no such tensor."""
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
    """The part of a checkpoint that belongs to this rank."""

    weights: Mapping[str, Any]
    buffers: Mapping[str, Any]
    optimizer: dict[str, Any]
    extra: Any


def _read(checkpoint: _StoredCheckpoint, model: torch.nn.Module, stepper: HostedStepper, rank: int) -> _Loaded:
    """Read and check all of it. Raises UsageError, CheckpointError."""
    params, own_groups = stepper.wrapped.params, stepper.wrapped.groups
    places = {param: place for place, param in enumerate(params)}
    names = {param: name for name, param in model.named_parameters() if param in places}
    _check_shapes(checkpoint, model, (_MODEL, buffers_prefix := f"buffers.{rank}."))
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
    weights, buffers = checkpoint.values(_MODEL), checkpoint.values(buffers_prefix)
    state = {}
    with ProgressBar("restoring", is_wanted=rank == 0, in_pipes=True) as bar:
        for count, (param, name) in enumerate(names.items()):
            bar.update(count, len(names), name)
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


def _check_shapes(checkpoint: _StoredCheckpoint, model: torch.nn.Module, prefixes: Sequence[str]) -> None:
    """Raises UsageError for a tensor that the model does not have, or has in another shape."""
    own = model.state_dict(keep_vars=True)
    for prefix in prefixes:
        for name in sorted(checkpoint.names(prefix)):
            shape, there = checkpoint.shape(prefix + name), own.get(name)
            if not isinstance(there, torch.Tensor) or there.shape != shape:
                has = f"has it in shape {list(there.shape)}" if isinstance(there, torch.Tensor) else "does not have it"
                raise UsageError(
                    f"restore(): {checkpoint.path} is of another model: it has {name!r} of shape {list(shape or ())}, "
                    f"and the model here {has}"
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
