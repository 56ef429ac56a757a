"""Payloads between ranks of different machines that are read from the sender's memory. What every lane does,
test_peer_connection.py tests of this one, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.connected import LANES, WAIT_S, ConnectedRank, connect, connected
from support.rdma import StandInAgent
from test_peer_connection import connection, expect, some_bytes, span, streams

from byteps_py.errors import CommunicationError, IntegrityError, PeerLostError, ProtocolError
from byteps_py.session.peers import peer_protocol, placed_payloads
from byteps_py.session.peers.message_matcher import StreamReceipt
from byteps_py.session.peers.peer_protocol import PeerMessageKind
from byteps_py.session.peers.placed_payloads import PlacedPayloads

SETTINGS = LANES["RDMA, a stand-in, signed"][0]
NBYTES = 1 << 20


def placed(rank: ConnectedRank) -> PlacedPayloads:
    assert rank.transport._placed is not None
    return rank.transport._placed


def agent(rank: ConnectedRank) -> StandInAgent:
    found = placed(rank)._lane._agent
    assert isinstance(found, StandInAgent)
    return found


def bytes_read(rank: ConnectedRank) -> int:
    return placed(rank)._lane.bytes_read


def settle(ranks: list[ConnectedRank], is_so: object) -> None:
    """Let both receive until it ``is_so``."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        for rank in ranks:
            rank.transport.take_messages()


@pytest.fixture(name="pair")
def pair_by_rdma() -> Iterator[list[ConnectedRank]]:
    with connected(2, SETTINGS) as ranks:
        yield ranks


class Transfer:
    """A payload from rank 0 to rank 1."""

    def __init__(self, pair: list[ConnectedRank], nbytes: int = NBYTES, seed: int = 0) -> None:
        self.pair, self.source, self.target = pair, some_bytes(nbytes, seed), np.zeros(nbytes, np.uint8)
        sending, receiving = streams(pair)
        self.receipt: StreamReceipt = expect(receiving, 0, self.target)
        self.unsent = pair[0].transport.send(sending, (1,), (span(self.source),), is_led=False, owner=self.source)

    def collect(self, timeout_s: float = WAIT_S) -> None:
        self.pair[1].transport.collect(self.receipt, timeout_s)
        assert np.array_equal(self.source, self.target)


def test_large_payloads_are_read_and_small_ones_are_sent(pair: list[ConnectedRank]) -> None:
    Transfer(pair, 4000).collect()
    assert bytes_read(pair[1]) == 0
    Transfer(pair).collect()
    assert bytes_read(pair[1]) == NBYTES
    settle(pair, lambda: not placed(pair[0])._held)


def test_a_sender_may_change_its_tensor_at_once(pair: list[ConnectedRank]) -> None:
    transfer = Transfer(pair)
    assert not transfer.unsent
    before = transfer.source.copy()
    transfer.source[:] = 0
    pair[1].transport.collect(transfer.receipt, WAIT_S)
    assert np.array_equal(transfer.target, before)


def test_memory_is_used_again(pair: list[ConnectedRank]) -> None:
    for seed in range(20):
        Transfer(pair, seed=seed).collect()
        settle(pair, lambda: not placed(pair[0])._held)
    assert [len(agent(rank).regions) for rank in pair] == [1, 1]
    assert placed(pair[0])._arena._used == NBYTES


def test_more_than_the_budget_waits_where_it_lies(pair: list[ConnectedRank]) -> None:
    agent(pair[1]).is_stuck = True
    count = (placed_payloads.BUDGET_BYTES >> 25) + 2
    transfers = [Transfer(pair, 32 << 20, seed) for seed in range(count)]
    assert [bool(transfer.unsent) for transfer in transfers] == [False] * (count - 2) + [True] * 2
    assert not pair[0].transport.is_sent(transfers[-1].unsent)
    agent(pair[1]).is_stuck = False
    taking = threading.Thread(target=lambda: [transfer.collect() for transfer in transfers])
    taking.start()
    pair[0].transport.wait_until_sent(transfers[-1].unsent, WAIT_S)
    taking.join()
    assert all(np.array_equal(each.source, each.target) for each in transfers)


def test_bytes_that_had_not_come_are_noticed_and_read_again(pair: list[ConnectedRank]) -> None:
    agent(pair[1]).lies = 1
    Transfer(pair).collect()


@pytest.mark.parametrize(
    ("lies", "fails", "error", "text"),
    [
        (3, False, IntegrityError, r"RDMA from rank 0 does not work: a payload came damaged 3 times\..*or unset DMLC"),
        (0, True, PeerLostError, r"RDMA from rank 0 does not work: the stand-in has failed\. .*or unset DMLC"),
    ],
)
def test_a_payload_that_can_not_be_read_is_an_error(
    pair: list[ConnectedRank], lies: int, fails: bool, error: type[CommunicationError], text: str
) -> None:
    pair[1].transport.lost_after_s = 0.1
    agent(pair[1]).lies, agent(pair[1]).fails = lies, fails
    transfer = Transfer(pair)
    with pytest.raises(error, match=text):
        transfer.collect()


def test_a_read_has_a_deadline(pair: list[ConnectedRank]) -> None:
    pair[1].transport.lost_after_s = 0.1
    agent(pair[1]).is_stuck = True
    transfer = Transfer(pair)
    settle(pair, lambda: agent(pair[1]).reads)
    placed(pair[1]).check(time.monotonic() + SETTINGS.patience_s + 1)
    with pytest.raises(PeerLostError, match=r"RDMA from rank 0 does not work: no read has ended for "):
        transfer.collect()
    agent(pair[1]).is_stuck = False


def test_a_sender_that_leaves_lets_the_other_read(pair: list[ConnectedRank]) -> None:
    agent(pair[1]).is_stuck = True
    transfer = Transfer(pair)
    leaving = threading.Thread(target=pair[0].transport.close)
    leaving.start()
    settle(pair[1:], lambda: agent(pair[1]).reads)
    assert leaving.is_alive()
    agent(pair[1]).is_stuck = False
    transfer.collect()
    leaving.join()


def test_a_receipt_that_is_given_up_is_not_written_to(pair: list[ConnectedRank]) -> None:
    agent(pair[1]).is_stuck = True
    transfer = Transfer(pair)
    settle(pair, lambda: agent(pair[1]).reads)
    pair[1].transport.abandon(transfer.receipt)
    agent(pair[1]).is_stuck = False
    settle(pair, lambda: not placed(pair[0])._held)
    assert not transfer.target.any()


@pytest.mark.parametrize("era_of_sender", [1, 0], ids=["the next", "the last"])
def test_a_payload_of_another_era(pair: list[ConnectedRank], era_of_sender: int) -> None:
    pair[0 if era_of_sender else 1].transport.begin_era()
    if era_of_sender:
        transfer = Transfer(pair)
        settle(pair, lambda: not placed(pair[0])._held)
        pair[1].transport.begin_era()
        transfer.receipt = expect(streams(pair)[1], 0, transfer.target)
        transfer.collect()
    else:
        transfer = Transfer(pair)
        settle(pair, lambda: not placed(pair[0])._held)
        assert not transfer.receipt.is_there


def test_a_rank_without_rdma_gets_all_over_its_connection_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = [ConnectedRank(0, SETTINGS), ConnectedRank(1, replace(SETTINGS, enable_rdma="0", rdma_transports=""))]
    knowing = threading.Thread(target=connect, args=(ranks,))
    try:
        knowing.start()
        settle(ranks, lambda: not knowing.is_alive())
        Transfer(ranks).collect()
        Transfer(ranks, seed=1).collect()
        assert caplog.text.count("rank 1 is without RDMA: tensors travel over TCP. Set DMLC_ENABLE_RDMA=1 there") == 1
        assert not agent(ranks[0]).reads
    finally:
        for rank in ranks:
            rank.transport.close()


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ((PeerMessageKind.MEMORY, 1, 0, 0, 0, 0, 1, 1, 0, 0, -1), r"the memory of rank 1 can't be read by RDMA"),
        (
            (PeerMessageKind.PLACED_READ, 1, 0, 5, 0, 0, 0, 0, 0, 0, -1),
            r"rank 1 has read a payload that was not for it",
        ),
        ((PeerMessageKind.MEMORY, 1, 0, 0, 0, 0, 2, 1, 0, 0, -1), r"a malformed message from another rank"),
        ((PeerMessageKind.PLACED, 1, 0, 0, 0, 1, 1, 2, 0, 0, -1), r"a malformed message from another rank"),
    ],
)
def test_what_no_correct_rank_sends(pair: list[ConnectedRank], record: tuple[int, ...], text: str) -> None:
    connection(pair[1], 0).send(peer_protocol.pack(*record) + b"x")
    with pytest.raises(ProtocolError, match=text):
        settle(pair[:1], lambda: False)


def test_ranks_of_one_machine_place_nothing(pair: list[ConnectedRank]) -> None:
    """They share memory: a message about it on a local socket is refused."""
    record = peer_protocol.pack(int(PeerMessageKind.PLACED_READ), 0, 0, 1, 0, 0, 0, 0, 0, 0, -1)
    pair[0].transport._local_ranks = range(2)
    pair[0].transport._inbox._write_end.send(record)
    with pytest.raises(ProtocolError, match=r"is no peer of rank 0 on its machine"):
        settle(pair[:1], lambda: False)
