"""The command line of ``bpslaunch``. Pure; any thread."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from byteps_py import __version__
from byteps_py.config import launchers
from byteps_py.config.variables import VARIABLES, Variable
from byteps_py.errors import ConfigurationError
from byteps_py.launch.hosts import HostOptions, parse_hostfile, parse_hosts
from byteps_py.launch.installation import describe_build
from byteps_py.launch.supervisor import Supervision

_TAG_VARIABLE = "BYTEPS_TAG_OUTPUT"
_LOG_VARIABLE = "BYTEPS_LOG_DIR"
_HOST_GRACE_S = 5.0
_WITH_HOSTS = (
    "--server-hosts",
    "--spare-hosts",
    "--exports",
    "--ssh-options",
    "--ssh-port",
    "--ssh-identity-file",
    "--remote-python",
)

_DESCRIPTION = """\
Start the processes of a training job on this machine, watch them, and end them together.

With DMLC_ROLE set, it starts what this machine runs in that role:
  worker     the communication service, this machine's share of summation (when DMLC_NUM_SERVER is below
             DMLC_NUM_WORKER), and BYTEPS_LOCAL_SIZE ranks of CMD (default: one per visible GPU, else one)
  joint      a worker; with DMLC_NUM_SERVER at least DMLC_NUM_WORKER also one of these servers
  server     a summation service for a CPU machine; CMD is not needed
  scheduler  the scheduler; CMD is not needed
With -np, it starts a whole cluster on this machine, over loopback, each emulated machine with processes of its own.
With -H or --hostfile, it starts a whole cluster on these hosts, over ssh.
"""

_EPILOG = """\
examples:
  bpslaunch -np 2 python train.py                               two ranks on this machine
  bpslaunch -np 2 --machines 2 --servers 1 python train.py      2 GPU machines with 2 ranks each, 1 CPU machine
  DMLC_ROLE=worker DMLC_WORKER_ID=0 DMLC_NUM_WORKER=2 DMLC_NUM_SERVER=1 \\
    DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=9000 bpslaunch python train.py
                                                                this machine's part of a cluster
  bpslaunch -H gpu1:4,gpu2:4 --server-hosts cpu1 python train.py
                                                                4 ranks on each of two hosts; a third one sums

Ranks find BYTEPS_LOCAL_RANK and BYTEPS_LOCAL_SIZE in their environment, with -np also HOROVOD_RANK, HOROVOD_SIZE and
what else horovodrun sets, and OMP_NUM_THREADS = cores / ranks on this host unless it is set already. For
torch.distributed they find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. On several
machines the last two are the scheduler's address and the port before its own: set them where the scheduler does not
run on the machine of DMLC_WORKER_ID=0. Only the first rank reads this terminal's input. When CMD's name is python and
no such program is found, the Python that runs bpslaunch is used.

The lines of several ranks have prefixes ([0], [1], ...). When a job fails, the error of the first rank that failed
comes last, once; errors of other ranks that follow from it are left out (--output-filename keeps them).

exit code: that of the first rank that failed (128 + signal number if a signal killed it); 2 when the configuration
is unusable; 126 or 127 when CMD can't be run or found. When a rank fails, the others have 15 s to end with an error
that says what they miss; then they get SIGTERM and, after the grace period, SIGKILL. In an elastic job a rank that
fails stops no other, and the exit code is 0 if one ends well.
SIGINT, SIGTERM and SIGHUP are passed on to the ranks and end the job (SIGTERM to a part of an elastic job: its ranks
leave at their next commit); a second Ctrl-C kills it. SIGUSR1 and SIGUSR2 are passed on. Whatever the ranks have
started ends with the job.
"""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The parsed command line. ``ranks``: 0 if DMLC_ROLE or ``hosts`` selects the processes; ``variables``: to set in
    every process; ``host_arguments``: of the launcher on each of ``hosts``; ``starts_scheduler``: this machine of a
    batch system's job runs the scheduler, too; ``lends_to``: SLURM's id of a job that this one helps;
    ``log_dir``: where the output of this job's launchers is kept (see BYTEPS_LOG_DIR)."""

    command: tuple[str, ...]
    ranks: int
    machines: int
    servers: int
    variables: Mapping[str, str]
    how: Supervision
    is_verbose: bool
    is_spare: bool = False
    hosts: HostOptions | None = None
    host_arguments: tuple[str, ...] = ()
    starts_scheduler: bool = False
    lends_to: str = ""
    log_dir: Path | None = None


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """Parse a command line. Raises ConfigurationError for options that do not fit together; on a malformed option
    argparse itself ends the program with status 2."""
    given = build_parser().parse_args(arguments)
    command = tuple(given.command[1:] if given.command[:1] == ["--"] else given.command)
    part = _slurm_part(given, environ, command)
    role = _role({**environ, **part})
    hosts = _hosts(given)
    if given.lend_to and (given.ranks or hosts or given.spare or environ.get("DMLC_ROLE") or command):
        raise ConfigurationError("--lend-to JOBID needs no command, and no option that says what else to start")
    restarts = given.max_restarts or _number(environ, "max_restarts")
    if hosts and (role or given.machines or given.servers is not None or given.spare):
        raise ConfigurationError(
            "with -H and --hostfile, hosts are the machines: --server-hosts and --spare-hosts name the others, and "
            "DMLC_ROLE, --machines, --servers and --spare do not go with them"
        )
    if hosts and hosts.spares and not restarts:
        raise ConfigurationError("--spare-hosts goes with --max-restarts: otherwise the loss of a host ends the job")
    if given.spare and (role != "worker" or not restarts):
        raise ConfigurationError("--spare goes with DMLC_ROLE=worker and --max-restarts (BYTEPS_MAX_RESTARTS)")
    if role and (given.ranks or given.machines or given.servers is not None):
        raise ConfigurationError(
            f"DMLC_ROLE={role} is set, so this machine is one part of a cluster: BYTEPS_LOCAL_SIZE, DMLC_NUM_WORKER "
            "and DMLC_NUM_SERVER say its size. Unset DMLC_ROLE to start a whole cluster here with -np"
        )
    if not role and not given.ranks and not hosts:
        raise ConfigurationError(
            "how many ranks? Give -np RANKS to start a cluster on this machine, -H HOSTS to start one on several, or "
            "set DMLC_ROLE (worker, server, scheduler or joint) to start this machine's part of one; bpslaunch --help "
            "explains all"
        )
    if not command and role not in ("server", "scheduler"):
        raise ConfigurationError("which program? Give the training command last: bpslaunch -np 2 python train.py")
    is_elastic = given.elastic or given.min_np is not None or given.max_np is not None
    if restarts and (is_elastic or _is_set(environ, "elastic")):
        raise ConfigurationError(
            "--max-restarts (BYTEPS_MAX_RESTARTS) keeps the ranks of a job, and --elastic (BYTEPS_ELASTIC, --min-np, "
            "--max-np) goes on with fewer or more: give one of them"
        )
    if part.get("DMLC_NUM_WORKER") == "1" and part.get("DMLC_NUM_SERVER") == "0" and not (is_elastic or restarts):
        part = {name: text for name, text in part.items() if not name.startswith("DMLC_PS_ROOT")}  # no scheduler
    log_dir = given.log_dir or (Path(text) if (text := environ.get(_LOG_VARIABLE, "").strip()) else None)
    if given.log_dir and given.output_filename:
        raise ConfigurationError("--log-dir and --output-filename both say where output is kept: give one of them")
    kept_in = given.output_filename or log_dir
    variables = {
        **part,
        "BYTEPS_PARTITION_BYTES": given.partition_bytes,
        "BYTEPS_START_TIMEOUT_S": given.start_timeout,
        "BYTEPS_LOG_LEVEL": given.log_level,
        # On hosts, an option says so, as it does where a user starts each machine's part.
        "BYTEPS_ELASTIC": "1" if is_elastic or (restarts and not hosts) else None,
        "BYTEPS_MAX_RESTARTS": str(restarts) if restarts and not hosts else None,
        "BYTEPS_MIN_NP": given.min_np,
        "BYTEPS_MAX_NP": given.max_np,
        "BYTEPS_ELASTIC_TIMEOUT_S": given.elastic_timeout,
        "BYTEPS_RESET_LIMIT": given.reset_limit,
        "BYTEPS_POOL": given.pool,
        _LOG_VARIABLE: None if kept_in is None else str(kept_in.absolute()),
        "BYTEPS_REPORT": None if given.report is None else str(given.report.absolute()),
    }
    return LaunchOptions(
        command,
        0 if hosts else given.ranks or 0,
        given.machines or 1,
        given.servers or 0,
        {name: value for name, value in variables.items() if value is not None},
        Supervision(
            # The launchers on hosts need as much, and then say so.
            grace_s=given.grace_period + (_HOST_GRACE_S if hosts else 0),
            tag_output=_tag_output(given.tag_output, environ),
            folder=None if hosts else given.output_filename,
            elastic=is_elastic or _is_set(environ, "elastic"),
            is_part=bool(role),
            has_warm=restarts > 0 and not given.no_warm and not hosts,
        ),
        given.verbose,
        given.spare,
        hosts,
        _host_arguments(given, restarts) if hosts else (),
        part.get("DMLC_WORKER_ID") == "0" and "DMLC_PS_ROOT_URI" in part,
        given.lend_to or "",
        None if given.output_filename else log_dir,
    )


def _slurm_part(given: argparse.Namespace, environ: Mapping[str, str], command: Sequence[str]) -> Mapping[str, str]:
    """The part of this machine in a step of srun. Empty elsewhere, and where options say what to start."""
    if given.lend_to:
        return {"DMLC_ROLE": "server"}
    if given.ranks or given.hosts or given.hostfile:
        return {}
    return launchers.slurm_part(environ, bool(command))


def _hosts(given: argparse.Namespace) -> HostOptions | None:
    """The hosts of -H, --hostfile, --server-hosts and --spare-hosts; None if there are none. Raises
    ConfigurationError."""
    # A path, as DeepSpeed's -H takes it: no host's name has a slash.
    files = [each for each in (given.hosts, given.hostfile) if each and (each == given.hostfile or "/" in each)]
    lists = [given.hosts] if given.hosts and given.hosts not in files else []
    if len(files) + len(lists) > 1:
        raise ConfigurationError("-H and --hostfile both name hosts: give one of them")
    if not files and not lists:
        if others := [name for name in _WITH_HOSTS if getattr(given, name.strip("-").replace("-", "_"))]:
            raise ConfigurationError(f"{others[0]} goes with -H or --hostfile, which name the hosts that train")
        return None
    workers = parse_hostfile(_read(files[0]), files[0]) if files else parse_hosts(lists[0], "-H")
    servers = parse_hosts(given.server_hosts, "--server-hosts") if given.server_hosts else []
    spares = parse_hosts(given.spare_hosts, "--spare-hosts") if given.spare_hosts else []
    if sized := [host for host in (*servers, *spares) if host.slots is not None]:
        raise ConfigurationError(f"{sized[0].name} has slots, which are for hosts that train: leave them out")
    seen: set[str] = set()
    for host in (*workers, *servers, *spares):
        if host.label in seen:
            raise ConfigurationError(f"{host.label} is named twice: a host has one part in a job")
        seen.add(host.label)
    ssh = [
        *([f"-p{given.ssh_port}"] if given.ssh_port else []),
        *([f"-i{given.ssh_identity_file}"] if given.ssh_identity_file else []),
    ]
    try:
        ssh += [word for text in given.ssh_options for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigurationError(f"--ssh-options is not understood: {error}") from None
    return HostOptions(
        tuple(workers),
        tuple(servers),
        tuple(spares),
        given.ranks or 0,
        tuple(ssh),
        given.remote_python or sys.executable,
        tuple(given.exports),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"the hostfile {path} can't be read: {error}") from None


def _host_arguments(given: argparse.Namespace, restarts: int) -> tuple[str, ...]:
    """The options that the launcher on each host gets; others travel as variables."""
    found = [f"--grace-period={given.grace_period:g}"]
    found += [f"--max-restarts={restarts}"] if restarts else []
    found += [f"--output-filename={given.output_filename.absolute()}"] if given.output_filename else []
    found += ["--no-warm"] if given.no_warm else []
    found += ["--verbose"] if given.verbose else []
    if given.tag_output is not None:
        found.append("--tag-output" if given.tag_output else "--no-tag-output")
    return tuple(found)


def _tag_output(given: bool | None, environ: Mapping[str, str]) -> bool | None:
    """None: the number of ranks decides. Raises ConfigurationError."""
    text = environ.get(_TAG_VARIABLE, "")
    if given is not None or not text:
        return given
    return bool(Variable("tag_output", (_TAG_VARIABLE,), bool, "").parse(_TAG_VARIABLE, text))


def _role(environ: Mapping[str, str]) -> str:
    """DMLC_ROLE; empty if it is not set. Raises ConfigurationError."""
    variable = next(each for each in VARIABLES if each.field == "role")
    return str(variable.parse("DMLC_ROLE", environ["DMLC_ROLE"])) if environ.get("DMLC_ROLE", "").strip() else ""


def _is_set(environ: Mapping[str, str], field: str) -> bool:
    """True if the environment sets this switch. Raises ConfigurationError."""
    return bool(_number(environ, field))


def _number(environ: Mapping[str, str], field: str) -> int:
    """This setting, a number or a switch, as the environment has it; 0 if it does not. Raises ConfigurationError."""
    variable = next(each for each in VARIABLES if each.field == field)
    values = (variable.parse(name, environ[name]) for name in variable.names if environ.get(name))
    return max((value for value in values if isinstance(value, int)), default=0)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `bpslaunch`, for its help and the documentation; ``parse`` also checks what belongs together."""
    parser = argparse.ArgumentParser(
        "bpslaunch",
        usage="bpslaunch [options] CMD [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="ranks", type=_count(1), metavar="RANKS", help="ranks of each machine")
    add("--machines", type=_count(1), metavar="N", help="GPU machines to emulate (default 1)")
    add("--servers", type=_count(0), metavar="K", help="CPU machines to emulate, which only sum (default 0)")
    add("--partition-bytes", metavar="B", help="sets BYTEPS_PARTITION_BYTES")
    add(
        "--report",
        type=Path,
        metavar="FILE",
        help="sets BYTEPS_REPORT: the traffic of each process, as JSON, at the end",
    )
    add("--timeout", "--start-timeout", dest="start_timeout", metavar="S", help="sets BYTEPS_START_TIMEOUT_S")
    add("--elastic", action="store_true", help="go on without ranks that are lost, and with new ones (BYTEPS_ELASTIC)")
    add("--min-np", "--min-num-proc", metavar="R", help="sets BYTEPS_MIN_NP, elastic: wait while there are fewer ranks")
    add("--max-np", "--max-num-proc", metavar="R", help="sets BYTEPS_MAX_NP, elastic: let no more ranks join")
    add("--elastic-timeout", metavar="S", help="sets BYTEPS_ELASTIC_TIMEOUT_S: how long to wait for ranks")
    add("--reset-limit", metavar="N", help="sets BYTEPS_RESET_LIMIT: how often the ranks may change")
    add(
        "--max-restarts", type=_count(0), default=0, metavar="N",
        help="start each rank and communication service again, up to N times, when it fails; the others wait for it "
        "(BYTEPS_MAX_RESTARTS)",
    )  # fmt: skip
    add(
        "--spare", action="store_true",
        help="with DMLC_ROLE=worker and --max-restarts: wait until the job has lost a machine, and take its place (set "
        "no DMLC_WORKER_ID)",
    )  # fmt: skip
    add(
        "--no-warm", action="store_true",
        help="with --max-restarts: keep no process that has imported torch already on each machine, for the next rank "
        "that is started again",
    )  # fmt: skip
    add("--lend-to", metavar="JOBID", help="in a job of SLURM's: be a server of that one, which trains")
    add("--log-level", metavar="LEVEL", help="sets BYTEPS_LOG_LEVEL")
    add(
        "--tag-output", "--prefix-output", action="store_true", default=None,
        help="put [rank] before every line of output (the default if there is more than one)",
    )  # fmt: skip
    add(
        "--no-tag-output", "--no-prefix-output", dest="tag_output", action="store_false",
        help="let ranks write to this terminal themselves (also BYTEPS_TAG_OUTPUT=0)",
    )  # fmt: skip
    add("--output-filename", type=Path, metavar="DIR", help="also write DIR/rank.R/stdout and stderr")
    add("--pool", metavar="HOST:PORT", help="sets BYTEPS_POOL: take CPU machines from the lenders of this pool")
    add(
        "--log-dir", type=Path, metavar="DIR",
        help="sets BYTEPS_LOG_DIR: also write what each process prints below DIR, which several launchers may share; "
        "bps logs reads it",
    )  # fmt: skip
    add("--grace-period", type=_seconds, default=5.0, metavar="S", help="from SIGTERM to SIGKILL (default 5)")
    add("-v", "--verbose", action="store_true", help="print what is started, with its variables")
    hosts = parser.add_argument_group("several hosts, over ssh")
    add = hosts.add_argument
    add("-H", "--hosts", "--host", metavar="LIST", help="hosts that train, with their ranks: gpu1:4,gpu2:4")
    add(
        "-hostfile", "--hostfile", "--machinefile", metavar="FILE",
        help="the same from a file, with lines such as: gpu1 slots=4",
    )  # fmt: skip
    add("--server-hosts", metavar="LIST", help="CPU hosts, which only sum: cpu1,cpu2")
    add("--spare-hosts", metavar="LIST", help="with --max-restarts: hosts that wait, and take the place of lost ones")
    add("-x", dest="exports", action="append", default=[], metavar="NAME[=VALUE]", help="set this variable everywhere")
    add(
        "--ssh-options", action="append", default=[], metavar="TEXT", help="options for ssh, as in '-l me -o Port=2222'"
    )
    add("-p", "--ssh-port", type=_count(1), metavar="PORT", help="port of ssh")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add(
        "--remote-python", metavar="PATH", help="the Python with byteps_py on the hosts (default: the path of this one)"
    )
    add = parser.add_argument
    add("--version", action="version", version=f"byteps_py {__version__}")
    add("-cb", "--check-build", action=_CheckBuild, nargs=0, help="print what this installation can do, and exit")
    add("command", nargs=argparse.REMAINDER, metavar="CMD", help="the training program and its arguments")
    return parser


class _CheckBuild(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(describe_build())
        parser.exit()


def _count(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"{text} is below {low}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
