"""Hosts with a real sshd each, in network namespaces, and bpslaunch on one more host that logs in there."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.cluster.hosts import Host, cluster
from support.clusters import clean_environment, has_namespaces
from support.launching import Launch
from support.processes import children, command_line, kill, wait_gone

_SSHD = "/usr/sbin/sshd"
_PRIVILEGE_SEPARATION = Path("/run/sshd")
_LIMIT_S = 100.0


def require_ssh_hosts() -> None:
    """Skips the test where no sshd can be started in a network namespace."""
    if not has_namespaces():
        pytest.skip("needs root and iproute2 (network namespaces)")
    if not Path(_SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("sshd is not installed (Debian: apt-get install openssh-server openssh-client)")


class SshHosts:
    """``hosts``: those with sshd; bpslaunch is started on ``login``."""

    def __init__(self, login: Host, hosts: Sequence[Host], folder: Path) -> None:
        self.login, self.hosts, self.folder = login, hosts, folder
        self._key = folder / "key"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        (self.folder / "key.pub").rename(self.folder / "authorized")
        host_key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known").write_text("".join(f"{host.address} {host_key}" for host in self.hosts))
        for host in self.hosts:
            config = self.folder / f"sshd-{host.index}"
            config.write_text(
                f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/authorized\nListenAddress "
                f"{host.address}\nStrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
            )
            daemon = subprocess.Popen(host.command([_SSHD, "-D", "-e", "-f", str(config)]), stderr=subprocess.PIPE)
            self._daemons[host.name] = daemon
        for daemon in self._daemons.values():
            assert daemon.stderr is not None
            line = b"-"
            while line and b"Server listening" not in line:
                line = daemon.stderr.readline()
            assert line, "sshd has ended"

    def stop_sshd(self, host: Host) -> None:
        """No one can log in any more."""
        self._end(self._daemons.pop(host.name))

    @property
    def ssh_options(self) -> list[str]:
        return ["-i", str(self._key), "--ssh-options", f"-F none -o UserKnownHostsFile={self.folder}/known"]

    def launch(self, *arguments: str, **environ: str) -> Launch:
        """``bpslaunch`` with these arguments, and those that ssh needs here."""
        command = [sys.executable, "-m", "byteps_py.launch", *self.ssh_options, *arguments]
        return Launch(self.login.command(command), clean_environment(BYTEPS_TAG_OUTPUT="", **environ))

    def pids(self, host: Host) -> list[int]:
        """The processes on this host, but for sshd's."""
        said = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout
        return [pid for pid in map(int, said.split()) if "sshd" not in command_line(pid)]

    def ssh_to(self, job: Launch, host: Host) -> int:
        """The process of ssh with the ranks of this host: the last one that was started."""
        started = children(job.process.pid)
        return max(pid for pid in started if f" -- {host.address} " in command_line(pid))

    def left(self) -> list[str]:
        """Processes of the job that are still there after a while, on any host."""
        found = [pid for host in (self.login, *self.hosts) for pid in self.pids(host)]
        return [f"{pid}: {command_line(pid)}" for pid in found if not wait_gone(pid)]

    def lose(self, host: Host) -> None:
        """All that runs on this host is gone, as without power."""
        self.crash(host)
        self._end(self._daemons.pop(host.name))

    def crash(self, host: Host) -> None:
        """The same, but one can log in again at once."""
        said = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout
        for pid in map(int, said.split()):
            if pid != self._daemons[host.name].pid:
                kill(pid)

    @staticmethod
    def _end(daemon: subprocess.Popen[bytes]) -> None:
        daemon.kill()
        daemon.communicate()

    def stop(self) -> None:
        for host in (self.login, *self.hosts):
            for pid in self.pids(host):
                kill(pid)
        for daemon in self._daemons.values():
            self._end(daemon)


@contextlib.contextmanager
def ssh_hosts(count: int, folder: Path, is_v6: bool = False) -> Iterator[SshHosts]:
    """``count`` hosts with sshd, and one to log in from; gone at the end of the block. ``is_v6``: they have addresses
    of IPv6 only."""
    # The system's own service makes this empty folder. It stays: tests that run at the same time may need it.
    _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    with cluster([0.0] * (count + 1), is_v6=is_v6) as (login, *hosts):
        found = SshHosts(login, hosts, folder)
        try:
            found.start()
            yield found
        finally:
            found.stop()
