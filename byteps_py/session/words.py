"""Sentences of a session: why it can't go on, and why its process ends."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType

from byteps_py.errors import (
    BytePSError,
    MismatchError,
    NonFiniteError,
    NonFiniteInputError,
    PeerLostError,
    UsageError,
)
from byteps_py.failure_notice import Blame
from byteps_py.tensors import TensorSpec

#: BYTEPS_LOG_LEVEL says so; see ``without_inside``.
whole_tracebacks = False
_MAX_CHARS = 500
_MAX_TRACEBACK_CHARS = 8000


def check_ranks(spec: TensorSpec, rank: int, size: int) -> None:
    """Raises UsageError if ``rank``, of ``size``, can't declare this."""
    for what, named in (("root rank", spec.root), ("rank", spec.group[-1] if spec.group else 0)):
        if named >= size:
            raise UsageError(f"tensor {spec.name!r}: {what} {named} does not exist, ranks go from 0 to {size - 1}")
    if spec.group and rank not in spec.group:
        raise UsageError(
            f"tensor {spec.name!r}: rank {rank} is not in its group {list(spec.group)}; only ranks of the group may "
            "declare it"
        )


def gone(service_pid: int) -> PeerLostError:
    return PeerLostError(
        f"the communication service of this machine is gone (process {service_pid}); its log may say why"
    )


def frozen(service_pid: int, silence_s: float) -> PeerLostError:
    return PeerLostError(
        f"the communication service of this machine (process {service_pid}) has not answered for {silence_s:g} s: it "
        "is frozen or starved (BYTEPS_HEARTBEAT_TIMEOUT_MAX_S)"
    )


def forked(rank: object) -> UsageError:
    return UsageError(
        f"process {os.getpid()} was forked from rank {rank}, which alone may communicate; start new ranks with "
        "bpslaunch or spawn"
    )


def uncaught() -> BaseException | None:
    """The exception that ends this process, when called while it ends (by ``atexit``); else None."""
    # An interactive session has a last error, too, but it goes on: its main thread lives.
    return None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)


def is_interactive() -> bool:
    """The interpreter goes on after an exception that nobody caught."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


def while_waiting(error: BytePSError, what: str) -> BytePSError:
    """What ended the session, and what did not come because of that. A disagreement of ranks is left as it is: it names
    what they disagree about, the same on all of them.

    >>> while_waiting(PeerLostError("rank 3 died"), "tensor 'w', round 5: no result")
    PeerLostError("rank 3 died; tensor 'w', round 5: no result")
    """
    first, newline, others = str(error).partition("\n")  # a traceback may follow
    is_said = isinstance(error, MismatchError) or first.startswith(("tensor ", "a barrier"))
    return type(error)(str(error) if is_said else f"{first}; {what}{newline}{others}")


def summary(error: BaseException) -> str:
    """``ValueError: the data is bad``"""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_CHARS]


def cause(error: BaseException) -> str:
    """What is the same on all ranks that end for the same reason: without what each of them waited for."""
    text = summary(error)
    return text.partition("; ")[0] if isinstance(error, PeerLostError) else text


def traceback_of(error: BaseException) -> str:
    """As Python prints it; of a long one the end. For the other ranks, who should not have to search for it in
    somebody else's output."""
    frames = without_inside(error.__traceback__) if isinstance(error, BytePSError) else error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return text if len(text) <= _MAX_TRACEBACK_CHARS else f"…{text[-_MAX_TRACEBACK_CHARS:]}"


def blame_for(error: BaseException) -> Blame:
    """Who is at fault when ``error`` ends this process."""
    if isinstance(error, KeyboardInterrupt):
        return Blame.NOBODY
    return Blame.OTHERS if isinstance(error, PeerLostError) else Blame.OWN


def without_inside(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without its end, as far as that is inside this package, or inside torch: an error's message says what
    happened there, and the frames before it where the program was. BYTEPS_LOG_LEVEL=DEBUG keeps it whole."""
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


def last_words(error: BaseException | None) -> dict[str, str]:
    """The fields of a LEAVE message."""
    # Gradients that are not finite all ranks report by themselves, and better.
    if error is None or (isinstance(error, NonFiniteError) and not isinstance(error, NonFiniteInputError)):
        return {}
    return {"error": summary(error), "traceback": traceback_of(error)}
