"""run: calls a training function again, from the last commit, when the job fails. The training thread calls.

sync ─► function ─┬─ returns ───────────────────────► its result
  ▲               ├─ HorovodInternalError ─► leave, join again, restore ─► on_reset ─┐
  │               └─ HostsUpdatedInterrupt ► leave, join again ──────────► on_reset ─┤
  └──────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from byteps_py.errors import BytePSError, DismissedError, HorovodInternalError, HostsUpdatedInterrupt, RendezvousError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.elastic.state import State
from byteps_py.torch.horovod.api import init, shutdown

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

#: After this many failures in a row without a commit between them the error is raised: it would repeat forever.
FRUITLESS_LIMIT = 3
_log = logging.getLogger("byteps_py")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function whose first argument is a State. It is called again after a failure of the job.

    Before each call, all ranks' states are made equal to rank 0's. After a HorovodInternalError (any
    CommunicationError), this rank leaves the job, joins it again and restores the last commit. After a
    HostsUpdatedInterrupt it restores nothing. All collective calls must be inside ``func``.

    In an elastic job (BYTEPS_ELASTIC, ``bpslaunch --elastic``) the group may have changed: ask ``rank()`` and
    ``size()`` again. In other jobs the same ranks must come back, so training goes on only after errors that every rank
    sees and survives, such as a tensor that ranks disagree about.

    Raises the function's other errors; the job's error after three failures in a row without a commit between them and
    with the same number of ranks; RendezvousError if the job can't be joined again; SystemExit, with status 0, on a
    machine that was told to leave the job.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> @bps.elastic.run
    ... def train(state):
    ...     while state.batch < 3:
    ...         state.batch += 1
    ...         state.commit()
    ...     return "done"
    >>> train(bps.elastic.TorchState(batch=0))
    'done'
    >>> bps.shutdown()
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        fruitless = 0
        lost: Exception | None = None  # the reason for joining the job again
        skip_sync = False
        size = contexts.current().session.size
        while True:
            if lost is not None:
                skip_sync = rejoin(lost) and skip_sync
                before, size = size, contexts.current().session.size
                fruitless = fruitless if size == before else 0
            commits = state.commits
            try:
                if lost is not None:
                    if isinstance(lost, HorovodInternalError):
                        state.restore()
                    lost = None
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                contexts.current().session.note_synced()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                fruitless = 1 if state.commits > commits else fruitless + 1
                if fruitless == FRUITLESS_LIMIT:
                    raise
                _log.warning("elastic: going back to the last commit after %s: %s", type(error).__name__, error)
                lost, skip_sync = error, False
            except HostsUpdatedInterrupt as interrupt:
                _log.warning("elastic: %s", interrupt)
                lost, skip_sync = interrupt, interrupt.skip_sync

    return wrapper  # type: ignore[return-value]  # the argument has a name, which a Callable cannot express


def rejoin(why: Exception) -> bool:
    """Leave the job and join it again. True if all ranks are equal: they were in the group before and left in order.

    Raises SystemExit, with status 0, if this machine was told to leave an elastic job; RendezvousError if the job can't
    be joined again.
    """
    context = contexts.current()
    is_elastic = context.settings.elastic
    if context.is_open:
        context.session.returning = (f"{type(why).__name__}: {why}", isinstance(why, HostsUpdatedInterrupt))
    with contextlib.suppress(BytePSError):  # errors of unfinished operations, whose results are not needed any more
        shutdown()
    # The incarnation keeps names of one group apart from those of the next. In an elastic job the service does that,
    # and a new rank could not know the number of earlier groups.
    if not is_elastic:
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
