"""The program ``bpslaunch``, also ``python -m byteps_py.launch``: command line in, exit code out."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from byteps_py.config.addresses import bare_host, joined
from byteps_py.config.settings import Settings, ignored_variables
from byteps_py.errors import BytePSError, ConfigurationError
from byteps_py.launch import command_line, joining, remote_hosts
from byteps_py.launch.host_link import HOST_OPTION, HostReport, LauncherLink
from byteps_py.launch.installation import visible_gpus
from byteps_py.launch.process_output import print_message
from byteps_py.launch.process_plan import (
    ClusterSize,
    ProcessKind,
    ProcessSpec,
    cluster_plan,
    free_port,
    role_plan,
    scheduler_spec,
)
from byteps_py.launch.supervision_policy import ENDING_SIGNALS
from byteps_py.launch.supervisor import Supervisor
from byteps_py.system import jobs
from byteps_py.system.jobs import COMMAND_VARIABLE
from byteps_py.system.machine import check_offered_host
from byteps_py.system.rdma_devices import check_rdma
from byteps_py.wire.launch_protocol import handle_signals

_RDMA = ("DMLC_ENABLE_RDMA", "BYTEPS_RDMA_TRANSPORTS")
_STARTS = 3


class CommandError(Exception):
    """The training command can't be run. ``code`` is the shell's exit code for that."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job to its end. Returns the exit code that ``bpslaunch --help`` describes.

    While there are no processes to pass it on to, a signal ends this program with an exit code. Once the job is over, a
    signal changes nothing.
    """
    taken = [
        signum for signum in ENDING_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN
    ]  # nohup's stay ignored
    with handle_signals(taken, _exit):
        return _code(sys.argv[1:] if arguments is None else arguments)


def _code(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == [HOST_OPTION]:
            return (
                remote_hosts.answer_launcher(_refusal)
                if arguments[1:] == ["answer"]
                else remote_hosts.run_host_part(_run)
            )
        return _run(arguments, os.environ)
    except ConfigurationError as error:
        print_message(str(error))
        return 2
    except CommandError as error:
        print_message(str(error))
        return error.code
    except BytePSError as error:
        print_message(str(error))
        return 1
    except OSError as error:
        print_message(f"the job can't be started: {error}")
        return 126


def _refusal(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why the command can't be run; empty if it can."""
    try:
        resolve(command, environ)
    except CommandError as error:
        return str(error)
    return ""


def _exit(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def _run(arguments: Sequence[str], outer_environ: Mapping[str, str], link: LauncherLink | None = None) -> int:
    """``link``: of a host of another launcher's job."""
    given = command_line.parse(arguments, outer_environ)
    environ = {**outer_environ, **given.variables}
    if given.ranks and not (environ.get("BYTEPS_SECRET") or environ.get("BYTEPS_SECRET_FILE")):
        # Only this job's processes know the secret: other users of this machine can't join the job, or end it.
        environ = {"BYTEPS_LOCAL_SECRET": secrets.token_hex(32), **environ}
    command = given.command if given.hosts else resolve(given.command, environ)
    if given.lends_to:
        environ = {**environ, **joining.lending_variables(given.lends_to, environ)}
    if given.is_spare:
        number = joining.wait_for_place(environ, link.pause if link else time.sleep)
        if number is None:
            return 0
        if link:
            link.report(HostReport(taken=True))
        environ = {**environ, "DMLC_WORKER_ID": str(number)}
    how = given.how
    if given.log_dir is not None:
        how = dataclasses.replace(how, folder=log_folder(given.log_dir, environ, bool(given.ranks or given.hosts)))
    for sentence in ignored_variables(environ) if link is None else ():
        print_message(sentence)
    jobs.prepare()
    environ = {**environ, COMMAND_VARIABLE: shlex.join(["bpslaunch", *arguments])}
    if link is not None:
        tags = how.tag_output is None or how.tag_output  # other hosts write to the same terminal
        how = dataclasses.replace(how, host=link.label, launcher=link, tag_output=tags)
    for start in range(1, _STARTS + 1):
        token = os.urandom(8).hex()
        specs = _host_specs(given, environ) if given.hosts else _plan(given, environ, command, token)
        if given.is_verbose:
            for spec in specs:
                settings = " ".join(f"{name}={value}" for name, value in spec.env.items())
                print_message(f"{spec.name}: {settings} {' '.join(spec.argv)}")
        if (given.ranks or given.hosts) and (address := _scheduler_address(specs)):
            print_message(f"job at {address}")
        outcome = Supervisor(specs, environ, how, token).run()
        if not outcome.retry:
            break
        if start < _STARTS:
            print_message("the scheduler could not use the port chosen for it; starting over with another one")
        else:
            print_message(f"the scheduler did not start in {_STARTS} tries; its own message is above")
    return outcome.code


def _host_specs(given: command_line.LaunchOptions, environ: Mapping[str, str]) -> list[ProcessSpec]:
    """The hosts' parts of the job, once all hosts have said that they can run theirs."""
    assert given.hosts is not None
    settings = Settings.from_env(environ)  # finds a file with a secret that can't be read, too
    job = remote_hosts.RemoteJob(
        given.command,
        given.host_arguments,
        {**remote_hosts.carried_variables(environ, given.hosts.exports), **given.variables},
        settings.secret or secrets.token_hex(32),
        os.getcwd(),
    )
    return remote_hosts.host_plan(given.hosts, job, remote_hosts.ask_hosts(given.hosts, job), environ)


def log_folder(log_dir: Path, environ: Mapping[str, str], is_whole: bool) -> Path:
    """Where this launcher keeps output below BYTEPS_LOG_DIR. ``is_whole``: it starts the whole cluster; else others may
    share the folder, over a file system of several machines.

    >>> str(log_folder(Path("/logs"), {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": "3"}, False))
    '/logs/worker-3'
    """
    role = environ.get("DMLC_ROLE", "").strip().lower()
    if is_whole:
        return log_dir
    if role == "server":
        return log_dir / f"server-{socket.gethostname()}-{os.getpid()}"
    number = "" if role == "scheduler" else f"-{environ.get('DMLC_WORKER_ID', '').strip() or '0'}"
    return log_dir / f"{role}{number}"


def _scheduler_address(specs: Sequence[ProcessSpec]) -> str:
    """The scheduler's address, for a job with a scheduler; else empty. It names the job for ``bps``."""
    env = specs[0].env
    host, port = env.get("DMLC_PS_ROOT_URI", ""), env.get("DMLC_PS_ROOT_PORT", "")
    return joined(bare_host(host), int(port)) if host else ""


def _plan(
    given: command_line.LaunchOptions, environ: Mapping[str, str], command: Sequence[str], token: str
) -> list[ProcessSpec]:
    cores = len(os.sched_getaffinity(0))
    if not given.ranks:
        gpus = 0 if environ.get("BYTEPS_LOCAL_SIZE") else visible_gpus(environ)
        specs = role_plan(environ, command, visible_gpus=gpus, cores=cores, token=token, port=free_port())
        if (service := next((spec for spec in specs if spec.kind is ProcessKind.SERVICE), None)) is not None:
            settings = Settings.from_env({**environ, **service.env})
            check_offered_host(settings)
            check_rdma(settings)
        return [*([scheduler_spec(environ, {})] if given.starts_scheduler else []), *specs]
    check_rdma(Settings.from_env({name: environ[name] for name in _RDMA if name in environ}))  # the plan sets others
    port = free_port()
    return cluster_plan(
        environ,
        command,
        ClusterSize(given.ranks, given.machines, given.servers),
        port=port,
        torch_port=free_port(taken=port),
        cores=cores,
        token=token,
    )


def resolve(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """``command`` with a program that can be run. Raises CommandError (126: not executable, 127: not found)."""
    if not command:
        return ()
    program, *rest = command
    found = shutil.which(program, path=environ.get("PATH"))
    if found is not None:
        return tuple(command)
    if program in ("python", "python3"):
        return (sys.executable, *rest)
    if os.path.exists(program):
        hint = f"; did you mean: python {program}" if program.endswith(".py") else ""
        raise CommandError(f"{program} can't be run: it is not an executable program{hint}", 126)
    raise CommandError(f"{program}: command not found", 127)


if __name__ == "__main__":
    sys.exit(main())
