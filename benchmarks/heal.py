"""A link that slows down and comes back while a job trains: how soon the shares of the servers follow, beside gloo.

    python -m benchmarks.heal [--workers 4] [--servers 2] [--mbit 400] [--mb 32] [--machine 1] [--factor 0.5]
        [--busy CORES] [--seconds 25] [--call session] [--told] [--json FILE]
    python -m benchmarks.heal --way 20 [--workers 2] [--servers 1] [--mbit 200] [--mb 8]
    python -m benchmarks.heal --late 1 [--workers 4] [--servers 4] [--mbit 400] [--mb 32]

Hosts are network namespaces with shaped links (root needed). One tensor is summed again and again; then the link of one
machine (``--machine``: workers first) carries ``--factor`` of its rate in both directions, and after ``--seconds`` all
of it again. A process beside the scheduler asks it for the epoch, as `bps status` does. gloo sums the same tensor in
each of the three phases, on the same hosts, in turn.

``--call``: what is done again and again instead of a sum: an allgather of as many bytes, a training step with an
optimizer that the services host (hosted_machine, hosted_sharded), or with states that servers keep as well (shadow).
"optimum" and "fixed shares" are those of a sum, which a step has in it, and gloo's time is that of a sum.

With ``--told``, machines say their rates (BYTEPS_LINK_MBIT): the processes of many hosts that start on a few processors
measure them wrongly.

With ``--busy``, its link stays as it is, and the processes of that machine get the time of so many processors: choose a
CPU machine.

With ``--way``, links stay as they are too, and what machines 0 and 1 send each other directly has a slow way: ranks
reach each other through a third machine as well. The sum goes from rank to rank.

With ``--late``, links stay as they are, and rank 0 begins each sum so many seconds after the others: the time from then
until all ranks have the sum.

"t·B/M" is the time in units of the model's bytes over the usual rate. "optimum" is that of the linear program for the
rates of this phase; a ring takes 2(n−1)/n over the slowest link. "fixed shares" is the time with the shares of before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.cluster.contenders import SECRET, Layout, counts_of
from benchmarks.cluster.hosts import Host, cluster, reshape, slow_way, throttled
from benchmarks.cluster.measure import Found, Turns, turns
from benchmarks.cluster.rank import GATHER, LATE_VARIABLE
from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError
from byteps_py.launch.process_plan import free_port
from byteps_py.placement.link_optimum import LinkOptimum
from byteps_py.placement.shares import Optimum
from byteps_py.scheduler import query

_JOB = "heal"
_GLOO_CALLS, _LONG_S = 4, 10.0  # one of longer sums
_LATE_CALLS = 7
#: What rank.py calls them, and the variables that they need.
_CALLS: dict[str, tuple[str, dict[str, str]]] = {
    "session": ("session", {}),
    "allgather": (GATHER, {}),
    "hosted_machine": ("hosted_machine", {}),
    "hosted_sharded": ("hosted_sharded", {}),
    "shadow": ("optimizer", {"BYTEPS_SHADOW": "1"}),
}
#: A step that takes longer than this, and so many times what the shares of before need, ends the benchmark.
_STEP_LIMIT_S, _STEP_LIMIT = 60.0, 10.0
#: Steps after the shares have changed that may still have parts of the old ones.
_SETTLING = 2


@dataclass
class Phase:
    """``steps``: when each was over, in seconds since the link changed, and how long it took."""

    name: str
    optimum_s: float
    fixed_s: float
    ring_s: float
    steps: list[tuple[float, float]] = field(default_factory=list)
    gloo_s: list[float] = field(default_factory=list)
    epochs: list[tuple[float, int, str]] = field(default_factory=list)

    @property
    def settled_s(self) -> list[float]:
        """The times of the steps after the last epoch, or of the last steps if there are none."""
        since_s = self.epochs[-1][0] if self.epochs else 0.0
        late = [took_s for at_s, took_s in self.steps if at_s > since_s]
        return late[_SETTLING:] or [took_s for _, took_s in self.steps[-_SETTLING:]]


class Watch:
    """A process that asks the scheduler for its epoch, and says when there is another one."""

    def __init__(self, host: Host, port: str) -> None:
        words = [sys.executable, "-m", "benchmarks.heal", "--watch", host.address, port]
        self._process = subprocess.Popen(host.command(words), stdout=subprocess.PIPE, text=True)
        self.seen: list[tuple[float, int, str]] = []

    def close(self) -> None:
        self._process.terminate()
        said, _ = self._process.communicate(timeout=10)
        for line in said.splitlines():
            at_s, epoch, why = json.loads(line)
            self.seen.append((at_s, epoch, why))


def watch(uri: str, port: str) -> None:
    """Print every epoch, with the time of the system's clock, until the process is ended."""
    settings = Settings.from_env(
        {"DMLC_PS_ROOT_URI": uri, "DMLC_PS_ROOT_PORT": port, "BYTEPS_SECRET": SECRET, "BYTEPS_JOB_ID": _JOB}
    )
    known = -1
    while True:
        with contextlib.suppress(BytePSError):
            said = query.status(settings)
            if said.epoch != known:
                known = said.epoch
                print(json.dumps([time.monotonic(), known, said.reason]), flush=True)
        time.sleep(0.2)


def train(
    ours: Turns, counts: Sequence[int], phase: Phase, since_s: float, seconds: float, call: str = "session"
) -> None:
    while (now_s := time.monotonic()) - since_s < seconds:
        found = Found()
        ours.take(call, counts, found)
        phase.steps += [(time.monotonic() - since_s, took_s) for took_s in found.times_s]
        took_s = time.monotonic() - now_s
        if took_s > max(_STEP_LIMIT_S, _STEP_LIMIT * phase.fixed_s):
            raise SystemExit(f"a step has taken {took_s:.0f} s, and {phase.fixed_s:.0f} s were expected")


@contextlib.contextmanager
def watched(host: Host, port: str) -> Iterator[Watch]:
    found = Watch(host, port)
    try:
        yield found
    finally:
        found.close()


def measure(arguments: argparse.Namespace) -> list[Phase]:
    n, k, mbit = arguments.workers, arguments.servers, arguments.mbit
    counts = counts_of("one", arguments.mb << 20)
    megabits = sum(counts) * 32 / 1e6
    usual = [mbit] * (n + k)
    slow = list(usual)
    slow[arguments.machine] *= arguments.factor
    phases: list[Phase] = []
    began: list[float] = []
    with cluster(usual) as hosts:
        workers, spare = hosts[:n], hosts[n:]
        layout = Layout(workers, spare, told_mbit=dict.fromkeys(hosts, mbit) if arguments.told else {})
        port = str(free_port())
        own = {"DMLC_PS_ROOT_PORT": port, "BYTEPS_JOB_ID": _JOB}
        call, more = _CALLS[arguments.call]
        with contextlib.ExitStack() as stack:
            gloo = stack.enter_context(turns("gloo", Layout(workers), 1))
            ours = stack.enter_context(turns("ours", layout, 1, {**own, **more}))
            with watched(workers[0], port) as seen:
                for name, rates in (("before", usual), ("slow", slow), ("back", usual)):
                    best = LinkOptimum(rates[n:], rates[:n])
                    fixed_s = float(best.time_of(Optimum(n, k).shares)) * megabits
                    ring_s = 2 * (n - 1) / n * megabits / min(rates[:n])
                    phase = Phase(name, float(best.time) * megabits, fixed_s, ring_s)
                    with contextlib.ExitStack() as slow_down:
                        if not arguments.busy:
                            reshape(hosts[arguments.machine], rates[arguments.machine])
                        elif name == "slow":
                            slow_down.enter_context(throttled(hosts[arguments.machine], arguments.busy))
                        since_s = time.monotonic()
                        train(ours, counts, phase, since_s, arguments.seconds, call)
                    for _ in range(_GLOO_CALLS if ring_s < _LONG_S else 1):
                        found = Found()
                        gloo.take("gloo", counts, found)
                        phase.gloo_s += found.times_s
                    phases.append(phase)
                    began.append(since_s)
    ends = [*began[1:], float("inf")]
    for phase, begin_s, end_s in zip(phases, began, ends, strict=True):
        phase.epochs = [(at_s - begin_s, epoch, why) for at_s, epoch, why in seen.seen if begin_s <= at_s < end_s]
    return phases


def measure_way(arguments: argparse.Namespace, unit_s: float) -> None:
    n, k, counts = arguments.workers, arguments.servers, counts_of("one", arguments.mb << 20)
    print(
        f"n = {n}, k = {k}, {arguments.mb} MB, {arguments.mbit:g} Mbit/s; the way between machines 0 and 1 carries "
        f"{arguments.way:g}"
    )
    print(f"{'':8} {'all_reduce, t·B/M (first to last)':>40} {'gloo':>6}")
    with cluster([arguments.mbit] * (n + k)) as hosts, contextlib.ExitStack() as stack:
        gloo = stack.enter_context(turns("gloo", Layout(hosts[:n]), 1))
        ours = stack.enter_context(turns("ours", Layout(hosts[:n], hosts[n:]), 1))
        for name in ("before", "slow", "back"):
            phase, gloo_s = Phase(name, 0.0, 0.0, 0.0), Found()
            with slow_way(hosts[0], hosts[1], arguments.way) if name == "slow" else contextlib.nullcontext():
                train(ours, counts, phase, time.monotonic(), arguments.seconds, "all_reduce")
                gloo.take("gloo", counts, gloo_s)  # it may take minutes
            times = [took_s / unit_s for _, took_s in phase.steps]
            late = statistics.median(times[-_LATE_CALLS:])
            spread = f"{late:.3f} ({times[0]:.3f} to {times[-1]:.3f})"
            soon = next((at_s for at_s, took_s in phase.steps if took_s <= 1.2 * late * unit_s), 0.0)
            print(f"{name:8} {spread:>40} {statistics.median(gloo_s.times_s) / unit_s:6.3f}   so since {soon:.1f} s")


def measure_late(arguments: argparse.Namespace, unit_s: float) -> None:
    n, k, counts = arguments.workers, arguments.servers, counts_of("one", arguments.mb << 20)
    ours_s, gloo_s = Found(), Found()
    os.environ[LATE_VARIABLE] = str(arguments.late)
    with cluster([arguments.mbit] * (n + k)) as hosts, contextlib.ExitStack() as stack:
        gloo = stack.enter_context(turns("gloo", Layout(hosts[:n]), 1))
        ours = stack.enter_context(turns("ours", Layout(hosts[:n], hosts[n:]), 1))
        for _ in range(_LATE_CALLS):
            ours.take("session", counts, ours_s)
            gloo.take("gloo", counts, gloo_s)
    print(f"n = {n}, k = {k}, {arguments.mb} MB, {arguments.mbit:g} Mbit/s; rank 0 comes {arguments.late:g} s late")
    for name, found, best in (
        ("ours", ours_s, float(Optimum(n, k).time)),
        ("gloo", gloo_s, 2 * (n - 1) / n),
    ):
        times = [took_s / unit_s for took_s in found.times_s]
        print(
            f"{name:5} {statistics.median(times):6.3f} ({min(times):.3f} to {max(times):.3f}) t·B/M, theory {best:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=400.0)
    parser.add_argument("--mb", type=int, default=32)
    parser.add_argument("--machine", type=int, default=1, help="the one whose link changes: workers first")
    parser.add_argument("--factor", type=float, default=0.5)
    parser.add_argument("--busy", type=float, default=0.0, help="processors that the machine has left, instead")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each phase")
    parser.add_argument("--late", type=float, default=0.0, help="seconds that rank 0 comes after the others")
    parser.add_argument("--way", type=float, default=0.0, help="Mbit/s that machines 0 and 1 send each other, instead")
    parser.add_argument("--call", choices=_CALLS, default="session")
    parser.add_argument("--told", action="store_true", help="machines say their rates")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--watch", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        watch(*arguments.watch)
        return
    unit_s = sum(counts_of("one", arguments.mb << 20)) * 32 / 1e6 / arguments.mbit
    if arguments.way:
        measure_way(arguments, unit_s)
        return
    if arguments.late:
        measure_late(arguments, unit_s)
        return
    phases = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(phase) for phase in phases], indent=1))
    what = f"{arguments.busy:g} processors left" if arguments.busy else f"at {arguments.factor:g} of its rate"
    print(
        f"n = {arguments.workers}, k = {arguments.servers}, {arguments.call}, {arguments.mb} MB, {arguments.mbit:g} "
        f"Mbit/s; machine {arguments.machine} {what}"
    )
    print(f"{'':8} {'t·B/M (min to max)':>24} {'optimum':>8} {'over':>6} {'fixed shares':>13} {'gloo':>6} {'ring':>6}")
    for phase in phases:
        times = [took_s / unit_s for took_s in phase.settled_s]
        median, best = statistics.median(times), phase.optimum_s / unit_s
        spread = f"{median:.3f} ({min(times):.3f} to {max(times):.3f})"
        gloo, ring = statistics.median(phase.gloo_s) / unit_s, phase.ring_s / unit_s
        fixed = phase.fixed_s / unit_s
        print(f"{phase.name:8} {spread:>24} {best:8.3f} {median / best:6.3f} {fixed:13.3f} {gloo:6.3f} {ring:6.3f}")
    for phase in phases[1:]:
        for at_s, epoch, why in phase.epochs:
            print(f"{phase.name}: epoch {epoch} after {at_s:.1f} s: {why}")


if __name__ == "__main__":
    main()
