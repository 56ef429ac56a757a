"""Opens a session: selects its kind, and starts the services that no launcher has started.

Under bpslaunch the services already run. Under torchrun, mpirun or srun the first local rank of each machine starts the
machine's services, and on machine 0 the scheduler. They end when their ranks have left. One
thread at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from byteps_py.config import launchers
from byteps_py.config.settings import Settings, ignored_variables
from byteps_py.errors import ConfigurationError, RendezvousError
from byteps_py.session import failure_reports
from byteps_py.session.base import Session
from byteps_py.session.round_recorder import RoundRecorder
from byteps_py.session.service.remote import RemoteSession
from byteps_py.session.solo import SoloSession
from byteps_py.system import channel, jobs
from byteps_py.system.flight_dump import open_flight_dump
from byteps_py.system.jobs import TOKEN_VARIABLE
from byteps_py.system.log import logger
from byteps_py.system.machine import check_offered_host, local_socket
from byteps_py.wire import rank_link as protocol
from byteps_py.wording import count_text

_END_S = 10.0
#: A service that stays for returning ranks already listens; one that does not within this time has ended.
_GONE_S = 1.0
_OF_OTHER_SERVICES = ("BYTEPS_SOCKET_NAME", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_ROLE")
#: Sessions of this process so far, by job. All ranks of a job open and close sessions alike, so the services of each
#: session have a name of their own: a rank that reopens early must not connect to services that others still use.
_opened: dict[str, int] = {}
#: The CPUs of this process before it was pinned to those of a rank; empty if it was not.
_cpus_before: set[int] = set()
#: The epoch, by job, with which the latest group began whose state this process has.
_synced_in: dict[str, int] = {}


def open_session(settings: Settings | None = None) -> Session:
    """The session of this process, as the environment (or ``settings``) describes it.

    Blocks until the cluster is complete. Raises ConfigurationError, RendezvousError or PeerLostError. One thread at a
    time.
    """
    settings = settings or Settings.from_env()
    failure_reports.whole_tracebacks = settings.log_level in ("DEBUG", "TRACE")
    failure_reports.ends_at_once = settings.max_restarts > 0
    if settings.is_alone:
        # A launcher has logged these; in a job with services, the first service logs them.
        if TOKEN_VARIABLE not in os.environ:
            for sentence in ignored_variables(os.environ):
                logger.warning("%s", sentence)
        return SoloSession()
    services: list[subprocess.Popen[bytes]] = []
    if settings.elastic and not settings.socket_name:
        raise ConfigurationError("an elastic job (BYTEPS_ELASTIC) needs bpslaunch, which keeps services between groups")
    if not settings.socket_name:
        is_given = bool(settings.scheduler_host)
        settings = _complete(settings, os.environ)
        check_offered_host(settings)
        if before := _opened.get(settings.job, 0):
            settings = dataclasses.replace(settings, socket_name=f"{local_socket(settings, 'cs')}-{before + 1}")
        if settings.local_rank == 0:
            services = _start_services(settings, scheduler_too=not is_given and settings.worker_id == 0)
    try:
        link = _connect(settings, services)
        try:
            session = ServiceOwningSession(link, settings, services)
            if settings.numa_on:
                _pin(settings)
            _opened[settings.job] = _opened.get(settings.job, 0) + 1
            return session
        except BaseException:
            link.close()
            raise
    except BaseException:
        _end(services, terminate=True)
        raise


class ServiceOwningSession(RemoteSession):
    """A session that also waits for the end of the services that this process has started, if any."""

    def __init__(self, link: channel.Channel, settings: Settings, services: list[subprocess.Popen[bytes]]) -> None:
        self._services = services
        super().__init__(
            link,
            settings.local_rank,
            settings.local_size,
            max(settings.start_timeout_s, settings.elastic_timeout_s if settings.elastic else 0),
            settings.stall_limit_s,
            settings.patience_s,
            _synced_in.get(settings.job, 0),
        )
        self._job = settings.job
        self.has_synced = settings.job in _synced_in
        self.exchanges_addresses = self.num_machines > 1
        if settings.direct_connections:
            self.connects = settings
        self._open_flight_recorder(settings)
        failure_reports.register(self)

    def _open_flight_recorder(self, settings: Settings) -> None:
        about = {
            "rank": self.rank, "size": self.size, "machine": self.machine_index, "local_rank": self.local_rank,
            "job": settings.job, "epoch": self.since_epoch,
        }  # fmt: skip
        dump = open_flight_dump(settings, about)
        if dump is not None:
            self.flight = RoundRecorder(dump, self.size, settings.trace_on)
            self.send(protocol.GiveFlightRecorder(), (dump.recorder.fd,))

    def note_synced(self) -> None:
        _synced_in[self._job] = self.since_epoch
        self.has_synced = True

    def close(self) -> None:
        failure_reports.unregister(self)
        super().close()
        if os.getpid() == self._pid:
            _end(self._services, terminate=False)


def _complete(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Fill in the address of the scheduler or, if the job needs no scheduler, the job's name as the launcher gives it.

    A job with a scheduler is named by the scheduler's address, so that servers, which no launcher starts, are in the
    same job.
    """
    if settings.scheduler_host:
        return settings
    if settings.num_workers == 1 and not settings.num_servers:
        return dataclasses.replace(settings, job_id=settings.job_id or launchers.job(environ))
    if (address := launchers.scheduler(environ)) is None:
        raise ConfigurationError(
            f"{count_text(settings.num_workers, 'GPU machine')} and {count_text(settings.num_servers, 'server')} need "
            "a scheduler: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, or MASTER_ADDR and MASTER_PORT as torchrun does"
        )
    return dataclasses.replace(settings, scheduler_host=address[0], scheduler_port=address[1])


def _start_services(settings: Settings, scheduler_too: bool) -> list[subprocess.Popen[bytes]]:
    modules = [["byteps_py.scheduler"]] if scheduler_too and settings.scheduler_host else []
    modules.append(["byteps_py.worker"])
    if settings.gpu_machines_sum:
        modules.append(["byteps_py.server", "--gpu-machine"])
    # Variables that describe a launcher's services do not apply to these.
    kept = {name: text for name, text in os.environ.items() if name not in _OF_OTHER_SERVICES}
    environ = {
        **kept,
        "BYTEPS_JOB_ID": settings.job,
        "DMLC_NUM_WORKER": str(settings.num_workers),
        "DMLC_NUM_SERVER": str(settings.num_servers),
        "DMLC_WORKER_ID": str(settings.worker_id),
        "BYTEPS_LOCAL_SIZE": str(settings.local_size),
        "BYTEPS_LOCAL_RANK": "0",
    }
    if settings.socket_name:
        environ["BYTEPS_SOCKET_NAME"] = settings.socket_name
    if settings.scheduler_host:
        environ["DMLC_PS_ROOT_URI"] = settings.scheduler_host
        environ["DMLC_PS_ROOT_PORT"] = str(settings.scheduler_port)
    # In a session of their own, so that Ctrl-C reaches the ranks only; the services end after their ranks.
    with _unpinned():
        return [
            subprocess.Popen(
                [sys.executable, "-m", *module], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
            )
            for module in modules
        ]


@contextlib.contextmanager
def _unpinned() -> Iterator[None]:
    """Processes that this thread starts get the CPUs that this process had before it was pinned: services choose their
    own."""
    own = os.sched_getaffinity(0)
    if _cpus_before:
        os.sched_setaffinity(0, _cpus_before)
    try:
        yield
    finally:
        if _cpus_before:
            os.sched_setaffinity(0, own)


def _pin(settings: Settings) -> None:
    from byteps_py.kernels.thread_pool import default_threads
    from byteps_py.topology.numa_pinning import pin_as_set

    before = os.sched_getaffinity(0)
    pin_as_set(settings, settings.local_rank, default_threads(settings.worker_threads))
    if before != os.sched_getaffinity(0):
        _cpus_before.update(before)


def _connect(settings: Settings, services: list[subprocess.Popen[bytes]]) -> channel.Channel:
    """Connect to the communication service. Raises RendezvousError if a service that was started here ends first, or if
    the time is over."""
    name = local_socket(settings, "cs")
    was_there = settings.elastic and not settings.max_restarts and _opened.get(settings.job, 0)
    deadline = time.monotonic() + (_GONE_S if was_there else settings.start_timeout_s)
    while True:
        with contextlib.suppress(RendezvousError):
            return channel.connect(name, 0.2)
        for service in services:
            if service.poll() is not None:
                raise RendezvousError(
                    f"{service.args!r} ended with exit code {service.returncode} "
                    "before this rank could connect; the log above has its message"
                )
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"no communication service of this job listens on this machine after {settings.start_timeout_s:g} s: "
                "is local rank 0 running, and is it the same job (BYTEPS_JOB_ID, DMLC_PS_ROOT_URI and _PORT)?"
            )


def _end(services: list[subprocess.Popen[bytes]], terminate: bool) -> None:
    """Wait for services to end, then kill those that are still running."""
    deadline = time.monotonic() + _END_S
    for service in services:
        if terminate:
            service.terminate()
        try:
            service.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()
    if services:
        jobs.clear()
    services.clear()
