"""A network that loses what is sent for a while, and connections that end, while all processes live.

Each machine is a network namespace of its own (root and iproute2 are needed for that); what is to be lost goes to a
hardware address that nobody has, so that nobody is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import time
from collections.abc import Iterator

from benchmarks.cluster.hosts import Host, cluster, lost
from benchmarks.recovery.job import Job
from benchmarks.recovery.launcher import UnforeseenError
from benchmarks.recovery.rows import Row
from benchmarks.recovery.survived import RANKS, History, calm_step_s, longest_step_s, middle_of_a_round, settle, survive

RATE_MBIT = 1000.0
SHORT_S = 0.5  # shorter than the silence after which a process counts as dead
_PIDFD_GETFD = 438  # on x86-64 and arm64


def network_fails(repeat: int, history: History) -> list[Row]:
    """The scheduler and machine 0 on the first host, machine 1 on the second, a CPU machine on the third."""
    apart = Row(f"a machine alone for {SHORT_S:g} s, from then until a step is done", 1.5)
    one_way = Row(f"one way lost for {SHORT_S:g} s, from then until a step is done", 1.5)
    for_good = Row("one way lost for good, from the loss until a step is done", None)
    rows = [apart, one_way, for_good]
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        apart.failures.append("not measured: it needs root and iproute2")
        return rows
    with cluster([RATE_MBIT] * 3) as hosts:
        first, other, spare = hosts
        names = {"scheduler": first, "m0": first, "m1": other, "s0": spare}
        where = {name: (host.address, host.command) for name, host in names.items()}

        def briefly(job: Job, row: Row, *ways: tuple[Host, Host]) -> None:
            middle_of_a_round(job)
            with lost(*ways):
                time.sleep(SHORT_S)
            healed_s = time.monotonic()
            row.add(job.until_step(healed_s, RANKS) - healed_s, calm_step=calm_step_s(job))
            settle(job)

        def hit(job: Job) -> None:
            briefly(job, apart, (other, first), (first, other), (other, spare), (spare, other))
            briefly(job, one_way, (other, spare))
            middle_of_a_round(job)
            at_s = time.monotonic()
            with lost((other, spare)):
                for_good.add(job.until_step(at_s, RANKS) - at_s)
                job.until_said("m0", "can't reach it", at_s)
            job.until_said("m0", "has come", at_s)
            settle(job)

        survive(history, rows, repeat, hit, where=where)
    return rows


def connections_of(pid: int) -> Iterator[socket.socket]:
    """Another process's TCP connections, as sockets of this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
            fd = libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
            if fd < 0:
                continue
            with socket.socket(fileno=fd) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    yield one
    finally:
        os.close(pidfd)


def ports_of(pid: int) -> set[int]:
    """Where it listens."""
    return {
        one.getsockname()[1] for one in connections_of(pid) if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def cut(service: int, server: int) -> int:
    """End what connects a communication service to a summation server; how many connections that was."""
    ports, count = ports_of(server), 0
    for one in connections_of(service):
        with contextlib.suppress(OSError):  # it is not connected
            if one.getpeername()[1] in ports:
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connection_cut(repeat: int, history: History) -> list[Row]:
    row = Row("connection of a machine and a server cut, until a step is done", None)

    def hit(job: Job) -> None:
        middle_of_a_round(job)
        (service,), (server,) = (
            job.launchers["m1"].pids("byteps_py.worker"),
            job.launchers["s0"].pids("byteps_py.server"),
        )
        at_s = time.monotonic()
        if not cut(service, server):
            raise UnforeseenError("no connection was found, or this process may not touch it")
        row.add(job.until_step(at_s, RANKS) - at_s, longest_step=longest_step_s(job, at_s))
        settle(job)

    survive(history, [row], repeat, hit)
    return [row]
