"""run: a training function that is called again, from the last commit, when the job fails. The training thread calls.

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

from byteps_py.errors import BytePSError, HorovodInternalError, HostsUpdatedInterrupt, RendezvousError
from byteps_py.torch import context as contexts
from byteps_py.torch.api import init, shutdown
from byteps_py.torch.elastic.state import State

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

#: So many failures in a row without a commit between them, and the error is raised: it would come for ever.
FRUITLESS_LIMIT = 3
_log = logging.getLogger("byteps_py")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function whose first argument is a State; it is called again after a failure of the job.

    Before each call all ranks' states are made equal. After a HorovodInternalError (any CommunicationError) the job is
    left and joined again and the last commit restored; after a HostsUpdatedInterrupt nothing is restored. Everything
    collective belongs into ``func``.

    Raises the function's other errors; the job's error after three failures in a row without a commit between them;
    RendezvousError if the job can't be joined again. That is so where a process of it is gone or was given up: this
    version does not change the membership of a job. What can be gone on from is what all ranks see and survive, such
    as a tensor that they disagree about. A rank that fails alone, and lives, keeps the others waiting until the stall
    limit.

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
        skip_sync = False
        while True:
            commits = state.commits
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                fruitless = 1 if state.commits > commits else fruitless + 1
                if fruitless == FRUITLESS_LIMIT:
                    raise
                _log.warning("elastic: going back to the last commit after %s: %s", type(error).__name__, error)
                _rejoin(error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                _log.warning("elastic: hosts changed; this version joins the job again with the ranks it had")
                _rejoin(interrupt)
                skip_sync = interrupt.skip_sync
            state.on_reset()

    return wrapper  # type: ignore[return-value]  # the argument has a name, which a Callable cannot say


def _rejoin(why: Exception) -> None:
    """Leave the job and join it again, as the same rank."""
    with contextlib.suppress(BytePSError):  # of unfinished work, which nobody needs any more
        shutdown()
    contexts.current().incarnation += 1
    try:
        init()
    except BytePSError as error:
        raise RendezvousError(
            f"elastic: the job can't be joined again after {type(why).__name__}: {error}. This version of byteps_py "
            "goes on with the same ranks only: it does not replace a process that is gone, nor go on without it. Start "
            "the job again, from a checkpoint"
        ) from why
