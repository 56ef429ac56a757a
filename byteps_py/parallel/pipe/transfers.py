"""Moves values between the workers of a pipeline: tensors of any dtype and shape, also several in nested structures.

A *channel* leads from one stage to another one; its values arrive in the order in which they were sent. Both ends
remember the signature of the last two values. If these are alike, the receiver expects another one like them, and posts
its receives before it is needed. If it is not, the header says so, and more messages follow: the signature and the
data.

    small values    header and tensors, copied together: one message
    large values    header | tensor | tensor …: each tensor is sent from its own memory

One thread.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.trees import Signature, TensorFacts, decode, encode, flatten, unflatten

_LINE = 64  # each tensor of a small value begins at a multiple of this
_HEADER_BYTES = 64
#: From this size on, on average, tensors are sent one by one. One tensor there and back, also between machines: 256 KB
#: takes 1.1 times as long apart, 1 MB 0.7 to 0.8 times, 16 MB 0.55 times.
_LARGE_BYTES = 512 << 10


class _Content(enum.IntEnum):
    """The first number of a header; the second one is the size of the signature that follows."""

    EXPECTED = 0  # the data, with the expected signature
    DIFFERENT = 1  # the signature and the data follow
    FAILED = 2  # nothing: the sender, or a worker before it, has failed


class WorkerFailed:
    """Stands in place of a value: the worker that should have computed it, or one before it, has failed."""


FAILED = WorkerFailed()


@dataclass(slots=True)
class _History:
    """The signatures of the last two values of a channel, as both ends know them."""

    last: Signature | None = None
    is_expected: bool = False  # the last two were alike

    @property
    def expected(self) -> Signature | None:
        return self.last if self.is_expected else None

    def add(self, signature: Signature) -> None:
        self.is_expected, self.last = signature == self.last, signature


@dataclass(frozen=True, slots=True)
class Ends:
    """``rank``: of the worker at the other end. ``tag``: of the channel's messages. ``group``: see torch.distributed.
    ``device``: of the tensors. ``copies``: tensors may change while they are sent."""

    rank: int
    tag: int
    group: dist.ProcessGroup
    device: torch.device
    copies: bool = False


class ValueSent:
    """Messages under way, and their memory."""

    def __init__(self, works: Sequence[dist.Work], memory: Sequence[torch.Tensor]) -> None:
        self._works, self._memory = works, memory
        self._versions = [_version(one) for one in memory]

    @property
    def is_over(self) -> bool:
        """True if ``wait`` would not block."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait until the memory is not needed any more. Raises UsageError if it has changed meanwhile, and the errors
        of the backend."""
        for work in self._works:
            work.wait()
        if [_version(one) for one in self._memory] != self._versions:
            raise UsageError(
                "a stage has changed its output in place while it was sent to the next stage: return a copy of what it "
                "keeps and changes (clone())"
            )


@dataclass(slots=True)
class SendingChannel:
    """The end of a channel that sends."""

    ends: Ends
    history: _History = field(default_factory=_History)

    def send(self, value: Any) -> list[ValueSent]:
        """Send ``value``, or FAILED. Returns at once, with the sends to wait for."""
        expected = self.history.expected
        if isinstance(value, WorkerFailed):
            return [self._instead(_Content.FAILED, 0, expected)]
        tensors, structure = flatten(value)
        signature = Signature(
            structure, tuple(TensorFacts(one.dtype, tuple(one.shape), one.requires_grad) for one in tensors)
        )
        self.history.add(signature)
        if signature == expected:
            header = _header(_Content.EXPECTED, 0, self.ends.device)
            if _is_large(signature):
                return [self._isend([header, *self._data(tensors, signature)])]
            return [self._isend([torch.cat([header, *_lines_of(tensors)])])]
        described = torch.frombuffer(bytearray(encode(signature)), dtype=torch.uint8).to(self.ends.device)
        sent = [self._instead(_Content.DIFFERENT, described.numel(), expected), self._isend([described])]
        if data := self._data(tensors, signature):
            sent.append(self._isend(data))
        return sent

    def _data(self, tensors: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
        """The messages with the tensors of a value that no header precedes."""
        if not _is_large(signature):
            return [torch.cat(_lines_of(tensors))] if _size(signature) else []
        bytes_of = [_bytes_of(tensor) for tensor in tensors if tensor.nbytes]
        return [one.clone() for one in bytes_of] if self.ends.copies else bytes_of

    def _instead(self, content: _Content, following: int, expected: Signature | None) -> ValueSent:
        """A header instead of the value that is expected, and as many bytes as that has: its receives are posted."""
        device = self.ends.device
        first, *memory = (torch.zeros(size, dtype=torch.uint8, device=device) for size in _expected_sizes(expected))
        first[:_HEADER_BYTES] = _header(content, following, device)
        return self._isend([first, *memory])

    def _isend(self, memory: Sequence[torch.Tensor]) -> ValueSent:
        ends = self.ends
        operations = [dist.P2POp(dist.isend, one, ends.rank, ends.group, ends.tag) for one in memory]
        return ValueSent(dist.batch_isend_irecv(operations), memory)


@dataclass(frozen=True, slots=True)
class _PostedReceives:
    """Messages that are posted."""

    works: Sequence[dist.Work]
    memory: Sequence[torch.Tensor]

    def wait(self) -> Sequence[torch.Tensor]:
        """Wait for the messages, and return their memory. Raises the errors of the backend."""
        for work in self.works:
            work.wait()
        return self.memory


@dataclass(slots=True)
class ReceivingChannel:
    """The end of a channel that receives."""

    ends: Ends
    history: _History = field(default_factory=_History)
    _posted: _PostedReceives | None = None

    def post(self) -> None:
        """Post the receives of the next value, unless that was done."""
        if self._posted is None:
            self._posted = self._irecv(_expected_sizes(self.history.expected))

    def receive(self) -> Any:
        """Wait for the next value. Floating tensors that required gradients at the sender do so here. Returns FAILED if
        its worker has failed. Raises the errors of the backend."""
        self.post()
        first, *data = self._take_posted().wait()
        content, following = first[:16].view(torch.int64).tolist()
        if content == _Content.FAILED:
            return FAILED
        signature = self.history.expected
        if content == _Content.DIFFERENT:
            (described,) = self._irecv([following]).wait()
            signature = decode(described.cpu().numpy().tobytes())
            data = list(self._irecv(_data_sizes(signature)).wait())
        elif not data:
            data = [first[_HEADER_BYTES:]]
        if signature is None:
            raise RuntimeError("a value without a signature: both ends of a channel must carry out the same program")
        self.history.add(signature)
        return unflatten(_tensors(data, signature, self.ends.device), signature.structure)

    def _take_posted(self) -> _PostedReceives:
        posted, self._posted = self._posted, None
        if posted is None:
            raise RuntimeError("receive() without post()")
        return posted

    def _irecv(self, sizes: Sequence[int]) -> _PostedReceives:
        ends = self.ends
        memory = [torch.empty(size, dtype=torch.uint8, device=ends.device) for size in sizes]
        operations = [dist.P2POp(dist.irecv, one, ends.rank, ends.group, ends.tag) for one in memory]
        return _PostedReceives(dist.batch_isend_irecv(operations) if operations else [], memory)


def _version(tensor: torch.Tensor) -> int:
    """The number of changes in place; they are not counted for a tensor that was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _is_large(signature: Signature) -> bool:
    """True if its tensors travel each by itself."""
    sizes = [facts.nbytes for facts in signature.tensors if facts.nbytes]
    return sum(sizes) >= _LARGE_BYTES * len(sizes) > 0


def _size(signature: Signature | None) -> int:
    """Bytes of the tensors of a small value, each filled up to a multiple of _LINE."""
    return sum(-(-facts.nbytes // _LINE) * _LINE for facts in signature.tensors) if signature is not None else 0


def _data_sizes(signature: Signature) -> list[int]:
    """Bytes of the messages with its tensors."""
    if _is_large(signature):
        return [facts.nbytes for facts in signature.tensors if facts.nbytes]
    return [size] if (size := _size(signature)) else []


def _expected_sizes(signature: Signature | None) -> list[int]:
    """Bytes of the messages of an expected value, the header first."""
    if signature is not None and _is_large(signature):
        return [_HEADER_BYTES, *_data_sizes(signature)]
    return [_HEADER_BYTES + _size(signature)]


@functools.lru_cache(maxsize=256)
def _header(content: _Content, following: int, device: torch.device) -> torch.Tensor:
    """The header of a message. Do not change it: it is kept for later messages."""
    numbers = torch.tensor([content, following, *(0,) * (_HEADER_BYTES // 8 - 2)], device="cpu")
    return numbers.view(torch.uint8).to(device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, or a copy if it is not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _lines_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each tensor, filled up to a multiple of _LINE. Few calls, because a worker that has just waited
    makes each of them with cold caches, and the next one waits for it."""
    pieces = []
    for tensor in tensors:
        pieces.append(_bytes_of(tensor))
        if left := -pieces[-1].numel() % _LINE:
            pieces.append(torch.zeros(left, dtype=torch.uint8, device=tensor.device))
    return pieces


def _tensors(data: Sequence[torch.Tensor], signature: Signature, device: torch.device) -> list[torch.Tensor]:
    """The tensors of a value, in the memory that has come."""
    tensors, messages, first = [], list(data), 0
    for facts in signature.tensors:
        if not facts.nbytes:
            memory = torch.empty(0, dtype=torch.uint8, device=device)
        elif _is_large(signature):
            memory = messages.pop(0)
        else:
            memory = messages[0][first : first + facts.nbytes]
            first += -(-facts.nbytes // _LINE) * _LINE
        tensors.append(memory.view(facts.dtype).view(facts.shape).requires_grad_(facts.requires_grad))
    return tensors
