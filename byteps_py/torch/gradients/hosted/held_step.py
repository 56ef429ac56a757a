"""The newest step of an earlier group that other machines hold: rank 0 finds it, and all ranks take it over.

    held_step ─► take_states ─► the next step reads the states of the elements that each rank owns

A restarted job begins with it (restore.py), and ranks that have lost others go back to it (in_place.py).
The training thread calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.errors import BytePSError, CommunicationError, UsageError
from byteps_py.shadow import NotRestorable, Restorable, ShadowReader, latest_step
from byteps_py.system.terminal import ProgressBar
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.gradients.hosted.agreement import largest
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.stepper import HostedStepper
from byteps_py.torch.gradients.whole_state import held_state
from byteps_py.torch.operations.broadcasts import allgather_object, broadcast_object

#: Servers apply no steps meanwhile. Those of a job that has ended get none.
_HOLD_S = 10.0


@dataclass(frozen=True, slots=True)
class StepToRestore:
    """``reader`` reads the states, the same on all ranks, as of the step that was ``found``."""

    reader: ShadowReader
    found: Restorable


@contextlib.contextmanager
def held_step(shadow: ShadowedSteps) -> Iterator[StepToRestore | None]:
    """The step that other machines hold; None if they hold nothing. All ranks call it, and what ranks do together in
    it. Raises CommunicationError if servers hold a part of the states, but of no step all of them."""
    context = contexts.current()
    reader = shadow.open_reader(context)
    try:
        found: Restorable | Exception | None = broadcast_object(
            _find(reader) if context.session.rank == 0 else None, name=f"{shadow.name}.restorable"
        )
        if isinstance(found, Exception):
            raise found
        yield None if found is None else StepToRestore(reader, found)
    except BaseException:
        reader.close()
        raise
    if found is None:
        reader.close()


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


def none_held() -> CommunicationError:
    """The error of all ranks, some of which were started again, if nothing is held that these could go on from."""
    return CommunicationError(
        "ranks were lost before other machines held a first step: no rank can go on, and training begins anew"
    )


def raise_together(failure: BytePSError | None, name: str) -> None:
    """All ranks call it: if one of them has failed, all raise. ``name``: the exchange's."""
    told = None if failure is None else (type(failure), str(failure))
    for rank, found in enumerate(allgather_object(told, name=name)):
        if found is not None:
            raise failure or found[0](f"rank {rank}: {found[1]}")


def take_states(stepper: HostedStepper, shadow: ShadowedSteps, held: StepToRestore, with_numbers: bool) -> None:
    """Take over parameters and states, and, ``with_numbers``, those of the param_groups. All ranks call it. Raises
    UsageError, before anything changes, if they are of another model, optimizer or mesh."""
    params = {stepper.wrapped.names[param]: param for param in stepper.wrapped.params}
    failure: BytePSError | None = None
    own = held.found.of_ranks(shadow.ranks)
    try:
        _check_same(params, own, held.found, shadow.ranks)
    except UsageError as error:  # other ranks have other parts of the model
        failure = error
    raise_together(failure, f"{shadow.name}.same")
    if own is None:
        raise RuntimeError("states of other ranks were taken for those of these")
    common = own.common
    # A parameter that has made no step is as the model's constructor has made it.
    states = {name: held_state(held.reader, own, name) for name, (*_, steps) in common["params"].items() if steps}
    total, done = sum(params[name].nbytes for name in states), 0
    with ProgressBar("restoring", is_wanted=contexts.current().session.rank == 0, in_pipes=True) as bar:
        for name, state in states.items():
            bar.update(done, total, name)
            with torch.no_grad():
                params[name].copy_(state.parameter.read())
            done += params[name].nbytes
    if with_numbers:
        for group, saved in zip(stepper.wrapped.groups, common["groups"], strict=True):
            for key, value in saved.items():
                group[key] = _like(group.get(key), value)
    stepper.load({params[name]: {"step": state.steps, **state.entries} for name, state in states.items()})
    shadow.go_on(own.step, common.get("calls", own.step), held.reader)


def agree_on_calls(shadow: ShadowedSteps) -> None:
    """Ranks that have lost others know of calls of step() after the step that is held, which made no step, as gradients
    were not finite. A rank that was started again makes none in these calls, either. All ranks call it."""
    (calls,) = largest(contexts.current(), f"{shadow.name}.calls", [shadow.calls])
    shadow.skips = calls - shadow.calls


def _check_same(
    params: Mapping[str, torch.nn.Parameter], own: Restorable | None, found: Restorable, ranks: Sequence[int]
) -> None:
    """Raises UsageError unless what is held is of this model, optimizer and mesh. ``own``: of what is ``found``, that
    of the optimizer that ``ranks`` share."""
    if own is None:
        said, has = (
            " and ".join(f"ranks {', '.join(map(str, each))}" for each in some) if all(some) else "all ranks"
            for some in (list(found.commons)[:4], [ranks])
        )
        raise UsageError(
            f"restore(): servers hold states of optimizers that {said} share, and this rank's belongs to {has}: start "
            "the job with the mesh of the first run"
        )
    held = own.common["params"]
    for name, (_, _, shape, dtype, _) in held.items():
        param = params.get(name)
        if param is None or list(param.shape) != shape or str(param.dtype) != dtype:
            has = "does not have it" if param is None else f"has it with shape {list(param.shape)} and {param.dtype}"
            raise UsageError(
                f"restore(): servers hold states of another model: parameter {name!r} of shape {shape} and {dtype}, "
                f"and the optimizer {has}"
            )


def _like(value: Any, saved: Any) -> Any:
    """A number of a param_group as it was: JSON has no tuples and no tensors."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, saved)
    return tuple(saved) if isinstance(saved, list) else saved
