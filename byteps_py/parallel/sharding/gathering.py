"""When segments are gathered and freed: by the forward pass of the modules that use them, and by autograd when it uses
a tensor that lies in one.

Forward: before a module with parameters computes, their segments are gathered, and the broadcast of the next one is
started. So it is under way while this one computes. Which is next is learned from the last forward pass.

Backward: autograd keeps no parameters, but notes where they lie (torch.autograd.graph.saved_tensors_hooks). When it
asks for one, its segment is gathered, and the broadcast of the one before is started. With non-reentrant activation
checkpoints (torch.utils.checkpoint with use_reentrant=False), the repeated forward pass gathers.

All ranks of a sharding group use the same modules in the same order. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.parallel.sharding.segments import ParameterSegment, SegmentMemory, SegmentPiece


@dataclass(frozen=True, slots=True)
class SavedPlace:
    """A tensor that autograd would have kept: a view of a flat tensor."""

    segment: ParameterSegment
    piece: SegmentPiece
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class SegmentGathering:
    """Hooks of one model. ``on_forward`` is called before each outermost forward pass, ``on_backward`` at each event of
    a backward pass."""

    def __init__(self, memory: SegmentMemory, reshard_after_forward: bool) -> None:
        self.memory = memory
        #: This rank in its sharding group.
        self.own = memory.own
        self.on_forward: Callable[[], None] = _nothing
        self.on_backward: Callable[[], None] = _nothing
        #: Counts the optimizer's steps: tensors that autograd has kept from earlier steps are not of these parameters.
        self.version = 0
        self._reshards = reshard_after_forward
        self._depth = 0
        self._hooks: Any = None
        self._used: list[int] = []
        self._order = [segment.index for segment in memory.segments]
        self._current: ParameterSegment | None = None
        self._previous: ParameterSegment | None = None
        self._held = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SegmentGathering:
        raise UsageError(
            "a model that sharding.shard has taken can't be copied: this rank holds only its own parameters. For an "
            "average of weights, copy the model before shard(), and update the copy from model.state_dict(), which all "
            "ranks call and which is whole"
        )

    def attach(self, model: nn.Module, whole: tuple[type[nn.Module], ...]) -> None:
        """Register the hooks of all modules of ``model`` that have parameters."""
        by_parameter = {id(member.parameter): segment for segment in self.memory.segments for member in segment.members}
        for module in model.modules():
            parameters = module.parameters(recurse=isinstance(module, whole))
            needed = sorted({by_parameter[id(one)].index for one in parameters})
            if needed or module is model:
                segments = [self.memory.segments[index] for index in needed]
                module.register_forward_pre_hook(_BeforeForward(self, segments), prepend=True)
                module.register_forward_hook(_AfterForward(self, segments), always_call=True)

    def hold(self) -> None:
        """Gather all segments, and keep them until ``release``."""
        self._held += 1
        for segment in self.memory.segments:
            self.memory.gather(segment)

    def release(self) -> None:
        """The end of ``hold``."""
        self._held -= 1
        self.free_all()

    def free_all(self) -> None:
        """Free parameters that no pass uses now."""
        self._trim(())

    # ---- forward ---------------------------------------------------------------------------------------------

    def before_module(self, segments: list[ParameterSegment]) -> None:
        """A module that uses ``segments`` begins its forward pass."""
        is_repeated = in_backward()
        if self._depth == 0 and not is_repeated:
            self.on_forward()
            self._used = []
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        self._depth += 1
        if is_repeated and segments:
            self.on_backward()
        for segment in segments:
            segment.users += 1
            self._use(segment, forward=not is_repeated)

    def after_module(self, segments: list[ParameterSegment]) -> None:
        """It has ended, perhaps with an exception."""
        self._depth -= 1
        for segment in segments:
            segment.users -= 1
        if self._depth == 0 and self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(None, None, None)
            if set(self._used) == set(self._order):
                self._order = self._used
            if not torch.is_grad_enabled():
                self.free_all()

    def _use(self, segment: ParameterSegment, forward: bool) -> None:
        self.memory.gather(segment)
        following = self._following(segment, 1 if forward else -1)
        if following is not None:
            self.memory.start(following)
        if segment is not self._current:
            self._previous, self._current = self._current, segment
            if forward:
                if segment.index not in self._used:
                    self._used.append(segment.index)
                if self._reshards or not torch.is_grad_enabled():
                    self._trim((segment, following))
            elif self._reshards:
                self._trim((segment, following, self._previous))

    def _following(self, segment: ParameterSegment, step: int) -> ParameterSegment | None:
        place = self._order.index(segment.index) + step
        if not 0 <= place < len(self._order):
            return None
        following = self.memory.segments[self._order[place]]
        return following if step > 0 or following.saved else None

    def _trim(self, kept: tuple[ParameterSegment | None, ...]) -> None:
        if not self._held:
            for segment in self.memory.resident():
                if segment not in kept and not segment.users:
                    self.memory.free(segment)

    # ---- backward --------------------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The backward pass has ended."""
        for segment in self.memory.segments:
            segment.saved = 0
        self._previous = self._current = None
        self.free_all()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedPlace:
        found = self.memory.by_address.get(tensor.untyped_storage().data_ptr())
        if found is None:
            if self.memory.is_placeholder(tensor):
                raise UsageError(
                    f"{self._names(tensor)} was read outside of the forward pass of its own module, while this rank "
                    "has no values of it: name the module that reads it in ShardOptions(whole_modules=…), or compute "
                    "within gathered_parameters()"
                )
            return tensor
        segment, piece = found
        segment.saved += 1
        return SavedPlace(segment, piece, tensor.size(), tensor.stride(), int(tensor.storage_offset()), self.version)

    def _unpack(self, saved: torch.Tensor | SavedPlace) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.version != self.version:
            raise GradientOrderError(
                f"a backward pass needs the values of {saved.piece.members[0].name} from before the last step: call "
                "backward() before step()"
            )
        self.on_backward()
        self._use(saved.segment, forward=False)
        flat = saved.piece.flat
        if flat is None:
            raise UsageError(f"{saved.piece.members[0].name} is not there")
        return flat.as_strided(saved.size, saved.stride, saved.offset)

    def _names(self, tensor: torch.Tensor) -> str:
        names = [
            member.name
            for segment in self.memory.segments
            for member in segment.members
            if not member.piece.is_own and sorted(member.shape) == sorted(tensor.shape)
        ]
        return " or ".join(names[:3]) or "a parameter"


@dataclass(frozen=True, slots=True)
class _BeforeForward:
    gathering: SegmentGathering
    segments: list[ParameterSegment]

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self.gathering.before_module(self.segments)


@dataclass(frozen=True, slots=True)
class _AfterForward:
    gathering: SegmentGathering
    segments: list[ParameterSegment]

    def __call__(self, module: nn.Module, arguments: Any, result: Any) -> None:
        self.gathering.after_module(self.segments)


def in_backward() -> bool:
    """True if autograd calls from a backward pass, as when an activation checkpoint repeats a forward pass."""
    return bool(torch._C._current_graph_task_id() != -1)  # torch.utils.checkpoint asks in the same way


def _nothing() -> None:
    return None
