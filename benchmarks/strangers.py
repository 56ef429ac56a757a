"""What honest traffic loses while strangers knock, with noise or greetings that lead nowhere, at each kind of port.

    python -m benchmarks.strangers [--rate 100] [--runs 5] [--seconds 5] [--only server …] [--json FILE]

    server     a summation server's: partitions pushed and answered, see benchmarks/server.py
    peer       a communication service's: all-gathers between two machines of a rank, which go over it
    new        the scheduler's: new tensors of 1 KB, which have to be agreed there, and barriers
    agreed     the scheduler's, too: sums of 1 KB that need it no more, beside its heartbeats

The peer of each is the same in peace: runs take turns. Strangers are those of the tests (tests/support/strangers.py),
each kind in turn, and stay until the other end hangs up on them. Printed: goodput of each, and its ratios run by run;
how long the connections of strangers lasted, how many were ended before they had been let in and said all they
wanted, what they cost in memory, and how much of a core the process with the port took, and they themselves: honest
processes lack that where cores are few.
"""

from __future__ import annotations

import argparse
import itertools
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.strangers import HALF_OPEN, HTTP2, ZMTP, Visit, begin_visit, resident_bytes, see_off
from turns import launch, orders

import server as benchmark
from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import query

SPOKEN = {"server": ZMTP, "peer": ZMTP, "new": HTTP2, "agreed": HTTP2}
UNITS = {"server": "Gbit/s each way per worker", "peer": "Gbit/s", "new": "new tensors/s", "agreed": "sums/s"}
GATHERED_BYTES = 8 << 20  # by each machine
SUMMED = 256  # float32
#: So many at a time, between two looks at the clock; the same on all ranks.
TOGETHER = {"peer": 4, "new": 10, "agreed": 100}
WARM_UP_S = 1.0
QUERY_LIMIT_S = 10.0


class Port(NamedTuple):
    """Where strangers knock, whose it is, and what honest ones get done meanwhile."""

    address: str
    pid: int
    goodput: Callable[[float], float]  # of so many seconds


# ---- strangers -------------------------------------------------------------------------------------------------------


def knock(address: str, kind: str, rate: float) -> None:
    """Until the standard input ends; then wait until all have been sent away. Prints how many came, the longest and
    the median life, how many were ended too early, and the share of a core that this took."""
    spoken = SPOKEN[kind]
    kinds = itertools.cycle([each for each in HALF_OPEN if each.after in ((), spoken)])
    came: list[Visit] = []
    waiting: dict[int, Visit] = {}
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    print("ready", flush=True)
    sys.stdin.readline()
    began, began_cpu = time.monotonic(), time.process_time()
    is_over = False
    while not is_over:
        now = time.monotonic()
        while len(came) < rate * (now - began):
            stranger = begin_visit(address, next(kinds), spoken)
            came.append(stranger)
            waiting[stranger.sock.fileno()] = stranger
            poll.register(stranger.sock, select.POLLIN)
        for fd, _ in poll.poll(1000 / rate):
            if fd == sys.stdin.fileno():
                is_over = True
                continue
            stranger = waiting[fd]
            stranger.read()
            if stranger.ended_s is not None:
                poll.unregister(fd)
                stranger.close()
                del waiting[fd]
    share = (time.process_time() - began_cpu) / (time.monotonic() - began)
    see_off(waiting.values())
    lives = [stranger.lasted_s for stranger in came] or [0.0]
    cut_short = sum(not stranger.is_through for stranger in came)
    print(len(came), max(lives), statistics.median(lives), cut_short, share, flush=True)


# ---- honest ones -----------------------------------------------------------------------------------------------------


class Server:
    """A summation server alone, and its workers."""

    def __init__(self) -> None:
        self._server = benchmark.start("--serve", "sums", "--workers", 2)
        self._address = benchmark.line_of(self._server)
        self._runs = 0
        self._rate = 0.0
        self._options = argparse.Namespace(
            workers=2, in_flight=8, gigabytes=0.5, partition_bytes=benchmark.settings(2).max_partition_bytes
        )

    def port(self, kind: str) -> Port:
        return Port(self._address, self._server.pid, self._goodput)

    def _goodput(self, seconds: float) -> float:
        if self._rate:  # known since the first run, which warms up
            self._options.gigabytes = self._options.workers * self._rate / 8 * seconds
        rate, *_ = benchmark.measure(self._server, self._address, self._options, self._runs, True)
        self._runs += 1
        self._rate = self._rate or rate
        return rate

    def close(self) -> None:
        self._server.communicate()


class Machines:
    """A job of two machines of a rank each."""

    def __init__(self) -> None:
        self._job = launch("strangers", 1, 2, [__file__, "--rank"])
        try:
            (job_id, port), _ = self._job.meet()
            told = Settings(scheduler_host="127.0.0.1", scheduler_port=port, job_id=job_id)
            self._status = query.status(told, QUERY_LIMIT_S)
            self._scheduler = told.scheduler_address
        except BaseException:
            self._job.close()
            raise

    def port(self, kind: str) -> Port:
        members = [each.member for each in self._status.members]
        member = next(each for each in members if each.role == pb.ROLE_COMMUNICATION)
        address, pid = member.address, member.pid
        if kind != "peer":
            address = self._scheduler
            pid = next(pid for pid in self._job.pids if b"byteps_py.scheduler" in command_of(pid))
        return Port(address, pid, lambda seconds: min(self._job.tell(f"{kind} {seconds}")))

    def close(self) -> None:
        self._job.close()


def command_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def rank() -> None:
    """Does what it is told for so many seconds; answers how much per second."""
    import torch

    import byteps_py as bps

    torch.set_num_threads(1)
    bps.init()
    own = Settings.from_env()
    gathered = torch.ones(GATHERED_BYTES // 4)
    numbers = itertools.count()

    def new() -> float:
        bps.push_pull(torch.ones(SUMMED), name=f"new{next(numbers)}")
        bps.barrier()
        return 1

    def agreed() -> float:
        bps.push_pull(torch.ones(SUMMED), name="agreed")
        return 1

    def peer() -> float:
        bps.allgather(gathered, name="gathered")
        return GATHERED_BYTES * 8 / 1e9

    works = {"new": new, "agreed": agreed, "peer": peer}
    over = torch.zeros(1)
    with orders([own.job_id, own.scheduler_port]) as words:
        for word, answer in words:
            kind, seconds = word.split()
            done = 0.0
            began = time.monotonic()
            over[0] = 0
            while not over[0]:
                done += sum(works[kind]() for _ in range(TOGETHER[kind]))
                over[0] = time.monotonic() - began > float(seconds)
                over = bps.push_pull(over, name="over", average=False)  # all of them, or none
            answer(done / (time.monotonic() - began))
    bps.shutdown()


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(kind: str, port: Port, options: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"peace": [], "strangers": []}
    cores: dict[str, list[float]] = {"peace": [], "strangers": []}
    lives: list[list[float]] = []
    port.goodput(WARM_UP_S)
    for run in range(options.runs):
        for way in ("strangers", "peace") if run % 2 else ("peace", "strangers"):
            before = resident_bytes(port.pid)
            strangers = begin_strangers(port.address, kind, options.rate) if way == "strangers" else None
            began, began_cpu = time.monotonic(), benchmark.used(port.pid)[0]
            found[way].append(port.goodput(options.seconds))
            cores[way].append((benchmark.used(port.pid)[0] - began_cpu) / (time.monotonic() - began))
            if strangers is not None:
                more = resident_bytes(port.pid) - before
                lives.append([*map(float, strangers.communicate("\n")[0].split()), more])
    ratios = [theirs / ours for theirs, ours in zip(found["strangers"], found["peace"], strict=True)]
    came, longest, median, cut_short, share, more_bytes = zip(*lives, strict=True)
    digits = 2 if kind in ("server", "peer") else 0
    at_peace, beside = (statistics.median(cores[way]) * 100 for way in ("peace", "strangers"))
    print(
        f"{kind}, {UNITS[kind]}: {benchmark.spread(found['peace'], digits)} in peace, "
        f"{benchmark.spread(found['strangers'], digits)} beside {options.rate:g} strangers a second: "
        f"{benchmark.spread(ratios, 2)}\n"
        f"    {sum(came):.0f} strangers; they lasted {statistics.median(median):.1f} s, at most {max(longest):.1f} s, "
        f"{sum(cut_short):.0f} of them too early; memory grew by at most {max(more_bytes) / max(came) / 1024:.0f} KB "
        f"for each\n"
        f"    of a core, it took {beside:.0f} % (in peace {at_peace:.0f} %), they "
        f"{statistics.median(share) * 100:.0f} %",
        flush=True,
    )
    return {**found, "ratios": ratios, "lasted_s": list(longest), "share": list(share), "cores": cores["strangers"]}


def begin_strangers(address: str, kind: str, rate: float) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--knock", address, kind, str(rate)]
    strangers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    benchmark.line_of(strangers)
    assert strangers.stdin is not None
    strangers.stdin.write("go\n")
    strangers.stdin.flush()
    return strangers


def main() -> None:
    if sys.argv[1:2] == ["--knock"]:
        knock(sys.argv[2], sys.argv[3], float(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0, help="strangers per second")
    parser.add_argument("--runs", type=int, default=5, help="of each kind, with strangers and without")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run, about")
    parser.add_argument("--only", nargs="+", choices=SPOKEN, default=list(SPOKEN))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank()
        return
    found = {}
    for kind in options.only:
        honest = Server() if kind == "server" else Machines()
        try:
            found[kind] = compare(kind, honest.port(kind), options)
        finally:
            honest.close()
    if options.json:
        options.json.write_text(json.dumps({"rate": options.rate, **found}, indent=1))


if __name__ == "__main__":
    main()
