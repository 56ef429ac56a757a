"""How often, and how soon, the scheduler of a running job names the rank that others wait for.

    python -m benchmarks.slow_rank [--trials 60] [--ranks 16] [--seed 0] [--json FILE]     (root: links are shaped)
    python -m benchmarks.slow_rank --simulated [--trials 600] [--ranks 16384]
    python -m benchmarks.slow_rank --reported [--trials 1000] [--ranks 16384]

The first form runs one job of real processes: a rank, a communication service and a launcher on each of 16 hosts
(network namespaces, see cluster/hosts.py), and two summation services. A step has three sums of 80 KB; ranks sleep
instead of computing, so that two cores are enough. Again and again a random rank gets a random cause: it computes twice
as long, waits for data, is suspended now and then (SIGSTOP), or its machine's link carries a tenth in both directions
or in one. Two of five causes are links, as in Greyhound's observations. Counted is the first line that names anybody:
right if rank or machine, and reason, are right. Between causes the job is quiet; who is named then is a false name.

The second form analyses spans of simulated trainings (tests/support/simulated_spans.py) as `bps trace slow-rank` does:
of random meshes of up to 256 ranks, or of one of as many as given.
The third one gives the scheduler's watch the heartbeats of simulated jobs (tests/support/simulated_reports.py): quiet
windows, a third of them each with even data, uneven and very uneven ones, and a tenth as many causes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import hosts
from benchmarks.cluster.contenders import Layout, our_commands, start

COMPUTES, DATA, PAUSES = "computes slowly", "waits for data", "pauses now and then"
LINK, LINK_OUT, LINK_IN = "has a slow link", "sends slowly", "receives slowly"
#: Two of five causes are links.
CAUSES = (COMPUTES, DATA, PAUSES, COMPUTES, DATA, PAUSES, LINK, LINK_OUT, LINK_IN, LINK)
LINK_MBIT, SLOW_MBIT, SERVER_MBIT = 40.0, 4.0, 400.0
ELEMENTS, SUMS = 20_000, 3
COMPUTE_S, DATA_S, PAUSE_S = 0.06, 0.15, 0.3
LIMIT_S, QUIET_S, AIM_S = 8.0, 9.0, 5.0
_STARTED = 25  # steps, after which all processes have started
_NAMED = re.compile(
    r"WARNING: (?:rank (?P<rank>\d+) \(|worker (?P<worker>\d+) \(|(?P<other>server)[^:]*?).*?"
    rf"(?P<reason>{'|'.join(dict.fromkeys(CAUSES))}): (?P<price>\d+)% of the time"
)


@dataclass(frozen=True)
class Trial:
    """``named``: by the first line: (rank, reason, price), None if nobody; ``after_s``: since the cause began."""

    cause: str
    rank: int
    named: tuple[int, str, float] | None
    after_s: float

    @property
    def is_right(self) -> bool:
        return self.named is not None and self.named[:2] == (self.rank, self.cause)


# ---- one rank ------------------------------------------------------------------------------------------------


def rank(folder: Path) -> None:
    """Trains until the file ``end`` is there. The file with its number says what is wrong with it."""
    import numpy as np

    from byteps_py.session import open_session
    from byteps_py.tensors import DType, TensorSpec

    session = open_session()
    slots = session.declare([TensorSpec(f"gradient{i}", DType.FLOAT32, (ELEMENTS,)) for i in range(SUMS)])
    for slot in slots:
        np.frombuffer(slot.input, np.float32)[:] = 1
    wrong, votes = folder / str(session.rank), session.declare([TensorSpec("end", DType.FLOAT32, (1,))])[0]
    source = random.Random(session.rank)
    is_over = False
    while not is_over:
        cause = wrong.read_text() if wrong.exists() else ""
        if session.flight is not None:
            session.flight.recorder.step += 1
        time.sleep(DATA_S if cause == DATA else 0.005)
        for slot in slots:
            time.sleep(COMPUTE_S * source.lognormvariate(0, 0.05) * (2 if cause == COMPUTES else 1))
            session.hand_over(slot)
            session.wait(slot)
        if session.flight is not None and session.flight.recorder.step == _STARTED:
            (folder / f"pid{session.rank}").write_text(str(os.getpid()))
        if session.flight is not None and session.flight.recorder.step % 10 == 0:  # all of them stop at the same step
            np.frombuffer(votes.input, np.float32)[:] = float((folder / "end").exists())
            session.hand_over(votes)
            session.wait(votes)
            is_over = bool(np.frombuffer(votes.result, np.float32)[0] > 0)
    session.barrier()
    session.close()


# ---- causes --------------------------------------------------------------------------------------------------


def shape(host: hosts.Host, mbit: float, outgoing: bool) -> None:
    """Change the rate of one direction of a host's link."""
    interface = host.interface if outgoing else host.outside
    words = ["tc", "qdisc", "change", "dev", interface, "root", "handle", "1:", "tbf", "rate", f"{mbit:g}mbit"]
    words += ["burst", "128kb" if mbit == LINK_MBIT else "16kb", "latency", "400ms"]
    subprocess.run(host.command(words) if outgoing else words, check=True)


@contextlib.contextmanager
def wrong(cause: str, host: hosts.Host, index: int, folder: Path) -> Iterator[None]:
    """The rank of this host has the cause within the block."""
    if cause in (COMPUTES, DATA):
        (folder / str(index)).write_text(cause)
        yield
        (folder / str(index)).unlink()
    elif cause == PAUSES:
        ended, pid = threading.Event(), int((folder / f"pid{index}").read_text())

        def suspend() -> None:
            source = random.Random(index)
            while not ended.wait(source.uniform(0.4, 0.9)):
                os.kill(pid, signal.SIGSTOP)
                ended.wait(PAUSE_S)
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=suspend)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
    else:
        ways = [way for way, causes in ((True, (LINK, LINK_OUT)), (False, (LINK, LINK_IN))) if cause in causes]
        for outgoing in ways:
            shape(host, SLOW_MBIT, outgoing)
        try:
            yield
        finally:
            for outgoing in ways:
                shape(host, LINK_MBIT, outgoing)


# ---- the job -------------------------------------------------------------------------------------------------


class Lines:
    """What the first machine's processes print: those that name anybody."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._named: queue.Queue[tuple[float, tuple[int, str, float]]] = queue.Queue()
        self._process = process
        self.others: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = _NAMED.search(line)
            self.others = [*self.others[-50:], line]
            if found is None:
                continue
            who = int(found["rank"] or found["worker"] or -1)
            self._named.put((time.monotonic(), (who, found["reason"], int(found["price"]) / 100)))

    def next(self, until: float) -> tuple[float, tuple[int, str, float]] | None:
        try:
            return self._named.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            return None


def run_job(
    count: int, trials: int, seed: int, minutes: float, causes: Sequence[str] = CAUSES
) -> tuple[list[Trial], list[tuple[int, str, float]], int]:
    """(trials, false names of quiet windows, quiet windows)"""
    source = random.Random(seed)
    found: list[Trial] = []
    false: list[tuple[int, str, float]] = []
    windows, index = 0, 0
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as name, hosts.cluster([LINK_MBIT] * count + [SERVER_MBIT] * 2) as all_hosts:
        folder, workers, servers = Path(name), all_hosts[:count], all_hosts[count:]
        told = {host: host.rate_mbit for host in all_hosts}
        layout = Layout(workers, servers, told_mbit=told)
        variables = {"PYTHONPATH": str(Path(__file__).parents[1])}
        services, machines = our_commands(layout, ["-m", "benchmarks.slow_rank", "--rank", name], variables)
        served = [start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in services]
        first = start(machines[0], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes = [first, *(start(command, **quiet) for command in machines[1:])]
        lines = Lines(first)
        try:
            deadline = time.monotonic() + 120
            while len(list(folder.glob("pid*"))) < count:
                if time.monotonic() > deadline or first.poll() is not None:
                    raise SystemExit("the job did not start:\n" + "".join(lines.others))
                time.sleep(0.2)
            time.sleep(QUIET_S)
            while lines.next(0) is not None:  # of its start
                pass
            for number in range(trials):
                if time.monotonic() > end or first.poll() is not None:
                    break
                windows += 1
                while (named := lines.next(time.monotonic() + QUIET_S)) is not None:
                    print("quiet, but", named[1], flush=True)
                    false.append(named[1])
                cause = causes[number % len(causes)]
                index = (index + source.randrange(1, count)) % count  # another one: the last may still be named
                with wrong(cause, workers[index], index, folder):
                    began = time.monotonic()
                    answer = lines.next(began + LIMIT_S)
                after_s = answer[0] - began if answer else LIMIT_S
                found.append(Trial(cause, index, answer[1] if answer else None, after_s))
                print(found[-1], flush=True)
                if not found[-1].is_right:
                    print("".join(lines.others[-4:]), flush=True)
        finally:
            (folder / "end").touch()
            for process in [*processes, *served]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
            for process in [*processes, *served]:
                process.terminate()
            for process in [*processes, *served]:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
    return found, false, windows


def print_table(trials: Sequence[Trial], aim_s: float = AIM_S) -> None:
    by_cause: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_cause[trial.cause].append(trial)
    print("\n| cause | trials | right | right within 5 s | another rank named | time to name, median and longest |")
    print("|---|---|---|---|---|---|")
    for cause, its in [*by_cause.items(), ("all", list(trials))]:
        right = [trial for trial in its if trial.is_right]
        soon = sum(trial.after_s <= aim_s for trial in right)
        others = sum(trial.named is not None and trial.named[0] != trial.rank for trial in its)
        times = [trial.after_s for trial in right]
        took = f"{statistics.median(times):.1f} s, {max(times):.1f} s" if times else "–"
        print(f"| {cause} | {len(its)} | {len(right)} | {soon} | {others} | {took} |")


def simulated(trials: int, seed: int, ranks: int) -> None:
    """Random meshes and causes, and as many quiet trainings, some with data that differ much. ``ranks``: at most."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import numpy as np
    from support.simulated_spans import CAUSES as SIMULATED, random_training, simulate

    from byteps_py.tools.slow_rank import find_slow_ranks

    source = np.random.default_rng(seed)
    right: dict[str, list[bool]] = defaultdict(list)
    wrong_prices: dict[str, list[float]] = defaultdict(list)
    for number in range(trials):
        cause = SIMULATED[number % len(SIMULATED)]
        training, price = random_training(source, cause, most=ranks)
        slow = find_slow_ranks(simulate(training)).slow
        right[cause].append([(each.rank, each.reason) for each in slow] == [(training.causes[0].rank, cause)])
        if right[cause][-1]:
            wrong_prices[cause].append(abs(slow[0].price - price))
    quiet = (random_training(source, None, 0.6, ranks)[0] for _ in range(trials))
    false = sum(bool(find_slow_ranks(simulate(training)).slow) for training in quiet)
    print("| cause | trainings | right | price wrong by, median and 95 % |")
    print("|---|---|---|---|")
    for cause, its in right.items():
        low, high = np.quantile(wrong_prices[cause], (0.5, 0.95))
        print(f"| {cause} | {len(its)} | {sum(its)} | {low:.1%}, {high:.1%} of the step |")
    print(f"\n{trials} quiet trainings: {false} false names")


def reported(windows: int, ranks: int, seed: int) -> None:
    """Quiet windows of 5 s, and causes, of jobs of many ranks."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.simulated_reports import CAUSES as REPORTED, ReportedTraining

    source = random.Random(seed)
    print("| documents' lengths | quiet windows | false names |\n|---|---|---|", flush=True)
    for name, uneven in (("all alike", 0.0), ("uneven", 0.6), ("very uneven", 1.2)):
        training = ReportedTraining(ranks, uneven, seed, heartbeats=24)
        count = -(-windows // 3)
        false = sum(bool(training.window(AIM_S)) for _ in range(count))
        print(f"| {name} (deviation of the logarithm {uneven}) | {count} | {false} |", flush=True)
    training, right, times = ReportedTraining(ranks, 0.2, seed), 0, []
    causes = [REPORTED[number % len(REPORTED)] for number in range(windows // 10)]
    for cause in causes:
        who = source.randrange(ranks)
        named = training.window(AIM_S + 1, cause, who)
        if [(each.who, each.reason) for _, each in named] == [(who, cause)]:
            right += named[0][0] <= AIM_S
            times.append(named[0][0])
    took = f", median {statistics.median(times):.1f} s, longest {max(times):.1f} s" if times else ""
    print(f"\n{len(causes)} causes: {right} named right within {AIM_S:.0f} s{took}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after that time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cause", choices=sorted(set(CAUSES)), help="only this one; default: all in turn")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--reported", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank(arguments.rank)
        return
    if arguments.simulated:
        simulated(arguments.trials, arguments.seed, max(arguments.ranks, 256))
        return
    if arguments.reported:
        reported(arguments.trials, arguments.ranks, arguments.seed)
        return
    causes = [arguments.cause] if arguments.cause else CAUSES
    trials, false, windows = run_job(arguments.ranks, arguments.trials, arguments.seed, arguments.minutes, causes)
    print_table(trials)
    print(f"\n{windows} quiet windows of {QUIET_S:.0f} s: {len(false)} false names")
    if arguments.json:
        text = json.dumps({"trials": [vars(trial) for trial in trials], "false": false, "windows": windows})
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
