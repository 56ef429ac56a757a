"""Gradients on their way to the owners: reduced over the sharding group in backward passes, segment by segment from the
last one on, summed over the copies, and accumulated in one block of memory.

All ranks send in the same order, regardless of the order in which gradients arrive; a gradient that does not come
counts as zeros. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from byteps_py.errors import GradientOrderError
from byteps_py.parallel.sharding.rank_memory import ChunkPart, FusedBuffer, TensorArena
from byteps_py.parallel.sharding.segments import NamedParameter, ParameterSegment, SegmentPiece
from byteps_py.system.log import logger


@dataclass(frozen=True, slots=True)
class GradientGroups:
    """Process groups, None for one rank: the sharding group (not the one that broadcasts parameters), the owners of
    the same parameters in the copies, and both together. ``ranks``: the global ranks of the sharding group."""

    sharding: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    ranks: Sequence[int]
    #: Ranks with different data.
    data_ranks: int


@dataclass(frozen=True, slots=True)
class MergeRules:
    """See Strategy.gradient_merge_acc_step, .pp_allreduce_in_optimize and ShardOptions."""

    backward_passes: int
    sums_copies_at_step: bool
    accumulates_on_rank: bool
    agrees_on_nonfinite: bool


class GradientOwners:
    """The gradients of one model. ``passes`` counts the backward passes of this step."""

    def __init__(
        self, segments: Sequence[ParameterSegment], groups: GradientGroups, rules: MergeRules, buffer_bytes: int
    ) -> None:
        self._pieces = [piece for segment in reversed(segments) for piece in reversed(segment.pieces)]
        self._members = [member for segment in segments for member in segment.members]
        self._groups, self._rules = groups, rules
        self._buffers: dict[torch.device, FusedBuffer] = {
            device: FusedBuffer(buffer_bytes, device) for device in {piece.device for piece in self._pieces}
        }
        own = [member for member in self._members if member.piece.is_own and member.parameter.requires_grad]
        self._arenas: dict[torch.device, TensorArena] = {}
        for device in {member.parameter.device for member in own}:
            sizes = [
                TensorArena.bytes_for((one.numel,), one.parameter.dtype)
                for one in own
                if one.parameter.device == device
            ]
            self._arenas[device] = TensorArena(sum(sizes), device)
        #: The sums of own parameters' gradients, flat.
        self.sums: dict[NamedParameter, torch.Tensor] = {
            one: self._arenas[one.parameter.device].take((one.numel,), one.parameter.dtype) for one in own
        }
        self._has_sum: set[NamedParameter] = set()
        self._used: set[NamedParameter] = set()
        self._ready: set[NamedParameter] = set()
        self._next = 0
        self.passes = 0
        self._checks_for_nan = True  # for gradients of a loss that has read parameters which are not there
        self.is_summed_over_copies = False

    @property
    def is_complete(self) -> bool:
        """True if all backward passes of a step are done."""
        return self.passes == self._rules.backward_passes

    def begin_backward(self) -> None:
        """Raises GradientOrderError if the step has all its backward passes."""
        if self.is_complete:
            raise GradientOrderError(
                f"there were {self.passes} backward passes of {self._rules.backward_passes} "
                "(gradient_merge_acc_step) since the last step: call step(), or zero_grad() to drop their gradients"
            )
        self._ready.clear()
        self._next = 0

    def add(self, member: NamedParameter) -> None:
        """The gradient of ``member`` is there."""
        self._used.add(member)
        self._ready.add(member)
        if self._checks_for_nan:
            self._warn_of_nan(member)
        if self._sends():
            while self._next < len(self._pieces) and self._is_ready(self._pieces[self._next]):
                self._send(self._pieces[self._next])
                self._next += 1

    def _warn_of_nan(self, member: NamedParameter) -> None:
        """Warn once, in the first backward pass, of a gradient that is NaN where its parameter reads as NaN."""
        gradient = member.parameter.grad
        if member.piece.is_own or gradient is None or not gradient.numel() or not bool(gradient.isnan().all()):
            return
        self._checks_for_nan = False
        logger.warning(
            "sharding: the gradient of %r is NaN on a rank that does not own it, where it reads as NaN while its "
            "module does not compute. If the loss uses it, as a penalty on weights does, compute that in the "
            "module's forward pass, or both loss and backward() within optimizer.gathered_parameters()", member.name,
        )  # fmt: skip

    def end_backward(self) -> None:
        """Send the rest and wait. After the last backward pass of a step, own parameters have their averages as
        ``.grad``."""
        if self._sends():
            for piece in self._pieces[self._next :]:
                self._send(piece)
            for buffer in self._buffers.values():
                buffer.wait()
        self.passes += 1
        self._checks_for_nan = False
        if self.is_complete:
            self._deliver()

    def forget_sums(self) -> None:
        """After a step: the next one begins with no gradients. ``.grad`` stays until ``zero_grad``."""
        self.passes = 0
        self._has_sum.clear()
        self._used.clear()
        self._ready.clear()
        self.is_summed_over_copies = False

    def drop_stepped(self) -> None:
        """Before a forward pass: gradients that a step has used are not added to."""
        if self.passes == 0:
            for member in self._members:
                member.parameter.grad = None

    def abandon(self) -> None:
        """Forget the gradients of this step."""
        self.forget_sums()
        for buffer in self._buffers.values():
            buffer.forget()
        for member in self._members:
            member.parameter.grad = None

    def sum_over_copies(self) -> None:
        """Sum own gradients over the copies now, once, as ``sums_copies_at_step`` asks."""
        if self._rules.sums_copies_at_step and self._groups.copies is not None and not self.is_summed_over_copies:
            for piece in self._pieces:
                grads = [member.parameter.grad for member in piece.members if member.parameter.grad is not None]
                if piece.is_own and grads:
                    self._buffers[piece.device].send(
                        grads,
                        [grad.numel() for grad in grads],
                        piece.dtype,
                        partial(dist.all_reduce, group=self._groups.copies, async_op=True),
                        partial(_copy_back, grads),
                    )
            for buffer in self._buffers.values():
                buffer.wait()
        self.is_summed_over_copies = True

    # ---- inside ----------------------------------------------------------------------------------------------

    def _sends(self) -> bool:
        return not self._rules.accumulates_on_rank or self.passes + 1 == self._rules.backward_passes

    def _trainable(self, piece: SegmentPiece) -> list[NamedParameter]:
        return [member for member in piece.members if member.parameter.requires_grad]

    def _is_ready(self, piece: SegmentPiece) -> bool:
        return all(member in self._ready for member in self._trainable(piece))

    def _send(self, piece: SegmentPiece) -> None:
        members = self._trainable(piece)
        if not members:
            return
        grads = [member.parameter.grad for member in members]
        for member, grad in zip(members, grads, strict=True):
            if grad is not None and grad.is_sparse:
                raise GradientOrderError(
                    f"the gradient of {member.name!r} is sparse, and owners add dense ones: give its layer sparse=False"
                )
        start: Callable[[torch.Tensor], dist.Work | None] = _no_work
        if self._groups.sharding is not None:
            owner = self._groups.ranks[piece.owner]
            start = partial(dist.reduce, dst=owner, group=self._groups.sharding, async_op=True)
        is_new = [member not in self._has_sum for member in members]
        receive: Callable[[torch.Tensor, Sequence[ChunkPart]], None] = _drop
        if piece.is_own:
            receive = partial(self._accumulate, members, is_new)
            self._has_sum.update(members)
        sizes = [member.numel for member in members]
        self._buffers[piece.device].send(grads, sizes, piece.dtype, start, receive)
        for member in members:
            member.parameter.grad = None

    def _accumulate(
        self,
        members: Sequence[NamedParameter],
        is_new: Sequence[bool],
        chunk: torch.Tensor,
        parts: Sequence[ChunkPart],
    ) -> None:
        if self._groups.copies is not None and not self._rules.sums_copies_at_step:
            dist.all_reduce(chunk, group=self._groups.copies)
        for part in parts:
            member = members[part.tensor]
            into = self._sum_of(member)[part.start : part.stop]
            values = chunk[part.offset : part.offset + part.stop - part.start]
            if is_new[part.tensor]:
                into.copy_(values)
            else:
                into.add_(values)

    def _sum_of(self, member: NamedParameter) -> torch.Tensor:
        if member not in self.sums:  # it was frozen when the memory was taken
            dtype, device = member.parameter.dtype, member.parameter.device
            self.sums[member] = torch.empty(member.numel, dtype=dtype, device=device)
        return self.sums[member]

    def _deliver(self) -> None:
        own = [member for member in self._members if member in self._has_sum]
        count = self._groups.data_ranks * self._rules.backward_passes
        for member in own:
            self.sums[member].div_(count)
        flags = torch.tensor(
            [0, *(member in self._used for member in self._members)],
            dtype=torch.int32,
            device=self._members[0].parameter.device,
        )
        if self._rules.agrees_on_nonfinite:
            finite = [torch.isfinite(self.sums[member]).all().to(flags.device) for member in own]
            if finite:
                flags[0] = torch.stack(finite).logical_not().any()
        if self._groups.data is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._groups.data)
        nonfinite, *used = flags.tolist()
        first: NamedParameter | None = None
        for member, is_used in zip(self._members, used, strict=True):
            if is_used and member in self._has_sum:
                member.parameter.grad = self.sums[member].view(member.shape)
                if first is None and member.numel:
                    first = member
        if first is not None and nonfinite:
            self.sums[first][0] = float("nan")  # a GradScaler finds it on every rank
        if first is None:
            self._stand_in(bool(nonfinite))

    def _stand_in(self, is_nonfinite: bool) -> None:
        """Give a rank that owns no gradient one without elements: a GradScaler wants something to check."""
        for member in self._members:
            if member.parameter.requires_grad and member.shape:
                places = [[0]] * len(member.shape) if is_nonfinite else [[]] * len(member.shape)
                device = member.parameter.device
                member.parameter.grad = torch.sparse_coo_tensor(
                    torch.tensor(places, dtype=torch.int64, device=device).view(len(member.shape), -1),
                    torch.full((int(is_nonfinite),), float("nan"), dtype=member.parameter.dtype, device=device),
                    member.shape,
                    device=device,
                    check_invariants=False,
                )
                return


def _copy_back(grads: Sequence[torch.Tensor], chunk: torch.Tensor, parts: Sequence[ChunkPart]) -> None:
    for part in parts:
        values = chunk[part.offset : part.offset + part.stop - part.start]
        grads[part.tensor].view(-1)[part.start : part.stop].copy_(values)


def _no_work(chunk: torch.Tensor) -> None:
    return None


def _drop(chunk: torch.Tensor, parts: Sequence[ChunkPart]) -> None:
    return None
