"""The job that a command is about: that of ``--scheduler`` or of the environment, else the only one on this machine.
One thread."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from byteps_py.config.addresses import joined, place_given
from byteps_py.errors import ConfigurationError, RendezvousError, UsageError
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.config.settings import Settings
    from byteps_py.system.jobs import JobNote


def add_job_choice(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the job."""
    option = parser.add_argument(
        "--scheduler",
        "--address",
        metavar="HOST:PORT",
        default="",
        help="the job's scheduler; default: DMLC_PS_ROOT_URI and _PORT, else the job of this machine",
    )
    option.completer = _complete_scheduler  # type: ignore[attr-defined]


def _complete_scheduler(**_: object) -> list[str]:
    """For argcomplete: the schedulers of this user's jobs on this machine."""
    from byteps_py.system import jobs

    return [job.address for job in jobs.find() if job.address]


def add_timeout(parser: argparse.ArgumentParser, default_s: float = 5.0) -> None:
    """Add ``--timeout``."""
    parser.add_argument("--timeout", type=float, default=default_s, metavar="S", help="how long to wait for an answer")


def names_scheduler(arguments: argparse.Namespace) -> bool:
    """The command line or the environment names a scheduler."""
    from byteps_py.config.settings import Settings

    return bool(arguments.scheduler or Settings.from_env().scheduler_host)


def chosen_settings(arguments: argparse.Namespace) -> Settings:
    """The settings of the job that the command line or the environment names, else of the only one on this machine."""
    from byteps_py.config.settings import Settings
    from byteps_py.system import jobs

    if not names_scheduler(arguments):
        found = jobs.find()
        if not found:
            raise RendezvousError(
                "no job of yours runs on this machine. For a job elsewhere, or of another user, name its scheduler: "
                "--scheduler HOST:PORT, or DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
            )
        if len(found) > 1:
            listed = [f"\n  {job_name(job)}{f': {begun}' if (begun := job_start(job)) else ''}" for job in found]
            raise UsageError(f"which job? Choose one with --scheduler HOST:PORT:{''.join(listed)}")
        return settings_of(found[0])
    settings = Settings.from_env()
    if not arguments.scheduler:
        return settings
    host, port = place_given("--scheduler", arguments.scheduler)
    # For a job of this machine, its note has the job id, which is part of the authentication.
    if not settings.job_id and (job := next((j for j in jobs.find() if j.address == joined(host, port)), None)):
        return settings_of(job)
    return _settings_at(host, port, {})


def settings_of(job: JobNote) -> Settings:
    """The settings for requests to its scheduler. Raises ConfigurationError if it has none, or if its secret can't be
    read."""
    if not job.address:
        raise ConfigurationError(
            f"{job_name(job)} has no scheduler that could answer: its communication service does that work"
        )
    own = {"BYTEPS_SECRET_FILE": job.secret_file, "BYTEPS_LOCAL_SECRET": job.local_secret}
    settings = _settings_at(job.scheduler_host, job.scheduler_port, {name: text for name, text in own.items() if text})
    return dataclasses.replace(settings, job_id=job.job_id, local_secret=job.local_secret)


def _settings_at(host: str, port: int, also: Mapping[str, str]) -> Settings:
    """The settings of the job whose scheduler is there. ``also``: variables, where the environment has none."""
    from byteps_py.config.settings import Settings

    place = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port)}
    return Settings.from_env({**also, **{name: text for name, text in os.environ.items() if text}, **place})


def job_name(job: JobNote) -> str:
    """The name of the job in messages."""
    name = f" (BYTEPS_JOB_ID={job.job_id})" if job.job_id else ""
    if not job.address:
        return f"a job of {count_text(job.ranks, 'rank')} on this machine alone, process {job.pid}{name}"
    return f"the job of the scheduler at {job.address}{name}"


def job_start(job: JobNote) -> str:
    """The start of the job in messages: the command, the time and the folder; empty if it is not known."""
    if not job.started_s:
        return ""
    ago_s = max(0.0, time.time() - job.started_s)
    ago = f"{ago_s:.0f} s" if ago_s < 120 else f"{ago_s / 60:.0f} min" if ago_s < 7200 else f"{ago_s / 3600:.0f} h"
    here = " (this folder)" if job.folder and job.folder == os.getcwd() else ""
    return f"{job.command or f'process {job.pid}'}, started {ago} ago{f' in {job.folder}' if job.folder else ''}{here}"
