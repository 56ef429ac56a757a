"""The memory of parameters: for each segment and owner one flat tensor, of which the parameters are views.

An owner keeps its flat tensors. Other ranks have them only while they are gathered. In between, their parameters are
views of one element (NaN), with the parameter's shape. To free a flat tensor is to drop our reference to it: a
computation that still uses it keeps it, so freeing is never wrong, only early. One thread at a time: the trainer's, or
that of its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from byteps_py.errors import UsageError


@dataclass(eq=False, slots=True)
class NamedParameter:
    """A parameter of the model, and its place: element ``offset`` of ``piece.flat``."""

    name: str
    parameter: nn.Parameter
    owner: int
    shape: torch.Size = field(init=False)
    numel: int = field(init=False)
    offset: int = 0
    piece: SegmentPiece = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.shape, self.numel = self.parameter.shape, self.parameter.numel()


@dataclass(eq=False, slots=True)
class SegmentPiece:
    """The parameters of one segment that one rank owns, of one dtype and device."""

    owner: int
    is_own: bool
    members: list[NamedParameter]
    dtype: torch.dtype
    device: torch.device
    #: The values: None while they are not on this rank.
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    @property
    def numel(self) -> int:
        """The number of elements of all its parameters."""
        return sum(member.numel for member in self.members)


@dataclass(eq=False, slots=True)
class ParameterSegment:
    """Parameters that are broadcast together."""

    index: int
    members: list[NamedParameter]
    pieces: list[SegmentPiece]
    #: Modules in their forward pass that use it.
    users: int = 0
    #: Tensors that autograd keeps and that lie in it.
    saved: int = 0
    #: Broadcasts are under way, or done.
    is_started: bool = False
    is_attached: bool = False


class SegmentMemory:
    """The segments of one model. Constructing it moves the parameters' values into flat tensors of their owners."""

    def __init__(
        self,
        segments: Sequence[Sequence[NamedParameter]],
        own: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.own, self._ranks, self._group = own, ranks, group
        self._placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        #: Flat tensors on this rank, by the address of their memory.
        self.by_address: dict[int, tuple[ParameterSegment, SegmentPiece]] = {}
        self.segments = [self._segment(index, members, own) for index, members in enumerate(segments)]
        #: Bytes of the segments that have been broadcast.
        self.broadcast_bytes = 0
        for segment in self.segments:
            for piece in segment.pieces:
                if piece.is_own:
                    self._attach(segment, piece)
                else:
                    piece.flat = None
                    self._detach(piece)
            segment.is_started = segment.is_attached = group is None

    def start(self, segment: ParameterSegment) -> None:
        """Start the broadcasts of ``segment`` from its owners, unless they are under way or done. All ranks of the
        sharding group call this in the same order."""
        if segment.is_started:
            return
        segment.is_started = True
        for piece in segment.pieces:
            if not piece.is_own:
                piece.flat = torch.empty(piece.numel, dtype=piece.dtype, device=piece.device)
            flat = _flat_of(piece)
            if flat.numel():
                self.broadcast_bytes += flat.nbytes
                piece.work = dist.broadcast(flat, self._ranks[piece.owner], group=self._group, async_op=True)

    def gather(self, segment: ParameterSegment) -> None:
        """Wait for the broadcasts of ``segment``; then its parameters have their values."""
        self.start(segment)
        if not segment.is_attached:
            segment.is_attached = True
            for piece in segment.pieces:
                self._finish(piece)
                if not piece.is_own:
                    self._attach(segment, piece)

    def free(self, segment: ParameterSegment) -> None:
        """Drop the parameters of ``segment`` that other ranks own."""
        if not segment.is_started or self._group is None:
            return
        for piece in segment.pieces:
            self._finish(piece)
            if not piece.is_own:
                if piece.flat is not None:
                    self.by_address.pop(piece.flat.untyped_storage().data_ptr(), None)
                piece.flat = None
                self._detach(piece)
        segment.is_started = segment.is_attached = False

    def resident(self) -> list[ParameterSegment]:
        """Gathered segments. They are the same on all ranks of the group, whichever ranks own them."""
        return [segment for segment in self.segments if segment.is_started and self._group is not None]

    def is_placeholder(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies in the element that stands for freed parameters."""
        one = self._placeholders.get((tensor.dtype, tensor.device))
        return one is not None and one.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()

    def check(self) -> None:
        """Raise UsageError if a parameter has another shape, dtype or memory than when it was sharded."""
        for segment in self.segments:
            for piece in segment.pieces:
                if piece.flat is not None and (piece.is_own or segment.is_attached):
                    address = piece.flat.untyped_storage().data_ptr()
                else:
                    address = self._placeholder(piece).untyped_storage().data_ptr()
                for member in piece.members:
                    parameter = member.parameter
                    if parameter.shape != member.shape or parameter.dtype != piece.dtype:
                        raise UsageError(
                            f"{member.name} had the shape {tuple(member.shape)} and {piece.dtype} when it was sharded, "
                            f"and has {tuple(parameter.shape)} and {parameter.dtype} now: change the model before "
                            "shard(), or shard a new one"
                        )
                    if member.numel and parameter.untyped_storage().data_ptr() != address:
                        raise UsageError(
                            f"the memory of {member.name} has been replaced (by .data, .to() or the like) after it was "
                            "sharded: change its values in place, within gathered_parameters()"
                        )

    # ---- inside ----------------------------------------------------------------------------------------------

    def _segment(self, index: int, members: Sequence[NamedParameter], own: int) -> ParameterSegment:
        pieces: list[SegmentPiece] = []
        by_kind: dict[tuple[int, torch.dtype, torch.device], SegmentPiece] = {}
        for member in members:
            kind = member.owner, member.parameter.dtype, member.parameter.device
            if kind not in by_kind:
                by_kind[kind] = SegmentPiece(kind[0], kind[0] == own, [], kind[1], kind[2])
                pieces.append(by_kind[kind])
            member.piece, member.offset = by_kind[kind], by_kind[kind].numel
            by_kind[kind].members.append(member)
        for piece in pieces:
            if piece.is_own:
                piece.flat = torch.cat([member.parameter.detach().reshape(-1) for member in piece.members])
        return ParameterSegment(index, list(members), pieces)

    def _finish(self, piece: SegmentPiece) -> None:
        if piece.work is not None:
            piece.work.wait()
            piece.work = None

    def _attach(self, segment: ParameterSegment, piece: SegmentPiece) -> None:
        flat = _flat_of(piece)
        if flat.numel():
            self.by_address[flat.untyped_storage().data_ptr()] = segment, piece
        for member in piece.members:
            member.parameter.data = flat[member.offset : member.offset + member.numel].view(member.shape)

    def _detach(self, piece: SegmentPiece) -> None:
        one = self._placeholder(piece)
        for member in piece.members:
            member.parameter.data = one.expand(member.shape)

    def _placeholder(self, piece: SegmentPiece) -> torch.Tensor:
        kind = piece.dtype, piece.device
        if kind not in self._placeholders:
            value = float("nan") if piece.dtype.is_floating_point or piece.dtype.is_complex else 0
            self._placeholders[kind] = torch.full((), value, dtype=piece.dtype, device=piece.device)
        return self._placeholders[kind]


def _flat_of(piece: SegmentPiece) -> torch.Tensor:
    if piece.flat is None:
        raise UsageError("a segment that is not gathered was used")
    return piece.flat
