"""The settings of a job of some of the ranks that a launcher started: Horovod's ``init(comm=[0, 2])``. Pure; any
thread.

Supported if all of them are on one machine: they start services of their own, apart from those of the launcher, and the
other ranks may do the same. Across machines only the launcher knows an address for a scheduler.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, UsageError


def rank_in(settings: Settings) -> int:
    """This process's rank according to the environment, if every machine has the same number of ranks."""
    return settings.worker_id * settings.local_size + settings.local_rank


def among(settings: Settings, ranks: Sequence[int]) -> Settings:
    """The settings of a job of the launcher's ranks ``ranks`` alone. ``settings`` itself if ``ranks`` is empty or names
    all ranks.

    Raises UsageError if ``ranks`` are not ascending ranks of this job that include this process's rank, and
    ConfigurationError if they are on several machines.

    >>> among(Settings(local_size=3, local_rank=2, job_id="j"), [0, 2]).local_rank
    1
    """
    size = settings.num_workers * settings.local_size
    me = rank_in(settings)
    given = list(ranks)
    if not given or given == list(range(size)):
        return settings
    if given != sorted(set(given)) or given[0] < 0 or given[-1] >= size:
        raise UsageError(f"comm must be ascending ranks from 0 to {size - 1}, got {given}")
    if me not in given:
        raise UsageError(f"comm={given} does not have this rank, {me}; ranks outside of it must not call init with it")
    if len(given) > 1 and given[0] // settings.local_size != given[-1] // settings.local_size:
        raise ConfigurationError(
            f"comm={given} has ranks of several machines: start a job of these ranks alone, or let all ranks call "
            "init() and give operations a ProcessSet of these"
        )
    digest = hashlib.blake2b(repr(given).encode(), digest_size=6).hexdigest()
    return dataclasses.replace(
        settings,
        scheduler_host="",
        scheduler_port=0,
        num_workers=1,
        num_servers=0,
        worker_id=0,
        local_size=len(given),
        local_rank=given.index(me),
        job_id=f"{settings.job}-among-{digest}",
        socket_name="",
        force_distributed=settings.force_distributed and len(given) > 1,
    )
