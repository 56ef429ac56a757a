"""Broadcasts: of one tensor; of any number of bytes through a few fixed slots, for data sent once; of Python objects.

The stream is for objects and optimizer states: if each of their tensors had a name, each would keep a slot of shared
memory for the rest of the job. All ranks must know the sizes, and call in the same order, one thread at a time. Any
thread may broadcast a tensor.

Bytes, for M bytes and n machines: M out of the root's machine and M into each other machine. The other machines pass
parts on: each sends at most (n-2)/(n-1) · M.

broadcast_object and allgather_object have Horovod's names and arguments. A rank pickles its object with cloudpickle if
that is installed, as in Horovod (cloudpickle takes lambdas and classes of the main program), else with pickle. A rank
unpickles only messages of ranks of its job: these are authenticated and run the same program anyway.

``broadcast_object``: one thread at a time, the same order on all ranks. The other functions: any thread.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from byteps_py.errors import CommunicationError, ProtocolError, UsageError
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import bits_of, check_dense, check_result, wire_dtype
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.collectives.work import Attempt, NamedWork
from byteps_py.torch.operations.gathers import start_gather
from byteps_py.torch.operations.handles import kind_in_group, named_work, result_of, start_when_name_is_free
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of, members_of

#: A chunk has the smallest of these sizes that holds the remaining bytes if they fill most of it, else the largest that
#: they fill, or the smallest.
CHUNK_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
_LEAST_FILLED = 0.75
#: The most chunks in flight at once.
WINDOW = 4

Piece = tuple[int, int, int]  # (buffer, start, length)


def cut(lengths: Sequence[int]) -> Iterator[tuple[int, list[Piece]]]:
    """Split buffers of ``lengths`` bytes, laid end to end, into chunks: (chunk size, its pieces).

    >>> list(cut([5000, 100]))
    [(4096, [(0, 0, 4096)]), (4096, [(0, 4096, 904), (1, 0, 100)])]
    >>> [size >> 10 for size, _ in cut([250_000])]
    [64, 64, 64, 64]
    >>> list(cut([]))
    []
    """
    left = sum(lengths)
    buffer = start = 0
    while left:
        size = next((size for size in CHUNK_BYTES if _LEAST_FILLED * size <= left <= size), 0)
        size = size or max((size for size in CHUNK_BYTES if size <= left), default=CHUNK_BYTES[0])
        pieces: list[Piece] = []
        room = min(size, left)
        left -= room
        while room:
            length = min(room, lengths[buffer] - start)
            if length:
                pieces.append((buffer, start, length))
            start += length
            room -= length
            if start == lengths[buffer]:
                buffer, start = buffer + 1, 0
        yield size, pieces


def broadcast_stream(
    context: Context, buffers: Sequence[torch.Tensor], root: int, label: str, group: tuple[int, ...] = ()
) -> None:
    """Copy the root's flat uint8 ``buffers`` (host memory) to the ranks of ``group`` (empty: all), in place.

    label: differs between kinds of streams and between groups. Raises as Session.wait does.
    """
    is_root = context.session.rank == root
    in_flight: deque[tuple[PieceView, list[Piece]]] = deque()

    def receive() -> None:
        slot_view, pieces = in_flight.popleft()
        slot_view.wait()
        if not is_root:
            offset = 0
            for buffer, start, length in pieces:
                buffers[buffer][start : start + length].copy_(slot_view.results[0][offset : offset + length])
                offset += length

    chunks = list(cut([b.numel() for b in buffers]))
    places = [(size, number % WINDOW) for number, (size, _) in enumerate(chunks)]
    slot_views = _stream_slots(context, dict.fromkeys(places), f"{label}.{root}", root, group)
    for place, (_, pieces) in zip(places, chunks, strict=True):
        if len(in_flight) == WINDOW:
            receive()
        slot_view = slot_views[place]
        if is_root:
            offset = 0
            for buffer, start, length in pieces:
                slot_view.inputs[0][offset : offset + length].copy_(buffers[buffer][start : start + length])
                offset += length
        slot_view.contribute_input()  # the data are in the slot already
        in_flight.append((slot_view, pieces))
    while in_flight:
        receive()


def _stream_slots(
    context: Context, places: Iterable[tuple[int, int]], label: str, root: int, group: tuple[int, ...]
) -> dict[tuple[int, int], PieceView]:
    """The slots of (chunk size, number), declared together: ranks agree on all of them in one round trip."""
    requests = {}
    for size, number in places:
        spec = TensorSpec(f"{label}.{size}.{number}", DType.UINT8, (size,), Op.BROADCAST, root=root, group=group)
        requests[size, number] = TensorRequest(spec, torch.uint8, ((size,),), torch.device("cpu"))
    return dict(zip(requests, context.slot_views(list(requests.values())), strict=True))


def check_root(context: Context, root_rank: int, group: tuple[int, ...] = ()) -> None:
    """Raises UsageError unless ``root_rank``, a global rank, is in ``group`` (empty: all ranks)."""
    size = context.session.size
    if not 0 <= root_rank < size:
        raise UsageError(f"invalid root rank: {root_rank} does not exist, ranks go from 0 to {size - 1}")
    if group and root_rank not in group:
        raise UsageError(
            f"broadcast received invalid root rank {root_rank} for provided process set of ranks {list(group)}; it is "
            "a global rank, and must be in the set"
        )


def broadcast_request(
    context: Context, tensor: torch.Tensor, root_rank: int, name: str | None, group: tuple[int, ...] = ()
) -> TensorRequest:
    """The declaration that a broadcast of ``tensor`` needs. Raises UsageError."""
    check_root(context, root_rank, group)
    check_dense(tensor, name)
    bits = bits_of(tensor)
    wire, shape = wire_dtype(bits.dtype, name), tuple(bits.shape)
    terms = "" if bits.dtype is tensor.dtype else str(tensor.dtype).removeprefix("torch.")
    kind = kind_in_group(group, "broadcast")
    if name is None:
        full_name = context.names.next(kind, (root_rank, wire, shape, terms), bits.nbytes)
    else:
        full_name = f"{kind}.{name}"
    spec = TensorSpec(full_name, wire, shape, Op.BROADCAST, root=root_rank, group=group, terms=terms)
    return TensorRequest(spec, bits.dtype, (shape,), tensor.device)


def start_broadcast(
    context: Context, request: TensorRequest, tensor: torch.Tensor, output: torch.Tensor, name: str | None
) -> int:
    """Begin to broadcast the root's ``tensor`` into ``output`` (may be the same tensor). Returns a handle."""
    check_result(output, name)

    def begin() -> NamedWork:
        (slot_view,) = context.slot_views([request])
        is_root = context.session.rank == request.spec.root
        if not is_root:
            slot_view.contribute_input()
        else:
            if output is not tensor:
                output.detach().copy_(tensor.detach())
            slot_view.contribute([bits_of(tensor)])

        def complete() -> torch.Tensor:
            slot_view.wait()
            if not is_root:
                slot_view.fetch([bits_of(output)])
            return output

        return named_work(context, request.spec.name, name is None, Attempt(lambda: slot_view.is_done, complete))

    return start_when_name_is_free(context, request.spec.name, name, begin)


__all__ = ["allgather_object", "broadcast_object"]

_OBJECT, _FAILURE = b"o", b"f"
#: Of an object, what travels first: the length of its bytes, and as many of them as have room. Most have no more.
_HEAD_BYTES, _LENGTH = 4 << 10, struct.Struct("<q")


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
    return object_from_root(obj, root_rank, name, group_of(process_set))


def object_from_root(obj: Any, root_rank: int, name: str | None, group: tuple[int, ...] = ()) -> Any:
    """As broadcast_object, among the ranks of ``group`` (empty: all), which alone call it."""
    context = contexts.current()
    check_root(context, root_rank, group)
    label = f"{kind_in_group(group, 'broadcast_object')}.{name or 'noname'}"
    is_root = context.session.rank == root_rank
    payload, failure = packed(obj) if is_root else (b"", None)
    head = bytearray(_LENGTH.pack(len(payload)) + payload[: _HEAD_BYTES - _LENGTH.size])
    first = torch.frombuffer(head.ljust(_HEAD_BYTES, b"\0"), dtype=torch.uint8)
    broadcast_stream(context, [first], root_rank, label, group)
    (length,) = _LENGTH.unpack(first[: _LENGTH.size].numpy().tobytes())
    if length < 1:
        raise ProtocolError(f"rank {root_rank} broadcasts an object of {length} bytes")
    begin = first[_LENGTH.size :][:length]
    rest = torch.empty(length - len(begin), dtype=torch.uint8, device="cpu")
    if is_root and rest.numel():
        rest = torch.frombuffer(bytearray(payload), dtype=torch.uint8)[len(begin) :]
    broadcast_stream(context, [rest], root_rank, label, group)
    if failure is not None:
        raise failure
    if is_root:
        return obj
    try:
        return unpacked(torch.cat([begin, rest]).numpy().tobytes())
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
