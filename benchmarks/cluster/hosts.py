"""Hosts with shaped links: network namespaces on one bridge, each link limited in both directions.

Needs root, iproute2 and the tbf queue (netem is missing on many kernels). Loopback inside a host is not shaped.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_BRIDGE = "bpsbench"
_PREFIX = "10.89.0"
#: Small enough that a burst does not flatter a short transfer, large enough for the rate to be reached.
_BURST = "128kb"


@dataclass(frozen=True)
class Host:
    """``rate_mbit``: of its link, each way."""

    index: int
    rate_mbit: float

    @property
    def name(self) -> str:
        return f"bpsh{self.index}"

    @property
    def address(self) -> str:
        return f"{_PREFIX}.{10 + self.index}"

    @property
    def interface(self) -> str:
        return f"bpsn{self.index}"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """``arguments``, to be run on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]


def _run(*arguments: str) -> None:
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)


def _try(*arguments: str) -> None:
    subprocess.run(arguments, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _shape(interface: str, rate_mbit: float, host: Host | None = None) -> None:
    tc = ["tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", f"{rate_mbit:g}mbit"]
    tc += ["burst", _BURST, "latency", "400ms"]
    _run(*(host.command(tc) if host else tc))


@contextlib.contextmanager
def cluster(rates_mbit: Sequence[float]) -> Iterator[list[Host]]:
    """One host per rate, gone at the end of the block. Raises CalledProcessError without root or iproute2."""
    hosts = [Host(index, rate) for index, rate in enumerate(rates_mbit)]
    _down(hosts)  # what a killed run has left
    try:
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "link", "set", _BRIDGE, "up")
        # A Docker engine makes the kernel filter bridged traffic and drop what it does not know.
        bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
        if bridged.exists():
            bridged.write_text("0")
        for host in hosts:
            inside, outside = host.interface, f"bpsl{host.index}"
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
            _run("ip", "link", "set", inside, "netns", host.name)
            _run("ip", "link", "set", outside, "master", _BRIDGE)
            _run("ip", "link", "set", outside, "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", inside)
            _run("ip", "-n", host.name, "link", "set", inside, "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _shape(inside, host.rate_mbit, host)
            _shape(outside, host.rate_mbit)
        yield hosts
    finally:
        _down(hosts)


def _down(hosts: Sequence[Host]) -> None:
    for host in hosts:
        _try("ip", "netns", "del", host.name)
    _try("ip", "link", "del", _BRIDGE)
