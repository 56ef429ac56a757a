"""Hosts with shaped links: network namespaces on one bridge. Each link is limited in both directions, may have a delay,
and may lose packets.

Needs root, iproute2 and the tbf queue. The delay is netem's, and where the kernel has none, that of a process, which
also makes the losses (delay_line.c, which needs a C compiler). Loopback inside a host is not shaped. ``network`` also
has hosts without any of that: this machine, over loopback.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX, _PREFIX_V6 = "10.89.0", "fd89:"
_CARDS_PREFIX = "10.89"
#: Linux's usual algorithm, whatever this machine uses. With BBR, flows that share links in both directions take long to
#: find their shares, and the results scatter by a tenth.
_CONGESTION_CONTROL = "cubic"
#: What all that is made begins with, and the process that made it: two runs on one machine don't meet.
_OWNED = re.compile(r"\bbps(\d+)[bhnl]\d*")
_NOBODY = "02:00:00:00:00:01"
#: Small enough that a burst does not flatter a short transfer, large enough for the rate to be reached.
_BURST = "128kb"
_HELD_PACKETS = 100_000  # more than are ever on their way: none is lost for want of room
_END_S = 10.0
_CPU_GROUPS = next((path for path in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup") if Path(path).is_dir()), "/sys/fs/cgroup")
_QUOTA_PERIOD_US = 50_000


@dataclass(frozen=True)
class Host:
    """``rate_mbit``: of its link, each way; 0: as fast as it goes. ``delay_ms``: of what it sends. ``is_v6``: it has an
    address of IPv6, and none of IPv4."""

    index: int
    rate_mbit: float = 0.0
    delay_ms: float = 0.0
    is_v6: bool = False
    _owner: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        return f"bps{self._owner}h{self.index}"

    @property
    def address(self) -> str:
        return f"{_PREFIX_V6}:{10 + self.index:x}" if self.is_v6 else f"{_PREFIX}.{10 + self.index}"

    @property
    def interface(self) -> str:
        return f"bps{self._owner}n{self.index}"

    @property
    def outside(self) -> str:
        """The other end of its link, on the bridge."""
        return f"bps{self._owner}l{self.index}"

    @property
    def is_loopback(self) -> bool:
        return False

    def command(self, arguments: Sequence[str]) -> list[str]:
        """``arguments``, to be run on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]


class LoopbackHost(Host):
    """One of several machines that are all emulated on this one, without a namespace."""

    @property
    def address(self) -> str:
        return "127.0.0.1"

    @property
    def interface(self) -> str:
        return "lo"

    @property
    def is_loopback(self) -> bool:
        return True

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [*arguments]


def _run(*arguments: str) -> None:
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)


def _try(*arguments: str) -> None:
    subprocess.run(arguments, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _shape(interface: str, rate_mbit: float, delay_ms: float = 0.0, host: Host | None = None) -> None:
    """``delay_ms``: by netem."""
    add = ["tc", "qdisc", "add", "dev", interface]
    place = ["root", "handle", "1:"]
    queues = []
    if delay_ms:
        queues.append([*add, *place, "netem", "delay", f"{delay_ms:g}ms", "limit", str(_HELD_PACKETS)])
        place = ["parent", "1:1", "handle", "2:"]
    if rate_mbit:
        queues.append([*add, *place, "tbf", "rate", f"{rate_mbit:g}mbit", "burst", _BURST, "latency", "400ms"])
    for queue in queues:
        _run(*(host.command(queue) if host else queue))


def reshape(host: Host, rate_mbit: float) -> None:
    """From now on the link of ``host`` carries ``rate_mbit`` in each direction. It must have had a rate before."""
    for interface, inside in ((host.interface, host), (host.outside, None)):
        change = ["tc", "qdisc", "change", "dev", interface, "root", "handle", "1:", "tbf"]
        queue = [*change, "rate", f"{rate_mbit:g}mbit", "burst", _BURST, "latency", "400ms"]
        _run(*(inside.command(queue) if inside else queue))


@contextlib.contextmanager
def slow_way(one: Host, other: Host, mbit: float) -> Iterator[None]:
    """What these two send each other takes a way of ``mbit`` in each direction, and the rest of their links is for what
    goes to others. Needs the htb queue."""
    for sender, receiver in ((one, other), (other, one)):
        device, rate = ["dev", sender.interface], f"{sender.rate_mbit:g}mbit"
        each = ["burst", _BURST, "quantum", "60000"]
        slow = f"{mbit:g}mbit"
        limits = (("1:1", "1:", rate, rate), ("1:10", "1:1", "1mbit", rate), ("1:11", "1:1", slow, slow))
        match = ["u32", "match", "ip", "dst", f"{receiver.address}/32", "flowid", "1:11"]
        _run(*sender.command(["tc", "qdisc", "del", *device, "root"]))
        _run(*sender.command(["tc", "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "10"]))
        for name, parent, least, most in limits:
            shape = ["htb", "rate", least, "ceil", most, *each]
            _run(*sender.command(["tc", "class", "add", *device, "parent", parent, "classid", name, *shape]))
        _run(*sender.command(["tc", "filter", "add", *device, "protocol", "ip", "parent", "1:", *match]))
    try:
        yield
    finally:
        for sender in (one, other):
            _run(*sender.command(["tc", "qdisc", "del", "dev", sender.interface, "root"]))
            _shape(sender.interface, sender.rate_mbit, sender.delay_ms, sender)


@contextlib.contextmanager
def throttled(host: Host, cores: float) -> Iterator[None]:
    """The processes that run on ``host`` get the time of so many processors together. Needs control groups of cpu."""
    group = Path(_CPU_GROUPS, host.name)
    is_first_version = Path(_CPU_GROUPS, "cpu.shares").exists()
    pids = subprocess.run(["ip", "netns", "pids", host.name], check=True, capture_output=True, text=True).stdout.split()
    group.mkdir()
    try:
        quota_us = int(cores * _QUOTA_PERIOD_US)
        if is_first_version:
            (group / "cpu.cfs_period_us").write_text(str(_QUOTA_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {_QUOTA_PERIOD_US}")
        for pid in pids:
            (group / "cgroup.procs").write_text(pid)
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                Path(_CPU_GROUPS, "cgroup.procs").write_text(pid)
        group.rmdir()


def _has_netem(interface: str) -> bool:
    """``interface`` is any that has no queue yet."""
    tried = ["tc", "qdisc", "add", "dev", interface, "root", "netem", "delay", "1ms"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        return False
    _run("tc", "qdisc", "del", "dev", interface, "root")
    return True


@contextlib.contextmanager
def _links(hosts: Sequence[Host], delay_ms: float, loss_percent: float) -> Iterator[None]:
    """Both ends of every host's link, in this namespace: pairs of veth, or of a process that delays and loses."""
    if not delay_ms and not loss_percent:
        for host in hosts:
            _run("ip", "link", "add", host.interface, "type", "veth", "peer", "name", host.outside)
        yield
        return
    names = [name for host in hosts for name in (host.interface, host.outside)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _run("cc", "-O2", "-o", str(folder / "delay_line"), str(Path(__file__).with_name("delay_line.c")), "-lm")
        command = [str(folder / "delay_line"), f"{delay_ms:g}", f"{loss_percent:g}", *names]
        line = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert line.stdin is not None
        assert line.stdout is not None
        try:
            if not line.stdout.readline():
                raise SystemExit("no process delays what hosts send: see above")
            yield
        finally:
            line.stdin.close()
            line.wait(_END_S)


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
def cluster(
    rates_mbit: Sequence[float], delay_ms: float = 0.0, loss_percent: float = 0.0, is_v6: bool = False
) -> Iterator[list[Host]]:
    """One host per rate, gone at the end of the block. ``delay_ms``: from any host to any other one, so that a round
    trip takes twice as long. ``loss_percent``: of the packets that a host sends. ``is_v6``: the hosts have addresses of
    IPv6 only. Raises CalledProcessError without root, iproute2, or a C compiler where it is needed."""
    hosts = [Host(index, rate, delay_ms, is_v6) for index, rate in enumerate(rates_mbit)]
    bridge = f"bps{os.getpid()}b"
    _remove_orphans()
    _end_in_order()
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, hosts, bridge)
        _run("ip", "link", "add", bridge, "type", "bridge")
        by_netem = delay_ms if delay_ms and not loss_percent and _has_netem(bridge) else 0.0
        stack.enter_context(_links(hosts, delay_ms - by_netem, loss_percent))
        _run("ip", "link", "set", bridge, "up")
        # A Docker engine makes the kernel filter bridged traffic and drop what it does not know.
        for bridged in Path("/proc/sys/net/bridge").glob("bridge-nf-call-ip*tables"):
            bridged.write_text("0")
        for host in hosts:
            inside, outside = host.interface, host.outside
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "set", inside, "netns", host.name)
            _run("ip", "link", "set", outside, "master", bridge)
            _run("ip", "link", "set", outside, "up")
            # Without a look for duplicates, in whose time the address could not be used.
            own = (f"{host.address}/64", "nodad") if is_v6 else (f"{host.address}/24",)
            _run("ip", "-n", host.name, "addr", "add", own[0], "dev", inside, *own[1:])
            _run("ip", "-n", host.name, "link", "set", inside, "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            net = f"{_PREFIX_V6}:/64" if is_v6 else f"{_PREFIX}.0/24"
            route = (net, "dev", inside, "src", host.address, "congctl", _CONGESTION_CONTROL)
            _run("ip", "-n", host.name, *(["-6"] if is_v6 else []), "route", "replace", *route)
            _shape(inside, host.rate_mbit, by_netem, host)
            _shape(outside, host.rate_mbit)
        yield hosts


def _end_in_order() -> None:
    """A benchmark that is asked to end leaves its blocks: so its jobs end, and its hosts are removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT also where a shell has it ignored
            if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
                signal.signal(number, leave)


def _remove(hosts: Sequence[Host], bridge: str) -> None:
    for host in hosts:
        # The kernel takes the links of a namespace down some time after it is gone: by then they are.
        _try("ip", "link", "del", host.outside)
        _try("ip", "netns", "del", host.name)
    _try("ip", "link", "del", bridge)


@contextlib.contextmanager
def second_cards(hosts: Sequence[Host]) -> Iterator[list[str]]:
    """Each of ``hosts`` has one more link, as fast, in a network of their own. Yields their addresses there."""
    owner = os.getpid()
    bridge, addresses = f"bps{owner}b1", [f"{_CARDS_PREFIX}.1.{10 + host.index}" for host in hosts]
    names = [(f"bps{owner}n{100 + host.index}", f"bps{owner}l{100 + host.index}") for host in hosts]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for host, address, (inside, outside) in zip(hosts, addresses, names, strict=True):
            _run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
            _run("ip", "link", "set", inside, "netns", host.name)
            _run("ip", "link", "set", outside, "master", bridge)
            _run("ip", "link", "set", outside, "up")
            _run("ip", "-n", host.name, "addr", "add", f"{address}/24", "dev", inside)
            _run("ip", "-n", host.name, "link", "set", inside, "up")
            _shape(inside, host.rate_mbit, 0.0, host)
            _shape(outside, host.rate_mbit)
        yield addresses
    finally:
        for _, outside in names:
            _try("ip", "link", "del", outside)
        _try("ip", "link", "del", bridge)


@contextlib.contextmanager
def network(count: int, mbit: float = 0.0, delay_ms: float | None = None) -> Iterator[list[Host]]:
    """``count`` hosts: over loopback, unless a rate is asked for or a delay, which may be 0."""
    if mbit or delay_ms is not None:
        with cluster([mbit] * count, delay_ms or 0.0) as hosts:
            yield hosts
    else:
        yield [LoopbackHost(index) for index in range(count)]


def _remove_orphans() -> None:
    """What runs that were killed have left."""

    def orphans(*listing: str) -> list[str]:
        said = subprocess.run(["ip", "-o", *listing], capture_output=True, text=True, check=False).stdout
        return [match[0] for match in _OWNED.finditer(said) if not Path("/proc", match[1]).exists()]

    for name in orphans("netns", "list"):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in map(int, found.split()):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)
        _try("ip", "netns", "del", name)
    for name in orphans("link", "show"):
        _try("ip", "link", "del", name)
