"""Python objects between ranks: broadcast_object and allgather_object, with Horovod's names and arguments.

A rank pickles its object with cloudpickle if that is installed, as in Horovod (cloudpickle takes lambdas and classes of
the main program), else with pickle. A rank unpickles only messages of ranks of its job: these are authenticated and run
the same program anyway.

``broadcast_object``: one thread at a time, the same order on all ranks. The other functions: any thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import CommunicationError, ProtocolError
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.dtypes import as_bytes
from byteps_py.torch.operations.broadcasts import broadcast_stream, check_root
from byteps_py.torch.operations.gathers import start_gather
from byteps_py.torch.operations.handles import kind_in_group, result_of
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of, members_of

__all__ = ["allgather_object", "broadcast_object"]

_OBJECT, _FAILURE = b"o", b"f"


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's ``obj`` on every rank. The root pickles it, the other ranks unpickle it.

    root_rank: a global rank, also with a process set. One thread at a time calls it, in the same order on all ranks.
    If the root can't pickle the object, the root raises the pickler's error, and the other ranks raise
    CommunicationError with the reason.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> bps.broadcast_object({"epoch": 3})  # a job of one rank
    {'epoch': 3}
    >>> bps.shutdown()
    """
    context = contexts.current()
    group = group_of(process_set)
    check_root(context, root_rank, group)
    label = f"{kind_in_group(group, 'broadcast_object')}.{name or 'noname'}"
    is_root = context.session.rank == root_rank
    payload, failure = packed(obj) if is_root else (b"", None)
    length = torch.tensor([len(payload)], device="cpu")
    broadcast_stream(context, [as_bytes(length)], root_rank, label, group)
    if int(length) < 1:
        raise ProtocolError(f"rank {root_rank} broadcasts an object of {int(length)} bytes")
    data = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if is_root
        else torch.empty(int(length), dtype=torch.uint8, device="cpu")
    )
    broadcast_stream(context, [data], root_rank, label, group)
    if failure is not None:
        raise failure
    if is_root:
        return obj
    try:
        return unpacked(data.numpy().tobytes())
    except NotPickledError as reason:
        raise CommunicationError(f"rank {root_rank} could not pickle the object to broadcast: {reason}") from None


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in a list in the order of the ranks.

    Each rank pickles its ``obj``, and all ranks unpickle it. Any thread may call it. If a rank can't pickle its object,
    every rank raises CommunicationError with the reason.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> bps.allgather_object({"rank": bps.rank()})  # a job of one rank
    [{'rank': 0}]
    >>> bps.shutdown()
    """
    members = members_of(process_set)
    payload, failure = packed(obj)
    both = [torch.frombuffer(bytearray(payload), dtype=torch.uint8), torch.tensor([len(payload)], device="cpu")]
    own = f"allgather_object.{name or 'noname'}"
    handle = start_gather(both, own, group_of(process_set), is_group=True, background=False)
    data, announced = result_of(handle)
    lengths = announced.tolist()
    check_lengths(lengths, len(members), len(data))
    objects = []
    for rank, piece in zip(members, data.split(lengths), strict=True):
        try:
            objects.append(unpacked(piece.numpy().tobytes()))
        except NotPickledError as reason:
            raise CommunicationError(f"rank {rank} could not pickle its object to gather: {reason}") from failure
    return objects


# ---- pickled objects ---------------------------------------------------------------------------------------


class NotPickledError(Exception):
    """A rank could not pickle its object; the message says why."""


def packed(obj: Any) -> tuple[bytes, Exception | None]:
    """(``obj`` as bytes, None), or (the pickler's error as bytes for the other ranks, the error)."""
    try:
        return _OBJECT + pickled(obj), None
    except Exception as error:
        return _FAILURE + f"{type(error).__name__}: {error}".encode(), error


def check_lengths(lengths: Sequence[int], count: int, total: int) -> None:
    """Raises ProtocolError unless ``lengths`` are the lengths of ``count`` objects that fill ``total`` bytes."""
    if len(lengths) != count or min(lengths, default=0) < 0 or sum(lengths) != total:
        raise ProtocolError(f"{count} ranks gave objects of {list(lengths[:8])} bytes, {total} bytes in all")


def unpacked(data: bytes) -> Any:
    """The object. Raises NotPickledError if its rank could not pickle it, ProtocolError if ``data`` is malformed."""
    if data[:1] == _FAILURE:
        raise NotPickledError(data[1:].decode(errors="replace"))
    if data[:1] != _OBJECT:
        raise ProtocolError(f"expected a rank's object, got {len(data)} bytes of another kind")
    return unpickled(memoryview(data)[1:])


def pickled(obj: Any) -> bytes:
    """``obj`` as bytes. Raises the errors of the pickler."""
    data: bytes = _pickler().dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def unpickled(data: bytes | memoryview) -> Any:
    """The object that a rank of this job, which is authenticated, has pickled."""
    return pickle.loads(data)


def _pickler() -> Any:
    return importlib.import_module("cloudpickle") if importlib.util.find_spec("cloudpickle") else pickle
