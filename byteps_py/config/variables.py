"""The table of environment variables: names, type, range, meaning. `bps env` prints it.

``VALIDATORS`` checks the values that a setting may have, beyond its type: names of hosts and sockets, paths, sizes. It
must not ask the system: whether a host exists or a file can be written
is found out where it is used. Pure; any thread.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from byteps_py.config.addresses import place_of
from byteps_py.errors import ConfigurationError
from byteps_py.wording import shown

#: An abstract address is a null byte and the name, in 108 bytes (``sun_path``).
MAX_SOCKET_NAME_BYTES = 107

_MAX_HOST = 253
_MAX_INTERFACE_BYTES = 15  # IFNAMSIZ without its null byte
_MAX_IDENTIFIER = 2000  # a job's name may consist of several names of a launcher
_MAX_PATH_BYTES = 4095  # PATH_MAX without its null byte
_MAX_PART_BYTES = 255  # NAME_MAX
#: The limit of connections between two ranks.
MOST_CONNECTIONS = 32
#: The limit of interfaces of a machine that carry tensors at the same time.
MOST_RAILS = 8
_MAX_COUNT = 1 << 62  # fits in 64 bits, and in a float

#: Python encodes a host's name as IDNA, which raises UnicodeError for empty labels and for those above 63.
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_ADDRESS_V6 = re.compile(r"(\[)?([0-9A-Fa-f:.]+)(?:%(?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_-])){1,15})?(?(1)\])")


@dataclass(frozen=True, slots=True)
class Validator:
    """``takes``: the allowed values, in words. ``allows``: whether a value that is set is allowed."""

    takes: str
    allows: Callable[[Any], bool]


def is_host(text: str) -> bool:
    """True for the name of a host and for an IPv4 or IPv6 address. A resolver can't know anything else.

    >>> [is_host(text) for text in ("db_1.example", "10.0.0.1", "fe80::1%eth0", "[::1]", "../x", "http://x", "-x")]
    [True, True, True, True, False, False, False]
    """
    if len(text) > _MAX_HOST:
        return False
    if _NAME.fullmatch(text):
        return True
    address = _ADDRESS_V6.fullmatch(text)
    if address is None:
        return False
    try:
        ipaddress.IPv6Address(address[2])
    except ValueError:
        return False
    return True


def _is_address(text: str) -> bool:
    try:
        host, _ = place_of(text)
    except ValueError:
        return False
    return is_host(host)


def _is_interface(text: str) -> bool:
    """The kernel's rule."""
    return (
        _size(text) <= _MAX_INTERFACE_BYTES
        and text.isprintable()
        and text not in (".", "..")
        and not any(letter in "/" or letter.isspace() for letter in text)
    )


def _are_transports(text: str) -> bool:
    return re.fullmatch(r"[a-z0-9_]+(,[a-z0-9_]+)*", text) is not None


def _are_interfaces(text: str) -> bool:
    entries = [entry.strip() for entry in text.removeprefix("^").removeprefix("=").split(",")]
    return len(entries) <= MOST_RAILS and all(entry and (is_host(entry) or _is_interface(entry)) for entry in entries)


def _is_socket_name(text: str) -> bool:
    return _size(text) <= MAX_SOCKET_NAME_BYTES and text.isprintable()


def _is_identifier(text: str) -> bool:
    return len(text) <= _MAX_IDENTIFIER and text.isprintable()


def _is_path(text: str) -> bool:
    """True if the kernel would look the path up."""
    parts = text.split("/")
    return "\0" not in text and _size(text) <= _MAX_PATH_BYTES and max(map(_size, parts)) <= _MAX_PART_BYTES


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


_HOST = Validator("the name of a host (letters, digits, '-', '_' and '.', at most 253) or its IP address", is_host)
_IDENTIFIER = Validator(f"printable characters, at most {_MAX_IDENTIFIER}", _is_identifier)
_PATH = Validator(f"a path of at most {_MAX_PATH_BYTES} bytes, {_MAX_PART_BYTES} in each of its parts", _is_path)
_COUNT = Validator("a whole number from 0 to 2^62 - 1", lambda number: number < _MAX_COUNT)

#: The validators of fields of Settings. Secrets may be any text; VARIABLES has the range or the choices of fields that
#: are not here.
VALIDATORS: dict[str, Validator] = {
    "scheduler_host": Validator(f"{_HOST.takes}; so do MASTER_ADDR and --scheduler", is_host),
    "node_host": _HOST,
    "interface": Validator(
        f"the name of a network interface: at most {_MAX_INTERFACE_BYTES} bytes, no space, no '/'", _is_interface
    ),
    "interfaces": Validator(
        f"1 to {MOST_RAILS} names of network interfaces, first letters of these, or addresses, with commas in between; '=' "
        "before them: whole names only; '^': all others",
        _are_interfaces,
    ),
    "rdma_transports": Validator("names of transports of UCX, with commas in between", _are_transports),
    "machine_id": _IDENTIFIER,
    "job_id": Validator(f"{_IDENTIFIER.takes}; so does a launcher's name for the job", _is_identifier),
    "socket_name": Validator(f"printable characters, at most {MAX_SOCKET_NAME_BYTES} bytes", _is_socket_name),
    "pool": Validator("HOST:PORT, with […] around an address of IPv6", _is_address),
    "secret_file": _PATH,
    "journal_dir": _PATH,
    "report": _PATH,
    "log_dir": _PATH,
    "shadow_dir": _PATH,
    "timeline": _PATH,
    "trace_dir": _PATH,
    "flight_recorder_dir": _PATH,
    "credit_bytes": _COUNT,
    "fusion_bytes": _COUNT,
    "min_compress_bytes": _COUNT,
    "trace_start_step": _COUNT,
    "trace_end_step": _COUNT,
}


def refusal(field: str, name: str, value: object) -> str:
    """Why ``value`` is not allowed for ``field``, which the variable ``name`` sets; empty if it is allowed."""
    validator = VALIDATORS.get(field)
    if validator is None or value in ("", None) or validator.allows(value):
        return ""
    text = f"'{shown(value)}'" if isinstance(value, str) else shown(str(value))
    return f"{name}={text} is not valid: it takes {validator.takes}"


_FAR = float(1 << 31)  # prevents overflows; not shown as a limit

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting.

    Attributes:
        field: the field of Settings.
        names: the variables; the first that is set is used.
        kind: the type of the value.
        meaning: the effect of the setting, in a few words.
        low: least value; None without a limit.
        high: largest value; None without a limit.
        choices: the allowed values, if they are a list.
        detail: sentences that do not fit in the table.
    """

    field: str
    names: tuple[str, ...]
    kind: type
    meaning: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    detail: str = ""

    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "0 or 1"
        if self.field in VALIDATORS:
            return VALIDATORS[self.field].takes
        if self.kind is str:
            return "any text in UTF-8"
        noun = "a whole number" if self.kind is int else "a number"
        if self.high is not None and self.high < _FAR:
            return f"{noun} from {self.low:.15g} to {self.high:.15g}"
        return f"{noun} of at least {self.low:.15g}" if self.low is not None else noun

    def parse(self, name: str, text: str) -> object:
        """The value that ``text`` stands for.

        Raises ConfigurationError that names the variable ``name`` and the allowed values.
        """
        is_hidden = self.field in ("secret", "local_secret")
        shown = "(hidden)" if is_hidden else repr(text if len(text) <= 200 else text[:200] + "…")
        error = ConfigurationError(f"{name}={shown} is not valid: it takes {self.allowed()}")
        try:
            text.encode()
        except UnicodeEncodeError:  # the variable's bytes are not valid UTF-8
            raise error from None
        text = text.strip()
        value: object = text
        if self.kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise error
            return text.lower() in _TRUE
        if self.kind in (int, float):
            try:
                value = self.kind(text)
            except ValueError:
                raise error from None
            number = float(text)
            if not (self.low is None or number >= self.low) or not (self.high is None or number <= self.high):
                raise error
        if self.choices:
            matches = [c for c in self.choices if c.lower() == text.lower()]
            if not matches:
                raise error
            value = matches[0]
        return value


VARIABLES: tuple[Variable, ...] = (
    Variable("role", ("DMLC_ROLE",), str, "what this process is", choices=("worker", "server", "scheduler", "joint")),
    Variable("scheduler_host", ("DMLC_PS_ROOT_URI",), str, "host of the scheduler"),
    Variable("scheduler_port", ("DMLC_PS_ROOT_PORT",), int, "port of the scheduler", low=1, high=65535),
    Variable("num_workers", ("DMLC_NUM_WORKER",), int, "number of GPU machines, n; default: what the launcher says, or 1", low=1, high=65535),
    Variable("num_servers", ("DMLC_NUM_SERVER",), int, "number of CPU machines, k", low=0, high=65535),
    Variable("worker_id", ("DMLC_WORKER_ID",), int, "index of this GPU machine, from 0; default: what the launcher says, or 0", low=0, high=65534),
    Variable("local_size", ("BYTEPS_LOCAL_SIZE",), int, "number of ranks on this machine; default: what the launcher says, or 1", low=1, high=1024),
    Variable("local_rank", ("BYTEPS_LOCAL_RANK",), int, "index of this rank on its machine; default: what the launcher says, or 0", low=0, high=1023),
    Variable("machine_id", ("BYTEPS_MACHINE_ID",), str, "name of this machine, the same in all its processes; default: boot id and network namespace"),
    Variable("node_host", ("DMLC_NODE_HOST",), str, "address this process offers to others"),
    Variable("interface", ("DMLC_INTERFACE",), str, "network interface whose address this process offers"),
    Variable("interfaces", ("BYTEPS_INTERFACES",), str, "network interfaces that carry tensors between machines, at the same time: names, the first letters of names, or addresses, with commas; the address of the first is the one this process offers", detail="See [several network cards](../howto/several-machines.md#several-network-cards)."),
    Variable("job_id", ("BYTEPS_JOB_ID",), str, "name of the job, which tells jobs on one machine apart; default: the scheduler's address"),
    Variable("socket_name", ("BYTEPS_SOCKET_NAME",), str, "local socket of this machine's communication service; set by bpslaunch"),
    Variable("secret", ("BYTEPS_SECRET",), str, "cluster secret, at least 16 bytes; required to listen beyond loopback"),
    Variable("secret_file", ("BYTEPS_SECRET_FILE",), str, "file that holds the cluster secret"),
    Variable("local_secret", ("BYTEPS_LOCAL_SECRET",), str, "secret of a job on loopback, against other users of this machine; set by bpslaunch -np"),
    Variable("encrypt", ("BYTEPS_ENCRYPT",), bool, "encrypt tensors between machines, which are otherwise only authenticated; needs a cluster secret"),
    Variable("enable_rdma", ("DMLC_ENABLE_RDMA",), str, "large payloads travel between machines by RDMA: those of communication services, summation servers and ranks; 1 and ibverbs are the same", choices=("0", "1", "ibverbs"), detail="See [RDMA](../howto/several-machines.md#rdma)."),
    Variable("rdma_transports", ("BYTEPS_RDMA_TRANSPORTS",), str, "transports of UCX that may stand in for RDMA, for tests, as in tcp,sm; default: none, only those of RDMA cards"),
    Variable("partition_bytes", ("BYTEPS_PARTITION_BYTES",), int, "largest piece of a tensor that is sent at once; default: what the slowest link carries in a few ms", low=4096, high=1 << 30),
    Variable("link_mbit", ("BYTEPS_LINK_MBIT",), float, "rate of this machine's network link in each direction, Mbit/s; 0: measured when the cluster starts", low=0, high=_FAR),
    Variable("placement", ("BYTEPS_PLACEMENT",), str, "which machines sum: all, each its optimal share, or only CPU machines (the classical parameter server)", choices=("optimal", "servers-only")),
    Variable("credit_bytes", ("BYTEPS_SCHEDULING_CREDIT",), int, "limit of the bytes that a machine has in flight; 0: no limit; default: 3 or 4 partitions per GPU machine", low=0),
    Variable("fusion_bytes", ("BYTEPS_FUSION_BYTES",), int, "gradients smaller than this are sent together, in buckets of up to this size; 0: never", low=0),
    Variable("min_compress_bytes", ("BYTEPS_MIN_COMPRESS_BYTES",), int, "tensors and buckets of gradients that are smaller travel without a codec", low=0, detail="Set it to the same value on all ranks. See [compression](../explanation/compression.md)."),
    Variable("direct_connections", ("BYTEPS_DIRECT_CONNECTIONS",), bool, "connect the ranks of different machines in pairs, for messages and small collectives of process groups", detail="If it is off on one rank, these go through the communication service on all."),
    Variable("connections_per_link", ("BYTEPS_CONNECTIONS_PER_LINK",), int, "connections between two ranks of different machines; 0: one, and up to 8 where the round trip takes longer than 5 ms", low=0, high=MOST_CONNECTIONS, detail="Of two ranks, the one with the greater number decides. See [long links](../howto/unequal-links.md#long-links)."),
    Variable("congestion_control", ("BYTEPS_CONGESTION_CONTROL",), str, "how TCP controls congestion on connections whose round trip takes longer than 5 ms: by BBR, if the system has and permits it, or as the system does", choices=("bbr", "system"), detail="See [long links](../howto/unequal-links.md#long-links)."),
    Variable("shadow", ("BYTEPS_SHADOW",), bool, "summation servers keep the states of DistributedOptimizer in step, so that bps.restore() goes on from the last step", detail="as shadow=True does."),
    Variable("shadow_copies", ("BYTEPS_SHADOW_COPIES",), int, "copies that machines keep of shadowed states; with 2, a step can be restored also while a lost server's copies are made again", low=1, high=8, detail="On further CPU machines; if there are not as many, on GPU machines. Set it on the GPU machines. See [when a server dies](../howto/shadow.md#when-a-server-dies)."),
    Variable("hosted_states", ("BYTEPS_HOSTED_STATES",), str, "where the states of an optimizer with hosted=True are: all on each machine, or a part with each rank; auto chooses", choices=("auto", "machine", "sharded"), detail="hosted=\"machine\" and hosted=\"sharded\" say it for one optimizer. See [sharded states](../howto/sharding.md#the-hosted-optimizer)."),
    Variable("nonfinite", ("BYTEPS_NONFINITE",), str, "what to do if gradients are NaN or infinite", choices=("allow", "raise", "skip"), detail="allow does nothing, as a GradScaler (AMP) expects; raise raises NonFiniteError on every rank, which names ranks and parameters; skip skips the step on every rank."),
    Variable("enable_async", ("BYTEPS_ENABLE_ASYNC",), bool, "machines step by themselves: DistributedOptimizer is an AsyncOptimizer", detail="Set it on all ranks. See [asynchronous training](../howto/async-training.md)."),
    Variable("async_staleness", ("BYTEPS_ASYNC_STALENESS",), int, "with BYTEPS_ENABLE_ASYNC: by how many steps a machine may be ahead of the slowest one; 0: no machine waits for another one", low=0, high=65535, detail="Set it to the same value on all ranks."),
    Variable("record_arrivals", ("BYTEPS_RECORD_ARRIVALS",), str, "folder in which each machine logs the order in which changes of asynchronous training were added, for `bps replay`; none: no log"),
    Variable("replay_arrivals", ("BYTEPS_REPLAY_ARRIVALS",), str, "folder with the logs of all machines of an asynchronous run that is to be repeated; `bps replay` sets it"),
    Variable("server_threads", ("BYTEPS_SERVER_ENGINE_THREAD",), int, "summing threads of a summation service; 0: one per core, at most 4", low=0, high=256),
    Variable("worker_threads", ("BYTEPS_WORKER_ENGINE_THREAD",), int, "summing threads of a communication service; 0: one per core, at most 4", low=0, high=256),
    Variable("numa_on", ("BYTEPS_NUMA_ON",), bool, "where a machine has several NUMA nodes, keep each rank on the CPUs of its GPU's node, and the services on those of the network card's", detail="`bps topology` shows who gets which. See [NUMA nodes](../howto/topology.md#numa-nodes)."),
    Variable("local_sum", ("BYTEPS_LOCAL_SUM",), str, "whether GPUs of a machine sum among themselves before the services do, as `bps topology` says: not at all, only where sums keep their bits, or always", choices=("host", "exact", "auto"), detail="For sums of torch.distributed and gradients of DistributedOptimizer, of 256 KB and more, on CUDA. Set it on all ranks. See [sums between GPUs](../howto/topology.md#sums-between-gpus)."),
    Variable("force_distributed", ("BYTEPS_FORCE_DISTRIBUTED",), bool, "use the services even for a single rank"),
    Variable("start_timeout_s", ("BYTEPS_START_TIMEOUT_S",), float, "how long to wait for the other processes of the cluster at the start", low=0.1, high=_FAR),
    Variable("stall_warn_s", ("BYTEPS_STALL_WARN_S",), float, "log a warning about ranks for which others have waited this long; half of a shorter BYTEPS_STALL_LIMIT_S", low=0.1, high=_FAR),
    Variable("stall_limit_s", ("BYTEPS_STALL_LIMIT_S",), float, "raise an error after waiting this long for other ranks; 0: never", low=0, high=_FAR),
    Variable("straggler", ("BYTEPS_STRAGGLER",), float, "log a warning about a rank or a summation service that takes this many times as long as the others", low=1.5, high=_FAR),
    Variable("rebalance_links", ("BYTEPS_REBALANCE_LINKS",), bool, "the shares of summation servers follow the rates of links that change while the job trains"),
    Variable("heartbeat_interval_s", ("PS_HEARTBEAT_INTERVAL",), float, "seconds between heartbeats", low=0.01, high=3600, detail="In jobs of more than 500 members (GPU machines count twice), as many times longer. See [scale](../explanation/scale.md#heartbeats-of-large-jobs)."),
    Variable("heartbeat_timeout_s", ("PS_HEARTBEAT_TIMEOUT",), float, "seconds of silence after which a process counts as dead", low=0.1, high=_FAR, detail="A process whose heartbeats have been late, as on a busy machine, or that has a link of less than 10 Mbit/s, has more time, up to BYTEPS_HEARTBEAT_TIMEOUT_MAX_S."),
    Variable("heartbeat_timeout_max_s", ("BYTEPS_HEARTBEAT_TIMEOUT_MAX_S",), float, "the longest silence that does not count as death; default: ten times PS_HEARTBEAT_TIMEOUT", low=0.1, high=_FAR, detail="It applies to a process whose heartbeats have been late, to a worker on a machine from which another process is still heard, and to a machine whose processes are starting."),
    Variable("journal_dir", ("BYTEPS_JOURNAL_DIR",), str, "folder of the scheduler's journal, with which a killed scheduler can be started again; none: no journal", detail="The default is $XDG_STATE_HOME/byteps or ~/.local/state/byteps, or else a folder of the user in the temporary folder."),
    Variable("shadow_keep_s", ("BYTEPS_SHADOW_KEEP_S",), float, "how long a CPU machine's server keeps shadowed states after its job has failed, for a restarted job; 0: not at all", low=0, high=_FAR),
    Variable("shadow_dir", ("BYTEPS_SHADOW_DIR",), str, "folder to which one of the CPU machines writes checkpoints of what servers keep with shadow=True; none is written without it", detail="Set it on the CPU machines, which need PyTorch for it. See [checkpoints from the servers](../howto/shadow-checkpoints.md)."),
    Variable("shadow_every_s", ("BYTEPS_SHADOW_EVERY_S",), float, "seconds from one checkpoint in BYTEPS_SHADOW_DIR to the next", low=1, high=_FAR),
    Variable("elastic", ("BYTEPS_ELASTIC", "HOROVOD_ELASTIC"), bool, "the job goes on when ranks or machines are lost, leave or join (elastic.run); otherwise a loss ends it"),
    Variable("min_ranks", ("BYTEPS_MIN_NP",), int, "elastic: with fewer ranks than this, the job waits for others to join", low=1, high=1 << 20),
    Variable("max_ranks", ("BYTEPS_MAX_NP",), int, "elastic: the most ranks of a job; a machine whose ranks would exceed this waits; 0: no limit", low=0, high=1 << 20),
    Variable("elastic_timeout_s", ("BYTEPS_ELASTIC_TIMEOUT_S", "HOROVOD_ELASTIC_TIMEOUT"), float, "elastic: how long ranks wait to form a group again, for each other and until there are BYTEPS_MIN_NP", low=0.1, high=_FAR),
    Variable("max_restarts", ("BYTEPS_MAX_RESTARTS",), int, "how often bpslaunch starts each rank and communication service again that has failed; the others wait for it, and training goes on from the step under way (shadow=True)", low=0, high=1 << 20),
    Variable("reset_limit", ("BYTEPS_RESET_LIMIT",), int, "elastic: how often the group may be formed again before the job ends with an error; 0: no limit", low=0, high=1 << 20),
    Variable("report", ("BYTEPS_REPORT",), str, "file to which the scheduler writes, at the end, what each service carried (JSON)"),
    Variable("log_dir", ("BYTEPS_LOG_DIR",), str, "folder in which bpslaunch also writes what each process prints, for `bps logs`", detail="Several launchers may share it: below it, each role of DMLC_ROLE has a folder of its own. bpslaunch --log-dir sets it."),
    Variable("metrics_port", ("BYTEPS_METRICS_PORT",), int, "first of the ports on which a job's processes serve their metrics to Prometheus; 0: none", low=0, high=65535, detail="The scheduler has this port, a machine's communication service the next one, its summation server the one after that, and its ranks those that follow. See [watch a job](../howto/watch.md)."),
    Variable("pool", ("BYTEPS_POOL",), str, "address (HOST:PORT) of a pool whose lenders give this job CPU machines (`bps pool`, `bps lend`)", detail="bpslaunch --pool sets it."),
    Variable("timeline", ("HOROVOD_TIMELINE",), str, "file for a timeline of rank 0, a Chrome trace; rank N appends .rankN; DYNAMIC: when start_timeline() is called"),
    Variable("timeline_mark_cycles", ("HOROVOD_TIMELINE_MARK_CYCLES",), bool, "mark the times at which a tensor is sent while no other is in flight"),
    Variable("trace_on", ("BYTEPS_TRACE_ON",), bool, "write <BYTEPS_TRACE_DIR>/trace.json, what all processes of the job did in some steps, and a timeline of each rank to <BYTEPS_TRACE_DIR>/<rank>/comm.json"),
    Variable("trace_dir", ("BYTEPS_TRACE_DIR",), str, "folder for the files of BYTEPS_TRACE_ON"),
    Variable("trace_start_step", ("BYTEPS_TRACE_START_STEP",), int, "the first step in the trace of BYTEPS_TRACE_ON, and the first round in its timelines", low=0),
    Variable("trace_end_step", ("BYTEPS_TRACE_END_STEP",), int, "the last step in the trace of BYTEPS_TRACE_ON, and the last round in its timelines", low=0),
    Variable("log_format", ("BYTEPS_LOG_FORMAT",), str, "how log lines look: text, or json with one JSON object a line", choices=("text", "json"), detail="json: also the log of ranks is written to stderr. See [structured logs](../howto/watch.md#structured-logs)."),
    Variable("flight_recorder_size", ("BYTEPS_FLIGHT_RECORDER_SIZE",), int, "how many of its latest operations each rank keeps in memory, for `bps dump`; 0: none", low=0, high=1 << 20),
    Variable("flight_recorder_dir", ("BYTEPS_FLIGHT_RECORDER_DIR",), str, "folder for what the flight recorders write at an error, and on SIGUSR1", detail="Below it, each job has a folder of its own. The default is $XDG_STATE_HOME/byteps/flight-recorder or ~/.local/state/byteps/flight-recorder, which keeps those of the last 20 jobs."),
    Variable("log_level", ("BYTEPS_LOG_LEVEL",), str, "the least severe messages that are logged", choices=("DEBUG", "INFO", "WARNING", "ERROR", "FATAL", "TRACE")),
)  # fmt: skip

_CORES = "set the cores with OMP_NUM_THREADS and the system's tools (taskset, numactl)"
_NCCL = "NCCL is not used"

#: BytePS's variables that have no effect here, and why.
IGNORED: dict[str, str] = {
    "BYTEPS_ENABLE_MIXED_MODE": "servers on CPU and GPU machines are always used together",
    "BYTEPS_MIXED_MODE_BOUND": "servers on CPU and GPU machines are always used together",
    "BYTEPS_SERVER_ENABLE_SCHEDULE": "servers always sum complete rounds first",
    "BYTEPS_ENABLE_IPC": "processes of one machine always use shared memory",
    "BYTEPS_SOCKET_PATH": "local sockets have no files",
    "BYTEPS_KEY_HASH_FN": "placement has one hash function, the same on every machine",
    "BYTEPS_BUILT_IN_HASH_COEF": "placement has one hash function, the same on every machine",
    "BYTEPS_PCIE_SWITCH_SIZE": "GPUs do not sum among themselves; `bps topology` shows what they share",
    "BYTEPS_REDUCE_ROOTS": "GPUs do not sum among themselves; `bps topology` shows what they share",
    "BYTEPS_NCCL_NUM_RINGS": _NCCL,
    "BYTEPS_NCCL_GROUP_SIZE": _NCCL,
    "BYTEPS_NUMA_DEFAULT_QUOTA": _CORES,
    "BYTEPS_NUMA_ROOT_QUOTA": _CORES,
    "BYTEPS_CPU_BLACKLIST": _CORES,
    "BYTEPS_VISIBLE_CPU_CORES": _CORES,
    "BYTEPS_MULTITHREADED_CPU": _CORES,
    "BYTEPS_OMP_THREAD_PER_GPU": "BYTEPS_WORKER_ENGINE_THREAD says how many threads sum",
    "BYTEPS_THREADPOOL_SIZE": "BYTEPS_WORKER_ENGINE_THREAD says how many threads sum",
    "BYTEPS_GLOBAL_RANK": "ranks are numbered machine by machine",
    "BYTEPS_ENABLE_GDB": "run the training command under a debugger",
    "BYTEPS_DEBUG_SAMPLE_TENSOR": "tensors are never printed",
    "BYTEPS_TELEMETRY_ON": "get_pushpull_speed() always works",
    "BYTEPS_LOG_HIDE_TIME": "log lines always have their time",
    "PS_VERBOSE": "use BYTEPS_LOG_LEVEL",
}

#: Set by this package's programs for each other.
INTERNAL = frozenset({
    "BYTEPS_LAUNCH_COMMAND", "BYTEPS_LAUNCH_RANK_COUNTS", "BYTEPS_LAUNCH_TOKEN", "BYTEPS_LAUNCH_WORDS",
    "BYTEPS_TAG_OUTPUT",
})  # fmt: skip
