"""The settings of a process, read from the environment. No other module reads these variables.

``Settings.from_env`` reads and validates every variable once, and returns a frozen object that the program passes on.
It also reads the file with the cluster secret (BYTEPS_SECRET_FILE). ``variables`` has the table of variables, which
`bps env` and docs/reference/variables.md print, and checks the form of hosts, paths and names. Any thread.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

from byteps_py.config import launchers, secret_files, variables
from byteps_py.config.addresses import bare_host, joined
from byteps_py.config.slurm import secret_name
from byteps_py.config.tuning import MAX_PARTITION_BYTES, control_pace
from byteps_py.config.variables import IGNORED, INTERNAL, VARIABLES
from byteps_py.errors import ConfigurationError
from byteps_py.wording import shown

MIN_SECRET_BYTES = 16
#: A command that prints a good secret.
MAKE_SECRET = "head -c 32 /dev/urandom | base64"
#: The number of heartbeat timeouts for which a process that is slow but not dead may be silent, by default.
SLOW_FACTOR = 10
_ALIKE = 0.8  # similarity from 0 to 1; names that share only their prefix are about half as alike


_STALL_WARN_S = 60.0
_LAST_PORT = 65535
#: Of a job's processes on one machine beside its ranks: the scheduler, the communication service, a summation server.
METRICS_PORTS = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process. Sizes are bytes, times are seconds; docs/reference/variables.md has each field.

    Raises ConfigurationError if a value is not valid, or if two values contradict each other. The message says why.

    >>> settings = Settings.from_env({"DMLC_NUM_WORKER": "2", "DMLC_WORKER_ID": "1"})
    >>> settings.num_workers, settings.worker_id, settings.stall_limit_s
    (2, 1, 600.0)
    """

    role: str = "worker"
    scheduler_host: str = ""
    scheduler_port: int = 0
    num_workers: int = 1
    num_servers: int = 0
    worker_id: int = 0
    local_size: int = 1
    local_rank: int = 0
    machine_id: str = ""
    node_host: str = ""
    interface: str = ""
    interfaces: str = ""
    job_id: str = ""
    socket_name: str = ""
    secret: str = field(default="", repr=False)
    secret_file: str = ""
    local_secret: str = field(default="", repr=False)
    encrypt: bool = False
    enable_rdma: str = "0"
    rdma_transports: str = ""
    placement: str = "optimal"
    link_mbit: float = 0.0
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    fusion_bytes: int = 1 << 20
    min_compress_bytes: int = 1 << 16
    direct_connections: bool = True
    connections_per_link: int = 0
    congestion_control: str = "bbr"
    nonfinite: str = "allow"
    enable_async: bool = False
    async_staleness: int = 0
    record_arrivals: str = ""
    replay_arrivals: str = ""
    shadow: bool = False
    shadow_copies: int = 1
    hosted_states: str = "auto"
    server_threads: int = 0
    worker_threads: int = 0
    numa_on: bool = False
    local_sum: str = "host"
    force_distributed: bool = False
    start_timeout_s: float = 60.0
    stall_warn_s: float = _STALL_WARN_S
    stall_limit_s: float = 600.0
    straggler: float = 5.0
    rebalance_links: bool = True
    heartbeat_interval_s: float = 0.2
    heartbeat_timeout_s: float = 1.0
    heartbeat_timeout_max_s: float | None = None
    journal_dir: str = ""
    shadow_keep_s: float = 600.0
    shadow_dir: str = ""
    shadow_every_s: float = 600.0
    elastic: bool = False
    min_ranks: int = 1
    max_ranks: int = 0
    elastic_timeout_s: float = 600.0
    reset_limit: int = 0
    max_restarts: int = 0
    report: str = ""
    log_dir: str = ""
    metrics_port: int = 0
    pool: str = ""
    timeline: str = ""
    timeline_mark_cycles: bool = False
    trace_on: bool = False
    trace_dir: str = "."
    trace_start_step: int = 10
    trace_end_step: int = 20
    log_format: str = "text"
    flight_recorder_size: int = 8192
    flight_recorder_dir: str = ""
    log_level: str = "WARNING"

    def __post_init__(self) -> None:
        for variable in VARIABLES:
            if why := variables.refusal(variable.field, variable.names[0], getattr(self, variable.field)):
                raise ConfigurationError(why)
        for name in ("scheduler_host", "node_host"):  # [FD00::1] and fd00::1 are one host, and so name one job
            object.__setattr__(self, name, bare_host(getattr(self, name)))
        if self.local_rank >= self.local_size:
            raise ConfigurationError(
                f"BYTEPS_LOCAL_RANK={self.local_rank} must be below BYTEPS_LOCAL_SIZE={self.local_size}"
            )
        if self.worker_id >= self.num_workers and not self.elastic:
            raise ConfigurationError(
                f"DMLC_WORKER_ID={self.worker_id} must be below DMLC_NUM_WORKER={self.num_workers}"
            )
        if self.max_restarts and not self.elastic:
            raise ConfigurationError(
                "BYTEPS_MAX_RESTARTS needs bpslaunch, which starts processes again: bpslaunch --max-restarts"
            )
        if self.max_restarts and (self.min_ranks > 1 or self.max_ranks):
            raise ConfigurationError(
                "with BYTEPS_MAX_RESTARTS a job keeps its number of ranks: unset BYTEPS_MIN_NP and BYTEPS_MAX_NP"
            )
        if self.local_sum != "host" and self.elastic:
            raise ConfigurationError(
                f"BYTEPS_LOCAL_SUM={self.local_sum} is not for --elastic and --max-restarts: process groups of NCCL "
                "end with one of their ranks. Set BYTEPS_LOCAL_SUM=host"
            )
        if bool(self.scheduler_host) != bool(self.scheduler_port):
            given, missing = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
            if self.scheduler_port:
                given, missing = missing, given
            raise ConfigurationError(f"{given} is set but {missing} is not; a scheduler's address needs both")
        if self.placement == "servers-only" and self.num_workers > 1 and not self.num_servers:
            raise ConfigurationError(
                "BYTEPS_PLACEMENT=servers-only needs CPU machines, but DMLC_NUM_SERVER is 0: without CPU machines, the "
                "GPU machines have to sum"
            )
        if 0 < len(self.secret.encode(errors="surrogateescape")) < MIN_SECRET_BYTES:
            raise ConfigurationError(
                f"the cluster secret (BYTEPS_SECRET or BYTEPS_SECRET_FILE) has fewer than {MIN_SECRET_BYTES} bytes, so "
                f"it can be guessed; make one with: {MAKE_SECRET}"
            )
        if self.encrypt and not self.secret:
            raise ConfigurationError(
                "BYTEPS_ENCRYPT=1 needs a key: set BYTEPS_SECRET or BYTEPS_SECRET_FILE to the same value everywhere"
            )
        if self.encrypt and self.rdma:
            raise ConfigurationError(
                "DMLC_ENABLE_RDMA=1 and BYTEPS_ENCRYPT=1 exclude each other, since network cards read tensors as they "
                "are: unset one of the two"
            )
        if self.rdma_transports and not self.rdma:
            raise ConfigurationError(
                "BYTEPS_RDMA_TRANSPORTS says how RDMA is done, which is off: set DMLC_ENABLE_RDMA=1, or unset it"
            )
        if self.record_arrivals and self.replay_arrivals:
            raise ConfigurationError(
                "BYTEPS_RECORD_ARRIVALS and BYTEPS_REPLAY_ARRIVALS are for two different runs: unset one"
            )
        if (self.record_arrivals or self.replay_arrivals) and self.elastic:
            name = "BYTEPS_RECORD_ARRIVALS" if self.record_arrivals else "BYTEPS_REPLAY_ARRIVALS"
            raise ConfigurationError(
                f"{name} is not for --elastic and --max-restarts, whose ranks begin anew: unset it"
            )
        if self.partition_bytes is not None and self.partition_bytes % 4096:
            raise ConfigurationError(
                f"BYTEPS_PARTITION_BYTES={self.partition_bytes} must be a multiple of the page size, 4096"
            )
        if self.stall_limit_s and self.stall_limit_s < self.stall_warn_s:
            raise ConfigurationError(
                f"BYTEPS_STALL_LIMIT_S={self.stall_limit_s:g} must not be below "
                f"BYTEPS_STALL_WARN_S={self.stall_warn_s:g}: the error would come before the warning"
            )
        if self.max_ranks and self.max_ranks < self.min_ranks:
            raise ConfigurationError(f"BYTEPS_MAX_NP={self.max_ranks} must not be below BYTEPS_MIN_NP={self.min_ranks}")
        if self.trace_start_step > self.trace_end_step:
            raise ConfigurationError(
                f"BYTEPS_TRACE_START_STEP={self.trace_start_step} must not be above "
                f"BYTEPS_TRACE_END_STEP={self.trace_end_step}"
            )
        last_port = self.metrics_port + METRICS_PORTS + self.local_size - 1
        if self.metrics_port and last_port > _LAST_PORT:
            raise ConfigurationError(
                f"BYTEPS_METRICS_PORT={self.metrics_port} is too high: with {self.local_size} ranks on this machine "
                f"its processes use the ports up to {last_port}, and {_LAST_PORT} is the last one"
            )
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ConfigurationError(
                f"PS_HEARTBEAT_TIMEOUT={self.heartbeat_timeout_s:g} must be at least twice "
                f"PS_HEARTBEAT_INTERVAL={self.heartbeat_interval_s:g}: one late heartbeat does not mean death"
            )
        if self.heartbeat_timeout_max_s is not None and self.heartbeat_timeout_max_s < self.heartbeat_timeout_s:
            raise ConfigurationError(
                f"BYTEPS_HEARTBEAT_TIMEOUT_MAX_S={self.heartbeat_timeout_max_s:g} must not be below "
                f"PS_HEARTBEAT_TIMEOUT={self.heartbeat_timeout_s:g}: it is the longest timeout, for busy machines"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings that ``environ`` has (default: the process's environment).

        An empty variable counts as unset. Raises ConfigurationError that names the variable which is not valid.
        """
        environ = os.environ if environ is None else environ
        environ = {**launchers.facts(environ), **{name: text for name, text in environ.items() if text}}
        values: dict[str, object] = {}
        for variable in VARIABLES:
            found = next(((n, environ[n]) for n in variable.names if n in environ), None)
            if found is not None:
                values[variable.field] = variable.parse(*found)
        if values.get("secret_file") and not values.get("secret"):
            values["secret"] = secret_files.read_secret(str(values["secret_file"]))
        if not (values.get("secret") or values.get("local_secret")) and _needs_secret(values):
            values["secret"] = _derived_secret(environ)
        limit_s = values.get("stall_limit_s")
        if isinstance(limit_s, float) and 0 < limit_s < _STALL_WARN_S:  # a short limit alone is no contradiction
            values.setdefault("stall_warn_s", max(0.1, limit_s / 2))
        return cls(**values)  # type: ignore[arg-type]

    @property
    def rdma(self) -> bool:
        """Partitions travel between machines by RDMA."""
        return self.enable_rdma != "0"

    @property
    def is_alone(self) -> bool:
        """True for one rank without servers, which starts no service and sends nothing."""
        ranks = self.num_workers * self.local_size
        return ranks == 1 and self.num_servers == 0 and not self.force_distributed and not self.elastic

    @property
    def gpu_machines_sum(self) -> bool:
        """True if each GPU machine runs a summation service. It sums the machine's share; where k ≥ n that is nothing,
        and it stands by to take over when CPU machines leave."""
        has_network = self.num_workers > 1 or (self.elastic and bool(self.scheduler_host))  # machines may join later
        return has_network and self.placement == "optimal"

    @property
    def patience_s(self) -> float:
        """The time that a process may be silent if it is probably slow rather than dead. That holds for a process whose
        heartbeats have been late, for one whose machine is alive, and for one that only the scheduler may declare dead
        sooner."""
        return self.heartbeat_timeout_max_s or SLOW_FACTOR * self.heartbeat_timeout_s

    @property
    def control_pace(self) -> float:
        """By what heartbeats are less often than ``heartbeat_interval_s`` says, because the job is large."""
        return control_pace(self.num_workers, self.num_servers)

    @property
    def max_partition_bytes(self) -> int:
        """The size in bytes that no partition of the job exceeds."""
        return self.partition_bytes or MAX_PARTITION_BYTES

    @property
    def scheduler_address(self) -> str:
        """``host:port``; empty on a single machine without a scheduler."""
        return joined(self.scheduler_host, self.scheduler_port) if self.scheduler_host else ""

    @property
    def job(self) -> str:
        """A name that tells two jobs on one machine apart: the job id, else the scheduler's address, else the parent
        process."""
        return self.job_id or self.scheduler_address or f"pid-{os.getppid()}"

    def describe(self) -> str:
        """All settings, one per line, without the secrets."""
        names = [f.name for f in fields(self) if f.name not in ("secret", "local_secret")]
        lines = [f"{name} = {getattr(self, name)!r}" for name in names]
        return "\n".join([*lines, f"secret = {'(set)' if self.secret else '(none)'}"])


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """Sentences about variables that are set but have no effect: BytePS's, and unknown ones, with the name that was
    perhaps meant. Each machine logs them once per job.

    >>> ignored_variables({"DMLC_NUM_WORKERS": "2", "HOME": "/"})
    ['DMLC_NUM_WORKERS has no effect: no such variable is known; did you mean DMLC_NUM_WORKER?']
    """
    known = {name for variable in VARIABLES for name in variable.names}
    # 0 asks for the behaviour that this package always has.
    asked_for = [name for name in IGNORED if environ.get(name, "0").strip() not in ("", "0")]
    sentences = [f"{name} has no effect: {IGNORED[name]}" for name in asked_for]
    for name in (name for name, text in environ.items() if text.strip()):
        if name.startswith(("BYTEPS_", "DMLC_")) and name not in known | IGNORED.keys() | INTERNAL:
            near = _nearest(name, known)
            hint = f"; did you mean {near}?" if near else " (`bps env` lists them all)"
            sentences.append(f"{shown(name)} has no effect: no such variable is known{hint}")
    return sentences


def _nearest(name: str, known: Collection[str]) -> str:
    """The name that was perhaps meant, or "": one that differs only in its prefix, else a similar one."""
    stem = name.partition("_")[2]
    same = [each for each in sorted(known) if each.partition("_")[2] == stem]
    return next(iter(same or difflib.get_close_matches(name, sorted(known), 1, _ALIKE)), "")


def _needs_secret(values: Mapping[str, object]) -> bool:
    """True for a job of several machines, and for whoever asks one."""
    return values.get("num_workers", 1) != 1 or any(values.get(name) for name in ("num_servers", "scheduler_host"))


def _derived_secret(environ: Mapping[str, str]) -> str:
    """The secret of a job of SLURM's; empty elsewhere, or if nothing says where this user's files are."""
    name, path = secret_name(environ), secret_files.user_secret_path(environ)
    return secret_files.job_secret(secret_files.user_secret(path), name) if name and path else ""
