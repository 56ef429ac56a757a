"""Jobs with ``shadow=True`` whose machines die and whose servers live on, of real processes."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time

from byteps_py.config.settings import Settings
from byteps_py.launch.process_plan import free_port
from byteps_py.shadow import Restorable, ShadowReader, latest_step
from support.breaking import Job, command
from support.clusters import ROOT, clean_environment

PROGRAM = ROOT / "tests" / "programs" / "shadowed.py"
LAUNCH = (sys.executable, "-m", "byteps_py.launch", "--no-tag-output")


class ShadowedCluster:
    """``machines`` GPU machines, and CPU machines whose servers live on from job to job."""

    def __init__(
        self, stack: contextlib.ExitStack, machines: int, servers: int, limit_s: float = 100, **variables: str
    ) -> None:
        self._stack, self._limit_s = stack, limit_s
        self._machines = machines
        self.program = PROGRAM
        self._variables = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NUM_WORKER": str(machines),
            "DMLC_NUM_SERVER": str(servers),
            **variables,
        }
        self.servers: list[Job] = []
        for _ in range(servers):
            self.add_server()

    def add_server(self) -> Job:
        """Start one more CPU machine."""
        self.servers.append(self._launch(DMLC_ROLE="server", BYTEPS_MACHINE_ID=f"c{len(self.servers)}"))
        return self.servers[-1]

    def _launch(self, *words: str, **variables: str) -> Job:
        return self._stack.enter_context(
            command(*LAUNCH, *words, limit_s=self._limit_s, **{**self._variables, **variables})
        )

    def start(self, *arguments: str) -> list[Job]:
        """A scheduler, and each machine's launcher."""
        scheduler = self._launch(DMLC_ROLE="scheduler")
        return [scheduler, *(self.start_machine(i, f"m{i}", *arguments) for i in range(self._machines))]

    def start_machine(self, number: int, machine_id: str, *arguments: str) -> Job:
        """The launcher of one machine of the job."""
        return self._launch(
            sys.executable, str(self.program), *arguments,
            DMLC_ROLE="worker", DMLC_WORKER_ID=str(number), BYTEPS_MACHINE_ID=machine_id,
        )  # fmt: skip

    def start_spare(self, machine_id: str, *arguments: str) -> Job:
        """The launcher of a machine that waits for the loss of another one."""
        words = ("--spare", sys.executable, str(self.program), *arguments)
        return self._launch(*words, DMLC_ROLE="worker", BYTEPS_MACHINE_ID=machine_id)

    def change(self, **variables: str) -> None:
        """Start what follows with these variables."""
        self._variables |= variables

    def wait_for_servers(self) -> None:
        """Until all servers, which are started again, are members."""
        until_s = time.monotonic() + 60
        with ShadowReader(self.settings) as reader:
            while sum(not each.error for each in reader.describe()) < len(self.servers):
                assert time.monotonic() < until_s
                select.select([], [], [], 0.05)

    @property
    def settings(self) -> Settings:
        return Settings(
            scheduler_host="127.0.0.1", scheduler_port=int(self._variables["DMLC_PS_ROOT_PORT"]),
            num_workers=self._machines, num_servers=len(self.servers),
        )  # fmt: skip

    def bps(self, *words: str) -> str:
        """What this command prints."""
        command = [sys.executable, "-m", "byteps_py.cli", *words, f"--scheduler={self.settings.scheduler_address}"]
        environ = clean_environment()
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout

    def held_step(self, at_least: int) -> int:
        """The step that a job could go on from, once it is at least that."""
        until_s = time.monotonic() + 60
        with ShadowReader(self.settings) as reader:
            while True:
                found = latest_step(reader.describe())
                if isinstance(found, Restorable) and found.step >= at_least:
                    return found.step
                assert time.monotonic() < until_s, found
                select.select([], [], [], 0.05)


def digests(text: str) -> dict[int, str]:
    lines = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return {int(words[1].rstrip(":")): words[2] for words in lines}
