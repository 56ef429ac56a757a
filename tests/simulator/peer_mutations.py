"""Cores that are broken on purpose, as in mutations.py, where bytes go from machine to machine and come in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from byteps_py.wire.chunks import Arriving
from byteps_py.wire.data_link import Kind
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.pieces import Receipt, Receipts, Serve
from byteps_py.worker.core.scatter import Scatter
from byteps_py.worker.core.tensor import ScatterPart
from byteps_py.worker.io import peers as product
from byteps_py.worker.io.peers import PeerMachines
from byteps_py.worker.io.piece_executor import PieceExecutor
from byteps_py.worker.ranks.request_handler import RequestHandler

from .mutations import Mutation
from .parts import Parts


class ServeALaterRound(Mutation):
    """A piece is read where its rank's latest contribution lies."""

    class direct(PieceExchange):
        @staticmethod
        def _serve(channel: Any, request: Any) -> Any:
            actions = PieceExchange._serve(channel, request)
            for action in actions:
                if isinstance(action, Serve):
                    action.block = action.member.slot.input
            return actions


class LetGoOfWhatIsBeingSent(Mutation):
    """Of sums."""

    class peers(PeerMachines):
        def serve(self, origin: object, view: memoryview, then: Callable[[], None] | None = None) -> None:
            peer, header = product._origin(origin)
            peer.lend(header, view)
            if then is not None:
                then()


class LetGoOfWhatHasLeft(Mutation):
    """A piece counts as taken when it is sent, though it may be lost on the way."""

    class piece_executor(PieceExecutor):
        def _serve(self, serve: Serve) -> None:
            super()._serve(serve)
            it = serve.request
            self._handle(Receipt(it.machine, it.key, it.round, it.source, it.target))


class ForgetWhatWasSaidOfPieces(Mutation):
    """That they have come is not said again, if it may have been lost."""

    class peers(PeerMachines):
        class receipts_class(Receipts):
            def sent_to(self, machine: int) -> Any:
                return []


class CountAnswersTwice(Mutation):
    """A piece that comes a second time is taken for another one."""

    class peers(PeerMachines):
        def _answered(self, header: Any, frame: Any) -> None:
            asked = self._fetched.get(header.index)
            if asked is not None and header.kind is Kind.ANSWER:
                asked.then(frame)


class ShowChunksThatAreBegun(Mutation):
    """As soon as there is a byte of them."""

    class requests(RequestHandler):
        class arriving_class(Arriving):
            def begin(self) -> None:
                super().begin()
                self._left = [1] * len(self._left)

            def add(self, offset: int, nbytes: int) -> list[int]:
                first, last = offset // self._chunk_bytes, (offset + nbytes - 1) // self._chunk_bytes
                begun = [chunk for chunk in range(first, last + 1) if self._left[chunk]]
                for chunk in begun:
                    self._left[chunk] = 0
                return begun


class ForgetWhoAskedEarly(Mutation):
    """What other machines ask for before this one knows that the cluster is complete is lost."""

    class peers(PeerMachines):
        def open(self, *given: Any) -> None:
            self._early.clear()
            super().open(*given)


class AskOnce(Mutation):
    """What a connection has lost is not asked for again."""

    class peers(PeerMachines):
        def _again(self, machine_index: int) -> None:
            pass


class LeaveWithWhatOthersNeed(Mutation):
    """A machine ends though pieces lie there that nobody has asked for yet."""

    class direct(PieceExchange):
        def owes(self, gone: set[int], local_rank: int | None = None) -> bool:
            return False


class ScatterInTheOrderOfArrival(Mutation):
    """Machines' sums of a part are added as they come."""

    class scatter(Scatter):
        def arrived(self, ask: Any, address: int, now: float) -> Any:
            actions = super().arrived(ask, address, now)
            part = ask.part
            for action in actions:
                if getattr(action, "part", None) is part and isinstance(part, ScatterPart):
                    action.inputs = tuple(part.sums.values())
            return actions


#: With the seed that shows it first.
PEER_MUTATIONS: dict[type[Parts], int] = {
    ServeALaterRound: 11,
    LetGoOfWhatIsBeingSent: 3,
    LetGoOfWhatHasLeft: 3,
    ForgetWhatWasSaidOfPieces: 1578,
    CountAnswersTwice: 3,
    ShowChunksThatAreBegun: 3,
    ForgetWhoAskedEarly: 52,
    AskOnce: 66,
    LeaveWithWhatOthersNeed: 6,
    ScatterInTheOrderOfArrival: 7,
}
