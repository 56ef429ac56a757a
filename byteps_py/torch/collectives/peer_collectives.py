"""The collectives among members that reach each other directly: which parts of which tensors go where.
peer_streams.py sends them.

Any thread; operations run in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from byteps_py.session.peers import Span
from byteps_py.tensors import Op
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.group_work import FallbackWork
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.peer_streams import Own, PeerStreams, PeerWork
from byteps_py.torch.collectives.tensor_bytes import ResultBuffer, octets, span, spans
from byteps_py.torch.collectives.work import Call, Work

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
