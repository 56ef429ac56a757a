"""Control connections say again at a steady pace what the network has lost."""

from __future__ import annotations

import socket

import pytest

from byteps_py.scheduler.rpc import retry_steadily

THIN_LINEAR_TIMEOUTS = 16


def is_steady(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.IPPROTO_TCP, THIN_LINEAR_TIMEOUTS))


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_schedulers_connections_and_no_others(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as listener, socket.socket(family) as other:
        for each in (listener, other):
            each.bind((host, 0))
            each.listen()
        port = listener.getsockname()[1]
        assert retry_steadily(port) == 1
        with socket.create_connection((host, port)) as member, socket.create_connection(other.getsockname()[:2]) as far:
            with listener.accept()[0] as accepted:
                assert is_steady(accepted)
            assert not is_steady(member)
            assert retry_steadily(port) == 2
            assert is_steady(member)
            assert not is_steady(far)
        assert not is_steady(other)


def test_a_port_without_sockets_is_no_error() -> None:
    assert retry_steadily(1) == 0
