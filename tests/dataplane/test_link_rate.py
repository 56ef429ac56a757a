"""The rates of a link, by the counters of its interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from byteps_py.config.settings import Settings
from byteps_py.dataplane.link_rate import (
    InterfaceCounters,
    LinkRateMeter,
    median_rate,
    open_link_rate_meter,
)
from byteps_py.system.loop import EventLoop
from byteps_py.system.machine import interface_of


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def count(folder: Path, sent: int, received: int) -> None:
    (folder / "tx_bytes").write_text(f"{sent}\n")
    (folder / "rx_bytes").write_text(f"{received}\n")


def test_half_of_the_bytes_went_at_the_median_rate_or_faster() -> None:
    assert median_rate([(60, 4.0), (16, 40.0), (4, 10.0)]) == 4.0
    assert median_rate([(10, 4.0), (30, 40.0), (30, 20.0)]) == 20.0
    assert median_rate([]) == 0.0


def test_each_direction_has_a_rate_of_its_own(loop: EventLoop, tmp_path: Path) -> None:
    """Whatever is counted in a while, eight times as much is received as is sent."""
    count(tmp_path, 0, 0)
    meter = LinkRateMeter(InterfaceCounters(tmp_path), loop)
    turn, sent, received = 0, 0.0, 0.0

    def go_on() -> None:
        nonlocal turn, sent, received
        turn += 1
        count(tmp_path, 100_000 * turn, 800_000 * turn)
        rates = meter.report()
        sent = rates.sent_bytes / rates.sent_s if rates.sent_s else sent
        received = rates.received_bytes / rates.received_s if rates.received_s else received
        loop.stop() if sent and received else loop.call_later(0.005, go_on)

    loop.call_later(0.0, go_on)
    loop.call_later(60.0, loop.stop)
    loop.run()
    meter.close()
    assert received > 2 * sent > 0


def test_a_system_that_does_not_count_is_an_error(tmp_path: Path) -> None:
    count(tmp_path, 0, 0)
    (tmp_path / "rx_bytes").unlink()
    with pytest.raises(OSError, match="rx_bytes"):
        InterfaceCounters(tmp_path)


def test_loopback_is_no_link(loop: EventLoop) -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == ""
    assert open_link_rate_meter(Settings(node_host="127.0.0.1"), loop) is None
