"""RDMA that was asked for and can't be done: an error by name, and never TCP in its place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from byteps_py.config.settings import Settings
from byteps_py.dataplane.link_rate import open_link_rate_meter
from byteps_py.errors import ConfigurationError
from byteps_py.system.loop import EventLoop
from byteps_py.system.rdma_devices import why_not

SECRET = {"BYTEPS_SECRET": "the secret of a test"}


@pytest.mark.parametrize(
    ("variables", "library", "devices", "why"),
    [
        ({}, "", [], ""),
        ({"DMLC_ENABLE_RDMA": "0"}, "", [], ""),
        ({"DMLC_ENABLE_RDMA": "1"}, "nixl_cu12", ["mlx5_0"], ""),
        ({"DMLC_ENABLE_RDMA": "ibverbs"}, "nixl_cu12", ["mlx5_0"], ""),
        ({"DMLC_ENABLE_RDMA": "1"}, "", ["mlx5_0"], "the library NIXL is not installed"),
        ({"DMLC_ENABLE_RDMA": "1"}, "nixl_cu12", [], "this machine has no RDMA device"),
        ({"DMLC_ENABLE_RDMA": "1", "BYTEPS_RDMA_TRANSPORTS": "tcp,sm"}, "nixl_cu12", [], ""),
        ({"DMLC_ENABLE_RDMA": "1", "BYTEPS_RDMA_TRANSPORTS": "tcp,sm"}, "", [], "the library NIXL is not installed"),
    ],
)
def test_why_not(variables: dict[str, str], library: str, devices: Sequence[str], why: str) -> None:
    said, remedy = why_not(Settings.from_env(variables), library, devices)
    assert why in said
    assert bool(said) == bool(remedy) == bool(why)


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"DMLC_ENABLE_RDMA": "1", "BYTEPS_ENCRYPT": "1", **SECRET}, r"exclude each other.*unset one of the two"),
        ({"BYTEPS_RDMA_TRANSPORTS": "tcp"}, r"which is off: set DMLC_ENABLE_RDMA=1, or unset it"),
        ({"DMLC_ENABLE_RDMA": "1", "BYTEPS_RDMA_TRANSPORTS": "tcp sm"}, r"names of transports of UCX, with commas"),
        ({"DMLC_ENABLE_RDMA": "ucx"}, r"one of 0, 1, ibverbs"),
    ],
)
def test_what_does_not_go_together(variables: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Settings.from_env(variables)


def test_the_rates_of_links_are_not_judged_by_what_does_not_travel_by_rdma() -> None:
    loop = EventLoop()
    settings = Settings.from_env({"DMLC_ENABLE_RDMA": "1"})
    assert open_link_rate_meter(settings, loop) is None
    loop.close()
