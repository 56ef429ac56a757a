"""Hosts with shaped links: network namespaces on one bridge, each link limited in both directions.

Needs root, iproute2 and the tbf queue (netem is missing on many kernels). Loopback inside a host is not shaped.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = "10.89.0"
#: Linux's usual algorithm, whatever this machine uses. With BBR, flows that share links in both directions take long to
#: find their shares, and the results scatter by a tenth.
_CONGESTION_CONTROL = "cubic"
#: What all that is made begins with, and the process that made it: two runs on one machine don't meet.
_OWNED = re.compile(r"\bbps(\d+)[bhnl]\d*")
_NOBODY = "02:00:00:00:00:01"
#: Small enough that a burst does not flatter a short transfer, large enough for the rate to be reached.
_BURST = "128kb"


@dataclass(frozen=True)
class Host:
    """``rate_mbit``: of its link, each way."""

    index: int
    rate_mbit: float
    _owner: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        return f"bps{self._owner}h{self.index}"

    @property
    def address(self) -> str:
        return f"{_PREFIX}.{10 + self.index}"

    @property
    def interface(self) -> str:
        return f"bps{self._owner}n{self.index}"

    @property
    def outside(self) -> str:
        """The other end of its link, on the bridge."""
        return f"bps{self._owner}l{self.index}"

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
def lost(*ways: tuple[Host, Host]) -> Iterator[None]:
    """What the first of each pair sends to the second is lost, and nobody is told: it goes to a hardware address that
    nobody has."""

    def neighbour(sender: Host, receiver: Host, *words: str) -> None:
        verb = "replace" if words else "del"
        command = ["ip", "-n", sender.name, "neigh", verb, receiver.address, *words, "dev", sender.interface]
        subprocess.run(command, check=True)

    for sender, receiver in ways:
        neighbour(sender, receiver, "lladdr", _NOBODY, "nud", "permanent")
    try:
        yield
    finally:
        for sender, receiver in ways:
            neighbour(sender, receiver)


@contextlib.contextmanager
def cluster(rates_mbit: Sequence[float]) -> Iterator[list[Host]]:
    """One host per rate, gone at the end of the block. Raises CalledProcessError without root or iproute2."""
    hosts = [Host(index, rate) for index, rate in enumerate(rates_mbit)]
    bridge = f"bps{os.getpid()}b"
    _remove_orphans()
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        # A Docker engine makes the kernel filter bridged traffic and drop what it does not know.
        bridged = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
        if bridged.exists():
            bridged.write_text("0")
        for host in hosts:
            inside, outside = host.interface, host.outside
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
            _run("ip", "link", "set", inside, "netns", host.name)
            _run("ip", "link", "set", outside, "master", bridge)
            _run("ip", "link", "set", outside, "up")
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", inside)
            _run("ip", "-n", host.name, "link", "set", inside, "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            route = (f"{_PREFIX}.0/24", "dev", inside, "src", host.address, "congctl", _CONGESTION_CONTROL)
            _run("ip", "-n", host.name, "route", "replace", *route)
            _shape(inside, host.rate_mbit, host)
            _shape(outside, host.rate_mbit)
        yield hosts
    finally:
        for host in hosts:
            # The kernel takes the links of a namespace down some time after it is gone: by then they are.
            _try("ip", "link", "del", host.outside)
            _try("ip", "netns", "del", host.name)
        _try("ip", "link", "del", bridge)


def _remove_orphans() -> None:
    """What runs that were killed have left."""

    def orphans(*listing: str) -> list[str]:
        said = subprocess.run(["ip", "-o", *listing], capture_output=True, text=True, check=False).stdout
        return [match[0] for match in _OWNED.finditer(said) if not Path("/proc", match[1]).exists()]

    for name in orphans("netns", "list"):
        _try("ip", "netns", "del", name)
    for name in orphans("link", "show"):
        _try("ip", "link", "del", name)
