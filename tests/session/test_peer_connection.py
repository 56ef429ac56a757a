"""Connections between ranks of different machines: what they carry, where it goes, and how they end."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from support.connected import LANES, SETTINGS, WAIT_S, ConnectedRank, connect, connected

from byteps_py.dataplane.seal import FRAME_BYTES, FrameHeader, Protection, StreamFrameKind, new_stream_seal
from byteps_py.errors import MismatchError, PeerLostError, ProtocolError, StallError
from byteps_py.session.peers import peer_protocol, peer_transport
from byteps_py.session.peers.message_matcher import LANDING_BYTES, Stream, StreamReceipt
from byteps_py.session.peers.peer_connection import PeerConnection
from byteps_py.session.peers.peer_protocol import PeerMessage, PeerMessageKind
from byteps_py.system.network_interfaces import addresses_of

SIZES = (0, 1, 1000, LANDING_BYTES, LANDING_BYTES + 1, 65_537, 200_000, 1 << 20, (16 << 20) + 3)


@contextlib.contextmanager
def by_lane(name: str) -> Iterator[list[ConnectedRank]]:
    if name == "IPv6" and "::1" not in addresses_of("lo"):
        pytest.skip("this machine has no IPv6")
    settings, on_machine = LANES[name]
    with connected(2, settings, on_machine) as ranks:
        yield ranks


@pytest.fixture(params=LANES)
def pair(request: pytest.FixtureRequest) -> Iterator[list[ConnectedRank]]:
    """Two ranks, however they reach each other: the tests that use it say what every way does."""
    with by_lane(request.param) as ranks:
        yield ranks


@pytest.fixture(params=[name for name, (its, near) in LANES.items() if near == 1 and not its.rdma])
def distant_pair(request: pytest.FixtureRequest) -> Iterator[list[ConnectedRank]]:
    """On two machines: the system takes only as much as it has room for."""
    with by_lane(request.param) as ranks:
        yield ranks


@pytest.fixture
def open_pair() -> Iterator[list[ConnectedRank]]:
    with connected(2, SETTINGS["open"]) as ranks:
        yield ranks


def streams(ranks: list[ConnectedRank], name: str = "stream") -> list[Stream]:
    return [rank.transport.stream(name, [r for r in range(len(ranks)) if r != rank.rank]) for rank in ranks]


def span(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def some_bytes(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def framed(*parts: bytes, first: int = 0) -> list[bytes]:
    """Each of ``parts`` as frames of a connection without protection, the first one numbered ``first``."""
    seal, numbers = new_stream_seal(Protection.OPEN, b""), itertools.count(first)
    return [
        b"".join(
            b"".join(seal.seal(FrameHeader(len(body), next(numbers), 0, StreamFrameKind.DATA), body))
            for body in (part[at : at + FRAME_BYTES] for at in range(0, len(part), FRAME_BYTES))
        )
        for part in parts
    ]


def expect(stream: Stream, source: int, target: np.ndarray[Any, Any]) -> StreamReceipt:
    receipt = StreamReceipt(stream, owner=target)
    receipt.expect(source, (span(target),), target.nbytes)
    return receipt


def socket_of(rank: ConnectedRank, other: int = 1) -> socket.socket:
    """That of its connection, made blocking."""
    sock = connection(rank, other)._sockets[0].sock
    sock.setblocking(True)
    return sock


def connection(rank: ConnectedRank, other: int) -> PeerConnection:
    return cast(PeerConnection, rank.transport._outboxes[other])


@pytest.mark.parametrize("is_posted", [True, False])
def test_payloads_of_all_sizes_arrive_in_order(pair: list[ConnectedRank], is_posted: bool) -> None:
    sending, receiving = streams(pair)
    sources = [some_bytes(nbytes, seed) for seed, nbytes in enumerate(SIZES)]
    targets = [np.zeros(nbytes, np.uint8) for nbytes in SIZES]
    receipts = [expect(receiving, 0, target) for target in targets] if is_posted else []
    unsent = [
        part
        for source in sources
        for part in pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    ]
    if not is_posted:
        pair[1].transport.await_next([(receiving, 0)], WAIT_S)
        receipts = [expect(receiving, 0, target) for target in targets]
    for source, target, receipt in zip(sources, targets, receipts, strict=True):
        pair[1].transport.collect(receipt, WAIT_S)
        assert np.array_equal(source, target)
    pair[0].transport.wait_until_sent(unsent, WAIT_S)


def test_spans_are_joined_and_split(pair: list[ConnectedRank]) -> None:
    sending, receiving = streams(pair)
    source, target = some_bytes(300_000), np.zeros(300_000, np.uint8)
    parts = (source[:7], source[7:100_000], source[100_000:100_000], source[100_000:])
    receipt = StreamReceipt(receiving, owner=target)
    receipt.expect(0, [span(part) for part in (target[:250_000], target[250_000:])], target.nbytes)
    pair[0].transport.send(sending, (1,), [span(part) for part in parts], is_led=False, owner=source)
    pair[1].transport.collect(receipt, WAIT_S)
    assert np.array_equal(source, target)


def test_a_large_payload_goes_where_it_belongs_without_passing_through_other_memory(
    open_pair: list[ConnectedRank],
) -> None:
    sending, receiving = streams(open_pair)
    source, target = some_bytes(1 << 20), np.zeros(1 << 20, np.uint8)
    receipt = expect(receiving, 0, target)
    open_pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    open_pair[1].wait_until(lambda: receipt.is_there, WAIT_S, lambda: "")
    assert np.array_equal(source, target)  # before it was collected
    open_pair[1].transport.collect(receipt, WAIT_S)


def test_both_may_send_before_either_receives(distant_pair: list[ConnectedRank]) -> None:
    """More than the system has room for, so that what is left is sent while its owner waits for the other."""
    sources = [some_bytes(32 << 20, rank) for rank in (0, 1)]
    targets = [np.zeros(32 << 20, np.uint8) for _ in range(2)]
    receipts = [expect(stream, 1 - rank, targets[rank]) for rank, stream in enumerate(streams(distant_pair))]
    unsent = [
        distant_pair[rank].transport.send(
            stream, (1 - rank,), (span(sources[rank]),), is_led=False, owner=sources[rank]
        )
        for rank, stream in enumerate(streams(distant_pair))
    ]
    assert all(unsent)

    def finish(rank: int) -> None:
        distant_pair[rank].transport.collect(receipts[rank], WAIT_S)
        distant_pair[rank].transport.wait_until_sent(unsent[rank], WAIT_S)

    threads = [threading.Thread(target=finish, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(np.array_equal(targets[rank], sources[1 - rank]) for rank in (0, 1))


def test_what_waits_is_sent_though_nobody_waits_for_it(distant_pair: list[ConnectedRank]) -> None:
    sending, receiving = streams(distant_pair)
    source, target = some_bytes(32 << 20), np.zeros(32 << 20, np.uint8)
    unsent = distant_pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    assert unsent
    distant_pair[1].transport.collect(expect(receiving, 0, target), WAIT_S)  # rank 0 does nothing
    assert np.array_equal(source, target)
    deadline = time.monotonic() + WAIT_S  # the last report may be on its way
    while not distant_pair[0].transport.is_sent(unsent):
        assert time.monotonic() < deadline


def test_a_large_payload_that_has_left_is_sent_once_it_has_come(distant_pair: list[ConnectedRank]) -> None:
    """To ask does not copy it, however often; a small one is copied."""
    sending, receiving = streams(distant_pair)
    small, large = some_bytes(100_000), some_bytes(2 << 20, 1)
    sent = distant_pair[0].transport.send(sending, (1,), (span(small),), is_led=False, owner=small)
    assert distant_pair[0].transport.is_sent(sent)
    small[:] = 0
    unsent = distant_pair[0].transport.send(sending, (1,), (span(large),), is_led=False, owner=large)
    assert not any(distant_pair[0].transport.is_sent(unsent) for _ in range(10))
    for source in (some_bytes(100_000), large):
        target = np.zeros(len(source), np.uint8)
        distant_pair[1].transport.collect(expect(receiving, 0, target), WAIT_S)
        assert np.array_equal(source, target)
    distant_pair[0].transport.wait_until_sent(unsent, WAIT_S)
    assert distant_pair[0].transport.is_sent(unsent)


def test_what_is_not_sent_yet_is_kept_in_memory(open_pair: list[ConnectedRank]) -> None:
    sending, receiving = streams(open_pair)
    source, expected = some_bytes(32 << 20), some_bytes(32 << 20)
    kept = weakref.ref(source)
    open_pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    del source
    gc.collect()
    assert kept() is not None
    target = np.zeros(32 << 20, np.uint8)
    open_pair[1].transport.collect(expect(receiving, 0, target), WAIT_S)
    assert np.array_equal(target, expected)
    deadline = time.monotonic() + WAIT_S
    while kept() is not None and time.monotonic() < deadline:
        open_pair[0].transport.take_messages()
    assert kept() is None


@pytest.mark.parametrize(
    ("nbytes", "ahead"),
    [(8, 8 * peer_transport.WINDOW), (100_000, 8 * peer_transport.WINDOW), (300_000, peer_transport.WINDOW)],
)
def test_who_sends_without_an_answer_is_at_most_a_window_ahead(
    open_pair: list[ConnectedRank], nbytes: int, ahead: int
) -> None:
    """Payloads up to 256 KB are acknowledged now and then only."""
    sending, receiving = streams(open_pair)
    transport, source = open_pair[0].transport, some_bytes(nbytes)
    for _ in range(ahead):
        assert transport.can_send(sending)
        transport.send(sending, (1,), (span(source),), is_led=True, owner=source)
    assert not transport.can_send(sending)
    with pytest.raises(StallError):
        transport.window_wait(sending)(0.01)
    for _ in range(ahead // peer_transport.WINDOW):
        open_pair[1].transport.collect(expect(receiving, 0, np.zeros(nbytes, np.uint8)), WAIT_S)
    transport.window_wait(sending)(WAIT_S)


@pytest.mark.parametrize("nbytes", [100, 1 << 20])
def test_a_payload_of_another_size_is_an_error_of_its_receipt_only(open_pair: list[ConnectedRank], nbytes: int) -> None:
    sending, receiving = streams(open_pair)
    source = some_bytes(nbytes)
    short, right = np.zeros(nbytes - 1, np.uint8), np.zeros(nbytes, np.uint8)
    receipts = [expect(receiving, 0, target) for target in (short, right)]
    for _ in range(2):
        open_pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    with pytest.raises(MismatchError, match=f"{nbytes} bytes"):
        open_pair[1].transport.collect(receipts[0], WAIT_S)
    open_pair[1].transport.collect(receipts[1], WAIT_S)
    assert not short.any()
    assert np.array_equal(right, source)


@pytest.mark.parametrize("taken", [0, 100_000, (1 << 20) - 1])
def test_nothing_is_written_to_memory_that_was_given_up(open_pair: list[ConnectedRank], taken: int) -> None:
    """``taken``: bytes of the payload that had come by then."""
    sending, receiving = streams(open_pair)
    source, target = some_bytes(1 << 20), np.zeros(1 << 20, np.uint8)
    receipt = expect(receiving, 0, target)
    record = peer_protocol.pack(PeerMessageKind.INLINE, 0, 0, 0, sending.key, 1, 1 << 20, 1 << 20, 0, 0, -1)
    sock = socket_of(open_pair[0])
    begun, payload = framed(record, source.tobytes())
    cut = taken + 36 * (taken // FRAME_BYTES) + (28 if taken else 0)  # headers and tags of its frames
    sock.sendall(begun + payload[:cut])

    def has_come() -> bool:
        return int((target != 0).sum()) >= int((source[:taken] != 0).sum())

    open_pair[1].wait_until(lambda: bool(receiving.flows[0].payloads) and has_come(), WAIT_S, lambda: "")
    open_pair[1].transport.abandon(receipt)
    before = target.copy()
    sock.sendall(payload[cut:])
    again = np.zeros(1 << 20, np.uint8)
    receiving.expected.clear()  # another receipt for the same payload
    open_pair[1].transport.collect(expect(receiving, 0, again), WAIT_S)
    assert np.array_equal(again, source)
    assert np.array_equal(target, before)


def test_any_pieces_of_the_byte_stream_make_the_same_payloads() -> None:
    """Whatever is posted when, and however the system cuts the bytes."""
    for seed in range(20):
        order = random.Random(seed)
        with connected(2, SETTINGS["open"]) as ranks:
            _, receiving = streams(ranks)
            sizes = [order.choice((0, 5, 3000, LANDING_BYTES, LANDING_BYTES + 1, 400_000)) for _ in range(12)]
            sources = [some_bytes(nbytes, number) for number, nbytes in enumerate(sizes)]
            targets = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
            stream = b"".join(
                peer_protocol.pack(
                    PeerMessageKind.INLINE, 0, 0, 0, receiving.key, number, len(source), len(source), 0, 0, -1
                )
                + source.tobytes()
                for number, source in enumerate(sources, 1)
            )
            bodies = list[bytes]()
            while stream:
                part = order.choice((1, 76, 5000, 100_000, FRAME_BYTES))
                bodies.append(stream[:part])
                stream = stream[part:]
            data = b"".join(framed(*bodies))
            sock, receipts = socket_of(ranks[0]), list[StreamReceipt]()
            while data:
                if len(receipts) < len(targets) and order.random() < 0.4:
                    receipts.append(expect(receiving, 0, targets[len(receipts)]))
                part = min(len(data), order.choice((1, 70, 5000, 100_000, 500_000)))
                sock.sendall(data[:part])
                data = data[part:]
                ranks[1].transport.take_messages()
            receipts += [expect(receiving, 0, target) for target in targets[len(receipts) :]]
            for receipt in receipts:
                ranks[1].transport.collect(receipt, WAIT_S)
            assert all(np.array_equal(*both) for both in zip(sources, targets, strict=True)), seed


# ---- the end of a connection ---------------------------------------------------------------------------------------


def test_a_connection_that_has_ended_is_told_of_once_the_services_had_time(
    open_pair: list[ConnectedRank],
) -> None:
    open_pair[1].transport.lost_after_s = 0.1
    _, receiving = streams(open_pair)
    connection(open_pair[0], 1).close()
    with pytest.raises(PeerLostError, match=r"connection from rank 1 \(127.*\) to rank 0 \(127.*\) has ended"):
        open_pair[1].transport.collect(expect(receiving, 0, np.zeros(8, np.uint8)), WAIT_S)


def test_the_services_word_about_a_lost_rank_comes_first(open_pair: list[ConnectedRank]) -> None:
    _, receiving = streams(open_pair)
    connection(open_pair[0], 1).close()
    open_pair[1].wait_until(lambda: connection(open_pair[1], 0).failure is not None, WAIT_S, lambda: "")
    open_pair[1].fatal = PeerLostError("rank 0 was killed by SIGKILL")
    with pytest.raises(PeerLostError, match="SIGKILL"):
        open_pair[1].transport.collect(expect(receiving, 0, np.zeros(8, np.uint8)), WAIT_S)


def test_a_short_wait_for_a_lost_rank_is_a_stall(open_pair: list[ConnectedRank]) -> None:
    _, receiving = streams(open_pair)
    connection(open_pair[0], 1).close()
    receipt = expect(receiving, 0, np.zeros(8, np.uint8))
    with pytest.raises(StallError, match="rank 0"):
        open_pair[1].transport.collect(receipt, 0.05)


def test_what_was_sent_arrives_though_its_sender_has_left(pair: list[ConnectedRank]) -> None:
    sending, receiving = streams(pair)
    source, target = some_bytes(32 << 20), np.zeros(32 << 20, np.uint8)
    pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    leaving = threading.Thread(target=pair[0].transport.close)
    leaving.start()
    pair[1].transport.collect(expect(receiving, 0, target), WAIT_S)
    leaving.join(WAIT_S)
    assert not leaving.is_alive()
    assert np.array_equal(source, target)


def test_what_was_sent_arrives_though_nothing_can_be_sent_back(open_pair: list[ConnectedRank]) -> None:
    sending, receiving = streams(open_pair)
    source, target = some_bytes(20_000), np.zeros(20_000, np.uint8)
    for _ in range(2):
        open_pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    connection(open_pair[0], 1).close()
    back = connection(open_pair[1], 0)
    deadline = time.monotonic() + WAIT_S
    while not back._is_cut and time.monotonic() < deadline:
        back.send(peer_protocol.pack(*PeerMessage(PeerMessageKind.JOINED, 1, 0)))
    for _ in range(2):
        open_pair[1].transport.collect(expect(receiving, 0, target), WAIT_S)
        assert np.array_equal(source, target)
        target[:] = 0


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (PeerMessage(99, 0, 0), "malformed"),
        (PeerMessage(PeerMessageKind.INLINE, 0, 0, total=3, ready=2), "malformed"),
        (PeerMessage(PeerMessageKind.INLINE, 1, 0), "in the name of rank 1"),
        (PeerMessage(PeerMessageKind.SEGMENT, 0, 0, total=4096), "shares no memory"),
        (PeerMessage(PeerMessageKind.SHARED, 0, 0, total=4096), "shares no memory"),
        (PeerMessage(PeerMessageKind.WAKE, 0, 0), "shares no memory"),
        (PeerMessage(PeerMessageKind.TAKEN, 0, 0, id=5), "acknowledged a payload that was not for it"),
    ],
)
def test_what_no_correct_rank_sends(open_pair: list[ConnectedRank], message: PeerMessage, match: str) -> None:
    connection(open_pair[0], 1).send(peer_protocol.pack(*message))
    with pytest.raises(ProtocolError, match=match):
        open_pair[1].wait_until(lambda: False, WAIT_S, lambda: "")


# ---- join ----------------------------------------------------------------------------------------------------------


def test_who_joins_is_known_to_ranks_that_connect_later() -> None:
    ranks = [ConnectedRank(rank, SETTINGS["open"]) for rank in (0, 1)]
    try:
        ranks[0].transport.join(lambda: None)
        connect(ranks)
        ranks[1].wait_until(lambda: bool(ranks[1].transport.joined_among([0])), WAIT_S, lambda: "")
    finally:
        for rank in ranks:
            rank.transport.close()


def test_large_payloads_of_the_next_era_are_kept_for_it(open_pair: list[ConnectedRank]) -> None:
    sending, receiving = streams(open_pair)
    source, target = some_bytes(1 << 20), np.zeros(1 << 20, np.uint8)
    open_pair[0].transport.begin_era()
    open_pair[0].transport.send(sending, (1,), (span(source),), is_led=False, owner=source)
    open_pair[1].wait_until(lambda: bool(open_pair[1].transport._matcher._early), WAIT_S, lambda: "")
    assert not receiving.flows[0].payloads
    open_pair[1].transport.begin_era()
    open_pair[1].transport.collect(expect(receiving, 0, target), WAIT_S)
    assert np.array_equal(source, target)
