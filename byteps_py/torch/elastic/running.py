"""run: a training function that is called again, from the last commit, when the job fails. The training thread calls.

sync ─► function ─┬─ returns ───────────────────────► its result
  ▲               ├─ HorovodInternalError ─► leave, join again, restore ─► on_reset ─┐
  │               └─ HostsUpdatedInterrupt ► leave, join again ──────────► on_reset ─┤
  └──────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from byteps_py.errors import HorovodInternalError, HostsUpdatedInterrupt
from byteps_py.torch.elastic.joining import rejoin
from byteps_py.torch.elastic.object_state import State
from byteps_py.torch.engine import context as contexts

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

    Raises the function's other errors; the job's error after three failures in a row without a commit between them and
    with the same number of ranks; RendezvousError if the job can't be joined again; SystemExit, with status 0, on a
    machine that was told to leave the job. In an elastic job (BYTEPS_ELASTIC, ``bpslaunch --elastic``) the group may
    have changed: ``rank()`` and ``size()`` are others. In a job that is not elastic, what can be gone on from is what
    all ranks see and survive, such as a tensor that they disagree about.

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
        lost: Exception | None = None  # why the job is to be joined again
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

    return wrapper  # type: ignore[return-value]  # the argument has a name, which a Callable cannot say
