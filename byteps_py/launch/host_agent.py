"""bpslaunch on one of the hosts of ``bpslaunch -H``: it answers whether its part can run there, and runs it.

It is the launcher that a user starts by hand on each machine, with the same variables. Only the way in differs: what to
do, and the cluster secret, come over standard input (host_link.py). One thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from byteps_py import __version__
from byteps_py.config import secret_files
from byteps_py.launch import process_output
from byteps_py.launch.host_link import HostAnswer, HostTask, LauncherLink
from byteps_py.launch.installation import visible_gpus
from byteps_py.launch.process_plan import free_port

#: Runs the launcher: (arguments, environment, link) → exit code.
RunPart = Callable[[Sequence[str], Mapping[str, str], LauncherLink], int]
#: Says why the command can't be run with this environment; empty if it can.
RefuseCommand = Callable[[Sequence[str], Mapping[str, str]], str]


def answer(refusal: RefuseCommand) -> int:
    """Say what this host is, and whether it can run the task that standard input has. Returns the exit status."""
    task = LauncherLink(0, 2).task()
    environ = _environ(task)
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


def run(run_part: RunPart) -> int:
    """Run this host's part of the job until it is over. Returns the launcher's exit code."""
    # The ranks of a lost connection are ended by the end of standard input, in order; not by their output.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    link = LauncherLink(0, 2)
    task = link.task()
    process_output.speak_as(f"bpslaunch on {task.label}")
    os.chdir(task.folder)
    environ = _environ(task)
    environ["BYTEPS_SECRET_FILE"] = secret_files.memory_file(task.secret)
    return run_part(task.arguments, environ, link)


def _environ(task: HostTask) -> dict[str, str]:
    environ = {**os.environ, **task.variables}
    environ.pop("BYTEPS_SECRET", None)
    environ.pop("BYTEPS_SECRET_FILE", None)
    return environ
