"""Looks at this machine and this installation: what a job needs, what is there, what to change.

Reads settings, /proc and /sys; starts nothing but nvidia-smi. Each look is a function that returns findings; those that
decide about numbers take them as arguments, so that a test can show them any machine. Any thread.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from byteps_py import __version__
from byteps_py.config.addresses import is_loopback
from byteps_py.config.settings import Settings, ignored_variables
from byteps_py.doctor import Figures, Finding, fail, ok, warn
from byteps_py.errors import ConfigurationError, TopologyError
from byteps_py.launch.installation import visible_gpus
from byteps_py.system import rdma_devices
from byteps_py.system.machine import offered_host, rails
from byteps_py.system.network_interfaces import network_of
from byteps_py.topology.choice import choose
from byteps_py.topology.local_sums import plan_local_sums
from byteps_py.topology.machine_reader import read_used
from byteps_py.topology.machine_topology import MachineTopology
from byteps_py.wording import count_text

_DISTRIBUTION = "byteps-py"
_LOWEST_PYTHON = (3, 11)
#: A service keeps a few descriptors for each other machine and each of its ranks; a rank several for each other rank.
_ENOUGH_FILES, _FEWEST_FILES = 4096, 256
#: What DataLoader workers of torch need for a few batches; Docker gives a container 64 MB.
_ENOUGH_SHM_BYTES = 256 << 20
_LOWEST_MEMORY_BYTES = 1 << 30
_ASK_TIMEOUT_S = 20.0
_NODES = Path("/sys/devices/system/node")
_NETWORKS = Path("/sys/class/net")
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronized


def check_machine(environ: Mapping[str, str]) -> list[Finding]:
    """All looks, in the order in which to read them."""
    looks: Sequence[Callable[[], Iterator[Finding]]] = (
        check_versions,
        lambda: check_settings(environ),
        lambda: check_cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), _cpu_quota()),
        lambda: check_numa(sorted(path.name for path in _NODES.glob("node[0-9]*")), _is_pinned(environ)),
        lambda: check_processor(platform.machine(), _processor_flags()),
        lambda: check_memory(_available_bytes()),
        lambda: check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        lambda: check_locked_memory(*resource.getrlimit(resource.RLIMIT_MEMLOCK), _wants_rdma(environ)),
        lambda: check_shared_memory(_folder_bytes(Path("/dev/shm"))),
        check_clock,
        lambda: check_gpus(environ),
        lambda: check_topology(lambda: read_used(environ), *_local_sums(environ)),
        lambda: check_ports(environ),
        lambda: check_links(environ),
        lambda: check_rdma(environ, rdma_devices.library(), rdma_devices.devices()),
    )
    return [finding for look in looks for finding in look()]


# ---- this installation -----------------------------------------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    """Python, this package, what it needs, and torch."""
    python = platform.python_version()
    if sys.version_info < _LOWEST_PYTHON:
        yield fail("python", f"Python {python}", "install Python 3.11 or newer")
    else:
        yield ok("python", f"Python {python}, byteps_py {__version__}")
    try:
        wanted = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield warn("packages", "byteps_py runs from its source tree", "pip install . installs it with what it needs")
        return
    yield from check_requirements(wanted, _installed)


def check_requirements(wanted: Sequence[str], installed: Callable[[str], str]) -> Iterator[Finding]:
    """``wanted``: requirements as a package states them. ``installed``: the version of a package; empty without."""
    found = []
    for text in wanted:
        requirement, _, marker = text.partition(";")
        name, ranges = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement.strip()).groups()  # type: ignore[union-attr]
        version = installed(name)
        if "extra" in marker:
            if 'extra == "torch"' not in marker:
                continue
            if not version:
                yield ok("torch", "PyTorch is not installed: this machine can sum, but not train")
                continue
        if not version:
            yield fail("packages", f"{name} is not installed", f"pip install '{requirement.strip()}'")
        elif not _is_in(version, ranges):
            yield fail("packages", f"{name} {version} is outside {ranges}", f"pip install '{requirement.strip()}'")
        elif "extra" in marker:
            yield ok("torch", f"PyTorch {version}")
        else:
            found.append(f"{name} {version}")
    if found:
        yield ok("packages", ", ".join(found))


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_in(version: str, ranges: str) -> bool:
    """True if a version is in ranges like ``<3,>=1.26``. Only these two signs, which pyproject.toml has.

    >>> _is_in("2.4.6", "<3,>=1.26"), _is_in("0.70.0", "<0.70,>=0.61"), _is_in("2.13.0+cpu", ">=2.8,<2.16")
    (True, False, True)
    """
    own = _numbers(version)
    for each in filter(None, (part.strip() for part in ranges.strip("() ").split(","))):
        sign, bound = re.fullmatch(r"(>=|<)\s*([\d.]+).*", each).groups()  # type: ignore[union-attr]
        if (own < _numbers(bound)) if sign == ">=" else (own >= _numbers(bound)):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release without zeros at the end, for comparisons."""
    numbers = [int(text) for text in re.match(r"[\d.]*\d", version)[0].split(".")]  # type: ignore[index]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The variables of this process, and the address that it would offer to others."""
    try:
        settings = Settings.from_env(environ)
        host, hosts = offered_host(settings), rails(settings)
    except ConfigurationError as error:
        yield fail("variables", str(error), "correct it; bps env lists all variables")
        return
    for sentence in ignored_variables(environ):
        yield warn("variables", sentence, "unset it, or correct its name")
    where = "only processes of this machine reach it" if is_loopback(host) else "other machines reach it here"
    yield ok("variables", f"valid; the address of this machine is {host}: {where}")
    if hosts:
        yield from check_network_cards({host: network_of(host) for host in hosts})


def check_network_cards(networks: Mapping[str, str]) -> Iterator[Finding]:
    """The cards of BYTEPS_INTERFACES: their addresses, and the network of each; empty if it is not known."""
    yield ok("network cards", f"tensors go over {' and '.join(networks)} at the same time")
    for network in dict.fromkeys(filter(None, networks.values())):
        if len(hosts := [host for host, its in networks.items() if its == network]) > 1:
            yield warn(
                "network cards",
                f"{' and '.join(hosts)} are in one network, {network}: the system sends all of it through one card",
                "give each card a network of its own, or have the source address choose the route (ip rule)",
            )


# ---- this machine ----------------------------------------------------------------------------------------------


def check_cores(cores: int, usable: int, quota: float | None) -> Iterator[Finding]:
    """``cores`` of the machine, ``usable`` by this process; ``quota``: cores' worth of time, None without a limit."""
    text = f"{count_text(cores, 'core')}, of which this process may use {usable}"
    figures: Figures = {"cores": usable if quota is None else min(usable, quota)}
    if quota is not None and quota < usable:
        yield warn(
            "cores",
            f"{text}, but only {quota:g} cores' worth of time",
            f"give the container a CPU set instead of a quota: services start {min(usable, 4)} threads each, and "
            "wait when the quota is used up",
            figures,
        )
    elif usable < 2:
        remedy = "give a machine that sums at least 2 cores: one reads the network while one adds"
        yield warn("cores", text, remedy, figures)
    else:
        yield ok("cores", text, figures)


def check_numa(nodes: Sequence[str], is_pinned: bool = False) -> Iterator[Finding]:
    """``nodes``: the names of the NUMA nodes. ``is_pinned``: processes will keep to one."""
    if len(nodes) > 1 and is_pinned:
        yield ok("NUMA", f"{len(nodes)} nodes; BYTEPS_NUMA_ON keeps each process on one")
    elif len(nodes) > 1:
        yield warn(
            "NUMA",
            f"{len(nodes)} nodes; nothing keeps a process on one",
            "set BYTEPS_NUMA_ON=1: ranks then keep to their GPU's node, and services to the network card's",
        )
    else:
        yield ok("NUMA", "one node")


def _is_pinned(environ: Mapping[str, str]) -> bool:
    try:
        return Settings.from_env(environ).numa_on
    except ConfigurationError:
        return False  # check_settings has said so


def check_processor(machine: str, flags: frozenset[str]) -> Iterator[Finding]:
    """``flags``: as /proc/cpuinfo has them."""
    wide = [name for name in ("avx512f", "avx2", "f16c", "asimd", "sve") if name in flags]
    if machine == "x86_64" and "avx2" not in flags:
        yield warn(
            "processor",
            "x86_64 without AVX2: sums take about twice as long",
            "if this is a virtual machine, let it show the processor of its host",
        )
    elif machine == "x86_64" and "f16c" not in flags:
        yield warn("processor", "x86_64 without F16C: sums of float16 are slow", "use Compression.bf16, or float32")
    else:
        yield ok("processor", f"{machine}: {', '.join(wide) or 'no vector extensions that are known here'}")


def check_memory(available: int) -> Iterator[Finding]:
    """``available``: bytes that processes could still take."""
    text = f"{available / 1e9:.1f} GB are free"
    figures: Figures = {"memory_free_bytes": available}
    if available < _LOWEST_MEMORY_BYTES:
        remedy = "end other programs: a service needs twice its share of the model, and 0.3 GB"
        yield warn("memory", text, remedy, figures)
    else:
        yield ok("memory", text, figures)


def check_open_files(soft: int, hard: int) -> Iterator[Finding]:
    """``soft``, ``hard``: limits of open files."""
    if soft != resource.RLIM_INFINITY and soft < _FEWEST_FILES:
        yield fail("open files", f"the limit is {soft}", f"ulimit -n {min(hard, _ENOUGH_FILES)}, before the launcher")
    elif soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        remedy = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}, before the launcher, for jobs of many machines"
        yield warn("open files", f"the limit is {soft}: enough for some hundred ranks", remedy)
    else:
        yield ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"the limit is {soft}")


def check_locked_memory(soft: int, hard: int, wants_rdma: bool = False) -> Iterator[Finding]:
    """``soft``, ``hard``: limits of locked memory in bytes. Only RDMA locks memory."""
    if soft == resource.RLIM_INFINITY:
        yield ok("locked memory", "no limit")
    elif wants_rdma:
        text = f"the limit is {soft >> 10} KB, and RDMA locks the memory of tensors"
        yield fail("locked memory", text, "ulimit -l unlimited; in containers --ulimit memlock=-1")
    else:
        yield ok("locked memory", f"the limit is {soft >> 10} KB: RDMA needs more, TCP and shared memory need none")


def check_shared_memory(nbytes: int | None) -> Iterator[Finding]:
    """``nbytes``: free in /dev/shm; None if there is none."""
    if nbytes is None:
        yield warn("/dev/shm", "there is none", "mount a tmpfs there: torch's DataLoader workers need it")
    elif nbytes < _ENOUGH_SHM_BYTES:
        remedy = (
            "docker run --shm-size=1g, or a larger tmpfs: torch's DataLoader workers need it, this package does not"
        )
        yield warn("/dev/shm", f"{nbytes / 1e6:.0f} MB are free", remedy)
    else:
        yield ok("/dev/shm", f"{nbytes / 1e9:.1f} GB are free")


def check_clock() -> Iterator[Finding]:
    """Whether the system's clock is set by others. Nothing but the times in logs and timelines depends on it."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    if state < 0:
        yield ok("clock", f"whether it is synchronized can't be read ({os.strerror(ctypes.get_errno())})")
    elif state == _TIME_ERROR:
        remedy = "start chrony or systemd-timesyncd; else logs and timelines of several machines do not fit together"
        yield warn("clock", "it is not synchronized, as far as the kernel knows", remedy)
    else:
        yield ok("clock", "synchronized")


def check_gpus(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The GPUs that a job on this machine would see."""
    gpus = visible_gpus(environ)
    if gpus:
        yield ok("GPUs", f"{gpus} visible: bpslaunch starts a rank for each", {"gpus": gpus, **_first_gpu()})
    elif Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
        remedy = "install nvidia-smi with the driver, or set BYTEPS_LOCAL_SIZE or CUDA_VISIBLE_DEVICES"
        yield warn("GPUs", "a driver is loaded, but there is no nvidia-smi to count GPUs", remedy)
    else:
        yield ok("GPUs", "none visible: ranks train on the processor, or this machine only sums", {"gpus": 0})


def _first_gpu() -> Figures:
    """The name and the memory that nvidia-smi says; nothing if it does not answer."""
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True)
        name, mebibytes = answer.stdout.splitlines()[0].rsplit(",", 1)
        return {"gpu_name": name.strip(), "gpu_memory_bytes": int(mebibytes) << 20}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def _local_sums(environ: Mapping[str, str]) -> tuple[str, int]:
    """(BYTEPS_LOCAL_SUM, ranks of this machine, or 0)."""
    try:
        settings = Settings.from_env(environ)
    except ConfigurationError:
        return "host", 0  # check_settings has said so
    return settings.local_sum, settings.local_size if settings.local_size > 1 else 0


def check_topology(read: Callable[[], MachineTopology], mode: str = "host", ranks: int = 0) -> Iterator[Finding]:
    """How GPUs, PCIe switches and network cards are connected, how gradients would best be summed, and how they are.
    ``mode``: BYTEPS_LOCAL_SUM. ``ranks``: of this machine; 0: one for each GPU."""
    try:
        machine = read()
        chosen = choose(machine)
    except TopologyError as error:
        yield ok("topology", f"it can't be read: {error}")
        return
    yield ok("topology", f"{chosen.plan.strategy} is best: {chosen.reasons[0]}; bps topology says more")
    if mode != "host":
        plan = plan_local_sums(chosen, ranks or len(machine.gpus), mode)
        yield ok("local sums", f"{plan.strategy}, with BYTEPS_LOCAL_SUM={mode}: {plan.reason}")


def check_ports(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The scheduler's port, where the scheduler would run here; and the ports that the system chooses from."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if last - first < 1000:
        remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        yield warn("ports", f"the system chooses from {first} to {last} only", remedy)
    try:
        settings = Settings.from_env(environ)
    except ConfigurationError:
        return  # check_settings has said so
    port, host = settings.scheduler_port, settings.scheduler_host
    if not host:
        yield ok("ports", f"services choose free ports from {first} to {last}; no scheduler is named")
        return
    if first <= port <= last:
        remedy = f"choose a port below {first} for DMLC_PS_ROOT_PORT: the system may give this one to any program"
        yield warn("ports", f"the scheduler's port {port} is one of those that the system chooses from", remedy)
    why, there = _why_not_bindable(host, port), settings.scheduler_address
    if why == errno.EADDRINUSE:
        yield ok("ports", f"something listens at {there}, on this machine: the scheduler, if the job runs")
    elif why == errno.EACCES:
        yield fail("ports", f"this user may not listen at port {port}", "choose a port of 1024 or above")
    elif why:
        yield ok("ports", f"the scheduler at {there} is on another machine")
    else:
        yield ok("ports", f"{there} is free for the scheduler")


def _why_not_bindable(host: str, port: int) -> int:
    """The system's error number; 0 if a scheduler can listen there."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return error.errno or errno.EADDRNOTAVAIL
    return 0


def check_links(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The network interfaces, and their rates where the driver says them."""
    found = []
    for path in sorted(_NETWORKS.glob("*")):
        if path.name == "lo" or _text(path / "operstate") not in ("up", "unknown"):
            continue
        speed = _text(path / "speed")
        rate = f"{int(speed):,} Mbit/s" if speed.isdecimal() else "rate unknown"
        found.append(f"{path.name} ({rate}, MTU {_text(path / 'mtu')})")
    if not found:
        yield warn("links", "no network interface is up", "one machine alone needs none; several do")
    else:
        told = environ.get("BYTEPS_LINK_MBIT")
        how = f"BYTEPS_LINK_MBIT={told} is used" if told else "jobs measure the rate when they start"
        yield ok("links", f"{', '.join(found)}; {how}")


def check_rdma(environ: Mapping[str, str], library: str, devices: Sequence[str]) -> Iterator[Finding]:
    """``library``: that of RDMA; empty: it is not installed."""
    try:
        settings = Settings.from_env(environ)
    except ConfigurationError:
        return  # check_settings has said so
    why, remedy = rdma_devices.why_not(settings, library, devices)
    there = f"RDMA devices: {', '.join(devices)}" if devices else "no RDMA device"
    if why:
        yield fail("RDMA", why, remedy)
    elif settings.rdma_transports:
        text = f"{settings.rdma_transports} stand in for RDMA, which they are slower than TCP at: for tests only"
        yield warn("RDMA", text, "unset BYTEPS_RDMA_TRANSPORTS")
    elif settings.rdma:
        yield ok("RDMA", f"partitions travel by RDMA; {there}")
    elif devices:
        yield ok("RDMA", f"{there}; tensors travel over TCP, also on them (IPoIB), unless DMLC_ENABLE_RDMA=1")


# ---- what the system says --------------------------------------------------------------------------------------


def _wants_rdma(environ: Mapping[str, str]) -> bool:
    """A card is to read memory; nothing, where the settings are not valid."""
    try:
        settings = Settings.from_env(environ)
    except ConfigurationError:
        return False
    return settings.rdma and not settings.rdma_transports


def _cpu_quota() -> float | None:
    """Cores' worth of time that the control group of this process gets; None without a limit."""
    quota, _, period = _text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _processor_flags() -> frozenset[str]:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def _available_bytes() -> int:
    from byteps_py.system.process_memory import available_memory_bytes

    return int(available_memory_bytes())


def _folder_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _text(path: Path) -> str:
    """The content of a file of the kernel; empty if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
