"""Whole jobs whose payloads NIXL moves, over TCP, as this machine has no RDMA device. Sums are the same bits."""

from __future__ import annotations

import re

import pytest
from chaos.run import calm
from support.clusters import ROOT, bpslaunch
from test_recovery import OPTIONS as CHAOS_OPTIONS, kill_and_return, nothing, run

from byteps_py.system import rdma_devices

PROGRAM = ROOT / "tests" / "programs" / "sums_by_rdma.py"
ON = {"DMLC_ENABLE_RDMA": "1", "BYTEPS_RDMA_TRANSPORTS": "tcp"}
OPTIONS = ["-np", "1", "--machines", "2", "--servers", "1"]

needs_nixl = pytest.mark.skipif(not rdma_devices.library(), reason="NIXL is not installed")


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"BYTEPS_SECRET": "the secret of a test"}, {"BYTEPS_INTERFACES": "127.0.0.1,127.0.0.2"}],
    ids=["open", "signed", "two network cards"],
)
def test_sums_by_rdma(more: dict[str, str]) -> None:
    done = bpslaunch(OPTIONS, [PROGRAM], BYTEPS_LOG_LEVEL="INFO", **ON, **more)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert text.count("all sums are right") == 2
    read = [int(nbytes) for nbytes in re.findall(r"read by RDMA: (\d+) bytes", text)]
    assert len(read) == 5  # two communication services, their machines' servers, and the one of its own
    assert sum(read) >= 6 * 4 * 3_000_000  # of each round of the largest tensor, at least what is sent once
    assert all(read)


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "direct"),
    [("1", "1"), pytest.param("2", "1", marks=pytest.mark.long), ("2", "0")],
    ids=["ranks", "ranks, two on a machine", "services"],
)
def test_what_ranks_and_communication_services_send_to_each_other(ranks: str, direct: str) -> None:
    """Without lent servers. Without connections of ranks, everything goes from service to service."""
    options = ["-np", ranks, "--machines", "2", "--servers", "0"]
    more = {"BYTEPS_DIRECT_CONNECTIONS": direct, "BYTEPS_SECRET": "the secret of a test"}
    done = bpslaunch(options, [ROOT / "tests" / "programs" / "ranks_by_rdma.py"], BYTEPS_LOG_LEVEL="INFO", **ON, **more)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    by_ranks = [int(nbytes) for nbytes in re.findall(r"all is right; read by RDMA: (\d+) bytes", text)]
    by_services = [int(nbytes) for nbytes in re.findall(r"worker \d INFO: read by RDMA: (\d+) bytes", text)]
    assert len(by_ranks) == 2 * int(ranks), text
    if direct == "1":
        assert min(by_ranks) >= 3 * 12_000_000, text  # what a rank receives, of each round
    else:
        assert not any(by_ranks)
        assert min(by_services) >= 3 * 3 * 12_000_000, text


@needs_nixl
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosted", [{}, {"TEST_HOSTED": "1"}], ids=["sums", "hosted"])
def test_servers_die_and_the_weights_are_those_of_tcp_without_faults(hosted: dict[str, str]) -> None:
    """Reads of a process that is killed are under way, and reads by it."""
    faults = [nothing, kill_and_return("--gpu-machine"), kill_and_return(), nothing]
    assert run(CHAOS_OPTIONS, faults, **ON, **hosted) == calm(len(faults), CHAOS_OPTIONS).digests


@pytest.mark.skipif(bool(rdma_devices.library() and rdma_devices.devices()), reason="this machine has RDMA")
def test_rdma_that_can_not_be_done_starts_nothing() -> None:
    done = bpslaunch(OPTIONS, [PROGRAM], DMLC_ENABLE_RDMA="1")
    assert done.returncode == 2, done.stderr
    assert re.search(
        r"^bpslaunch: DMLC_ENABLE_RDMA is set, and .*, or unset DMLC_ENABLE_RDMA, and tensors travel over TCP$",
        done.stderr,
        re.MULTILINE,
    )


@needs_nixl
def test_transports_that_are_not_there_are_an_error() -> None:
    from byteps_py.config.settings import Settings
    from byteps_py.dataplane.nixl_agent import try_rdma
    from byteps_py.errors import ConfigurationError

    if rdma_devices.devices():
        pytest.skip("this machine has RDMA")
    with pytest.raises(ConfigurationError, match=r"UCX can use none of rc on this machine .*ibv_devinfo.*or unset"):
        try_rdma(Settings.from_env({"DMLC_ENABLE_RDMA": "1", "BYTEPS_RDMA_TRANSPORTS": "rc"}))
