"""Which address a process offers, on machines with IPv4, IPv6 or both."""

from __future__ import annotations

import socket

import pytest

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError
from byteps_py.system import machine
from byteps_py.system.network_interfaces import addresses_of, interface_of, names, usable_v6

SECRET = "the secret of a test"
TABLE = """
00000000000000000000000000000001 01 80 10 80       lo
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
fd000000000000000000000000000003 04 40 00 21     eth0
fd000000000000000000000000000002 04 40 00 80     eth0
fd000000000000000000000000000004 04 40 00 40     eth0
fd000000000000000000000000000005 05 40 00 80     eth1
""".strip()


def test_an_address_of_the_link_alone_or_not_yet_usable_is_none_and_a_temporary_one_comes_last() -> None:
    assert usable_v6(TABLE, "eth0") == ["fd00::2", "fd00::3"]
    assert usable_v6(TABLE, "eth1") == ["fd00::5"]
    assert usable_v6(TABLE, "lo") == ["::1"]
    assert usable_v6("", "eth0") == []


def test_the_interfaces_of_this_machine_have_the_addresses_that_they_have() -> None:
    assert "lo" in names()
    assert addresses_of("lo")[0] == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    for name in names():
        for host in addresses_of(name):
            with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                pass


@pytest.mark.skipif("::1" not in addresses_of("lo"), reason="this machine has no IPv6")
@pytest.mark.parametrize("scheduler", ["::1", "[::1]"])
def test_a_process_offers_an_address_of_the_schedulers_kind(scheduler: str) -> None:
    place = {"scheduler_host": scheduler, "scheduler_port": 9000}
    assert machine.offered_host(Settings(**place)) == "::1"  # type: ignore[arg-type]
    assert machine.offered_host(Settings(**place, interface="lo")) == "::1"  # type: ignore[arg-type]
    assert machine.bindable_host(Settings(**place, node_host="lo", secret=SECRET)) == "::1"  # type: ignore[arg-type]
    machine.check_offered_host(Settings(num_workers=2, **place, node_host="::1"))  # type: ignore[arg-type]


def test_an_address_of_ipv4_comes_first_elsewhere() -> None:
    assert machine.offered_host(Settings(interface="lo")) == "127.0.0.1"
    there = Settings(scheduler_host="localhost", scheduler_port=9000)
    assert machine.offered_host(there) == "127.0.0.1"


@pytest.mark.parametrize(
    "settings",
    [
        Settings(node_host="fe80::1%eth0", secret=SECRET),
        Settings(node_host="[fe80::1]", secret=SECRET),
    ],
)
def test_an_address_of_one_link_alone_is_refused(settings: Settings) -> None:
    with pytest.raises(ConfigurationError, match="DMLC_NODE_HOST leads to the link-local address fe80::1"):
        machine.offered_host(settings)


def test_loopback_needs_no_secret_and_other_addresses_do() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]", "0:0:0:0:0:0:0:1"):
        machine.offered_host(Settings(node_host=host))
    for host in ("10.0.0.1", "fd00::1", "::", "0.0.0.0", "gpu1"):
        with pytest.raises(ConfigurationError, match="set BYTEPS_SECRET"):
            machine.offered_host(Settings(node_host=host))
