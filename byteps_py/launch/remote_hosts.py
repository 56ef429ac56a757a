"""``bpslaunch -H``: one launcher starts a job on several hosts, over the system's ssh. Both ends.

    ask_hosts   all hosts at once: can you run this, and under which address do others reach you?
    host_plan   the answers → one process of ssh for each host, and what it says to the launcher there (host_link.py)

    answer_launcher, run_host_part   the launcher on such a host: it answers whether its part can run, and runs it

The launcher on each host is the one that users start there by hand, with DMLC_ROLE and its companion variables. Only
the way in differs: what to do, and the cluster secret, come over standard input. So this module decides what these are,
and no more: which host is which machine, and where the scheduler listens. The supervisor then watches the processes of
ssh as if they were ranks. One thread.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from byteps_py import __version__
from byteps_py.config import secret_files
from byteps_py.config.addresses import bare_host, is_loopback
from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, RendezvousError
from byteps_py.launch import process_output
from byteps_py.launch.host_link import HOST_OPTION, MAX_TASK_BYTES, HostAnswer, HostTask, LauncherLink
from byteps_py.launch.hosts import HostOptions, RemoteHost, sizes_of
from byteps_py.launch.installation import visible_gpus
from byteps_py.launch.process_guard import die_with
from byteps_py.launch.process_plan import RANK_COUNTS_VARIABLE, ProcessKind, ProcessSpec, free_port
from byteps_py.wire.launch_protocol import NO_JOURNAL_STATUS, UNUSABLE_STATUS

#: After the user's options, of which ssh uses the first of each kind. Nobody is there to type a password; a host that
#: is gone is noticed.
_SSH_OPTIONS = (
    "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3",
    "-oForwardX11=no", "-oClearAllForwardings=yes",
)  # fmt: skip
#: ssh itself needs none of them, and its environment may go to the host (SendEnv).
_SECRETS = ("BYTEPS_SECRET", "BYTEPS_SECRET_FILE")
#: The exit status of ssh that has no connection, or has lost it.
SSH_LOST_STATUS = 255
_ANSWER_LIMIT_S = 30.0
_MOST_LINES = 3

#: Variables that all machines of a job share, which users therefore set once.
_CARRIED = (
    "BYTEPS_", "DMLC_", "PS_", "HOROVOD_", "NCCL_", "OMP_", "MKL_", "NUMBA_", "TORCH_", "PYTHON", "LC_",
)  # fmt: skip
_CARRIED_NAMES = ("PATH", "LD_LIBRARY_PATH", "LANG", "VIRTUAL_ENV", "CONDA_PREFIX")
#: … but for those that are of one machine, or of this launcher alone. Secrets go another way.
_OWN = (
    "BYTEPS_SECRET", "BYTEPS_LAUNCH_", "BYTEPS_LOCAL_", "BYTEPS_MACHINE_ID", "BYTEPS_SOCKET_NAME", "DMLC_ROLE",
    "DMLC_WORKER_ID", "DMLC_NODE_HOST", "DMLC_NUM_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RemoteJob:
    """What all hosts of a job have in common.

    Attributes:
        command: of the ranks.
        arguments: options of bpslaunch on each host.
        variables: for all processes.
        secret: the cluster secret.
        folder: where the command runs, on each host.
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    secret: str
    folder: str

    def task(self, host: RemoteHost, variables: Mapping[str, str], arguments: Sequence[str]) -> HostTask:
        return HostTask(host.label, self.folder, tuple(arguments), {**self.variables, **variables}, self.secret)


def carried_variables(environ: Mapping[str, str], exports: Sequence[str]) -> dict[str, str]:
    """The variables of ``environ`` that go to all hosts, and those that -x names. Raises ConfigurationError for a name
    that is not set.

    >>> carried_variables({"PATH": "/bin", "HOME": "/root", "DMLC_ROLE": "worker", "A": "1"}, ["A", "B=2"])
    {'PATH': '/bin', 'A': '1', 'B': '2'}
    """
    found = {
        name: text
        for name, text in environ.items()
        if (name in _CARRIED_NAMES or name.startswith(_CARRIED)) and not name.startswith(_OWN)
    }
    for export in exports:
        name, has_value, text = export.partition("=")
        if name in _SECRETS:
            raise ConfigurationError(f"-x {name} is not needed: the cluster secret goes to all hosts by itself")
        if not has_value and name not in environ:
            raise ConfigurationError(f"-x {name}: this variable is not set; set it, or write -x {name}=VALUE")
        found[name] = text if has_value else environ[name]
    return found


def ask_hosts(options: HostOptions, job: RemoteJob) -> dict[str, HostAnswer]:
    """The answers of all hosts, by name. Raises RendezvousError that names each host which can't run its part."""
    if shutil.which("ssh") is None and not all(map(_is_here, options.all)):
        raise ConfigurationError("ssh is not installed here (Debian: apt-get install openssh-client)")
    started: dict[str, subprocess.Popen[bytes]] = {}
    answers: dict[str, HostAnswer] = {}
    problems: dict[str, str] = {}
    end_s = time.monotonic() + _ANSWER_LIMIT_S
    try:
        for host in options.all:
            trains = host not in options.servers
            size = {"BYTEPS_LOCAL_SIZE": "1"} if host.slots or options.total or not trains else {}
            task = job.task(host, size, job.command if trains else ())
            started[host.name] = _ask(_argv(options, host, "answer"), task)
        for host in options.all:
            try:
                found = _answer_of(started[host.name], host, options, end_s - time.monotonic())
            except RendezvousError as error:
                problems[host.label] = str(error)
            else:
                answers[host.name] = found
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    if problems:
        count = f"{len(problems)} of {len(options.all)} hosts" if len(options.all) > 1 else "the host"
        lines = [f"  {label}: {problem}" for label, problem in problems.items()]
        raise RendezvousError("\n".join([f"{count} can't run this job, so nothing was started:", *lines]))
    return answers


def _ask(argv: Sequence[str], task: HostTask) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    environ = {name: text for name, text in os.environ.items() if name not in _SECRETS}
    # In a session of its own: Ctrl-C is for this program, which then ends the question.
    process = subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=True,
        preexec_fn=die_with(os.getpid()),
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(task.pack())
        process.stdin.close()
    except BrokenPipeError:
        pass  # ssh has ended, and says why
    process.stdin = None
    return process


def _answer_of(process: subprocess.Popen[bytes], host: RemoteHost, options: HostOptions, left_s: float) -> HostAnswer:
    try:
        out, err = process.communicate(timeout=max(0.1, left_s))
    except subprocess.TimeoutExpired:
        raise RendezvousError(
            "it did not answer in time: can you reach it with ssh, and does its login shell ask for something?"
        ) from None
    found = HostAnswer.find(out.decode(errors="replace"))
    if found is None:
        raise RendezvousError(_why(host, options, process.returncode, err.decode(errors="replace")))
    if found.problem:
        raise RendezvousError(found.problem)
    if found.version != __version__:
        raise RendezvousError(
            f"it has byteps_py {found.version}, and this machine {__version__}: install the same version on all"
        )
    return found


def _why(host: RemoteHost, options: HostOptions, status: int, text: str) -> str:
    """What a host's standard error means, and what to do."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = "; ".join(lines[-_MOST_LINES:]) or f"its shell ended with status {status} and said nothing"
    if "Host key verification failed" in text:
        return f"{said}: its key is not known here; run ssh {host.name} once, and accept the key"
    if "Permission denied" in text and status == SSH_LOST_STATUS:
        return f"{said}: ssh can't log in without a password; run ssh-copy-id {host.name} once"
    if "No module named" in text or status in (126, 127):
        return (
            f"{said}: byteps_py is to be installed there at the same path as here, for {options.python}; "
            "--remote-python names another Python"
        )
    return said


def host_plan(
    options: HostOptions, job: RemoteJob, answers: Mapping[str, HostAnswer], environ: Mapping[str, str]
) -> list[ProcessSpec]:
    """One process of ssh for each machine of the job, in the order in which to start them.

    ``environ``: DMLC_PS_ROOT_URI is the address of the first worker, for hosts with several networks. Raises
    ConfigurationError.
    """
    workers, servers = options.workers, options.servers
    sizes = sizes_of(options, [answers[host.name].gpus for host in workers])
    first = answers[workers[0].name]
    # With spare machines, a GPU machine may be lost: rather not the scheduler with it.
    home = servers[0] if options.spares and servers else workers[0]
    port = first.ports[0] if home is workers[0] else answers[home.name].ports[0]
    address = bare_host(environ.get("DMLC_PS_ROOT_URI") or _address(answers[home.name], answers.values()))
    common = {
        "DMLC_NUM_WORKER": str(len(workers)),
        "DMLC_NUM_SERVER": str(len(servers)),
        "DMLC_PS_ROOT_URI": address,
        "DMLC_PS_ROOT_PORT": environ.get("DMLC_PS_ROOT_PORT") or str(port),
        "MASTER_ADDR": address if home is workers[0] else _address(first, answers.values()),
        "MASTER_PORT": str(first.ports[1]),
        RANK_COUNTS_VARIABLE: ",".join(map(str, sizes)),
    }
    command = ("--", *job.command)
    own = [
        {**common, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(index), "BYTEPS_LOCAL_SIZE": str(size)}
        for index, size in enumerate(sizes)
    ]
    # Also finds a setting that is not valid before anything starts.
    settings = Settings.from_env({**job.variables, **own[0], "BYTEPS_SECRET": job.secret, "BYTEPS_LOCAL_RANK": "0"})
    specs = []
    if settings.is_alone:
        own[0] |= {"DMLC_PS_ROOT_URI": "", "DMLC_PS_ROOT_PORT": ""}
    else:
        task = job.task(home, {**common, "DMLC_ROLE": "scheduler"}, job.arguments)
        specs.append(
            dataclasses.replace(
                _spec(options, home, task), name=f"the scheduler on {home.label}", kind=ProcessKind.SERVICE,
                is_vital=False, retry_status=UNUSABLE_STATUS, hopeless_status=NO_JOURNAL_STATUS,
            )
        )  # fmt: skip
    for host in servers:
        # It ends with the job: no restarted one finds it, since that has another port.
        task = job.task(host, {**common, "DMLC_ROLE": "server", "BYTEPS_SHADOW_KEEP_S": "0"}, job.arguments)
        name = f"the server on {host.label}"
        spec = _spec(options, host, task)
        specs.append(dataclasses.replace(spec, name=name, kind=ProcessKind.SERVICE, is_replaceable=True))
    for host, variables in zip(workers, own, strict=True):
        specs.append(_spec(options, host, job.task(host, variables, (*job.arguments, *command))))
    for host in options.spares:
        task = job.task(host, {**common, "DMLC_ROLE": "worker"}, (*job.arguments, "--spare", *command))
        spec = _spec(options, host, task)
        specs.append(
            dataclasses.replace(spec, name=f"spare host {host.label}", kind=ProcessKind.SERVICE, is_spare=True)
        )
    return specs


def _spec(options: HostOptions, host: RemoteHost, task: HostTask) -> ProcessSpec:
    packed = task.pack()
    if len(packed) > MAX_TASK_BYTES:
        raise ConfigurationError(
            f"the variables and the command for {host.label} have {len(packed)} bytes; the most are {MAX_TASK_BYTES}"
        )
    place = {name: task.variables[name] for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")}
    env = {**place, **dict.fromkeys(_SECRETS, "")}
    return ProcessSpec(
        host.label,
        ProcessKind.MAIN,
        host.label,
        _argv(options, host, "run"),
        env,
        task=packed,
        lost_status=SSH_LOST_STATUS,
    )


def _argv(options: HostOptions, host: RemoteHost, what: str) -> tuple[str, ...]:
    agent = (options.python, "-P", "-m", "byteps_py.launch", HOST_OPTION, what)
    if _is_here(host):
        return (sys.executable, *agent[1:])
    return ("ssh", *options.ssh, *_SSH_OPTIONS, "--", host.name, f"exec {shlex.join(agent)}")


def _is_here(host: RemoteHost) -> bool:
    """True for a name of this very machine: no ssh is needed. An address of it is reached by ssh like any other."""
    return host.name in ("localhost", socket.gethostname())


def _address(answer: HostAnswer, answers: Iterable[HostAnswer]) -> str:
    """The address of a host under which others reach it: that which ssh used. Of this machine, it is the one from which
    ssh reached the others. What a host's own name means there is no use: many resolve it to loopback."""
    candidates = (answer.address, *(other.client for other in answers))
    return next((each for each in candidates if each and not is_loopback(each)), "127.0.0.1")


#: Runs the launcher: (arguments, environment, link) → exit code.
RunPart = Callable[[Sequence[str], Mapping[str, str], LauncherLink], int]
#: Says why the command can't be run with this environment; empty if it can.
RefuseCommand = Callable[[Sequence[str], Mapping[str, str]], str]


def answer_launcher(refusal: RefuseCommand) -> int:
    """Say what this host is, and whether it can run the task that standard input has. Returns the exit status."""
    task = LauncherLink(0, 2).task()
    environ = _host_environ(task)
    try:
        os.chdir(task.folder)
    except OSError as error:
        problem = f"the command is to run in {task.folder}, as here, which can't be entered there: {error.strerror}"
    else:
        problem = refusal(task.arguments, environ)
    client, _, address, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    first = free_port()
    gpus = 0 if environ.get("BYTEPS_LOCAL_SIZE") else visible_gpus(environ)
    found = HostAnswer(__version__, address, client, (first, free_port(taken=first)), gpus, problem)
    sys.stdout.write(found.pack())
    sys.stdout.flush()
    return 0


def run_host_part(run_part: RunPart) -> int:
    """Run this host's part of the job until it is over. Returns the launcher's exit code."""
    # The ranks of a lost connection are ended by the end of standard input, in order; not by their output.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    link = LauncherLink(0, 2)
    task = link.task()
    process_output.speak_as(f"bpslaunch on {task.label}")
    os.chdir(task.folder)
    environ = _host_environ(task)
    environ["BYTEPS_SECRET_FILE"] = secret_files.memory_file(task.secret)
    return run_part(task.arguments, environ, link)


def _host_environ(task: HostTask) -> dict[str, str]:
    environ = {**os.environ, **task.variables}
    environ.pop("BYTEPS_SECRET", None)
    environ.pop("BYTEPS_SECRET_FILE", None)
    return environ
