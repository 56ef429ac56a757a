"""Ranks beside a real communication service that deal with each other directly."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading

import pytest
from support.peers import doomed_pair, lasting_service, met, peers, two_ranks
from support.sessions import WAIT_S, Service, end, failure, start, sum_once_more

from byteps_py.errors import JoinedError, MismatchError, NotInitializedError, PeerLostError, StallError
from byteps_py.session.peers import WINDOW, Stream, StreamReceipt
from byteps_py.session.peers.peer_transport import INLINE_BYTES
from byteps_py.session.service.remote import RemoteSession

#: A rank in a process of its own, that sends one large payload, and then waits for what never comes.
SENDER = """
import ctypes, sys
from byteps_py.system import channel
from byteps_py.session.service.remote import RemoteSession
session = RemoteSession(channel.connect(sys.argv[1], 30), 1, 2, 30, 600)
peers = session.peers
peers.directory.request_introduction("s", (0,))
peers.directory.introduction_wait("s", (0,))(30)
memory = ctypes.create_string_buffer(b"x" * 3_000_000, 3_000_000)
peers.send(peers.stream("s", (0,)), (0,), [(ctypes.addressof(memory), 3_000_000)], True)
print("sent", flush=True)
sys.stdin.read()
"""
SIZES = (0, 1, 1000, INLINE_BYTES, INLINE_BYTES + 1, 1 << 20, (5 << 20) + 3)


lasting = pytest.fixture(scope="module")(lasting_service)
ranks = pytest.fixture(two_ranks)
pair = pytest.fixture(doomed_pair)


def send(session: RemoteSession, stream: Stream, data: bytes, is_led: bool = True, due: int = -1) -> None:
    memory = ctypes.create_string_buffer(data, len(data)) if data else ctypes.create_string_buffer(1)
    half = len(data) // 2
    spans = [(ctypes.addressof(memory), half), (ctypes.addressof(memory) + half, len(data) - half)]
    peers(session).send(stream, (1 - session.rank,), spans, is_led, () if due < 0 else (due,))


class Expected:
    """Room for the next payload, in three pieces."""

    def __init__(self, session: RemoteSession, stream: Stream, nbytes: int, sent: int = -1) -> None:
        self._session = session
        self._memory = ctypes.create_string_buffer(nbytes + 1)
        self._nbytes = nbytes
        self.receipt = StreamReceipt(stream)
        first, start = nbytes // 3, ctypes.addressof(self._memory)
        spans = [(start, first), (start + first, 0), (start + first, nbytes - first)]
        self.receipt.expect(1 - session.rank, spans, nbytes, sent)

    def get(self, timeout_s: float = WAIT_S) -> bytes:
        peers(self._session).collect(self.receipt, timeout_s)
        return self._memory.raw[: self._nbytes]


def data(nbytes: int, seed: int) -> bytes:
    return bytes((i * 7 + seed) % 251 for i in range(min(nbytes, 251))) * (nbytes // 251 + 1)


def test_payloads_of_all_sizes(ranks: list[RemoteSession]) -> None:
    _, streams = met(ranks)
    for seed in range(3):
        for nbytes in SIZES:
            sent = data(nbytes, seed)[:nbytes]
            got = Expected(ranks[1], streams[1], nbytes)
            send(ranks[0], streams[0], sent)
            assert got.get() == sent
            assert peers(ranks[1]).poll(got.receipt)
    assert len(peers(ranks[0])._outgoing.segments) == 1  # the memory is used again
    peers(ranks[0]).take_messages()
    assert streams[0].unacknowledged == 0


def test_a_sender_does_not_wait_for_its_receiver_but_is_a_window_ahead_at_most(ranks: list[RemoteSession]) -> None:
    _, streams = met(ranks)
    for nbytes in (3, 100_000):
        for seed in range(WINDOW):
            peers(ranks[0]).window_wait(streams[0])(0.0)
            send(ranks[0], streams[0], data(nbytes, seed)[:nbytes])
        assert isinstance(failure(lambda: peers(ranks[0]).window_wait(streams[0])(0.1)), StallError)
        for seed in range(WINDOW):
            assert Expected(ranks[1], streams[1], nbytes).get() == data(nbytes, seed)[:nbytes]
        peers(ranks[0]).window_wait(streams[0])(WAIT_S)
        peers(ranks[0]).take_messages()
        assert streams[0].unacknowledged == 0


def test_both_send_before_either_receives(ranks: list[RemoteSession]) -> None:
    _, streams = met(ranks)
    for nbytes in (10, 3 << 20):
        for session, stream in zip(ranks, streams, strict=True):
            send(session, stream, data(nbytes, session.rank)[:nbytes])
        for session, stream in zip(ranks, streams, strict=True):
            assert Expected(session, stream, nbytes).get() == data(nbytes, 1 - session.rank)[:nbytes]


def test_receipts_may_be_collected_in_any_order_and_by_any_thread(ranks: list[RemoteSession]) -> None:
    _, streams = met(ranks)
    expected = [Expected(ranks[1], streams[1], 50_000) for _ in range(3)]
    assert not peers(ranks[1]).poll(expected[2].receipt)
    found: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: expected[i].get()}))  # type: ignore[misc]
        for i in (2, 0, 1)
    ]
    for thread in threads:
        thread.start()
    for seed in range(3):
        send(ranks[0], streams[0], data(50_000, seed)[:50_000])
    for thread in threads:
        thread.join(WAIT_S)
    assert found == {seed: data(50_000, seed)[:50_000] for seed in range(3)}


def test_a_wait_may_be_taken_up_again(ranks: list[RemoteSession]) -> None:
    _, streams = met(ranks)
    got = Expected(ranks[1], streams[1], 5)
    assert "nothing came from rank 0 within 0.5 s" in str(failure(lambda: got.get(0.5)))
    send(ranks[0], streams[0], b"there")
    assert got.get() == b"there"
    sum_once_more(ranks)


def test_what_was_sent_arrives_though_the_sender_has_left(lasting: Service) -> None:
    sessions = [lasting.rank(0), lasting.rank(1)]
    _, streams = met(sessions)
    send(sessions[0], streams[0], data(1 << 20, 1)[: 1 << 20])
    sessions[0].close()
    try:
        assert Expected(sessions[1], streams[1], 1 << 20).get() == data(1 << 20, 1)[: 1 << 20]
    finally:
        sessions[1].close()


@pytest.mark.parametrize("nbytes", [0, 2, 100_000, 3 << 20])
def test_a_payload_of_another_size_is_an_error_of_its_receipt_only(ranks: list[RemoteSession], nbytes: int) -> None:
    name, streams = met(ranks)
    for due in (3, 1 << 20):
        sent = data(nbytes, due)[:nbytes]
        got, following = Expected(ranks[1], streams[1], due), Expected(ranks[1], streams[1], nbytes)
        send(ranks[0], streams[0], sent)
        send(ranks[0], streams[0], sent)
        error = failure(got.get)
        assert isinstance(error, MismatchError)
        assert str(error) == (
            f"tensor {name!r}: rank 0 sends {nbytes} bytes to rank 1, which expects {due}; give matching sizes on both"
        )
        assert following.get() == sent
    peers(ranks[0]).take_messages()
    assert streams[0].unacknowledged == 0  # what was let go needs no memory


@pytest.mark.parametrize("nbytes", [0, 2, 100_000])
def test_who_sends_is_told_what_the_other_expects(ranks: list[RemoteSession], nbytes: int) -> None:
    name, streams = met(ranks)
    sent = data(nbytes, 1)[:nbytes]
    for mine, theirs in ((nbytes, nbytes), (nbytes + 1, nbytes), (nbytes, nbytes)):
        got = [Expected(ranks[0], streams[0], nbytes, nbytes), Expected(ranks[1], streams[1], mine, theirs)]
        send(ranks[0], streams[0], sent, False, nbytes)
        send(ranks[1], streams[1], sent, False, mine)
        if mine == nbytes:
            assert [each.get() for each in got] == [sent, sent]
            continue
        for each in got:
            error = failure(each.get)
            assert isinstance(error, MismatchError)
            assert str(error) == (
                f"tensor {name!r}: rank 0 sends {nbytes} bytes to rank 1, which expects {mine}; give matching sizes "
                "on both"
            )


def test_a_payload_that_nobody_expects_is_seen(ranks: list[RemoteSession]) -> None:
    _, streams = met(ranks)
    stream = streams[1]
    assert isinstance(failure(lambda: peers(ranks[1]).await_next([(stream, 0)], 0.1)), StallError)
    send(ranks[0], streams[0], b"there")
    peers(ranks[1]).await_next([(stream, 0)], WAIT_S)
    got = Expected(ranks[1], stream, 5)
    assert not stream.has_next(0)
    assert got.get() == b"there"


def test_who_waits_for_a_neighbour_that_left_is_told(pair: list[RemoteSession]) -> None:
    _, streams = met(pair)
    got = Expected(pair[0], streams[0], 3)
    pair[1].close()
    error = failure(got.get)
    assert isinstance(error, PeerLostError)
    assert "rank 1 shut down" in str(error)


def test_a_killed_neighbour_is_named_and_what_it_sent_is_there() -> None:
    service = start()
    session = service.rank(0)
    command = [sys.executable, "-c", SENDER, service.name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.closing(session), process:
        peers(session).directory.request_introduction("s", (1,))
        peers(session).directory.introduction_wait("s", (1,))(WAIT_S)
        stream = peers(session).stream("s", (1,))
        assert process.stdout.readline() == b"sent\n"
        process.kill()
        assert Expected(session, stream, 3_000_000).get() == b"x" * 3_000_000
        error = failure(Expected(session, stream, 1).get)
        assert isinstance(error, PeerLostError)
        assert f"rank 1 (process {process.pid} on " in str(error)
    end(service)


def test_who_waits_is_woken_by_close(pair: list[RemoteSession]) -> None:
    _, streams = met(pair)
    got = Expected(pair[0], streams[0], 3)
    errors: list[Exception] = []
    thread = threading.Thread(target=lambda: errors.append(failure(got.get)))
    thread.start()
    pair[0].close()
    thread.join(WAIT_S)
    assert [type(error) for error in errors] == [NotInitializedError]


def test_a_closed_session_still_knows_its_peers(pair: list[RemoteSession]) -> None:
    """A thread that waits looks at the connections once more before it sees that the session is closed."""
    met(pair)
    transport = peers(pair[0])
    known = set(transport._outboxes)
    pair[0].close()
    assert known == {1}
    assert set(transport._outboxes) == known


def test_nothing_comes_of_a_neighbour_that_has_joined(ranks: list[RemoteSession]) -> None:
    _, streams = met(ranks)
    send(ranks[1], streams[1], b"last")
    lasts: list[int] = []
    thread = threading.Thread(target=lambda: lasts.append(ranks[1].join(WAIT_S)))
    thread.start()
    assert Expected(ranks[0], streams[0], 4).get() == b"last"
    error = failure(Expected(ranks[0], streams[0], 4).get)
    assert isinstance(error, JoinedError)
    assert "rank 1 has called join()" in str(error)
    assert ranks[0].join(WAIT_S) == 0
    thread.join(WAIT_S)
    assert lasts == [0]
    send(ranks[1], streams[1], b"anew")
    assert Expected(ranks[0], streams[0], 4).get() == b"anew"
    sum_once_more(ranks)


def test_the_service_hears_of_a_join_before_peers_do(
    ranks: list[RemoteSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a neighbour that joins because of it could be heard first there, and this rank be taken for the last."""
    met(ranks)
    tell, known = ranks[1].send, []

    def telling(message: bytes) -> None:
        peers(ranks[0]).take_messages()
        known.append(set(peers(ranks[0])._matcher.joined))
        tell(message)

    monkeypatch.setattr(ranks[1], "send", telling)
    thread = threading.Thread(target=ranks[1].join, args=(WAIT_S,))
    thread.start()
    assert ranks[0].join(WAIT_S) in (0, 1)
    thread.join(WAIT_S)
    assert known == [set()]
