"""Another process at the port of a service that is gone: the service can't be reached, and nothing else follows."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
import zmq
from support.data_plane import WAIT_S, BareListener
from support.ports import answering
from support.summation import SETTINGS

from byteps_py.dataplane.listener import DataListener
from byteps_py.dataplane.traffic import Traffic
from byteps_py.runtime import Runtime
from byteps_py.system.loop import EventLoop
from byteps_py.wire.data_link import Kind
from byteps_py.worker.io.server_links import LinkEvents, LinkOrigin, LinkTarget, TcpLink

QUICK = dataclasses.replace(SETTINGS, heartbeat_timeout_s=0.3, heartbeat_interval_s=0.1)
RUBBISH = b"HTTP/1.1 400 Bad Request\r\n\r\n"


class Link:
    """A machine's link to a service, which tells what it hears of it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], loop: EventLoop, address: str, is_late: bool) -> None:
        self.lost: list[str] = []
        self._loop = loop
        self.link = TcpLink(
            LinkOrigin(context, Runtime(loop=loop), 0, QUICK, lambda *block: memoryview(b"")),
            LinkTarget(address, is_late=is_late), LinkEvents(lambda *answer: None, lambda: None, self._on_lost),
        )  # fmt: skip

    def _on_lost(self, sentence: str) -> None:
        self.lost.append(sentence)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """For as long as a test may wait."""
        until_s = time.monotonic() + WAIT_S

        def look() -> None:
            if condition() or time.monotonic() > until_s:
                self._loop.stop()
            else:
                self._loop.call_later(0.01, look)

        self._loop._stopped = False
        look()
        self._loop.run()
        assert condition()


@pytest.mark.parametrize("says", ["nothing", "rubbish", "other secret"])
def test_the_port_of_a_server_that_was_welcomed(says: str) -> None:
    """It is lost like a server that is silent; refusals don't end the communication service."""
    loop = EventLoop()
    listener = DataListener("127.0.0.1", QUICK, Traffic(), frozenset((Kind.PUSH,)), lambda *_: None, lambda _: None)
    listener.attach(loop)
    port = urlsplit(listener.address).port or 0
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        link = Link(context, loop, listener.address, is_late=False)
        stack.callback(link.link.close)
        link.run_until(lambda: link.link.is_open)
        listener.detach(loop)
        listener.close()
        if says == "other secret":
            other = dataclasses.replace(QUICK, secret="known to others only")
            stack.enter_context(BareListener(context, other, port)).attach(loop)
        else:
            stack.enter_context(answering(port, RUBBISH if says == "rubbish" else b""))
        link.run_until(lambda: len(link.lost) > 3)
    loop.close()
    assert all("can't be reached since" in sentence for sentence in link.lost)
    assert ("turned this process away" in link.lost[-1]) == (says == "other secret")


def test_a_server_that_came_late_is_lost_where_another_process_has_its_port() -> None:
    """It was never welcomed, but all others are at work."""
    loop = EventLoop()
    with zmq.Context() as context:
        other = dataclasses.replace(QUICK, secret="known to others only")
        with BareListener(context, other) as listener:
            listener.attach(loop)
            link = Link(context, loop, listener.address, is_late=True)
            link.run_until(lambda: bool(link.lost))
            link.link.close()
    loop.close()
    assert "turned this process away: its proof of membership is wrong" in link.lost[0]
