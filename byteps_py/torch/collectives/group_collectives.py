"""The operations of a process group, as its front end calls them.

For each operation the router (router.py) chooses a route, and the operation starts there.

    GroupCollectives ─ Router ┬ sums           AllReduce, one for each route (all_reduce/)
                              ├ gathers, …     PeerCollectives ─ PeerStreams, or ServiceGathers ─ SlotView
                              └ messages       PointToPoint

``PeerCollectives``, among members that reach each other directly, says which parts of which tensors go where;
peer_streams.py sends them. Any thread. Operations run in the order of the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from byteps_py.session.peers import Span
from byteps_py.system.log import logger
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import DType, Op, Sizes
from byteps_py.torch.collectives.all_reduce import AllReduce, GroupSum, shared_memory
from byteps_py.torch.collectives.all_reduce.large import LargeSumQueue, QueuedAllReduce
from byteps_py.torch.collectives.all_reduce.one_shot import OneShotAllReduce
from byteps_py.torch.collectives.all_reduce.service import ServiceAllReduce
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.dtypes import bits_of, is_plain, wire_dtype
from byteps_py.torch.collectives.fallback_work import FallbackWork
from byteps_py.torch.collectives.group_work import GroupContext
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.peer_streams import Own, PeerStreams, PeerWork
from byteps_py.torch.collectives.point_to_point import PointToPoint
from byteps_py.torch.collectives.router import (
    CODED,
    FIRST_OF_ITS_KIND,
    GROUP_MESSAGE_BYTES,
    MOST_CONNECTION_BYTES,
    Reach,
    Route,
    RouteChoice,
    Router,
    SumFacts,
)
from byteps_py.torch.collectives.service_gathers import ServiceGathers
from byteps_py.torch.collectives.tensor_bytes import Pieces, ResultBuffer, device_of, octets, span, spans
from byteps_py.torch.collectives.work import Call, OperationKind, Work

Fold = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: The most kinds that are cached; beyond that the cache is cleared.
_MOST_KINDS = 4096


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduce operation on a dtype, as the service carries it out.

    ``fold``: the function that combines two tensors, for an operation that the service does not know: members gather
    all tensors and combine them. ``view``: the dtype as which the service sees the memory. ``factor``: the factor of a
    contribution. ``terms``: further facts on which members must agree. ``codec``: the form in which it travels between
    machines, through the service.
    """

    op: Op = Op.SUM
    average: bool = False
    factor: float | torch.Tensor | None = None
    view: torch.dtype | None = None
    fold: Fold | None = None
    terms: str = ""
    codec: Codec | None = None

    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """The contribution of ``tensor``, in the wire's dtype."""
        if self.factor is not None:
            tensor = tensor.detach() * self.factor
        return self.seen(tensor)

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the wire's dtype, sharing memory."""
        tensor = tensor.detach()
        if self.view is None or tensor.dtype is self.view:
            return tensor
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(self.view)


@dataclass(frozen=True, slots=True)
class GroupTransfer:
    """Tensors for each member and from each member, by position, concatenated. A GATHER has one entry in ``sends``, for
    all members.

    ``stream``: keeps transfers of different kinds apart; the same on all members. ``sizes``: how a member compares the
    size that it receives with the size that it expects. ``outputs``: the result for the caller, if that is not
    ``receives``; ``finish`` makes it of ``receives``.
    """

    op: Op
    stream: str
    sends: Pieces
    receives: Pieces
    sizes: Sizes = Sizes.TOGETHER
    outputs: list[torch.Tensor] | None = None
    finish: Callable[[], None] | None = None

    @classmethod
    def gather(
        cls,
        tensors: Sequence[torch.Tensor],
        receives: Pieces,
        outputs: list[torch.Tensor] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Self:
        """The ``tensors`` of every member to every member."""
        return cls(Op.GATHER, "gather", [tensors], receives, outputs=outputs, finish=finish)

    @classmethod
    def exchange(
        cls,
        sends: Pieces,
        receives: Pieces,
        outputs: list[torch.Tensor] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Self:
        """``sends[p]`` to the member at position ``p``, ``receives[p]`` from it."""
        return cls(Op.EXCHANGE, "exchange", sends, receives, outputs=outputs, finish=finish)


class GroupCollectives:
    """The operations of one group. ``streams``: to the other members, if they reach each other directly, and
    ``large_sums`` among them; otherwise None. ``local_groups``: the sums of GPUs, if they sum among themselves.

    Every method returns a Work at once; errors of the operation are raised where it is waited for. UsageError for wrong
    arguments, and the error that has ended the group, are raised by the call.
    """

    def __init__(
        self,
        members: Members,
        group_context: GroupContext,
        completer: Completer,
        streams: PeerStreams | None = None,
        large_sums: LargeSumQueue | None = None,
        local_groups: AllReduce | None = None,
    ) -> None:
        self._members = members
        reach, most_on_machine, machines = Reach.SERVICE, 1, None
        if streams is not None:
            reach, most_on_machine, machines = streams.reach, streams.most_on_machine, streams.machines
        message_bytes = GROUP_MESSAGE_BYTES if machines is None else MOST_CONNECTION_BYTES
        can_share = shared_memory.is_able if machines is None else lambda: machines.can_share
        has_groups = local_groups is not None
        self.router = Router(members.count, reach, members.count, message_bytes, can_share, most_on_machine, has_groups)
        self._service = ServiceAllReduce(members, group_context, completer)
        self._gathers = ServiceGathers(members, group_context, completer)
        self.point_to_point = PointToPoint(members, group_context, self.router, streams)
        self._peers = PeerCollectives(members, streams) if streams is not None else None
        #: The all-reduces, by the router's choice.
        self._all_reduces: dict[Route, AllReduce] = {Route.SERVICE: self._service}
        if streams is not None:
            self._all_reduces[Route.ONE_SHOT] = OneShotAllReduce(members, streams)
        if large_sums is not None and (all_reduce := large_sums.sums.all_reduce) is not None:
            self._all_reduces[all_reduce.route] = QueuedAllReduce(members, large_sums, all_reduce)
        if local_groups is not None:
            self._all_reduces[Route.LOCAL_GROUPS] = local_groups
        self._kinds: dict[object, tuple[OperationKind, RouteChoice]] = {}
        self._is_barrier_agreed = False

    def finish(self) -> None:
        """Complete all operations under way. Raises StallError."""
        for all_reduce in self._all_reduces.values():
            all_reduce.finish()
        self._gathers.finish()

    # ---- sums ------------------------------------------------------------------------------------------

    def reduce(self, call: Call, tensors: Sequence[torch.Tensor], how: Reduction, is_awaited: bool = False) -> Work:
        """Reduce the concatenation of ``tensors``, all of one dtype, to the call's outputs: the same number of tensors
        with the same sizes, or none. ``is_awaited``: the caller is about to wait for it."""
        return self._reduce(call, tensors, how, is_awaited, scatters=False)

    def reduce_scatter(
        self, call: Call, tensors: Sequence[torch.Tensor], how: Reduction, is_awaited: bool = False
    ) -> Work:
        """Reduce the concatenation of ``tensors``; the call's only output is this member's even share. ``is_awaited``:
        see ``reduce``."""
        return self._reduce(call, tensors, how, is_awaited, scatters=True)

    def _reduce(
        self, call: Call, tensors: Sequence[torch.Tensor], how: Reduction, is_awaited: bool, scatters: bool
    ) -> Work:
        service = self._service
        contributions = [how.prepare(tensor) for tensor in tensors]
        targets = [how.seen(output) for output in call.outputs]
        kind, choice = self._kind(how, contributions, scatters)
        if choice.route is Route.SERVICE:
            return service.start(call, kind, contributions, targets)
        place, agreement = service.agreed_place(kind), None
        if place is None and choice.route is Route.ONE_SHOT:
            # Members do not know yet whether they agree about the kind.
            logger.debug("%s: %s goes by %s", self._members.prefix, kind, FIRST_OF_ITS_KIND)
            return service.start(call, kind, contributions, targets)
        if place is None:
            place, agreement = service.agree(call.what, kind, call.timeout_s)
        fallback = functools.partial(service.start, call, kind, contributions, targets)
        what = GroupSum(call, kind, contributions, targets, place, fallback, is_awaited, agreement)
        return self._all_reduces[choice.route].begin(what)

    def _kind(
        self, how: Reduction, contributions: Sequence[torch.Tensor], scatters: bool
    ) -> tuple[OperationKind, RouteChoice]:
        """The facts on which members must agree, and the route of such a sum."""
        first = contributions[0]
        if len(contributions) > 1:
            count, is_on_host = sum(tensor.numel() for tensor in contributions), all(t.is_cpu for t in contributions)
        else:
            count, is_on_host = first.numel(), first.is_cpu
        key = how.op, how.average, how.terms, how.codec, first.dtype, count, is_on_host, scatters
        found = self._kinds.get(key)
        if found is None:
            members = self._members.count
            shape = (members, count // members) if scatters else (count,)
            kind = OperationKind(
                how.op, wire_dtype(first.dtype, None), shape, how.average, scatters=scatters, terms=how.terms,
                codec=how.codec,
            )  # fmt: skip
            nbytes = count * first.itemsize
            from_others = nbytes * (members - 1) // (members if scatters else 1)
            is_exact = first.is_floating_point() or not how.average
            facts = SumFacts(how.op, nbytes, from_others, is_exact, is_on_host, scatters)
            choice = self.router.sum(facts) if how.codec is None else CODED
            logger.debug("%s: %s goes by %s", self._members.prefix, kind, choice)
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            found = self._kinds[key] = kind, choice
        return found

    def broadcast(self, call: Call, root: int) -> Work:
        """Copy the tensor of the member at position ``root``, the call's only output, to all members. Any dtype. The
        first one of a kind goes through the service, which detects whether members disagree."""
        (tensor,) = call.outputs
        view = bits_of(tensor)
        kind = OperationKind(Op.BROADCAST, wire_dtype(view.dtype, None), (view.numel(),), root=self._members.root(root))
        if (peers := self._peers_for(Op.BROADCAST, tensor.nbytes, tensor.is_cpu)) is not None:
            place = self._service.agreed_place(kind)
            if place is not None:
                return peers.broadcast(place, tensor, root, call.timeout_s)
        sends = [view] if root == self._members.position else []
        return self._service.start(call, kind, sends, [] if sends else [view])

    def barrier(self, timeout_s: float) -> Work:
        """Complete when every member has called it."""

        def fallback() -> Work:
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            kind = OperationKind(Op.SUM, DType.UINT8, (1,))
            return self._service.start(Call("barrier", [], timeout_s), kind, [token], [])

        if self._is_barrier_agreed and (peers := self._peers_for(Op.EXCHANGE, 0, True)) is not None:
            return peers.barrier(fallback, timeout_s)
        self._is_barrier_agreed = True  # the first one goes through the service, see ``broadcast``
        return fallback()

    def _peers_for(self, op: Op, nbytes: int, is_on_host: bool) -> PeerCollectives | None:
        """The collectives among members that reach each other directly, if the router chooses PEERS: see
        Router.move."""
        return self._peers if self.router.move(op, nbytes, is_on_host).route is Route.PEERS else None

    # ---- gathers and exchanges -------------------------------------------------------------------------

    def move(self, what: str, transfer: GroupTransfer, timeout_s: float) -> Work:
        """Move bytes from member to member, as ``transfer`` says. Any dtype and layout of tensors."""
        outgoing = [[octets(tensor) for tensor in piece] for piece in transfer.sends]
        result_buffers = [[ResultBuffer(tensor) for tensor in piece] for piece in transfer.receives]
        incoming = [[result_buffer.memory for result_buffer in piece] for piece in result_buffers]
        outputs = transfer.outputs
        if outputs is None:
            outputs = [tensor for piece in transfer.receives for tensor in piece]
        device = device_of([tensor for piece in (*transfer.sends, *transfer.receives) for tensor in piece])

        def finish() -> None:
            for piece in result_buffers:
                for result_buffer in piece:
                    result_buffer.deliver()
            if transfer.finish is not None:
                transfer.finish()

        call = Call(what, outputs, timeout_s, finish)
        nbytes = sum(tensor.numel() for piece in incoming for tensor in piece)
        if (peers := self._peers_for(transfer.op, nbytes, device.type == "cpu")) is not None:
            if transfer.sizes is Sizes.TOGETHER:
                return peers.move(transfer.stream, call, outgoing, incoming, True)
            sent, due = ([piece or None for piece in pieces] for pieces in (outgoing, incoming))
            return peers.move(transfer.stream, call, sent, due, False)
        return self._gathers.move(transfer.op, call, outgoing, incoming, transfer.sizes, device)

    def move_evenly(self, op: Op, what: str, source: torch.Tensor, target: torch.Tensor, timeout_s: float) -> Work:
        """A GATHER of ``source`` to equal shares of ``target``, or an EXCHANGE of equal shares of both; both
        contiguous."""
        call = Call(what, [target], timeout_s)
        if (peers := self._peers_for(op, target.nbytes, source.is_cpu and target.is_cpu)) is not None:
            return peers.even(op, call, source, target)
        return self._gathers.even(op, call, source, target)

    def gather_to(self, root: int, tensor: torch.Tensor, outputs: list[torch.Tensor], timeout_s: float) -> Work:
        """The ``tensor`` of every member to the member at position ``root``. ``outputs``: one for each member on the
        root, empty on the others."""
        peers = self._peers_for(Op.EXCHANGE, tensor.nbytes, tensor.is_cpu)
        if peers is not None and is_plain(tensor) and all(map(is_plain, outputs)):
            return peers.gather(tensor, outputs, root, timeout_s)
        count = self._members.count
        sends: Pieces = [[tensor] if member == root else [] for member in range(count)]
        receives: Pieces = [[output] for output in outputs] or [[] for _ in range(count)]
        transfer = GroupTransfer(Op.EXCHANGE, f"gather.{root}", sends, receives, _one_sided(outputs))
        return self.move("gather", transfer, timeout_s)

    def scatter_from(self, root: int, inputs: list[torch.Tensor], output: torch.Tensor, timeout_s: float) -> Work:
        """A tensor from the member at position ``root`` to each member's ``output``. ``inputs``: one for each member on
        the root, empty on the others."""
        peers = self._peers_for(Op.EXCHANGE, output.nbytes, output.is_cpu)
        if peers is not None and is_plain(output) and all(map(is_plain, inputs)):
            return peers.scatter(output, inputs, root, timeout_s)
        count = self._members.count
        sends: Pieces = [[tensor] for tensor in inputs] or [[] for _ in range(count)]
        receives: Pieces = [[output] if member == root else [] for member in range(count)]
        transfer = GroupTransfer(Op.EXCHANGE, f"scatter.{root}", sends, receives, _one_sided([output]))
        return self.move("scatter", transfer, timeout_s)


def _one_sided(outputs: Sequence[torch.Tensor]) -> Sizes:
    """The comparison of sizes in a transfer in which other members receive nothing: a member that only sends does not
    wait for others."""
    return Sizes.PLAIN if all(output.numel() for output in outputs) else Sizes.CHECKED


_NOTHING: Sequence[Span] = ((0, 0),)


class PeerCollectives:
    """All tensors are in the host's memory; those of ``even``, ``gather`` and ``scatter`` are plain, those of ``move``
    flat."""

    def __init__(self, members: Members, streams: PeerStreams) -> None:
        self._streams = streams
        self._own = members.position
        self._count = members.count

    def even(self, op: Op, call: Call, source: torch.Tensor, target: torch.Tensor) -> PeerWork:
        """A GATHER of ``source`` to equal shares of ``target``, or an EXCHANGE of equal shares of both."""
        streams, own = self._streams, self._own
        pieces = self._shares(target)
        call = call._replace(inputs=source)
        receives = {position: (pieces[position],) for position in streams.others}
        if op is Op.GATHER:
            mine = (span(source),)
            kept = (mine, (pieces[own],))
            return streams.to_all("gather", call, mine, receives, kept, together=True)
        sent = self._shares(source)
        sends = {position: (sent[position],) for position in streams.others}
        kept = ((sent[own],), (pieces[own],))
        return streams.begin("exchange", call, sends, receives, kept, together=True)

    def gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor], root: int, timeout_s: float) -> PeerWork:
        """The tensor of every member to the member at ``root``, which alone has ``outputs``."""
        streams, mine, stream = self._streams, (span(tensor),), f"gather.{root}"
        if root != self._own:
            return streams.begin(stream, Call("gather", [], timeout_s, inputs=tensor), {root: mine}, {}, is_led=True)
        kept = (mine, (span(outputs[root]),))
        receives = {position: (span(outputs[position]),) for position in streams.others}
        return streams.begin(stream, Call("gather", outputs, timeout_s), {}, receives, kept)

    def scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], root: int, timeout_s: float) -> PeerWork:
        """A tensor from the member at ``root``, which alone has ``inputs``, to each member."""
        streams, target, stream = self._streams, (span(output),), f"scatter.{root}"
        if root != self._own:
            return streams.begin(stream, Call("scatter", [output], timeout_s), {}, {root: target})
        kept = ((span(inputs[root]),), target)
        sends = {position: (span(inputs[position]),) for position in streams.others}
        return streams.begin(stream, Call("scatter", [output], timeout_s, inputs=inputs), sends, {}, kept, is_led=True)

    def broadcast(self, place: int, tensor: torch.Tensor, root: int, timeout_s: float) -> PeerWork:
        """The tensor of the member at ``root`` to all. ``place``: of its kind, on which all members have agreed."""
        streams, stream, finish = self._streams, f"broadcast.{place}", None
        if root == self._own:
            data = tensor if is_plain(tensor) else octets(tensor)
            call = Call("broadcast", [tensor], timeout_s, inputs=data)
            return streams.to_all(stream, call, (span(data),), {}, is_led=True)
        target = tensor
        if not is_plain(tensor):
            result_buffer = ResultBuffer(tensor)
            target, finish = result_buffer.memory, result_buffer.deliver
        return streams.to_all(stream, Call("broadcast", [tensor], timeout_s, finish), None, {root: (span(target),)})

    def barrier(self, fallback: Callable[[], Work], timeout_s: float) -> FallbackWork:
        """Complete when every member has called it or has joined. ``otherwise`` begins a barrier through the
        service."""
        receives = dict.fromkeys(self._streams.others, _NOTHING)
        call = Call("barrier", [], timeout_s)
        work = self._streams.to_all("barrier", call, _NOTHING, receives, together=True)
        return FallbackWork(self._streams.fallbacks, call, work, fallback)

    def move(
        self,
        stream: str,
        call: Call,
        sends: Sequence[Sequence[torch.Tensor] | None],
        receives: Sequence[Sequence[torch.Tensor] | None],
        together: bool,
    ) -> PeerWork:
        """Flat tensors, concatenated, to each member and from each, by position; None: no payload at all. One entry in
        ``sends``: the same to all. ``together``: see PeerStreams.begin."""
        streams, own, call = self._streams, self._own, call._replace(inputs=sends)
        is_gather = len(sends) == 1
        mine, theirs = sends[0 if is_gather else own], receives[own]
        kept: Own | None = None
        if mine is not None and theirs is not None:
            kept = (spans(mine), spans(theirs))
        due = {p: spans(piece) for p, piece in enumerate(receives) if p != own and piece is not None}
        if is_gather:
            whole = spans(sends[0] or ())
            return streams.to_all(stream, call, whole, due, kept, together=together)
        sent = {p: spans(piece) for p, piece in enumerate(sends) if p != own and piece is not None}
        is_led = len(sent) != len(due)
        return streams.begin(stream, call, sent, due, kept, is_led, together)

    def _shares(self, tensor: torch.Tensor) -> list[Span]:
        """Equal parts of a plain tensor, one for each member."""
        address, share = tensor.data_ptr(), tensor.nbytes // self._count
        return [(address + at * share, share) for at in range(self._count)]
