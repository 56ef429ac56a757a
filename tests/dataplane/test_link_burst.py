"""Bursts of filler between real services, and what they show of a link that hands out tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.data_plane import WAIT_S, Server

from byteps_py.config.settings import Settings
from byteps_py.dataplane.link_burst import BurstTarget, LinkBurst
from byteps_py.dataplane.link_rate import InterfaceCounters
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop

SETTINGS = Settings(
    num_workers=2,
    secret="a secret of at least sixteen characters",
    node_host="127.0.0.1",
    scheduler_host="127.0.0.1",
    scheduler_port=1,
)
CPU = pb.MACHINE_KIND_CPU
KNOWN, USUAL = 20.0, 40.0  # Mbit/s
MBIT = 125_000  # bytes


class LimitedLink(InterfaceCounters):
    """Of a link that carries ``mbit``, once it has spent the tokens that it has saved at the usual rate."""

    def __init__(self, folder: Path, clock: Callable[[], float], mbit: float, saved_bytes: int) -> None:
        for name in ("tx_bytes", "rx_bytes"):
            (folder / name).write_text("0")
        super().__init__(folder)
        self._clock, self._began_s, self._mbit, self._saved_bytes = clock, clock(), mbit, saved_bytes
        self.reads = 0

    def read(self) -> tuple[int, int]:
        self.reads += 1
        took_s = self._clock() - self._began_s
        carried = int(min(USUAL * MBIT * took_s, self._saved_bytes + self._mbit * MBIT * took_s))
        return int(1.05 * carried), carried


def burst(addresses: list[str], counters: Callable[[EventLoop], InterfaceCounters | None] = lambda _: None) -> float:
    loop, found = EventLoop(), list[float]()

    def done(mbit: float) -> None:
        found.append(mbit)
        loop.stop()

    made = LinkBurst(loop, SETTINGS, BurstTarget(tuple(addresses), KNOWN, USUAL), counters(loop), done)
    loop.call_later(WAIT_S, loop.stop)
    loop.run()
    made.close()
    loop.close()
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("mbit", "saved_bytes", "shown"),
    [
        pytest.param(KNOWN, 0, KNOWN, id="as slow as before"),
        pytest.param(KNOWN, 200_000, KNOWN, id="fast while its tokens last"),
        pytest.param(USUAL, 0, USUAL, id="fast again"),
    ],
)
def test_only_what_a_link_can_go_on_to_carry_counts(
    tmp_path: Path, mbit: float, saved_bytes: int, shown: float
) -> None:
    with Server(SETTINGS) as server:
        server.service._network.open_echo()
        made: list[LimitedLink] = []

        def counters(loop: EventLoop) -> LimitedLink:
            made.append(LimitedLink(tmp_path, loop.time, mbit, saved_bytes))
            return made[0]

        assert burst([server.service.address], counters) == pytest.approx(shown, rel=0.2)
        if not saved_bytes:  # with tokens, it depends on how soon the first look is
            # Where the look shows nothing new, that is all.
            assert (made[0].reads == 3) == (shown == KNOWN)


def test_a_service_sends_to_others_what_they_send_back_and_tells_the_scheduler() -> None:
    with (
        Server(SETTINGS, kind=CPU) as first,
        Server(SETTINGS, kind=CPU) as second,
        Server(SETTINGS, kind=CPU) as third,
    ):
        for server in (second, third):
            server.service._network.open_echo()
        addresses = [second.service.address, third.service.address]
        first.link.has_sent.clear()
        first.link.say(probe=pb.Probe(number=7, addresses=addresses, known_mbit=KNOWN, usual_mbit=USUAL))
        told: list[pb.MemberMessage] = []
        while not told:
            assert first.link.has_sent.wait(WAIT_S)
            first.link.has_sent.clear()
            told = [message for message in first.link.sent if message.HasField("probed")]
        assert told[0].probed.number == 7
        assert told[0].probed.mbit > 1.25 * KNOWN  # loopback: what came back counts


def test_nobody_answers() -> None:
    assert burst([]) == 0.0
    assert burst(["tcp://127.0.0.1:9"]) == 0.0
