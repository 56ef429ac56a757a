"""Which job a command is about: that of ``--scheduler`` or of the environment, else the only one on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import os

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
            raise UsageError(f"which job? Choose one with --scheduler HOST:PORT: {'; '.join(map(job_name, found))}")
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
