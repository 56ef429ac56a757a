"""``python -m tests.chaos.shadow --faults N``: a shadowed job whose ranks, services, machines and servers are killed.

After a fault that ends the job, the next one goes on from the last step that servers hold. Every step's weights are
compared with those of a job that nothing happened to.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.breaking import Job, arguments_of, command
from support.shadowed_cluster import LAUNCH, PROGRAM, ShadowedCluster, digests

MACHINES, SERVERS = 2, 2
#: Of these, only the last one does not end the job.
FAULTS = ("a rank", "a service", "a machine", "all machines", "all machines and the scheduler", "a server", "a server")
_PAUSE_S = "0.05"


class ShadowChaos:
    """One run. ``expected``: the weights after each step."""

    def __init__(self, stack: contextlib.ExitStack, seed: int, optimizer: str, expected: dict[int, str]) -> None:
        self._random = random.Random(seed)
        self._optimizer, self._expected = optimizer, expected
        self._cluster = ShadowedCluster(stack, MACHINES, SERVERS, limit_s=7200)
        self._jobs = self._start(0)
        self.done: Counter[str] = Counter()
        self.lost = 0  # steps that were made and had to be made again

    def _start(self, at_least: int) -> list[Job]:
        """Start a job. Returns the scheduler and the machines, once it goes on."""
        jobs = self._cluster.start(self._optimizer, "1000000", _PAUSE_S)
        begun = jobs[1].until("restored at").split()[-1]
        if at_least:
            assert begun != "None", jobs[1].text
            assert int(begun) >= at_least - 1, f"went on from {begun}, though step {at_least} was made"
            self.lost += max(0, at_least - int(begun))
        jobs[1].until("step ")
        return jobs

    def strike(self) -> None:
        """The next fault, and what follows from it."""
        for _ in range(self._random.randrange(3, 12)):
            self._jobs[1].until("step ")
        fault = self._random.choice(FAULTS)
        self.done[fault] += 1
        time.sleep(self._random.random() * 0.1)  # in the middle of a step
        if fault == "a server":
            self._kill_server()
        else:
            self._kill_job(fault)
        self._check()

    def _kill_server(self) -> None:
        server = self._random.choice(self._cluster.servers)
        os.kill(server.pid("byteps_py.server"), signal.SIGKILL)
        step = max(digests(self._jobs[1].text))
        while max(digests(self._jobs[1].text)) < step + 3:
            self._jobs[1].until("step ")
        self._cluster.held_step(step + 3)
        self._cluster.wait_for_servers()

    def _kill_job(self, fault: str) -> None:
        scheduler, *machines = self._jobs
        one = self._random.choice(machines)
        if fault == "a rank":
            self._kill(one, str(PROGRAM))
        elif fault == "a service":
            self._kill(one, "byteps_py.worker")
        elif fault == "a machine":
            one.close()
        else:
            for job in self._jobs if "scheduler" in fault else machines:
                job.close()
        for job in (*machines, scheduler):
            if job.process.poll() is None:
                job.end()
        self._check()
        self._jobs = self._start(max(digests(machines[0].text)))

    @staticmethod
    def _kill(job: Job, word: str) -> None:
        for pid in job.pids():
            words = arguments_of(pid)
            if word in words and "byteps_py.launch" not in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _check(self) -> None:
        for step, found in digests(self._jobs[1].text).items():
            assert found == self._expected[step], f"step {step} has other weights"

    def end(self) -> int:
        """The last step."""
        self._check()
        step = max(digests(self._jobs[1].text))
        for job in self._jobs:
            job.close()
        return step


def undisturbed(optimizer: str, steps: int) -> dict[int, str]:
    words = ["-np", "1", "--machines", str(MACHINES), "--servers", str(SERVERS)]
    with command(*LAUNCH, *words, sys.executable, str(PROGRAM), optimizer, str(steps), limit_s=7200) as job:
        assert job.end() == 0, job.text
        return digests(job.text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.shadow")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw")
    arguments = parser.parse_args()
    expected = undisturbed(arguments.optimizer, 200 + 60 * arguments.faults)
    with contextlib.ExitStack() as stack:
        chaos = ShadowChaos(stack, arguments.seed, arguments.optimizer, expected)
        for _ in range(arguments.faults):
            chaos.strike()
        step = chaos.end()
    print(", ".join(f"{count} times {fault}" for fault, count in sorted(chaos.done.items())))
    print(f"weights: the same bits after each of {step} steps; {chaos.lost} steps had to be made again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
