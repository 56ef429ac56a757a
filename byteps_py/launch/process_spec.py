"""The description of one process of a job. Pure data; any thread."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass


class ProcessKind(enum.Enum):
    """What the end of a process means for the job."""

    MAIN = "main"  # the job is over when all of these have ended; their exit codes decide the launcher's
    SERVICE = "service"  # serves the others; exits by itself when they have left


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. ``env`` holds only what differs from the launcher's own environment; an empty
    value counts as unset. ``label`` is short, for prefixes and file names."""

    name: str
    kind: ProcessKind
    label: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    reads_stdin: bool = False
    is_dismissed: bool = False  # a service that stays until it gets SIGTERM, once all ranks have ended
    is_vital: bool = True  # a service without which the ranks can't go on for long
    is_replaceable: bool = False  # a service whose work others take over
    restarts: int = 0  # how often it is started again if a signal killed it while the ranks ran
    again_status: int | None = None  # … or if it ended with this exit status
    waits_for_address: bool = False  # … or, from the second time on, if it can't use its address
    retry_status: int | None = None  # this exit status, before any other process ended: start the whole job over
    hopeless_status: int | None = None  # … and this one: the job can't begin, now or later


def service_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a program of this package. ``-P``: files in the user's folder must not shadow its
    modules."""
    return (sys.executable, "-P", "-m", f"byteps_py.{module}", *arguments)
