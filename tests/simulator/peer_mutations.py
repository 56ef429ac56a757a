"""Cores that are broken on purpose, as in mutations.py, where bytes go from machine to machine and come in strips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from byteps_py import strips
from byteps_py.strips import Arriving
from byteps_py.wire import Kind
from byteps_py.worker import direct, peers, serving
from byteps_py.worker.courier import Courier
from byteps_py.worker.direct import Direct
from byteps_py.worker.peers import PeerMachines
from byteps_py.worker.pieces import Receipt, Serve
from byteps_py.worker.receipts import Receipts
from byteps_py.worker.scatter import Scatter
from byteps_py.worker.tensor import ScatterPart


def serve_a_later_round(core: pytest.MonkeyPatch) -> None:
    """A piece is read where its rank's latest contribution lies."""
    real = serving.serve

    def serve(channel: Any, request: Any) -> Any:
        actions = real(channel, request)
        for action in actions:
            if isinstance(action, Serve):
                action.block = action.member.slot.input
        return actions

    core.setattr(direct, "serve", serve)


def let_go_of_what_is_being_sent(core: pytest.MonkeyPatch) -> None:
    """Of sums."""

    def serve(self: PeerMachines, origin: object, view: memoryview, then: Callable[[], None] | None = None) -> None:
        peer, header = peers._origin(origin)
        peer.lend(header, view)
        if then is not None:
            then()

    core.setattr(PeerMachines, "serve", serve)


def let_go_of_what_has_left(core: pytest.MonkeyPatch) -> None:
    """A piece counts as taken when it is sent, though it may be lost on the way."""
    real = Courier._serve

    def serve(self: Courier, peers_: Any, action: Serve) -> None:
        real(self, peers_, action)
        it = action.request
        self._run(self._direct.received(Receipt(it.machine, it.key, it.round, it.source, it.target)))

    core.setattr(Courier, "_serve", serve)


def forget_what_was_said_of_pieces(core: pytest.MonkeyPatch) -> None:
    """That they have come is not said again, if it may have been lost."""
    core.setattr(Receipts, "said", lambda self, machine: [])


def count_answers_twice(core: pytest.MonkeyPatch) -> None:
    """A piece that comes a second time is taken for another one."""

    def answered(self: PeerMachines, header: Any, frame: Any) -> None:
        asked = self._fetched.get(header.index)
        if asked is not None and header.kind is Kind.ANSWER:
            asked.then(frame)

    core.setattr(PeerMachines, "_answered", answered)


def show_strips_that_are_begun(core: pytest.MonkeyPatch) -> None:
    """As soon as there is a byte of them."""

    real = Arriving.begin

    def begin(self: Arriving) -> None:
        real(self)
        self._left = [1] * len(self._left)

    def add(self: Arriving, offset: int, nbytes: int) -> list[int]:
        first, last = offset // strips.STRIP_BYTES, (offset + nbytes - 1) // strips.STRIP_BYTES
        begun = [strip for strip in range(first, last + 1) if self._left[strip]]
        for strip in begun:
            self._left[strip] = 0
        return begun

    core.setattr(Arriving, "begin", begin)
    core.setattr(Arriving, "add", add)


def forget_who_asked_early(core: pytest.MonkeyPatch) -> None:
    """What other machines ask for before this one knows that the cluster is complete is lost."""
    real = PeerMachines.open

    def open_(self: PeerMachines, *given: Any) -> None:
        self._early.clear()
        real(self, *given)

    core.setattr(PeerMachines, "open", open_)


def ask_once(core: pytest.MonkeyPatch) -> None:
    """What a connection has lost is not asked for again."""
    core.setattr(PeerMachines, "_again", lambda self, machine_index: None)


def leave_with_what_others_need(core: pytest.MonkeyPatch) -> None:
    """A machine ends though pieces lie there that nobody has asked for yet."""
    core.setattr(Direct, "owes", lambda self, gone, local_rank=None: False)


def scatter_in_the_order_of_arrival(core: pytest.MonkeyPatch) -> None:
    """Machines' sums of a part are added as they come."""
    real = Scatter.arrived

    def arrived(self: Scatter, ask: Any, address: int, now: float) -> Any:
        actions = real(self, ask, address, now)
        part = ask.part
        for action in actions:
            if getattr(action, "part", None) is part and isinstance(part, ScatterPart):
                action.inputs = tuple(part.sums.values())
        return actions

    core.setattr(Scatter, "arrived", arrived)


#: With the seed that shows it first.
PEER_MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    serve_a_later_round: 11,
    let_go_of_what_is_being_sent: 3,
    let_go_of_what_has_left: 3,
    forget_what_was_said_of_pieces: 1578,
    count_answers_twice: 3,
    show_strips_that_are_begun: 3,
    forget_who_asked_early: 52,
    ask_once: 66,
    leave_with_what_others_need: 6,
    scatter_in_the_order_of_arrival: 7,
}
