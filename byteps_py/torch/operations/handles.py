"""Names and handles of operations: how an operation gets a name that all its ranks agree on, waits until the
name is free, and is waited for.

Must not know the kinds of operations. Any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.work import Attempt, NamedWork

__all__ = ["poll", "synchronize"]


def kind_in_group(group: tuple[int, ...], kind: str) -> str:
    """The beginning of the names of ``kind`` in ``group``. Two groups never share a name.

    >>> kind_in_group((), "allgather"), kind_in_group((0, 2), "allgather")
    ('allgather', 'allgather[0-2]')
    """
    if not group:
        return kind
    text = "-".join(map(str, group))
    if len(text) > 48:
        text = f"{len(group)} ranks {hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    return f"{kind}[{text}]"


def named_work(context: Context, full_name: str, is_unnamed: bool, attempt: Attempt) -> NamedWork:
    """The operation ``attempt`` under ``full_name``.

    If ranks disagree about an operation that the user did not name, every rank restarts its count of unnamed ones.
    """
    epoch = context.names.epoch

    def recount() -> None:
        if is_unnamed:
            context.names.restart(epoch)

    return NamedWork(full_name, attempt, recount)


def start_when_name_is_free(context: Context, full_name: str, name: str | None, begin: Callable[[], NamedWork]) -> int:
    """Run ``begin`` as soon as no other operation uses ``full_name``. Returns the operation's handle.

    Raises UsageError if the user gave the ``name`` and an earlier operation still has it. Generated names repeat after
    a while: then this call completes the earlier operation first, and its result stays ready for its owner.
    """
    while True:
        with context.lock:
            earlier = context.handles.occupant(full_name)
            if earlier is None:
                return context.handles.add(begin())
        if name is not None:
            raise UsageError(
                f"Duplicate tensor name {name!r}: a tensor with the same name is currently being processed; use a "
                "different tensor name, or call synchronize() on its handle first"
            )
        earlier.complete()


def poll(handle: int) -> bool:
    """True if synchronize(handle) would not block. Raises UsageError for an unknown handle. Any thread."""
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    operation = context.handles.get(handle)
    if operation.is_done:
        operation.complete()  # so that a tensor reduced in place holds its result
    return operation.is_over


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result: a tensor, a tuple of tensors for a group, or the tensor and the
    received splits for alltoall_async. None for an unknown handle, or one that was synchronized before.

    Any thread may call it. Raises MismatchError, StallError or PeerLostError.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> handle = bps.push_pull_async(torch.tensor([1.0]), name="x")
    >>> bps.synchronize(handle)
    tensor([1.])
    >>> bps.shutdown()
    """
    context = contexts.current()
    context.session  # noqa: B018  raises NotInitializedError
    operation = context.handles.pop(handle)
    return None if operation is None else operation.deliver()


def result_of(handle: int) -> Any:
    """``synchronize`` for the handle of a synchronous function. Raises UsageError if a shutdown cleared it."""
    output = synchronize(handle)
    if output is None:
        raise UsageError(f"handle {handle} was cleared by a shutdown in another thread")
    return output
