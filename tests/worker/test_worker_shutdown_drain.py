"""When a machine whose ranks are done may end, and what the end of another one means to those that go on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.worker_core import slot as make_slot

from byteps_py.config.settings import Settings
from byteps_py.errors import StallError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.worker.core.credit import PushQueue
from byteps_py.worker.core.deadlines import StallDeadline
from byteps_py.worker.core.events import PiecesDeclared, PiecesReady
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.pieces import PieceRequest, Receipt, Serve
from byteps_py.worker.core.tensor import RankSlot
from byteps_py.worker.group import Group, GroupServices
from byteps_py.worker.service import CommunicationService
from byteps_py.worker.shutdown_drain import ShutdownDrain


class Loop:
    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append((delay_s, callback))


class Machine:
    def __init__(self, owed_s: float = 60.0) -> None:
        self.loop = Loop()
        self.sent: list[pb.MemberMessage] = []
        self.stops = 0
        self.is_owing = self.is_lacking = False
        self.shutdown_drain = ShutdownDrain(
            cast(Any, self.loop), self.sent.append, self._stop, Settings(stall_limit_s=owed_s, stall_warn_s=1.0)
        )
        self.shutdown_drain.open(7, lambda ranks: self.is_lacking, lambda gone: self.is_owing)

    def _stop(self) -> None:
        self.stops += 1


def test_it_ends_when_it_is_dismissed() -> None:
    machine = Machine()
    machine.shutdown_drain.go()
    assert not machine.stops
    machine.shutdown_drain.dismissed()
    assert machine.stops == 1


def test_it_stays_for_pieces_that_nobody_has_asked_for_and_until_they_have_left() -> None:
    machine = Machine()
    machine.is_owing = True
    machine.shutdown_drain.dismissed()
    machine.shutdown_drain.go()
    machine.shutdown_drain.drain()
    assert not machine.stops
    machine.is_owing = False
    machine.shutdown_drain.drain()
    assert not machine.stops
    delay_s, end = machine.loop.timers[-1]
    assert delay_s < 1
    machine.shutdown_drain.drain()
    assert not machine.stops
    end()
    assert machine.stops == 1


@pytest.mark.parametrize(("owed_s", "limits"), [(60.0, [10.0, 60.0]), (3.0, [10.0, 10.0]), (0.0, [10.0])])
def test_it_does_not_stay_for_ever(owed_s: float, limits: list[float]) -> None:
    machine = Machine(owed_s)
    machine.shutdown_drain.go()
    assert [delay_s for delay_s, _ in machine.loop.timers] == limits


def test_others_hear_when_it_lacks_nothing_of_theirs() -> None:
    machine = Machine()
    machine.is_lacking = True
    machine.shutdown_drain.departed([2, 3])
    assert not machine.sent
    assert machine.shutdown_drain.are_gone([2, 3])
    assert not machine.shutdown_drain.are_gone([1, 2])
    machine.is_lacking = False
    machine.shutdown_drain.drain()
    assert [list(message.shutdown_confirmed.ranks) for message in machine.sent] == [[2, 3]]


def test_it_looks_again_while_it_lacks_something() -> None:
    machine = Machine()
    assert not machine.loop.timers
    machine.is_lacking = True
    for _ in range(2):
        machine.shutdown_drain.departed([2])
    for _ in range(3):
        ((_, look),) = machine.loop.timers
        machine.loop.timers.clear()
        look()
    assert machine.shutdown_drain.is_waiting
    assert not machine.sent
    machine.is_lacking = False
    machine.loop.timers.pop()[1]()
    assert [list(message.shutdown_confirmed.ranks) for message in machine.sent] == [[2], [2]]
    assert not machine.loop.timers
    assert not machine.shutdown_drain.is_waiting


def test_it_looks_again_while_it_owes_something() -> None:
    machine = Machine()
    machine.is_owing = True
    machine.shutdown_drain.go()
    machine.loop.timers.clear()  # its limits
    machine.shutdown_drain.dismissed()
    machine.loop.timers.pop()[1]()
    assert machine.shutdown_drain.is_waiting
    machine.is_owing = False
    machine.loop.timers.pop()[1]()
    ((_, end),) = machine.loop.timers
    assert not machine.shutdown_drain.is_waiting
    end()
    assert machine.stops == 1


def test_of_a_group_that_is_over_it_says_nothing() -> None:
    machine = Machine()
    machine.is_lacking = True
    machine.shutdown_drain.departed([2])
    machine.shutdown_drain.end()
    machine.is_lacking = False
    machine.loop.timers.pop()[1]()
    assert not machine.sent
    assert not machine.loop.timers


# ---- what it gives, and to whom --------------------------------------------------------------------------


def one_of_two() -> tuple[PieceExchange, RankSlot]:
    """Rank 0, alone on its machine, gathers with rank 1, of which it expects nothing."""
    direct = PieceExchange(0, [0, 1], 100, 100, PushQueue(0), 1 << 18)
    slot = make_slot(0, TensorSpec("x", DType.UINT8, (8, 16), Op.GATHER), inputs=2)
    direct.handle(PiecesDeclared(0, slot), 0.0)
    return direct, slot


def request_of(direct: PieceExchange, round_: int = 1) -> PieceRequest:
    key = next(iter(direct.members()))[0].key
    return PieceRequest(None, 1, key, round_, 0, 0xFFFFFFFF, 0, 8, 8)


def receipt_of(request: PieceRequest) -> Receipt:
    return Receipt(request.machine, request.key, request.round, request.source, request.target)


def test_a_piece_is_owed_until_it_is_taken_or_its_taker_is_gone() -> None:
    direct, slot = one_of_two()
    assert not direct.owes(set())
    direct.handle(PiecesReady(slot, 1, Layout(((0, 8),), ((0, 0), (8, 0)))), 0.0)
    assert slot.ready_bytes < 0  # its own round is over
    assert direct.owes({0})
    assert direct.owes(set(), 0)
    assert not direct.owes(set(), 1)  # of another local rank
    assert not direct.owes({1})
    request = request_of(direct)
    (serve,) = direct.handle(request, 0.0)
    assert isinstance(serve, Serve)
    assert direct.owes(set())
    direct.handle(receipt_of(request), 0.0)
    assert not direct.owes(set())


def test_a_rank_lacks_what_it_waits_for() -> None:
    direct, slot = one_of_two()
    assert not direct.lacks({0, 1})
    direct.handle(PiecesReady(slot, 1, Layout(((0, 0),), ((0, 0), (8, 8)))), 0.0)
    assert direct.lacks({1})
    assert not direct.lacks({0})


def test_what_came_before_all_joined_gives_no_memory_back() -> None:
    """Whoever calls ``start_anew`` has got all of it."""
    direct, slot = one_of_two()
    direct.handle(PiecesReady(slot, 1, Layout(((0, 8),), ((0, 0), (8, 0)))), 0.0)
    larger = make_slot(0, TensorSpec("x", DType.UINT8, (80, 160), Op.GATHER), inputs=2)
    assert direct.handle(PiecesDeclared(0, larger), 0.0) == []
    (serve,) = direct.handle(request_of(direct), 0.0)
    assert isinstance(serve, Serve)
    assert direct.start_anew(1) == [larger, slot]
    assert direct.handle(receipt_of(serve.request), 0.0) == []


# ---- others ----------------------------------------------------------------------------------------------


def test_other_machines_may_ask_once_whoever_answers_knows_the_group() -> None:
    """What they have asked before is answered by ``PeerMachines.open``, through the service."""
    opened: list[int] = []
    peers = SimpleNamespace(
        open=lambda topology, *_: opened.append(topology.machine_index), when_left=lambda then: then()
    )
    rank_server = SimpleNamespace(open=lambda requests: opened.append(-1))
    services = GroupServices(
        *cast(
            Any,
            (
                Runtime(loop=cast(Any, Loop())),
                Settings(),
                False,
                None,
                rank_server,
                peers,
                None,
                None,
                None,
                None,
                None,
            ),
        )
    )
    membership = pb.Membership(epoch=1, workers=[pb.Member(local_size=1)], partition_bytes=4096)
    group = Group(services, membership, 0)
    assert opened == []
    group.open()
    assert opened == [0, -1]
    group.requests.memory.release()


@pytest.mark.parametrize(("gone", "timers"), [([], 1), ([1], 1), ([1, 2], 0)])
def test_a_machine_whose_ranks_were_done_is_not_missed(gone: list[int], timers: int) -> None:
    service, machine = object.__new__(CommunicationService), Machine()
    service._group = cast(Any, SimpleNamespace(topology=SimpleNamespace(ranks_of=lambda index: range(1, 3))))
    service._shutdown_drain, service._loop, service._stall_deadline = (
        machine.shutdown_drain,
        cast(Any, machine.loop),
        StallDeadline(0.0),
    )
    machine.shutdown_drain.departed(gone)
    service._machine_lost("it can't be reached", 1)
    assert len(machine.loop.timers) == timers


@pytest.mark.parametrize(("is_leaving", "done"), [(True, "farewell"), (False, "stop")])
def test_a_machine_that_was_told_to_leave_stays_until_the_others_have_the_last_result(
    is_leaving: bool, done: str
) -> None:
    """Its ranks have gone back to let the group go on without them, and are none that have shut down."""
    did: list[str] = []
    service = object.__new__(CommunicationService)
    service._group = cast(Any, SimpleNamespace(network=object(), topology=SimpleNamespace(local_size=1)))
    service._rank_server = cast(Any, SimpleNamespace(failure=None, ranks=SimpleNamespace(left={})))
    service._rejoining = cast(Any, SimpleNamespace(is_leaving=is_leaving))
    service._loop = cast(Any, SimpleNamespace(stop=lambda: did.append("stop")))
    service._shutdown_drain = cast(Any, SimpleNamespace(go=lambda: did.append("farewell")))
    service._stall_deadline = StallDeadline(0.0)
    service._go()
    assert did == [done]


@pytest.mark.parametrize("stalled", ["_pool", "_prefaulter", ""])
def test_threads_that_are_still_busy_do_not_fail_a_job_that_is_done(
    stalled: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it ends before a kernel is compiled, which takes long on a busy machine. What they use stays open."""
    closed: list[str] = []

    def close(name: str, *_: object) -> None:
        if name == stalled:
            raise StallError("thread pool 'byteps-worker': byteps-worker-0 still busy 10 s after close()")
        closed.append(name)

    service = object.__new__(CommunicationService)
    service._exit_code, service._group, service._probe, service._peers = 0, None, None, None
    for name in ("_link", "_rank_server", "_pool", "_prefaulter", "_bursts", "_loop"):
        setattr(service, name, SimpleNamespace(close=functools.partial(close, name), run=lambda: None))
    service.begin = lambda: None  # type: ignore[method-assign]
    assert service.run() == 0
    assert ("_loop" in closed) is (not stalled)
    assert ("still busy" in caplog.text) is bool(stalled)


@pytest.mark.parametrize("is_back", [False, True])
def test_without_a_scheduler_a_machine_ends_when_connections_had_the_time_to_come_back(is_back: bool) -> None:
    """Over them it may yet be asked, also for the size of nothing, which nobody keeps."""
    did: list[str] = []
    timers: list[Callable[[], None]] = []
    service = object.__new__(CommunicationService)
    service._group = cast(Any, SimpleNamespace(network=object(), topology=SimpleNamespace(local_size=0)))
    service._rank_server = cast(Any, SimpleNamespace(failure=None, ranks=SimpleNamespace(left={})))
    service._rejoining = None
    service._settings = Settings(heartbeat_timeout_s=1.5)
    delays_s: list[float] = []

    def call_later(delay_s: float, act: Callable[[], None]) -> None:
        delays_s.append(delay_s)
        timers.append(act)

    service._loop = cast(Any, SimpleNamespace(call_later=call_later))
    service._shutdown_drain = cast(
        Any, SimpleNamespace(go=lambda: did.append("go"), dismissed=lambda: did.append("dismissed"))
    )
    service._stall_deadline = StallDeadline(0.0)
    service._stall_deadline.away_since_s = 7.0
    service._go()
    assert (did, delays_s) == (["go"], [3.0])
    if is_back:
        service._stall_deadline.away_since_s = None  # it says who needs what
    timers[0]()
    assert did == (["go"] if is_back else ["go", "dismissed"])
