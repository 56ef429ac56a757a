"""Creates process groups for ``init_process_group("byteps")`` and ``new_group``.

``init_process_group`` and ``byteps_py.init()`` share the process's one session; the first call opens it. A rank learns
its machine from the environment. Without a launcher (``torch.multiprocessing.spawn``) the ranks exchange their machines
through torch's store. The thread that calls torch.distributed calls this.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.session.solo import SoloSession
from byteps_py.settings import Settings
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import nonfinite, torch_rendezvous
from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.members import Members, prefix_of
from byteps_py.torch.process_group.byteps_process_group import BytePSProcessGroup
from byteps_py.torch.process_group.group_metadata import Options
from byteps_py.torch.process_group.input_check import check_mode

_HOLDER = "torch.distributed"
_worlds = 0  # default groups that this process has created


def create(opts: Any, pg_options: Any = None) -> BytePSProcessGroup:
    """Create a group. torch calls it on the group's members. pg_options: an Options.

    Raises ConfigurationError, RendezvousError, UnsupportedError for BYTEPS_NONFINITE=skip, and UsageError if the job
    differs from the world in size or ranks.
    """
    global _worlds
    context = contexts.current()
    is_world = not dist.is_initialized()
    if is_world:
        _worlds += 1
    ranks = tuple(opts.global_ranks_in_group) or tuple(range(opts.group_size))
    timeout: timedelta = getattr(pg_options, "_timeout", None) or opts.timeout
    if is_world:
        _join_job(context, opts.store, opts.group_rank, opts.group_size)
    session = context.session if len(ranks) > 1 else SoloSession()
    members = Members(context, session, ranks, opts.group_rank, prefix_of(_worlds, opts.group_id, ranks))
    leave = (lambda: _leave(context)) if is_world else None
    options = pg_options if isinstance(pg_options, Backend.Options) else Options(timeout)
    return BytePSProcessGroup(members, opts.store, timeout.total_seconds(), options, leave)


def _leave(context: Context) -> None:
    context.release(_HOLDER)
    POOL.close()


def _join_job(context: Context, store: Store, rank: int, size: int) -> None:
    if not context.is_open:
        settings = Settings.from_env()
        if size > 1 and torch_rendezvous.says_one_rank(settings):
            settings = torch_rendezvous.discover_machines(settings, store, rank, size)
        context.open(settings, holder=_HOLDER)
    else:
        context.open(holder=_HOLDER)
    try:
        check_mode(nonfinite.wanted(context))
    except UnsupportedError:
        context.release(_HOLDER)
        raise
    session = context.session
    if (session.rank, session.size) != (rank, size):
        context.release(_HOLDER)
        raise UsageError(
            f"torch.distributed says rank {rank} of {size}, byteps_py rank {session.rank} of {session.size}: ranks "
            "must be numbered machine by machine, and the world must have all ranks of the job. Start them with "
            "torchrun or bpslaunch, or pass rank=byteps_py.rank() and world_size=byteps_py.size() to init_process_group"
        )
