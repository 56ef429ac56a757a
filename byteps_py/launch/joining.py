"""Machines that join a job which runs already. One thread.

A spare machine waits until the job has lost a machine, and takes that one's place (``wait_for_place``).

``bpslaunch --lend-to JOBID`` starts summation servers in a job of SLURM's that help another one, which trains. The job
that trains may have begun long before. SLURM says where it runs; its port and its secret follow from its id, and its
scheduler says how many machines it has.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping

from byteps_py.config import secret_files
from byteps_py.config.settings import Settings
from byteps_py.config.slurm import expand, scheduler_port, secret_name
from byteps_py.errors import BytePSError, ConfigurationError, RendezvousError
from byteps_py.launch.process_output import print_message
from byteps_py.scheduler import query

#: A machine that lost only its service is back before that.
_MISSING_S = 5.0
_ASK_S = 0.5
#: A scheduler that is started again answers before that.
_SILENT_S = 30.0


def wait_for_place(environ: Mapping[str, str], pause: Callable[[float], object] = time.sleep) -> int | None:
    """The number of a machine that the job has lost and that has not come back; None once the job has ended. ``pause``
    waits for so many seconds between two looks.

    Raises ConfigurationError for a job without BYTEPS_MAX_RESTARTS, and RendezvousError if no scheduler answers for
    30 s, or for BYTEPS_START_TIMEOUT_S before the first answer.
    """
    settings = Settings.from_env({**environ, "DMLC_WORKER_ID": "0", "BYTEPS_LOCAL_RANK": "0"})
    if not settings.max_restarts:
        raise ConfigurationError("a spare machine needs bpslaunch --max-restarts, as all machines of the job have it")
    silent_until_s = time.monotonic() + settings.start_timeout_s
    missing_since_s: dict[int, float] = {}
    has_answered = False
    while True:
        now_s = time.monotonic()
        try:
            reply = query.status(settings, 5.0)
        except BytePSError as error:
            if has_answered and now_s >= silent_until_s:
                print_message(f"the job's scheduler does not answer any more, so the job has ended: {error}")
                return None
            if now_s >= silent_until_s:
                raise RendezvousError(f"a spare machine waits for a job, and there is none: {error}") from error
        else:
            if not has_answered:
                print_message(f"a spare machine of the job at {settings.scheduler_address}")
            has_answered, silent_until_s = True, now_s + _SILENT_S
            if query.STATE_WORDS.get(reply.state) in ("failed", "ended"):
                return None
            missing_since_s = {number: missing_since_s.get(number, now_s) for number in reply.missing_workers}
            for number, since_s in missing_since_s.items():
                if now_s - since_s >= _MISSING_S:
                    print_message(f"machine {number} is lost: this one takes its place")
                    return number
        pause(_ASK_S)


_SLURM_LIMIT_S = 30.0
_ASK_LIMIT_S = 5.0
_PAUSE_S = 1.0


def lending_variables(job: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a server of the job with this id. Waits for its scheduler.

    Raises ConfigurationError if there is no such job that runs, and RendezvousError if its scheduler does not answer
    for BYTEPS_START_TIMEOUT_S.
    """
    if not re.fullmatch("[0-9]{1,10}", job):
        raise ConfigurationError(
            f"--lend-to {job[:40]!r} is not the id of a job: it takes a number, as squeue shows it"
        )
    host = _first_node(job)
    place = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(scheduler_port(job))}
    settings = Settings.from_env({**environ, **_secret(job, environ), **place, "DMLC_ROLE": "server"})
    print_message(f"lends to job {job}, whose scheduler is at {settings.scheduler_address}")
    until_s = time.monotonic() + settings.start_timeout_s
    while True:
        try:
            reply = query.status(settings, _ASK_LIMIT_S)
        except BytePSError as error:
            if time.monotonic() >= until_s:
                raise RendezvousError(f"job {job} has no scheduler that this user's job can join: {error}") from error
            time.sleep(_PAUSE_S)
        else:
            break
    return {
        **place,
        "DMLC_ROLE": "server",
        "DMLC_NUM_WORKER": str(reply.num_workers),
        "DMLC_NUM_SERVER": str(reply.num_servers),
        "BYTEPS_SECRET": "",
        "BYTEPS_SECRET_FILE": secret_files.memory_file(settings.secret),
    }


def _secret(job: str, environ: Mapping[str, str]) -> dict[str, str]:
    """That of the job that trains: this one's own would be derived from its own id."""
    if environ.get("BYTEPS_SECRET") or environ.get("BYTEPS_SECRET_FILE"):
        return {}
    path = secret_files.user_secret_path(environ)
    if path is None:
        raise ConfigurationError("--lend-to needs HOME, where this user's secret is, or BYTEPS_SECRET_FILE")
    of_user = secret_files.user_secret(path)
    return {"BYTEPS_SECRET": secret_files.job_secret(of_user, secret_name(environ, job))}


def _first_node(job: str) -> str:
    """The first node of the job's last component, which trains. Raises ConfigurationError."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%i|%T|%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"squeue does not say where job {job} runs: {error}") from None
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
    if done.returncode or not rows:
        said = done.stderr.strip() or "it is not in the queue"
        raise ConfigurationError(f"there is no job {job} to lend to: {said[:200]}")
    _, state, nodes = max(rows, key=lambda row: int(row[0].partition("+")[2] or 0))
    hosts = expand(nodes)
    if state != "RUNNING" or not hosts:
        raise ConfigurationError(
            f"job {job} is {state}, not RUNNING: lend when it has begun, as with sbatch --dependency=after:{job}"
        )
    return hosts[0]
