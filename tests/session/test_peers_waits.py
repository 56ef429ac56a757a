"""What a rank tells its service that it waits for: every such wait comes to an end there, too. The service ends the job
for one that lasts longer than the stall limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from support.peers import lasting_service, met, peers, two_ranks
from support.sessions import WAIT_S, failure, sum_once_more

from byteps_py.errors import CommunicationError, JoinedError, StallError
from byteps_py.session.peers import WINDOW, Stream, StreamReceipt
from byteps_py.session.service.remote import RemoteSession
from byteps_py.wire import rank_link as protocol

#: Longer than it takes until the service is told.
TOLD_S = 0.4

lasting = pytest.fixture(scope="module")(lasting_service)
ranks = pytest.fixture(two_ranks)


class Told:
    """The waits that the service was told of, and those that it was told the end of; ``first``: of the first one."""

    def __init__(self, session: RemoteSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.ages: list[float] = []
        self.first = threading.Event()
        tell = session.send

        def telling(message: object, fds: tuple[int, ...] = ()) -> None:
            tell(message, fds)
            if isinstance(message, protocol.WaitBegun):
                self.begun.append(message.id)
                self.ages.append(message.age_s)
                self.first.set()
            elif isinstance(message, protocol.WaitEnded):
                self.ended.append(message.id)

        monkeypatch.setattr(session, "send", telling)


@pytest.fixture
def told(ranks: list[RemoteSession], monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Of rank 0. All is well in the end."""
    found = Told(ranks[0], monkeypatch)
    yield found
    monkeypatch.undo()
    assert found.begun
    assert sorted(found.ended) == sorted(found.begun)
    assert len(set(found.begun)) == len(found.begun)
    sum_once_more(ranks)


def empty(session: RemoteSession, stream: Stream) -> None:
    peers(session).send(stream, (1 - session.rank,), [(0, 0)], True)


def receipt(session: RemoteSession, stream: Stream) -> StreamReceipt:
    """Of an empty payload."""
    found = StreamReceipt(stream)
    found.expect(1 - session.rank, [(0, 0)], 0)
    return found


def gives_up(wait: Callable[[float], object], told: Told) -> None:
    """Twice: the second time it is the same wait, as long as ever."""
    for turn in range(2):
        assert isinstance(failure(lambda: wait(TOLD_S)), StallError)
        assert len(told.begun) == len(told.ended) == turn + 1
    assert told.ages[1] > told.ages[0]


def test_room_for_a_payload_that_never_comes(ranks: list[RemoteSession], told: Told) -> None:
    _, streams = met(ranks)
    for _ in range(WINDOW):
        empty(ranks[0], streams[0])
    gives_up(room := peers(ranks[0]).window_wait(streams[0]), told)
    peers(ranks[1]).collect(receipt(ranks[1], streams[1]), WAIT_S)
    room(WAIT_S)


def test_a_meeting_that_nobody_comes_to(ranks: list[RemoteSession], told: Told) -> None:
    peers(ranks[0]).directory.request_introduction("alone", (1,))
    gives_up(meeting := peers(ranks[0]).directory.introduction_wait("alone", (1,)), told)
    peers(ranks[1]).directory.request_introduction("alone", (0,))
    meeting(WAIT_S)


def test_a_payload_that_is_late(ranks: list[RemoteSession], told: Told) -> None:
    _, streams = met(ranks)
    late = receipt(ranks[0], streams[0])
    gives_up(lambda timeout_s: peers(ranks[0]).collect(late, timeout_s), told)
    empty(ranks[1], streams[1])
    peers(ranks[0]).collect(late, WAIT_S)


def test_what_an_interrupt_ends(ranks: list[RemoteSession], told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    _, streams = met(ranks)
    wait_until = ranks[0].wait_until

    def interrupted(*arguments: object) -> None:
        if told.begun:
            raise KeyboardInterrupt
        wait_until(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ranks[0], "wait_until", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peers(ranks[0]).collect(receipt(ranks[0], streams[0]), WAIT_S)
    monkeypatch.undo()
    assert told.begun == told.ended


def ends_by_a_join(ranks: list[RemoteSession], told: Told, wait: Callable[[float], object]) -> None:
    """``wait``, of rank 0, is told to the service; then rank 1 has no more data."""
    errors: list[Exception] = []
    waiting = threading.Thread(target=lambda: errors.append(failure(lambda: wait(WAIT_S))))
    waiting.start()
    assert told.first.wait(WAIT_S)
    joining = threading.Thread(target=lambda: ranks[1].join(WAIT_S))
    joining.start()
    waiting.join(WAIT_S)
    assert [type(error) for error in errors] == [JoinedError]
    assert "rank 1 has called join()" in str(errors[0])
    assert told.begun == told.ended
    ranks[0].join(WAIT_S)
    joining.join(WAIT_S)


def test_a_payload_of_who_joins(ranks: list[RemoteSession], told: Told) -> None:
    _, streams = met(ranks)
    late = receipt(ranks[0], streams[0])
    ends_by_a_join(ranks, told, lambda timeout_s: peers(ranks[0]).collect(late, timeout_s))


def test_room_for_a_payload_to_who_joins(ranks: list[RemoteSession], told: Told) -> None:
    _, streams = met(ranks)
    for _ in range(WINDOW):
        empty(ranks[0], streams[0])
    ends_by_a_join(ranks, told, peers(ranks[0]).window_wait(streams[0]))


def test_who_is_refused_a_payload_hears_why(ranks: list[RemoteSession]) -> None:
    name, streams = met(ranks)
    refused = receipt(ranks[1], streams[1])
    peers(ranks[0]).refuse(streams[0], (1,), 0)
    error = failure(lambda: peers(ranks[1]).collect(refused, WAIT_S))
    assert isinstance(error, CommunicationError)
    assert str(error) == str(peers(ranks[0]).joined_error(streams[0], [0]))
    assert name in str(error)
    empty(ranks[0], streams[0])
    peers(ranks[1]).collect(receipt(ranks[1], streams[1]), WAIT_S)
