"""Parts of what ranks of one machine do among themselves: the ledger, memory, who is introduced to whom."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from byteps_py.errors import ProtocolError
from byteps_py.session.peers import peer_protocol
from byteps_py.session.peers.message_matcher import MessageMatcher, Stream
from byteps_py.session.peers.peer_protocol import PeerMessage, PeerMessageKind
from byteps_py.session.peers.peer_transport import PeerTransport
from byteps_py.session.peers.shared_slots import IncomingMemory, OutgoingMemory, size_class
from byteps_py.system.shm import Segment
from byteps_py.system.spin_policy import SpinPolicy
from byteps_py.tensors import key_of
from byteps_py.worker.core.local_ranks import Introduce, PeerIntroductions, Tell

# ---- the ledger ----------------------------------------------------------------------------------------------------


def pair() -> tuple[MessageMatcher, Stream, MessageMatcher, Stream]:
    """Two ranks and a stream between them."""
    one, other = MessageMatcher(0), MessageMatcher(1)
    return one, one.stream("s", (1,)), other, other.stream("s", (0,))


def inline(
    matcher: MessageMatcher, stream: Stream, target: int, data: bytes, payload_id: int = 0
) -> tuple[PeerMessage, bytes]:
    number, total = stream.send(target), len(data)
    return PeerMessage(
        PeerMessageKind.INLINE, matcher.me, matcher.era, 0, stream.key, number, total, total, payload_id
    ), data


def test_payloads_of_a_stream_are_numbered_by_both_sides_alike() -> None:
    one, sent, other, got = pair()
    for word in (b"a", b"", b"c"):
        assert other.on_message(*inline(one, sent, 1, word)) is None
    payloads = got.flows[0].payloads
    assert [payloads[got.expect(0)].data for _ in range(3)] == [b"a", b"", b"c"]
    assert all(payload.has_news for payload in payloads.values())  # the empty one, too


def test_a_payload_may_come_before_its_stream_is_known() -> None:
    one, other = MessageMatcher(0), MessageMatcher(1)
    other.on_message(*inline(one, one.stream("s", (1,)), 1, b"early"))
    stream = other.stream("s", (0,))
    assert stream.flows[0].payloads[stream.expect(0)].data == b"early"


def test_a_payload_grows_until_it_is_whole() -> None:
    one, sent, other, got = pair()
    payload_id = one.send(sent, (1,), "block")
    other.on_message(PeerMessage(PeerMessageKind.SHARED, 0, 0, 3, sent.key, sent.send(1), 10, 4, payload_id, 64), None)
    payload = got.flows[0].payloads[1]
    assert (payload.segment, payload.offset, payload.ready, payload.has_news) == (3, 64, 4, True)
    payload.done = 4
    assert not payload.has_news
    other.on_message(PeerMessage(PeerMessageKind.MORE, 0, 0, total=10, ready=10, id=payload_id), None)
    assert payload.has_news
    with pytest.raises(ProtocolError, match="never began"):
        other.on_message(PeerMessage(PeerMessageKind.MORE, 0, 0, total=10, ready=10, id=payload_id), None)


def test_a_block_is_free_once_all_have_taken_it() -> None:
    matcher = MessageMatcher(0)
    stream = matcher.stream("s", (1, 2))
    payload_id = matcher.send(stream, (1, 2), "block")
    assert stream.unacknowledged == 1
    assert matcher.on_message(PeerMessage(PeerMessageKind.TAKEN, 2, 0, id=payload_id), None) is None
    assert matcher.takers(stream) == {1}
    assert matcher.on_message(PeerMessage(PeerMessageKind.TAKEN, 1, 0, id=payload_id), None) == "block"
    assert stream.unacknowledged == 0
    with pytest.raises(ProtocolError, match="not for it"):
        matcher.on_message(PeerMessage(PeerMessageKind.TAKEN, 1, 0, id=payload_id), None)


@pytest.mark.parametrize(("total", "ready"), [(11, 11), (9, 9), (10, 3)])
def test_more_of_a_payload_is_of_the_same_one(total: int, ready: int) -> None:
    other = MessageMatcher(1)
    other.on_message(PeerMessage(PeerMessageKind.SHARED, 0, 0, 3, 77, 1, 10, 4, 5, 64), None)
    with pytest.raises(ProtocolError, match=f"{ready} of {total} bytes of a payload, after 4 of 10"):
        other.on_message(PeerMessage(PeerMessageKind.MORE, 0, 0, total=total, ready=ready, id=5), None)


def test_a_payload_begins_once() -> None:
    other = MessageMatcher(1)
    other.on_message(PeerMessage(PeerMessageKind.SHARED, 0, 0, 3, 77, 1, 10, 4, 5, 64), None)
    with pytest.raises(ProtocolError, match="began payload 5 twice"):
        other.on_message(PeerMessage(PeerMessageKind.SHARED, 0, 0, 3, 77, 2, 10, 4, 5, 64), None)


def test_what_nobody_here_knows_is_kept_but_not_without_limit() -> None:
    one, known = MessageMatcher(1), [f"stream {number}" for number in range(5)]
    one.most_early = 3
    for name in known:  # these are known once their names are
        one.on_message(PeerMessage(PeerMessageKind.INLINE, 0, 0, 0, key_of(name), 1), b"")
        assert 1 in one.stream(name, (0,)).flows[0].payloads
    for number in range(3):
        one.on_message(PeerMessage(PeerMessageKind.INLINE, 0, 0, 0, number, 1), b"")
    with pytest.raises(ProtocolError, match="streams that are not open"):
        one.on_message(PeerMessage(PeerMessageKind.INLINE, 0, 0, 0, 3, 1), b"")
    one.begin_era()
    one.on_message(PeerMessage(PeerMessageKind.INLINE, 0, 1, 0, 3, 1), b"")
    for number in (2, 3):
        one.on_message(PeerMessage(PeerMessageKind.INLINE, 0, 1, 0, 3, number), b"")
    with pytest.raises(ProtocolError, match="more than this rank takes"):
        one.on_message(PeerMessage(PeerMessageKind.INLINE, 0, 1, 0, 3, 4), b"")


def test_all_begin_anew_when_all_have_joined() -> None:
    one, sent, other, got = pair()
    other.on_message(*inline(one, sent, 1, b"old"))
    one.send(sent, (1,), "block")
    other.on_message(PeerMessage(PeerMessageKind.JOINED, 0, 0), None)
    assert other.joined == {0}
    assert one.begin_era() == ["block"]
    assert sent.unacknowledged == 0
    new = inline(one, sent, 1, b"new")
    other.on_message(*new)  # the other has not heard yet that all have joined
    assert got.flows[0].payloads[1].data == b"old"
    assert other.begin_era() == []
    assert other.joined == set()
    assert got.flows[0].payloads[got.expect(0)].data == b"new"
    other.on_message(PeerMessage(PeerMessageKind.TAKEN, 0, 0, id=77), None)  # of the old era: no matter
    with pytest.raises(ProtocolError, match="era 3"):
        other.on_message(PeerMessage(PeerMessageKind.JOINED, 0, 3), None)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_delays_all_arrives_once_and_in_order(seed: int) -> None:
    """Ranks that send each other payloads, and messages that take their time: those of one rank keep their order."""
    rng = random.Random(seed)
    count, payloads = rng.choice((2, 3, 5)), 40
    ledgers = [MessageMatcher(rank) for rank in range(count)]
    streams = [matcher.stream("s", [r for r in range(count) if r != matcher.me]) for matcher in ledgers]
    ways = {(a, b): deque[tuple[PeerMessage, bytes | None]]() for a in range(count) for b in range(count) if a != b}
    to_send = {way: deque(range(payloads)) for way in ways}
    blocks: set[object] = set()
    taken: dict[tuple[int, int], list[int]] = {way: [] for way in ways}
    expected = {way: streams[way[1]].expect(way[0]) for way in ways}
    while any(to_send.values()) or any(ways.values()):
        source, target = way = rng.choice(list(ways))
        if to_send[way] and streams[source].unacknowledged < 3 * count and rng.random() < 0.5:
            value = to_send[way].popleft()
            if value % 3:
                ways[way].append(inline(ledgers[source], streams[source], target, bytes([value])))
                continue
            block = (way, value)
            blocks.add(block)
            payload_id = ledgers[source].send(streams[source], (target,), block)
            number = streams[source].send(target)
            key = streams[source].key
            ways[way].append(
                (PeerMessage(PeerMessageKind.SHARED, source, 0, value, key, number, 2, 1, payload_id), None)
            )
            ways[way].append((PeerMessage(PeerMessageKind.MORE, source, 0, total=2, ready=2, id=payload_id), None))
        elif ways[way]:
            blocks.discard(ledgers[target].on_message(*ways[way].popleft()))
            flow = streams[target].flows[source]
            payload = flow.payloads.get(expected[way])
            if payload is not None and payload.ready == payload.total:
                del flow.payloads[expected[way]]
                expected[way] = streams[target].expect(source)
                taken[way].append(payload.segment if payload.data is None else payload.data[0])
                if payload.id:
                    ways[target, source].append((PeerMessage(PeerMessageKind.TAKEN, target, 0, id=payload.id), None))
    assert all(seen == list(range(payloads)) for seen in taken.values())
    assert not blocks
    assert [stream.unacknowledged for stream in streams] == [0] * count


# ---- messages ------------------------------------------------------------------------------------------------------


def test_who_looks_in_vain_sleeps_at_once_but_for_one_try_in_sixteen() -> None:
    spin_policy = SpinPolicy()
    for _ in range(2):
        assert spin_policy.is_due()
        spin_policy.ended(paid=False)
    assert [spin_policy.is_due() for _ in range(16)] == [False] * 15 + [True]
    spin_policy.ended(paid=False)
    assert not spin_policy.is_due()


def test_one_look_that_pays_is_reason_enough_for_the_next() -> None:
    spin_policy = SpinPolicy()
    for _ in range(2):
        spin_policy.is_due()
        spin_policy.ended(paid=False)
    while not spin_policy.is_due():
        pass
    spin_policy.ended(paid=True)
    assert spin_policy.is_due()
    spin_policy.ended(paid=False)
    assert spin_policy.is_due()  # one late rank is no reason not to


def test_messages_come_back_as_they_were() -> None:
    message = PeerMessage(PeerMessageKind.SHARED, 3, 1, 2, 1 << 63, 5, 1 << 40, 7, 8, 1 << 35)
    assert peer_protocol.unpack(memoryview(peer_protocol.pack(*message)), peer_protocol.RECORD_BYTES) == message


@pytest.mark.parametrize(
    "data",
    [
        b"short",
        peer_protocol.pack(*PeerMessage(99, 0, 0)),
        peer_protocol.pack(*PeerMessage(PeerMessageKind.INLINE, 0, 0, total=3)) + b"ab",
        peer_protocol.pack(*PeerMessage(PeerMessageKind.INLINE, 0, 0, total=3, ready=2)) + b"abc",
        peer_protocol.pack(*PeerMessage(PeerMessageKind.MORE, 0, 0, total=3, ready=4)),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        peer_protocol.unpack(memoryview(data), len(data))


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def outgoing() -> Iterator[OutgoingMemory]:
    memory = OutgoingMemory(idle_bytes=1 << 20)
    yield memory
    memory.close()


def test_what_was_freed_last_is_used_first(outgoing: OutgoingMemory) -> None:
    one, other = (outgoing.allocate(20_000)[0] for _ in range(2))
    outgoing.free(one)
    outgoing.free(other)
    assert [outgoing.allocate(n)[0] for n in (19_000, 20_480)] == [other, one]


def test_a_free_block_may_be_larger_but_not_much(outgoing: OutgoingMemory) -> None:
    large = outgoing.allocate(100_000)[0]
    outgoing.free(large)
    assert outgoing.allocate(10_000)[0] != large
    assert outgoing.allocate(30_000)[0] == large


def test_what_is_idle_gives_its_pages_back(outgoing: OutgoingMemory) -> None:
    blocks = [outgoing.allocate(1 << 19)[0] for _ in range(3)]
    segment = outgoing.segments[0]
    for block in blocks:
        segment.view[block.offset] = 1
    for block in blocks:
        outgoing.free(block)
    assert [segment.view[block.offset] for block in blocks] == [0, 1, 1]
    assert [outgoing.allocate(1 << 19)[0] for _ in range(3)] == blocks[::-1]


def test_sizes_share_blocks() -> None:
    for nbytes in (1, 4096, 4097, 100_000, (64 << 20) + 1):
        assert nbytes <= size_class(nbytes) <= max(4096, nbytes * 1.25 + 4096)


def test_memory_of_a_neighbour() -> None:
    theirs, mine = Segment.create(8192), IncomingMemory()
    mine.add(1, 0, os.dup(theirs.fd), 8192)
    theirs.view[5000:5003] = b"abc"
    assert bytes(mine.find(1, 0, 8192).view[5000:5003]) == b"abc"
    for number, end in ((0, 8193), (1, 1)):
        with pytest.raises(ProtocolError, match="outside of its memory"):
            mine.find(1, number, end)
    mine.close()
    theirs.close()


@pytest.mark.parametrize(("number", "nbytes"), [(0, 4097), (0, 1 << 63), (1, 4096)])
def test_memory_of_a_neighbour_that_can_not_be_had(number: int, nbytes: int) -> None:
    theirs, mine = Segment.create(4096), IncomingMemory()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match="can't be mapped"):
        mine.add(1, number, os.dup(theirs.fd), nbytes)
    assert len(os.listdir("/proc/self/fd")) == before
    theirs.close()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"short", "a message of 5 bytes"),
        (peer_protocol.pack(*PeerMessage(PeerMessageKind.JOINED, 1, 0)), "no peer of"),
        (peer_protocol.pack(*PeerMessage(PeerMessageKind.JOINED, 2, 0)), "no peer of"),
        (peer_protocol.pack(*PeerMessage(PeerMessageKind.SEGMENT, 0, 0, total=1 << 40)), "can't be mapped"),
        (peer_protocol.pack(*PeerMessage(PeerMessageKind.MORE, 0, 0, id=9)), "never began"),
        (b"", ""),
    ],
)
def test_a_descriptor_that_nobody_wants_is_closed(data: bytes, what: str) -> None:
    host = SimpleNamespace(state=threading.Condition())
    peers, segment = PeerTransport(cast(Any, host), 1, range(2)), Segment.create(4096)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(fileno=os.dup(peers._inbox.write_fd)) as door:
        socket.send_fds(door, [data], [segment.fd])
    with pytest.raises(ProtocolError, match=what) if what else contextlib.nullcontext():
        peers.take_message()
    assert len(os.listdir("/proc/self/fd")) == before
    peers.close()
    segment.close()


# ---- meetings ------------------------------------------------------------------------------------------------------


def test_ranks_are_introduced_once_all_have_asked() -> None:
    directory = PeerIntroductions()
    assert directory.ask(0, 7, [0, 2]) == []
    assert directory.ask(1, 8, [0, 1]) == []
    assert directory.ask(2, 7, [0, 2]) == [Introduce(0, 2), Introduce(2, 0), Tell(0, 7), Tell(2, 7)]
    assert directory.ask(0, 9, [0, 2]) == []
    assert directory.ask(2, 9, [0, 2]) == [Tell(0, 9), Tell(2, 9)]  # they know each other


def test_who_comes_back_is_somebody_else() -> None:
    directory = PeerIntroductions()
    directory.ask(0, 7, [0, 1])
    directory.ask(1, 7, [0, 1])
    assert directory.ask(1, 8, [0, 1]) == []
    directory.forget(1)
    directory.forget(0)
    assert directory.ask(0, 8, [0, 1]) == []
    assert directory.ask(1, 8, [0, 1]) == [Introduce(0, 1), Introduce(1, 0), Tell(0, 8), Tell(1, 8)]


@pytest.mark.parametrize("asks_late", [True, False])
def test_who_is_back_before_others_have_left_meets_them_when_they_are_back(asks_late: bool) -> None:
    """Else it would send to who is not there any more, and be waited for in vain."""
    directory = PeerIntroductions()
    assert directory.ask(0, 7, [0, 1]) == []
    if not asks_late:
        assert directory.ask(1, 7, [0, 1]) == [Introduce(0, 1), Introduce(1, 0), Tell(0, 7), Tell(1, 7)]
    directory.forget(0)
    assert directory.ask(0, 7, [0, 1]) == []
    if asks_late:
        assert directory.ask(1, 7, [0, 1]) == []
    directory.forget(1)
    assert directory.ask(1, 7, [0, 1]) == [Introduce(0, 1), Introduce(1, 0), Tell(0, 7), Tell(1, 7)]


def test_ranks_must_ask_for_the_same() -> None:
    directory = PeerIntroductions()
    directory.ask(0, 7, [0, 1])
    for rank, members in ((1, [0, 1, 2]), (2, [0, 1])):
        with pytest.raises(ProtocolError, match="others under that key"):
            directory.ask(rank, 7, members)
