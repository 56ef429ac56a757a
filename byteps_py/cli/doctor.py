"""`bps doctor`: what will fail on this machine, or be slow, and what to change."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.job_choice import add_job_choice, add_timeout, chosen_settings, names_scheduler
from byteps_py.system.terminal import ProgressBar, coloured

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "doctor",
        help="check this machine, and the links to a running job",
        description="Check versions, cores, memory, limits, ports, clock, GPUs and network of this machine. With "
        "--scheduler, or if one job of yours runs here, also measure the latency and the rate to each of its servers: "
        "a fifth of a second of all that the link carries, for each. Each line that does not begin with ok is followed "
        "by what to change.",
        example="bps doctor --scheduler 10.0.0.1:9000",
        exits={0: "nothing that was found stops a job", 1: "something will fail: a line begins with fail"},
    )
    parser.add_argument("--no-job", action="store_true", help="look at this machine only")
    add_job_choice(parser)
    add_timeout(parser)
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    from byteps_py.doctor.machine_checks import check_machine
    from byteps_py.system import jobs

    findings = check_machine(os.environ)
    runs_here = sum(bool(job.address) for job in jobs.find()) == 1
    if not arguments.no_job and (names_scheduler(arguments) or runs_here):
        from byteps_py.doctor.link_checks import check_job

        with ProgressBar("measuring links") as bar:
            is_expected = bool(arguments.scheduler) or not names_scheduler(arguments)
            findings += check_job(chosen_settings(arguments), arguments.timeout, is_expected, bar.update)
    if arguments.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            level = coloured(f"{finding.level:<4}", _COLOURS[finding.level], sys.stdout)
            print(f"{level}  {finding.subject:<{width}}  {finding.text}")
            if finding.remedy:
                print(f"      {'':<{width}}  → {finding.remedy}")
    return int(any(finding.level == "fail" for finding in findings))
