"""Lists of hosts as users of Horovod, Open MPI and DeepSpeed write them: on the command line, and in hostfiles. Pure;
any thread.

    gpu1:4,gpu2:4                 -H of horovodrun, mpirun and bpslaunch
    gpu1 slots=4                  a hostfile of Horovod, of DeepSpeed, and of Open MPI, which also has max_slots=
    gpu1:4                        an older hostfile of Horovod
    gpu1                          repeated lines of Open MPI: each of them is one more slot
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.config.variables import is_host
from byteps_py.errors import ConfigurationError
from byteps_py.wording import count_text

_MOST_SLOTS = 1024
_ENTRY = re.compile(r"(?P<name>\[[^\]]*\]|[^\s:]+)(?::(?P<slots>[0-9]{1,6}))?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?")


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """A host. ``name``: as ssh takes it, perhaps with a user; ``slots``: its ranks, None if the list does not say."""

    name: str
    slots: int | None = None

    @property
    def label(self) -> str:
        """The name without the user, for prefixes.

        >>> RemoteHost("me@gpu1", 4).label
        'gpu1'
        """
        return self.name.rpartition("@")[2]


def parse_hosts(text: str, option: str) -> list[RemoteHost]:
    """The hosts of a list with commas. Raises ConfigurationError that names ``option``.

    >>> parse_hosts("gpu1:4,me@gpu2", "-H")
    [RemoteHost(name='gpu1', slots=4), RemoteHost(name='me@gpu2', slots=None)]
    """
    return _merged([_host(entry.strip(), option) for entry in text.split(",")], option)


def parse_hostfile(text: str, path: str) -> list[RemoteHost]:
    """The hosts of a hostfile. ``path``: for messages. Raises ConfigurationError that names the line.

    >>> parse_hostfile("# two\\ngpu1 slots=4 max_slots=8\\n\\ngpu2 slots=4  # new\\n", "hosts")
    [RemoteHost(name='gpu1', slots=4), RemoteHost(name='gpu2', slots=4)]
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_of_line(words, f"{path}, line {number}"))
    if not hosts:
        raise ConfigurationError(f"{path} names no host: it takes lines such as gpu1 slots=4")
    return _merged(hosts, path)


def _of_line(words: Sequence[str], where: str) -> RemoteHost:
    host = _host(words[0], where)
    sizes: dict[str, int] = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        if name not in ("slots", "max_slots") or not re.fullmatch("[0-9]{1,6}", value):
            raise ConfigurationError(
                f"{where}: {word[:40]!r} is not understood: a line has a host, and may have slots=N and max_slots=N"
            )
        sizes[name] = int(value)
    if "slots" in sizes and host.slots is not None:
        raise ConfigurationError(f"{where}: {host.name} has two numbers of slots, {host.slots} and {sizes['slots']}")
    slots = sizes.get("slots", host.slots)
    if slots is None:
        return RemoteHost(host.name)
    if slots > sizes.get("max_slots", slots):
        raise ConfigurationError(f"{where}: slots={slots} is more than max_slots={sizes['max_slots']}")
    return RemoteHost(host.name, _checked(slots, host.name, where))


def _host(entry: str, where: str) -> RemoteHost:
    match = _ENTRY.fullmatch(entry)
    user, at, bare = match["name"].rpartition("@") if match else ("", "", "")
    # A name that began with a hyphen would be an option of ssh.
    if match is None or not is_host(bare) or (at and not _USER.fullmatch(user)):
        raise ConfigurationError(
            f"{where}: {entry[:60]!r} is not a host: write HOST or HOST:SLOTS, where HOST is a name or an address ([…] "
            "around one of IPv6), perhaps with USER@ before it"
        )
    name = f"{user}{at}{bare.strip('[]')}"
    return RemoteHost(name, None if match["slots"] is None else _checked(int(match["slots"]), name, where))


def _checked(slots: int, name: str, where: str) -> int:
    if not 1 <= slots <= _MOST_SLOTS:
        raise ConfigurationError(f"{where}: {name} can't have {slots} slots: a host has 1 to {_MOST_SLOTS} ranks")
    return slots


def _merged(hosts: Sequence[RemoteHost], where: str) -> list[RemoteHost]:
    """Each host once. A host that is named without slots several times has as many."""
    found: dict[str, list[RemoteHost]] = {}
    for host in hosts:
        found.setdefault(host.name, []).append(host)
    merged = []
    for name, same in found.items():
        if len(same) == 1:
            merged.append(same[0])
            continue
        merged.append(RemoteHost(name, _checked(sum(host.slots or 1 for host in same), name, where)))
    return merged


@dataclass(frozen=True, slots=True)
class HostOptions:
    """What ``bpslaunch -H`` starts where, and how it gets there.

    Attributes:
        workers: GPU machines, which train.
        servers: CPU machines, which only sum.
        spares: GPU machines that wait until one of the others is lost.
        total: ranks of the whole job as -np says; 0: the hosts' slots decide.
        ssh: options for ssh.
        python: the Python that runs bpslaunch on the hosts.
        exports: variables for all processes, each NAME or NAME=VALUE.
    """

    workers: tuple[RemoteHost, ...]
    servers: tuple[RemoteHost, ...] = ()
    spares: tuple[RemoteHost, ...] = ()
    total: int = 0
    ssh: tuple[str, ...] = ()
    python: str = ""
    exports: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[RemoteHost, ...]:
        return (*self.workers, *self.servers, *self.spares)


def sizes_of(options: HostOptions, gpus: Sequence[int]) -> list[int]:
    """The number of ranks of each worker. ``gpus``: those that each has, for hosts without slots.

    Raises ConfigurationError if -np does not fit the slots.

    >>> sizes_of(HostOptions((RemoteHost("a", 4), RemoteHost("b"))), [8, 2])
    [4, 2]
    >>> sizes_of(HostOptions((RemoteHost("a"), RemoteHost("b")), total=6), [0, 0])
    [3, 3]
    """
    workers, total = options.workers, options.total
    if total and all(host.slots is None for host in workers):
        if total % len(workers):
            raise ConfigurationError(
                f"-np {total} ranks can't be divided among {len(workers)} hosts evenly: give each host its number, as "
                "in -H gpu1:4,gpu2:3"
            )
        return [total // len(workers)] * len(workers)
    sizes = [host.slots or count or 1 for host, count in zip(workers, gpus, strict=True)]
    if total and total != sum(sizes):
        said = ", ".join(f"{host.label}:{size}" for host, size in zip(workers, sizes, strict=True))
        raise ConfigurationError(
            f"-np {total} is not what the hosts have: {said} make {count_text(sum(sizes), 'rank')}. With hosts, -np is "
            "the number of all ranks, and may be left out"
        )
    return sizes
