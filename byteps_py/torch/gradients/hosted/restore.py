"""A restarted job goes on from the last step that other machines hold: ``bps.restore``.

    rank 0: which step can be delivered ─► all ranks ─► parameters, param_groups, what the user has attached
    at the next step: each rank reads the states of the elements that it owns

States are read late, and in part, since no rank may have room for all of them. The training thread calls.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from byteps_py.errors import BytePSError, CommunicationError, UsageError
from byteps_py.shadow import NotRestorable, Restorable, ShadowReader, latest_step
from byteps_py.shadow.record import Attachment
from byteps_py.system.log import logger
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.gradients.hosted.buffers import ModelBuffers, tensors_of
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import MASTER
from byteps_py.torch.gradients.hosted.states import StoredElements
from byteps_py.torch.gradients.hosted.stepper import HostedStepper
from byteps_py.torch.gradients.hosted.stored_checkpoint import load_newest, raise_together
from byteps_py.torch.operations.objects import broadcast_object, unpickled

#: Elements of a parameter that are read at once.
_CHUNK = 1 << 20
#: Servers apply no steps meanwhile. Those of a job that has ended get none.
_HOLD_S = 10.0


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
    shadow.model, shadow.buffers = model, ModelBuffers(model)
    shadow.check_size()
    reader = shadow.open_reader(context.settings)
    try:
        found: Restorable | Exception | None = broadcast_object(
            _find(reader) if context.session.rank == 0 else None, name=f"{stepper.name}.restorable"
        )
        if isinstance(found, Exception):
            raise found
        if found is None:
            reader.close()
            return load_newest(model, optimizer, shadow, path) if path is not None else None
        _restore(model, stepper, shadow, reader, found)
    except BaseException:
        reader.close()
        raise
    logger.info("going on from step %d, which other machines held", found.step)
    return shadow.calls


def _find(reader: ShadowReader) -> Restorable | Exception | None:
    """The newest step that can be restored; None if there are no states. An error is returned: all ranks raise it."""
    try:
        found = latest_step(reader.describe(_HOLD_S))
    except BytePSError as error:
        return error
    if isinstance(found, NotRestorable):
        return CommunicationError(
            f"restore(): other machines hold states of an earlier run, but of no step all of them: {found.reason}. Go "
            "on from a checkpoint; without restore(), new states take their place"
        )
    return found


def _read_attached(
    model: torch.nn.Module, stepper: HostedStepper, reader: ShadowReader, found: Restorable
) -> tuple[Attachment, dict[str, torch.Tensor]]:
    """The attachment of this rank to the step, and the buffers in it. If one rank can't read its own, all raise."""
    record = found.records.get(contexts.current().session.rank)
    attached, buffers = Attachment(b"", {}), dict[str, torch.Tensor]()
    failure: BytePSError | None = None
    try:
        if record is not None:
            attached = Attachment.unpack(reader.read_attached(record))
        buffers = tensors_of(attached.buffers)
        ModelBuffers(model).check(attached.constants)
    except BytePSError as error:
        failure = error
    raise_together(failure, f"{stepper.name}.attached")
    return attached, buffers


def _check_parameters(model: torch.nn.Module, stepper: HostedStepper) -> None:
    mine = set(model.parameters())
    strangers = [name for param, name in stepper.wrapped.names.items() if param not in mine]
    if strangers:
        raise UsageError(f"restore(): parameter {strangers[0]!r} of the optimizer is not one of the model's")


def _restore(
    model: torch.nn.Module, stepper: HostedStepper, shadow: ShadowedSteps, reader: ShadowReader, found: Restorable
) -> None:
    common = found.common
    attached, buffers = _read_attached(model, stepper, reader, found)
    groups = stepper.wrapped.groups
    params = {stepper.wrapped.names[param]: param for param in stepper.wrapped.params}
    _check_same(params, common)
    states: dict[torch.nn.Parameter, Mapping[str, Any]] = {}
    for name, (tensor, first, shape, _, steps) in common["params"].items():
        param, kinds = params[name], common["kinds"][tensor]
        stored = {
            kind: StoredElements(reader, found.tensors[tensor], number, first, tuple(shape))
            for number, kind in enumerate(kinds)
        }
        if not steps:
            continue  # it has made no step: it is as the model's constructor has made it
        _read(param, stored[MASTER])
        if param.dtype is stored[MASTER].dtype:
            del stored[MASTER]
        states[param] = {"step": torch.tensor(float(steps), device="cpu"), **stored}
    for group, saved in zip(groups, common["groups"], strict=True):
        for key, value in saved.items():
            group[key] = _like(group.get(key), value)
    stepper.load(states)
    shadow.go_on(found.step, common.get("calls", found.step), reader)
    if attached.extra:  # only this job's ranks, which are authenticated, have written it
        shadow.extra = unpickled(attached.extra)
    if buffers:
        model.load_state_dict(buffers, strict=False)
        shadow.buffers = ModelBuffers(model, attached.buffers)


def _check_same(params: Mapping[str, torch.nn.Parameter], common: Mapping[str, Any]) -> None:
    """Raises UsageError unless what is held is of this model and optimizer."""
    held = common["params"]
    for name, (_, _, shape, dtype, _) in held.items():
        param = params.get(name)
        if param is None or list(param.shape) != shape or str(param.dtype) != dtype:
            has = "does not have it" if param is None else f"has it with shape {list(param.shape)} and {param.dtype}"
            raise UsageError(
                f"restore(): servers hold states of another model: parameter {name!r} of shape {shape} and {dtype}, "
                f"and the optimizer {has}"
            )


def _read(param: torch.nn.Parameter, master: StoredElements) -> None:
    flat = torch.empty(param.shape, dtype=param.dtype, device="cpu").view(-1)
    count = math.prod(param.shape)
    for start in range(0, count, _CHUNK):
        end = min(start + _CHUNK, count)
        flat[start:end] = master[start:end]
    with torch.no_grad():
        param.copy_(flat.view(param.shape))


def _like(value: Any, saved: Any) -> Any:
    """A number of a param_group as it was: JSON has no tuples and no tensors."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, saved)
    return tuple(saved) if isinstance(saved, list) else saved
