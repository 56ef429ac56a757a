"""Leaving the job and joining it again, in a group that may be another one. The training thread calls."""

from __future__ import annotations

import contextlib

from byteps_py.errors import BytePSError, DismissedError, HostsUpdatedInterrupt, RendezvousError
from byteps_py.torch.engine import context as contexts
from byteps_py.torch.horovod.api import init, shutdown


def rejoin(why: Exception) -> bool:
    """Leave the job and join it again. True if all ranks are equal: they were in the group before, and left in order.

    Raises SystemExit, with status 0, if this machine was told to leave an elastic job; RendezvousError if the job can't
    be joined again.
    """
    context = contexts.current()
    is_elastic = context.settings.elastic
    if context.is_open:
        context.session.returning = (f"{type(why).__name__}: {why}", isinstance(why, HostsUpdatedInterrupt))
    with contextlib.suppress(BytePSError):  # of unfinished work, which nobody needs any more
        shutdown()
    if not is_elastic:  # else nothing of one group meets another, and newcomers could not know how often there was one
        context.incarnation += 1
    try:
        init()
    except DismissedError as dismissed:
        raise SystemExit(0) from dismissed
    except BytePSError as error:
        remedy = "" if is_elastic else (
            ". Only an elastic job (BYTEPS_ELASTIC=1, bpslaunch --elastic) goes on without a process that is gone, or "
            "with others; this one goes on with the same ranks only. Start the job again, from a checkpoint"
        )  # fmt: skip
        raise RendezvousError(
            f"elastic: the job can't be joined again after {type(why).__name__}: {error}{remedy}"
        ) from why
    return context.session.is_continued or not is_elastic
