"""Errors of a session and reports of the exception that ends this process: messages, causes, tracebacks. Any thread."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from types import TracebackType

from byteps_py.errors import (
    BytePSError,
    CommunicationError,
    MismatchError,
    NonFiniteError,
    NonFiniteInputError,
    PeerLostError,
    UsageError,
)
from byteps_py.tensors import TensorSpec
from byteps_py.wire.launch_protocol import Blame
from byteps_py.wire.rank_link import Leave

#: Set by BYTEPS_LOG_LEVEL: ``without_inside`` then keeps tracebacks whole.
whole_tracebacks = False
_MAX_CHARS = 500
_DISREGARDED = "_byteps_py_disregarded"
_MAX_TRACEBACK_CHARS = 8000


def check_ranks(spec: TensorSpec, rank: int, size: int) -> None:
    """Raises UsageError if ``rank``, in a job of ``size`` ranks, can't declare ``spec``."""
    for what, named in (("root rank", spec.root), ("rank", spec.group[-1] if spec.group else 0)):
        if named >= size:
            raise UsageError(f"tensor {spec.name!r}: {what} {named} does not exist, ranks go from 0 to {size - 1}")
    if spec.group and rank not in spec.group:
        raise UsageError(
            f"tensor {spec.name!r}: rank {rank} is not in its group {list(spec.group)}; only ranks of the group may "
            "declare it"
        )


def service_lost(service_pid: int) -> PeerLostError:
    """The communication service has closed its channel."""
    return PeerLostError(
        f"the communication service of this machine is gone (process {service_pid}); its log may say why"
    )


def service_frozen(service_pid: int, silence_s: float) -> PeerLostError:
    """The communication service has been silent for ``silence_s`` seconds."""
    return PeerLostError(
        f"the communication service of this machine (process {service_pid}) has not answered for {silence_s:g} s: it "
        "is frozen or starved (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S)"
    )


def uncaught() -> BaseException | None:
    """The exception that ends this process, if the process is ending (during ``atexit``); otherwise None."""
    # An interactive interpreter has a last error, too, but its main thread is alive.
    return None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)


def in_flight() -> BaseException | None:
    """The exception that is being raised or handled in this thread, unless that was so before ``disregard``."""
    error = sys.exc_info()[1]
    return None if error is None or hasattr(error, _DISREGARDED) else error


def disregard() -> None:
    """The job begins while an exception is being handled, as in ``except ImportError: main()``: it is not the job's."""
    error = sys.exc_info()[1]
    if error is not None:
        with contextlib.suppress(Exception):  # a class of the user may refuse
            setattr(error, _DISREGARDED, True)


def ending() -> BaseException | None:
    """The exception with which this rank leaves the job: uncaught, or in flight."""
    return uncaught() or in_flight()


def is_exiting() -> bool:
    """True in the main thread once its program is over (during ``atexit``)."""
    thread = threading.current_thread()
    return thread is threading.main_thread() and not thread.is_alive()


def is_interactive() -> bool:
    """True if the interpreter continues after an uncaught exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


def while_waiting(error: BytePSError, what: str) -> BytePSError:
    """``error``, which ended the session, with ``what``, the operation that this rank was waiting for. A MismatchError
    stays as it is: it names the disagreement in the same words on all ranks.

    >>> while_waiting(PeerLostError("rank 3 died"), "tensor 'w', round 5: no result")
    PeerLostError("rank 3 died; tensor 'w', round 5: no result")
    """
    first, newline, others = str(error).partition("\n")  # a traceback may follow
    is_said = isinstance(error, MismatchError) or first.startswith(("tensor ", "a barrier"))
    return type(error)(str(error) if is_said else f"{first}; {what}{newline}{others}")


def summary(error: BaseException) -> str:
    """The type and the message of ``error``, at most 500 characters: ``ValueError: the data is bad``."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_CHARS]


def cause(error: BaseException) -> str:
    """A summary that is the same on all ranks that end for the same reason: without the operation that each of them
    waited for."""
    text = summary(error)
    return text.partition("; ")[0] if isinstance(error, PeerLostError) else text


def traceback_of(error: BaseException) -> str:
    """The traceback of ``error`` as Python prints it, at most its last 8000 characters. For the other ranks, whose
    users should not have to search for it in another rank's output."""
    if isinstance(error, BytePSError):
        shorten(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    return text if len(text) <= _MAX_TRACEBACK_CHARS else f"…{text[-_MAX_TRACEBACK_CHARS:]}"


def blame_for(error: BaseException) -> Blame:
    """The party at fault when ``error`` ends this process."""
    if isinstance(error, KeyboardInterrupt):
        return Blame.NOBODY
    return Blame.OTHERS if isinstance(error, PeerLostError) else Blame.OWN


def shorten(error: BytePSError) -> None:
    """Shorten its traceback to the frames that a user can act on: see ``without_inside``. An error that it was made
    from, with the same message, is left out."""
    if whole_tracebacks:
        return
    error.__traceback__ = without_inside(error.__traceback__)
    before = error.__context__
    if isinstance(before, BytePSError) and error.__cause__ in (None, before):
        if str(before).partition("\n")[0] in str(error):
            error.__cause__ = error.__context__ = None
        else:
            shorten(before)
    elif error.__cause__ is not None:  # of the user's code, such as a pipeline's stage
        error.__cause__.__traceback__ = _outside(error.__cause__.__traceback__)


def _outside(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback with its frames outside of this package and of torch; unchanged if there are none."""
    kept, entries, entry = None, [], traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for each in reversed(entries):
        if not _is_inside(each.tb_frame.f_globals.get("__name__", "")):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or traceback


def without_inside(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without its innermost frames in this package or in torch. The message of the error describes the
    failure; the frames before show where the program was. BYTEPS_LOG_LEVEL=DEBUG keeps the whole traceback."""
    entries = []
    entry = traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    outside = [i for i, each in enumerate(entries) if not _is_inside(each.tb_frame.f_globals.get("__name__", ""))]
    if not outside or whole_tracebacks:
        return traceback
    kept: TracebackType | None = None
    for each in reversed(entries[: outside[-1] + 1]):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _is_inside(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in ("byteps_py", "torch")


def leave_message() -> Leave | None:
    """The message that tells other ranks of ``ending``; None if they need none. An error of the job that is in flight
    needs none: the others have it too, and the program may handle it and join again."""
    error = ending()
    return None if isinstance(error, CommunicationError) and uncaught() is None else leave_message_for(error)


def leave_message_for(error: BaseException | None) -> Leave | None:
    """The message that tells others of ``error``, with which this rank ends; None if they need not know."""
    # All ranks report non-finite gradients themselves, with more detail.
    if error is None or (isinstance(error, NonFiniteError) and not isinstance(error, NonFiniteInputError)):
        return None
    if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return None  # the program ends as it was told to
    return Leave(error=summary(error), traceback=traceback_of(error))
