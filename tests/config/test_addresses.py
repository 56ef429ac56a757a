"""Texts for places in the network: each form that people and programs write is read, and the ambiguous one refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from byteps_py.config import addresses
from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError

HOSTS = st.one_of(st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), st.sampled_from(["gpu1", "a.b_c"]))


@given(HOSTS, st.integers(1, 65535))
def test_an_address_is_read_as_it_was_written(host: str, port: int) -> None:
    address = addresses.joined(host, port)
    assert addresses.place_of(address) == (host, port)
    assert addresses.joined(*addresses.place_of(address)) == address
    assert addresses.bare_host(addresses.bracketed(host)) == host


@pytest.mark.parametrize(
    "text",
    ["", "gpu1", "gpu1:", ":9000", "gpu1:x", "gpu1:0", "gpu1:65536", "gpu1:٣", "fd00::1", "fd00::1:9000", "[::1]"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|no port"):
        addresses.place_of(text)


@pytest.mark.parametrize("written", ["fd00::1", "[fd00::1]", "[FD00:0:0::1]", "fd00:0000::0001"])
def test_all_forms_of_a_host_name_the_same_job(written: str) -> None:
    settings = Settings.from_env({"DMLC_PS_ROOT_URI": written, "DMLC_PS_ROOT_PORT": "9000", "DMLC_NODE_HOST": written})
    assert settings.job == settings.scheduler_address == "[fd00::1]:9000"
    assert (settings.scheduler_host, settings.node_host) == ("fd00::1", "fd00::1")


def test_a_pool_needs_brackets() -> None:
    assert Settings.from_env({"BYTEPS_POOL": "[fd00::1]:9000"}).pool
    with pytest.raises(ConfigurationError, match=r"HOST:PORT, with \[…\] around"):
        Settings.from_env({"BYTEPS_POOL": "fd00::1:9000"})
