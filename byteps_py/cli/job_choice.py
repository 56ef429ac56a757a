"""Which job a command is about: that of ``--scheduler`` or of the environment, else the only one on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time

from byteps_py import jobs
from byteps_py.errors import ConfigurationError, RendezvousError, UsageError
from byteps_py.settings import Settings
from byteps_py.wording import count_text


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--scheduler``."""
    parser.add_argument(
        "--scheduler",
        metavar="HOST:PORT",
        default="",
        help="default: DMLC_PS_ROOT_URI and _PORT, else the job of this machine",
    )


def is_told(arguments: argparse.Namespace) -> bool:
    """The command line or the environment names a scheduler."""
    return bool(arguments.scheduler or Settings.from_env().scheduler_host)


def chosen_settings(arguments: argparse.Namespace) -> Settings:
    """The settings of the job that the command line or the environment names, else of the only one on this machine."""
    if not is_told(arguments):
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
    # For a job of this machine, its note has the job id, which is part of the authentication.
    if not settings.job_id and (job := next((j for j in jobs.find() if j.address == arguments.scheduler), None)):
        return settings_of(job)
    host, _, port = arguments.scheduler.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--scheduler={arguments.scheduler!r} is not HOST:PORT")
    return dataclasses.replace(settings, scheduler_host=host, scheduler_port=int(port))


def settings_of(job: jobs.JobNote) -> Settings:
    """The settings for requests to its scheduler. Raises ConfigurationError if it has none, or if its secret can't be
    read."""
    if not job.address:
        raise ConfigurationError(
            f"{job_name(job)} has no scheduler that could answer: its communication service does that work"
        )
    settings = Settings.from_env()
    if not settings.secret and job.secret_file:
        settings = Settings.from_env({**os.environ, "BYTEPS_SECRET_FILE": job.secret_file})
    return dataclasses.replace(
        settings,
        job_id=job.job_id,
        local_secret=job.local_secret,
        scheduler_host=job.scheduler_host,
        scheduler_port=job.scheduler_port,
    )


def job_name(job: jobs.JobNote) -> str:
    """For messages."""
    name = f" (BYTEPS_JOB_ID={job.job_id})" if job.job_id else ""
    if not job.address:
        return f"a job of {count_text(job.ranks, 'rank')} on this machine alone, process {job.pid}{name}"
    return f"the job of the scheduler at {job.address}{name}"


def job_start(job: jobs.JobNote) -> str:
    """What was started, when and where, for messages; empty if it is not known."""
    if not job.started_s:
        return ""
    ago_s = max(0.0, time.time() - job.started_s)
    ago = f"{ago_s:.0f} s" if ago_s < 120 else f"{ago_s / 60:.0f} min" if ago_s < 7200 else f"{ago_s / 3600:.0f} h"
    here = " (this folder)" if job.folder and job.folder == os.getcwd() else ""
    return f"{job.command or f'process {job.pid}'}, started {ago} ago{f' in {job.folder}' if job.folder else ''}{here}"
