"""A real SLURM on this machine: one controller, and a slurmd for each node, each in a network namespace of its own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.cluster.hosts import Host, cluster
from support.clusters import clean_environment, has_namespaces
from support.launching import Launch
from support.processes import command_line, kill, wait_gone

#: On a host: with names of its own, and otherwise this machine's files. ``ip netns exec`` would hide control groups.
_ENTER = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch")
_CONTROLLER_PORT = 6817
_LIMIT_S = 100.0

_CONFIG = """\
ClusterName=test
SlurmctldHost={name}({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MinJobAge=60
KillWait=30
ReturnToService=2
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
"""


def require_slurm() -> None:
    """Skips the test where SLURM's daemons can't be started."""
    if not has_namespaces():
        pytest.skip("needs root and iproute2 (network namespaces)")
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(
            f"{missing[0]} is not installed (Debian: apt-get install --no-install-recommends slurmctld slurmd "
            "slurm-client slurm-wlm-basic-plugins)"
        )


class SlurmCluster:
    """``nodes``: by name. Programs run on the login host, as a user's do."""

    def __init__(self, login: Host, nodes: dict[str, Host], folder: Path) -> None:
        self.login, self.nodes, self.folder = login, nodes, folder
        self.home, self._hosts = folder / "home", folder / "hosts"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.home.mkdir()
        (self.folder / "state").mkdir()
        names = {"login": self.login, **self.nodes}
        lines = [
            _CONFIG.format(
                name=socket.gethostname(), login=self.login.address, port=_CONTROLLER_PORT, folder=self.folder
            )
        ]
        for name, host in self.nodes.items():
            (self.folder / name).mkdir()
            lines.append(f"NodeName={name} NodeHostname={name} NodeAddr={host.address} CPUs=8 RealMemory=100\n")
        for partition, letter, more in (
            ("cpu", "c", "Default=YES"),
            ("gpu", "g", ""),
            ("first", "c", "PriorityTier=9"),
        ):
            listed = ",".join(name for name in self.nodes if name.startswith(letter))
            lines.append(f"PartitionName={partition} Nodes={listed} MaxTime=INFINITE OverSubscribe=NO {more}\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        hosts = "127.0.0.1 localhost\n" + "".join(f"{host.address} {name}\n" for name, host in names.items())
        self._hosts.write_text(hosts)
        self._daemon(self.login, "slurmctld", "-D")
        for name, host in self.nodes.items():
            self._daemon(host, "slurmd", "-D", "-N", name)
        for _ in range(100):
            said = self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()
            if said and set(said) == {"idle"}:
                return
            self.run(sys.executable, "-c", "import select; select.select([], [], [], 0.1)")
        raise AssertionError(f"nodes are {said}: {self.log()}")

    def _daemon(self, host: Host, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(subprocess.Popen(self._on(host, command), env=self._environ(), stdout=log, stderr=log))

    def _on(self, host: Host, command: Sequence[str]) -> list[str]:
        namespace = f"--net=/run/netns/{host.name}"
        return ["nsenter", namespace, "unshare", "-m", "sh", "-c", _ENTER, "-", str(self._hosts), *command]

    def _environ(self, **environ: str) -> dict[str, str]:
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "HOME": str(self.home), "BYTEPS_TAG_OUTPUT": ""}
        own["XDG_RUNTIME_DIR"] = str(self.home)  # jobs of other tests are not found
        return clean_environment(**own, **environ)

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a program on the login host to its end. stdout and stderr are one stream."""
        return subprocess.run(
            self._on(self.login, command), env=self._environ(**environ), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip

    def launch(self, *command: str, **environ: str) -> Launch:
        """Start a program on the login host."""
        return Launch(self._on(self.login, command), self._environ(**environ))

    def pids(self, node: str) -> list[int]:
        """The processes of jobs on this node."""
        said = subprocess.run(
            ["ip", "netns", "pids", self.nodes[node].name], capture_output=True, text=True, check=True
        ).stdout
        programs = {pid: Path(command_line(pid).partition(" ")[0]).name for pid in map(int, said.split())}
        return [pid for pid, program in programs.items() if program and not program.startswith("slurm")]

    def left(self) -> list[str]:
        """Processes of jobs that are still there after a while, on any node."""
        found = [pid for node in self.nodes for pid in self.pids(node)]
        return [f"{pid}: {command_line(pid)}" for pid in found if not wait_gone(pid)]

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        if self._daemons:
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
        for host in (self.login, *self.nodes.values()):
            said = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False)
            for pid in map(int, said.stdout.split()):
                kill(pid)
        for daemon in self._daemons:
            daemon.wait()


@contextlib.contextmanager
def slurm_cluster(names: Sequence[str], folder: Path) -> Iterator[SlurmCluster]:
    """A cluster with nodes of these names, c… in the partition cpu, and g… in gpu; gone at the end of the block."""
    with cluster([0.0] * (len(names) + 1)) as (login, *hosts):
        found = SlurmCluster(login, dict(zip(names, hosts, strict=True)), folder)
        try:
            found.start()
            yield found
        finally:
            found.stop()
