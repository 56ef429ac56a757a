"""Activation checkpoints of which each tensor-parallel rank keeps a part (ZeRO-R's P_a, Rajbhandari et al., 2020,
section 6.1): the ranks of a tensor-parallel group have the same inputs, so each saves 1/t of them, and the backward
pass gathers them before it repeats the forward pass. That costs one all-gather of each input. One thread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.parallel.collectives import Group, all_gather_single, rank_in, size_of
from byteps_py.parallel.sharding.rank_memory import TensorArena


def partitioned_checkpoint(
    function: Callable[..., Any], *arguments: Any, group: Group, arena: TensorArena | None = None
) -> Any:
    """Like ``torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)``, with 1/t of each saved
    input on each of the t ranks of ``group``.

        hidden = partitioned_checkpoint(layer, hidden, group=mesh.group("tp"))

    Args:
        function: computes the same when it is called again. Random numbers are repeated.
        arguments: of ``function``. Floating-point tensors are the same on all ranks of ``group``, and are divided;
            everything else is kept as it is. With sequence parallelism, ranks have different inputs: do not use this.
        group: the tensor-parallel ranks; None or one rank: inputs stay whole.
        arena: where the parts lie; default: each in memory of its own. The last backward pass of all that share an
            arena empties it.

    Raises UsageError if the arena is full; in the backward pass, UsageError if ``function`` does not repeat itself.

    >>> x = torch.ones(3, requires_grad=True)
    >>> partitioned_checkpoint(torch.exp, x, group=None).sum().backward()
    >>> bool((x.grad == x.exp()).all())
    True
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    saved = _SavedCall(function, [_save(one, group, arena) for one in arguments], _surroundings(arguments))
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        return function(*arguments)


@dataclass(frozen=True, slots=True)
class SavedInput:
    """A rank's part of an input: elements from rank·len(part) on, the last ones padding."""

    part: torch.Tensor
    shape: torch.Size
    needs_gradient: bool
    group: Group
    arena: TensorArena | None

    def whole(self) -> torch.Tensor:
        """The input, gathered from the ranks, as a leaf of a new graph."""
        ranks = size_of(self.group)
        if ranks == 1:
            flat = self.part
        else:
            flat = self.part.new_empty(ranks * self.part.numel())
            all_gather_single(flat, self.part, self.group)
        return flat[: math.prod(self.shape)].view(self.shape).requires_grad_(self.needs_gradient)

    def free(self) -> None:
        """Give the part's memory back."""
        if self.arena is not None:
            self.arena.give_back(self.part)


def _save(argument: Any, group: Group, arena: TensorArena | None) -> Any:
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        return argument
    ranks, flat = size_of(group), argument.detach().reshape(-1)
    if ranks == 1 and arena is None:
        return SavedInput(flat, argument.shape, argument.requires_grad, group, None)
    length = -(-flat.numel() // ranks)
    own = flat[rank_in(group) * length : (rank_in(group) + 1) * length]
    if arena is None:
        part = flat.new_zeros(length)
    else:
        part = arena.take((length,), flat.dtype)
        if own.numel() < length:
            part.zero_()
    part[: own.numel()].copy_(own)
    return SavedInput(part, argument.shape, argument.requires_grad, group, arena)


@dataclass(frozen=True, slots=True)
class CallSurroundings:
    """The surroundings of a forward pass that a repetition restores: random states and autocast."""

    device: torch.device
    cpu_state: torch.Tensor
    device_state: torch.Tensor | None
    autocasts: tuple[tuple[str, bool, torch.dtype], ...]


def _surroundings(arguments: Sequence[Any]) -> CallSurroundings:
    device = next((one.device for one in arguments if isinstance(one, torch.Tensor)), torch.device("cpu"))
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    kinds = {"cpu", device.type}
    autocasts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds))
    return CallSurroundings(device, torch.get_rng_state(), state, autocasts)


class _SavedCall:
    """One call: numbers in place of the tensors that autograd would keep, until the backward pass asks for the first of
    it."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], around: CallSurroundings) -> None:
        self._function, self._arguments, self._around = function, arguments, around
        self._count = 0
        self._kept: dict[int, torch.Tensor] | None = None

    def pack(self, tensor: torch.Tensor) -> int:
        self._count += 1
        return self._count - 1

    def unpack(self, number: int) -> torch.Tensor:
        if self._kept is None:
            self._kept = self._repeat()
        if number not in self._kept:
            raise GradientOrderError(
                "a second backward pass goes through a partitioned checkpoint: retain_graph is not supported here"
            )
        return self._kept.pop(number)

    def _repeat(self) -> dict[int, torch.Tensor]:
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> int:
            kept[len(kept)] = tensor.detach()
            return len(kept)

        around = self._around
        devices = [around.device] if around.device_state is not None else []
        arguments = [one.whole() if isinstance(one, SavedInput) else one for one in self._arguments]
        with torch.random.fork_rng(devices), torch.enable_grad(), contextlib.ExitStack() as autocasts:
            torch.set_rng_state(around.cpu_state)
            if around.device_state is not None:
                torch.cuda.set_rng_state(around.device_state, around.device)
            for kind, is_on, dtype in around.autocasts:
                autocasts.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
            with torch.autograd.graph.saved_tensors_hooks(keep, _never):
                self._function(*arguments)
        if len(kept) != self._count:
            raise UsageError(
                f"a checkpointed function kept {self._count} tensors when it was first called, and {len(kept)} when it "
                "was repeated: it must compute the same each time"
            )
        for one in self._arguments:
            if isinstance(one, SavedInput):
                one.free()
        self._arguments = ()
        return kept


def _never(kept: int) -> torch.Tensor:
    raise UsageError("the graph of a repeated forward pass has no backward pass")
