"""Gathers and exchanges of one group: bytes from member to member, nothing combined.

The calling thread copies in and hands over. Every member takes part in every round, if only with pieces of 0 bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from byteps_py.tensors import DType, Layout, Op, Sizes, TensorSpec
from byteps_py.torch.engine.completion import Completer
from byteps_py.torch.engine.dtypes import is_plain
from byteps_py.torch.engine.lanes import Lane, Place
from byteps_py.torch.engine.members import Members
from byteps_py.torch.engine.operation import LaneOperation
from byteps_py.torch.engine.peer_collectives import NearCollectives
from byteps_py.torch.engine.work import Call, GroupContext, Pending
from byteps_py.torch.process_group.arguments import Landing, device_of, octets

#: Operations of a group that may be under way at once; a further one waits for the first of them to end.
LANES = 2

#: By member: the tensors sent to it, or received from it, end to end.
Pieces = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class After:
    """What is left to do when the pieces are there, and what the caller sees as the outputs."""

    outputs: list[torch.Tensor]
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """What an operation moves: bytes to the lane's input and from its result, by offset; how they lie there; copies
    (to, from) of what a member has for itself; the room that the lane must have, in and out."""

    outgoing: list[Place]
    incoming: list[Place]
    layout: Layout
    kept: list[tuple[torch.Tensor, torch.Tensor]]
    room: tuple[int, int]


class GroupGathers:
    """Any thread; operations go in the order of the calls."""

    def __init__(
        self, members: Members, around: GroupContext, completer: Completer, near: NearCollectives | None = None
    ) -> None:
        self._near = near
        self._members = members
        self._around = around
        self._completer = completer
        self._lock = threading.Lock()
        self._lanes = {
            op: [Lane(members.session, members.mover) for _ in range(LANES)] for op in (Op.GATHER, Op.EXCHANGE)
        }
        self._calls = {op: itertools.count() for op in (Op.GATHER, Op.EXCHANGE)}

    def gather(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        outputs: Pieces,
        timeout_s: float,
        after: After | None = None,
    ) -> Pending:
        """Everybody's ``tensors`` to everybody."""
        return self._start(Op.GATHER, "gather", Call(what, [], timeout_s), [tensors], outputs, after, Sizes.TOGETHER)

    def exchange(
        self, what: str, sends: Pieces, receives: Pieces, timeout_s: float, after: After | None = None
    ) -> Pending:
        """To each member what is for it, from each what is for this one."""
        return self._start(Op.EXCHANGE, "exchange", Call(what, [], timeout_s), sends, receives, after, Sizes.TOGETHER)

    def finish(self) -> None:
        """Complete what is under way. Raises StallError."""
        with self._lock:
            for lane in itertools.chain.from_iterable(self._lanes.values()):
                self._around.finish(lane.occupant)

    def even(self, op: Op, what: str, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Pending:
        """A GATHER of ``source`` to equal shares of ``target``, or an EXCHANGE of equal shares of both; contiguous.

        What others have lies on one side of a member's own share or on the other: two copies, however many they are.
        """
        own, count = self._members.position, self._members.count
        if self._near is not None and source.is_cpu and target.is_cpu:
            return self._near.even(op, what, source, target, timeout_s)
        mine, whole = octets(source), octets(target)
        share = whole.numel() // count
        first, after = own * share, (own + 1) * share
        ranges = tuple((at * share, 0 if at == own else share) for at in range(count))

        def others(tensor: torch.Tensor) -> list[Place]:
            sides = ((0, tensor[:first]), (after, tensor[after:]))
            return [(at, side) for at, side in sides if side.numel()]

        is_gather = op is Op.GATHER
        moved = Moved(
            [(0, mine)] if is_gather else others(mine),
            others(whole),
            Layout(((0, share),) if is_gather else ranges, ranges, Sizes.TOGETHER),
            [(whole[first:after], mine if is_gather else mine[first:after])],
            (mine.numel(), whole.numel()),
        )
        return self._begin(op, Call(what, [target], timeout_s), moved, device_of([source, target]))

    def gather_to(self, root: int, tensor: torch.Tensor, outputs: list[torch.Tensor], timeout_s: float) -> Pending:
        """Everybody's ``tensor`` to the root, which alone gives outputs."""
        if self._near is not None and is_plain(tensor) and all(map(is_plain, outputs)):
            return self._near.gather(tensor, outputs, root, timeout_s)
        count = self._members.count
        sends: Pieces = [[tensor] if member == root else [] for member in range(count)]
        receives: Pieces = [[output] for output in outputs] or [[] for _ in range(count)]
        sizes = _one_sided(outputs)
        return self._start(Op.EXCHANGE, f"gather.{root}", Call("gather", [], timeout_s), sends, receives, None, sizes)

    def scatter_from(self, root: int, inputs: list[torch.Tensor], output: torch.Tensor, timeout_s: float) -> Pending:
        """From the root, which alone gives inputs, a tensor to each member."""
        if self._near is not None and is_plain(output) and all(map(is_plain, inputs)):
            return self._near.scatter(output, inputs, root, timeout_s)
        count = self._members.count
        sends: Pieces = [[tensor] for tensor in inputs] or [[] for _ in range(count)]
        receives: Pieces = [[output] if member == root else [] for member in range(count)]
        sizes = _one_sided([output])
        return self._start(Op.EXCHANGE, f"scatter.{root}", Call("scatter", [], timeout_s), sends, receives, None, sizes)

    def _start(
        self,
        op: Op,
        stream: str,
        call: Call,
        sends: Pieces,
        receives: Pieces,
        after: After | None,
        sizes: Sizes,
    ) -> Pending:
        """``call``: but for its outputs, and for what is to be done in the end, which follow from the rest."""
        outgoing = [[octets(tensor) for tensor in piece] for piece in sends]
        landings = [[Landing(tensor) for tensor in piece] for piece in receives]
        incoming = [[landing.memory for landing in piece] for piece in landings]
        outputs = after.outputs if after else [tensor for piece in receives for tensor in piece]
        device = device_of([tensor for piece in (*sends, *receives) for tensor in piece])

        def finish() -> None:
            for piece in landings:
                for landing in piece:
                    landing.land()
            if after is not None:
                after.finish()

        call = call._replace(outputs=outputs, finish=finish)
        if self._near is not None and device.type == "cpu":
            if sizes is Sizes.TOGETHER:
                return self._near.move(stream, call, outgoing, incoming, True)
            sent, due = ([piece or None for piece in pieces] for pieces in (outgoing, incoming))
            return self._near.move(stream, call, sent, due, False)
        kept = self._keep_own(op, outgoing, incoming)
        layout = Layout(_ranges(outgoing), _ranges(incoming), sizes)
        room = (_total(outgoing), _total(incoming))
        moved = Moved(_places(outgoing), _places(incoming), layout, kept, room)
        return self._begin(op, call, moved, device)

    def _begin(self, op: Op, call: Call, moved: Moved, device: torch.device) -> LaneOperation:
        with self._lock:
            self._around.check()
            number = next(self._calls[op]) % LANES
            lane = self._lanes[op][number]
            self._around.finish(lane.occupant)
            if not lane.has_room(*moved.room):
                lane.declare(self._spec(op, number, lane, *moved.room))

            def deliver() -> None:
                lane.fetch(device, moved.incoming)
                if call.finish is not None:
                    call.finish()

            work = LaneOperation(self._around, self._completer, call._replace(finish=deliver), lane, device)
            # The service compares sizes, not what they are for: to the journal, that is part of the name.
            work.number = self._around.journal.record((call.what,), f"{lane.name} {call.what}")
            lane.begin(device, moved.outgoing, moved.layout, moved.incoming)
            lane.occupant = work
            with torch.no_grad():  # while the others' are on their way; before another call may deliver this one
                for target, source in moved.kept:
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)
        return work

    def _keep_own(
        self, op: Op, outgoing: list[list[torch.Tensor]], incoming: list[list[torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What a member has for itself need not travel: take it out. Returns the copies (to, from) to be made."""
        own = self._members.position
        source = outgoing[0 if op is Op.GATHER else own]
        target = incoming[own]
        if [tensor.numel() for tensor in source] != [tensor.numel() for tensor in target]:
            return []  # the service says what is wrong
        incoming[own] = []
        if op is Op.EXCHANGE:
            outgoing[own] = []
        return list(zip(target, source, strict=True))

    def _spec(self, op: Op, number: int, lane: Lane, nbytes_in: int, nbytes_out: int) -> TensorSpec:
        name = f"{self._members.prefix}.{op.name.lower()}.{number}"
        return spec_of(name, op, self._members.spec_group, lane, nbytes_in, nbytes_out)


def spec_of(name: str, op: Op, group: tuple[int, ...], lane: Lane, nbytes_in: int, nbytes_out: int) -> TensorSpec:
    """With room for so many bytes and for all that the lane had room for, growing in steps."""
    had = lane.slot.spec.shape if lane.slot is not None else (0, 0)
    room = tuple(have if want <= have else roomy(want) for want, have in zip((nbytes_in, nbytes_out), had, strict=True))
    return TensorSpec(name, DType.UINT8, room, op, group=group)


def roomy(nbytes: int) -> int:
    """At least ``nbytes``, in steps of up to a quarter, so that a growing tensor needs new memory rarely."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


def _total(pieces: Sequence[Sequence[torch.Tensor]]) -> int:
    return sum(tensor.numel() for piece in pieces for tensor in piece)


def _ranges(pieces: Sequence[Sequence[torch.Tensor]]) -> tuple[tuple[int, int], ...]:
    ranges = []
    first = 0
    for piece in pieces:
        nbytes = sum(tensor.numel() for tensor in piece)
        ranges.append((first, nbytes))
        first += nbytes
    return tuple(ranges)


def _places(pieces: Sequence[Sequence[torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    places = []
    first = 0
    for tensor in itertools.chain.from_iterable(pieces):
        places.append((first, tensor))
        first += tensor.numel()
    return places


def _one_sided(outputs: Sequence[torch.Tensor]) -> Sizes:
    """How a member that gets ``outputs`` looks at sizes, where others get nothing: who only sends waits for nobody."""
    return Sizes.PLAIN if all(output.numel() for output in outputs) else Sizes.CHECKED
