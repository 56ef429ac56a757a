"""Records of steps, and what is attached to them in pieces: which is held when. Pure: the test is the shell."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from byteps_py.server.shadow import LONGEST_HOLD_S, ShadowStore
from byteps_py.server.shadow_records import AttachedPieces
from byteps_py.server.shadow_state import (
    HoldAsked,
    HoldOver,
    JobReplaced,
    OwnerMessage,
    RefuseShadow,
    ShadowEvent,
    ShadowReply,
)
from byteps_py.wire.data_link import MAX_ATTACHED_BYTES, Header, Kind, ShadowRecord

RUN = 7
DATA = bytes(range(100))


@dataclass(frozen=True)
class Bytes:
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


def joined(pieces: AttachedPieces, start: int, stop: int) -> bytes:
    return b"".join(piece.data[first:last] for piece, first, last in pieces.cut(start, stop))  # type: ignore[attr-defined]


@dataclass
class Ranks:
    """Ranks that send records to a server. ``heard``: kind, rank, step."""

    store: ShadowStore = field(default_factory=lambda: ShadowStore(4096))
    heard: list[tuple[str, int, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    now: float = 0.0

    def handle(self, event: ShadowEvent) -> None:
        for action in self.store.handle(event, self.now):
            if isinstance(action, ShadowReply):
                self.heard.append(
                    (action.header.kind.name.removeprefix("SHADOW_"), action.header.index, action.header.round)
                )
                self.texts.append(action.text)
            elif isinstance(action, RefuseShadow):
                self.refused.append(action.text)

    def record(self, step: int, nbytes: int = len(DATA), rank: int = 0, durable: int = 0) -> None:
        said = ShadowRecord(run=RUN, step=step, rank=rank, size=2, durable=durable, attached_bytes=nbytes)
        header = Header(Kind.SHADOW_RECORD, 1, key=RUN, index=rank, round=step)
        self.handle(OwnerMessage(header, "peer", said))

    def attach(self, step: int, start: int = 0, stop: int = len(DATA), rank: int = 0, total: int = len(DATA)) -> None:
        header = Header(Kind.SHADOW_ATTACHED, 1, key=RUN, index=rank, round=step, offset=start, segment_offset=total)
        self.handle(OwnerMessage(header, "peer", Bytes(DATA[start:stop])))

    def held(self) -> list[tuple[int, int]]:
        """(rank, step) of what a restarted job finds. All of it is there."""
        found = [record for run in self.store.describe(self.now).runs for record in run.records]
        for record in found:
            pieces = self.store.read_attached(RUN, record.rank, record.step)
            assert pieces is not None
            assert joined(pieces, 0, record.attached_bytes) == DATA[: record.attached_bytes]
        return [(record.rank, record.step) for record in found]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_record_is_held_with_its_last_piece(ranks: Ranks, order: tuple[int, ...]) -> None:
    """In any order, and twice all but the last one."""
    says = [lambda: ranks.record(3), *(lambda at=at: ranks.attach(3, at, at + 40) for at in (0, 40, 80))]
    for number in order[:-1]:
        says[number]()
        says[number]()
    assert (ranks.heard, ranks.held()) == ([], [])
    assert ranks.store.read_attached(RUN, 0, 3) is None
    says[order[-1]]()
    assert (ranks.heard, ranks.held()) == ([("HELD", 0, 3)], [(0, 3)])


def test_a_record_without_anything_attached_is_held_at_once(ranks: Ranks) -> None:
    ranks.record(3, nbytes=0)
    assert (ranks.heard, ranks.held()) == ([("HELD", 0, 3)], [(0, 3)])


def test_what_comes_again_is_answered_by_the_record_alone(ranks: Ranks) -> None:
    for _ in range(2):
        ranks.record(3)
        ranks.attach(3, 0, 50)
        ranks.attach(3, 50, 100)
    assert ranks.heard == [("HELD", 0, 3)] * 2
    assert ranks.store.record_bytes == 100 + ranks.store.describe(0.0).runs[0].records[0].nbytes


def test_a_part_that_is_lost_is_said_to_be_missing_when_a_later_record_is_held(ranks: Ranks) -> None:
    """Of the same rank; the other one's may still come."""
    ranks.record(3)
    ranks.attach(3, 0, 50)
    ranks.record(3, rank=1)
    ranks.record(4)
    ranks.attach(4)
    assert ranks.heard == [("HELD", 0, 4), ("LACKS", 0, 3)]
    assert ranks.texts[-1] == "a part of the record of step 3 did not come"
    ranks.attach(3, rank=1)
    assert ranks.held() == [(0, 4), (1, 3)]


def test_pieces_that_come_late_leave_nothing(ranks: Ranks) -> None:
    """Of a record that was held, and dropped because a later one is durable."""
    for step in (3, 4):
        ranks.record(step)
        ranks.attach(step)
    ranks.record(5, nbytes=0, durable=4)
    assert ranks.held() == [(0, 4), (0, 5)]
    waiting, ranks.heard = ranks.store.record_bytes, []
    ranks.attach(3, 0, 50)
    ranks.record(3)
    assert ranks.store.record_bytes == waiting
    assert ranks.heard == [("HELD", 0, 3)] * 2, "it is needed no more"
    assert ranks.held() == [(0, 4), (0, 5)]


def test_another_cut_takes_the_place_of_the_first_one(ranks: Ranks) -> None:
    ranks.record(3)
    for start in (0, 30, 60):
        ranks.attach(3, start, start + 30)
    for start in (0, 40, 80):
        assert ranks.held() == []
        ranks.attach(3, start, start + 40)
    assert ranks.held() == [(0, 3)]


def test_without_memory_nothing_of_it_is_kept() -> None:
    """Room is taken for all pieces with the first message."""
    ranks = Ranks(ShadowStore(4096, most_waiting_bytes=98))
    ranks.attach(3, 0, 50)
    ranks.attach(3, 0, 50, rank=1)
    assert ranks.heard == [("LACKS", 1, 3)]
    assert ranks.texts == ["the record of step 3, with 100 bytes attached: 100 bytes wait here already"]
    ranks.record(3)
    ranks.attach(3, 50, 100)
    assert ranks.held() == [(0, 3)]
    ranks.record(4, nbytes=0, durable=3)
    ranks.record(4, nbytes=50, rank=1)
    ranks.attach(4, 0, 50, rank=1, total=50)
    assert ranks.held() == [(0, 3), (0, 4)]
    assert ranks.heard[-1] == ("LACKS", 1, 4)


def test_ranks_that_are_ahead_leave_room_for_the_others() -> None:
    """Their records fill the memory. Without those of rank 1, none of them could ever be dropped."""
    ranks = Ranks(ShadowStore(4096, most_waiting_bytes=320))
    for step in (3, 4, 5):
        ranks.record(step)
        ranks.attach(step)
    assert ranks.heard == [("HELD", 0, 3), ("HELD", 0, 4), ("LACKS", 0, 5), ("LACKS", 0, 5)]
    ranks.heard = []
    for step in (3, 4):
        ranks.record(step, rank=1)
        ranks.attach(step, rank=1)
    assert ranks.heard == [("HELD", 1, 3), ("LACKS", 1, 4), ("LACKS", 1, 4)]
    for rank in (0, 1):
        ranks.record(6, rank=rank, durable=3)
        ranks.attach(6, rank=rank)
    assert ranks.held() == [(0, 3), (0, 4), (1, 3), (1, 6)]
    for rank in (0, 1):
        ranks.record(7, rank=rank, durable=4)
        ranks.attach(7, rank=rank)
    assert (0, 7) in ranks.held()


def test_what_comes_again_needs_no_room() -> None:
    """The first records of two ranks fill more than the usual memory. What is held stays; what has room keeps it."""
    ranks = Ranks(ShadowStore(4096, most_waiting_bytes=150))
    for rank in (0, 1):
        ranks.record(3, rank=rank)
        ranks.attach(3, 0, 100 - 50 * rank, rank=rank)
    assert ranks.held() == [(0, 3)]
    ranks.heard = []
    ranks.record(3)
    ranks.attach(3)
    assert (ranks.heard, ranks.held()) == ([("HELD", 0, 3)], [(0, 3)])
    ranks.attach(3, 50, 100, rank=1)
    assert ranks.held() == [(0, 3), (1, 3)]


def test_a_record_whose_words_find_no_room_gives_up_that_of_its_pieces() -> None:
    ranks = Ranks(ShadowStore(4096, most_waiting_bytes=52))
    ranks.attach(3, 0, 50)
    ranks.record(3)
    assert ranks.heard == [("LACKS", 0, 3)]
    assert (ranks.store.record_bytes, len(ranks.store.describe(0.0).runs)) == (0, 0)


def test_a_new_job_forgets_what_has_come_in_part(ranks: Ranks) -> None:
    """Its connection is gone; what is held stays."""
    ranks.record(3)
    ranks.attach(3)
    ranks.record(4)
    ranks.attach(4, 0, 50)
    ranks.handle(JobReplaced())
    assert ranks.held() == [(0, 3)]
    assert ranks.store.record_bytes == 100 + ranks.store.describe(0.0).runs[0].records[0].nbytes


def test_a_reader_may_read_what_it_has_found(ranks: Ranks) -> None:
    """While it holds steps back, no record is dropped, though a later one is durable."""
    ranks.record(3)
    ranks.attach(3)
    ranks.handle(HoldAsked(5.0))
    for step in (4, 5):
        ranks.record(step, durable=step - 1)
        ranks.attach(step)
    ranks.record(6, nbytes=0, durable=5)
    assert ranks.held() == [(0, 3), (0, 4), (0, 5), (0, 6)]
    ranks.now = LONGEST_HOLD_S
    ranks.handle(HoldOver())
    assert ranks.held() == [(0, 5), (0, 6)]


def test_records_that_fill_the_memory_end_a_hold() -> None:
    ranks = Ranks(ShadowStore(4096, most_waiting_bytes=300))
    ranks.record(3)
    ranks.attach(3)
    ranks.handle(HoldAsked(5.0))
    ranks.record(4, durable=3)
    ranks.attach(4)
    assert ranks.held() == [(0, 3), (0, 4)]
    ranks.record(5, durable=4)
    assert ranks.held() == [(0, 4)]


@pytest.mark.parametrize(
    ("start", "stop", "total"), [(0, 0, 100), (0, 60, 50), (0, 50, MAX_ATTACHED_BYTES + 1), (1 << 63, 1 << 63, 8)]
)
def test_pieces_that_no_correct_peer_sends_are_refused(ranks: Ranks, start: int, stop: int, total: int) -> None:
    ranks.attach(3, start, stop, total=total)
    assert (len(ranks.refused), ranks.heard, ranks.store.record_bytes) == (1, [], 0)


def test_more_than_the_limit_is_refused(ranks: Ranks) -> None:
    ranks.record(3, nbytes=MAX_ATTACHED_BYTES + 1)
    assert ranks.refused == [
        f"{MAX_ATTACHED_BYTES + 1} bytes are attached to a record of rank 0, which may have 268435456"
    ]


# ---- any order --------------------------------------------------------------------------------------------------


def cuts(size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, len(DATA))) for start in range(0, len(DATA), size)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 99)), max_size=60), st.integers(1, 100))
def test_whatever_comes_in_whatever_order_is_whole_or_is_not(said: list[tuple[int, int]], size: int) -> None:
    """Pieces of several cuts; then all of one."""
    pieces = AttachedPieces(len(DATA))
    for cut, number in said:
        start, stop = cuts(cut)[number % len(cuts(cut))]
        pieces.add(start, Bytes(DATA[start:stop]))
        if pieces.is_whole:
            break
    if not pieces.is_whole:
        for start, stop in cuts(size):
            pieces.add(start, Bytes(DATA[start:stop]))
    assert pieces.is_whole
    for start, stop in ((0, 100), (13, 14), (size % 100, 100), (99, 200)):
        assert joined(pieces, start, stop) == DATA[start:stop]
