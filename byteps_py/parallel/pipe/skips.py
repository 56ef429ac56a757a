"""Skip connections: a tensor from one stage straight to a later one, past the stages in between.

    class Down(nn.Module):
        stashes = ("edges",)

        def forward(self, x):
            stash("edges", x)
            return self.conv(x)

    class Up(nn.Module):
        pops = ("edges",)

        def forward(self, x):
            return self.conv(x) + pop("edges")

The attributes name the tensors that a module stashes and pops, so that all workers know it beforehand, and which stages
exchange values. Without a pipeline, or where both are in one stage, the tensor does not move. One thread for each
model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from byteps_py.errors import UsageError


class _Current(threading.local):
    """The tensors of the forward pass that runs in this thread. ``outgoing``: names popped by later stages; None:
    there is no pipeline."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.outgoing: dict[str, torch.Tensor] | None = None


_current = _Current()


def stash(name: str, tensor: torch.Tensor) -> None:
    """Keep ``tensor`` for the ``pop`` of this name, later in the same forward pass. The module needs the attribute
    ``stashes``. Raises UsageError if it is there already, or if no module declares it."""
    if name in _current.tensors:
        raise UsageError(f"stash({name!r}): the name is stashed already, and was not popped")
    outgoing = _current.outgoing
    if outgoing is not None and name in outgoing:
        raise UsageError(f"stash({name!r}): the name is stashed twice in one forward pass")
    _current.tensors[name] = tensor


def pop(name: str) -> torch.Tensor:
    """The tensor of this name. Raises UsageError if no earlier module has stashed it."""
    if name not in _current.tensors:
        raise UsageError(
            f"pop({name!r}): there is no such tensor; an earlier module stashes it, and both declare the name in their "
            "attributes `stashes` and `pops`"
        )
    return _current.tensors.pop(name)


@contextlib.contextmanager
def forward_pass(incoming: dict[str, torch.Tensor], outgoing: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Replace the tensors of skip connections in the forward pass of a stage: ``incoming`` comes from earlier stages;
    the dictionary receives the tensors for later ones, named ``outgoing``. Raises UsageError at the end if one of these
    was not stashed, or if a tensor is left."""
    before = _current.tensors, _current.outgoing
    _current.tensors, _current.outgoing = dict(incoming), {}
    taken = _current.outgoing
    try:
        yield taken
        for name in outgoing:
            if name not in _current.tensors:
                raise UsageError(f"a module declares that it stashes {name!r}, but did not")
            taken[name] = _current.tensors.pop(name)
        if _current.tensors:
            name = min(_current.tensors)
            raise UsageError(f"{name!r} was stashed, but no later module declares in `pops` that it pops it")
    finally:
        _current.tensors, _current.outgoing = before


def declared(module: nn.Module, attribute: str) -> set[str]:
    """The names in ``attribute`` ("stashes" or "pops") of ``module`` and the modules in it."""
    return {name for each in module.modules() for name in getattr(each, attribute, ())}


# ---- between stages ------------------------------------------------------------------------------------------------


#: The name of the value that each stage gives to the next one; other names are those of skip connections.
MAIN = ""


class Connection(NamedTuple):
    """``source`` gives the value ``name`` to the stage ``target``, and gets its gradient back."""

    source: int
    target: int
    name: str


@dataclass(frozen=True, slots=True)
class SkipNames:
    """The names that the modules of one stage declare (skips.py)."""

    stashes: frozenset[str] = frozenset()
    pops: frozenset[str] = frozenset()


def connections_of(skips: Sequence[SkipNames]) -> list[Connection]:
    """The connections of a pipe, in an order that is the same on all workers. ``skips``: of each stage. Raises
    UsageError if a name is popped by no stage or by several, or by an earlier one."""
    found = [Connection(stage, stage + 1, MAIN) for stage in range(len(skips) - 1)]
    names = sorted({name for each in skips for name in each.stashes | each.pops})
    for name in names:
        sources = [stage for stage, each in enumerate(skips) if name in each.stashes]
        targets = [stage for stage, each in enumerate(skips) if name in each.pops]
        if len(sources) != 1 or len(targets) != 1 or targets[0] < sources[0]:
            raise UsageError(
                f"the skip connection {name!r} is stashed at stages {sources} and popped at stages {targets}; it needs "
                "one of each, the first not after the second"
            )
        if sources[0] < targets[0]:
            found.append(Connection(sources[0], targets[0], name))
    return found
