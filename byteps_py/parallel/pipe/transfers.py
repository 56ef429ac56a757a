"""Moves values between the workers of a pipeline: tensors of any dtype and shape, also several in nested structures.

A *channel* leads from one stage to another one; its values arrive in the order in which they were sent. All tensors of
a value travel in one message, behind a header. Both ends remember the signature of the last two values. If these are
alike, the receiver expects another one like them, and posts a receive of that size before it is needed. If it is not,
the message says so, and two more follow: the signature and the data.

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

from byteps_py.parallel.pipe.trees import Signature, TensorFacts, decode, encode, flatten, unflatten

_LINE = 64  # each tensor begins at a multiple of this
_HEADER_BYTES = 64


class _Content(enum.IntEnum):
    """The first number of a header; the second one is the size of the signature that follows."""

    EXPECTED = 0  # the data, with the expected signature
    DIFFERENT = 1  # the signature and the data follow
    FAILED = 2  # nothing: the sender, or a worker before it, has failed


class WorkerFailed:
    """In place of a value: the worker that should have computed it, or one before it, has failed."""


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
    ``device``: of the tensors."""

    rank: int
    tag: int
    group: dist.ProcessGroup
    device: torch.device


@dataclass(slots=True)
class SendingChannel:
    """The end of a channel that sends."""

    ends: Ends
    history: _History = field(default_factory=_History)

    def send(self, value: Any) -> list[tuple[dist.Work, torch.Tensor]]:
        """Send ``value``, or FAILED. Returns at once, with the works to wait for, and memory to keep until then."""
        expected = self.history.expected
        if isinstance(value, WorkerFailed):
            return [self._message(_Content.FAILED, 0, expected)]
        tensors, structure = flatten(value)
        signature = Signature(
            structure, tuple(TensorFacts(one.dtype, tuple(one.shape), one.requires_grad) for one in tensors)
        )
        self.history.add(signature)
        if signature == expected:
            return [self._message(_Content.EXPECTED, 0, expected, tensors)]
        described = torch.frombuffer(bytearray(encode(signature)), dtype=torch.uint8).to(self.ends.device)
        works = [self._message(_Content.DIFFERENT, described.numel(), expected), self._isend(described)]
        if _size(signature):
            works.append(self._isend(torch.cat(_bytes_of(tensors))))
        return works

    def _message(
        self, content: _Content, following: int, expected: Signature | None, tensors: Sequence[torch.Tensor] = ()
    ) -> tuple[dist.Work, torch.Tensor]:
        pieces = [_header(content, following, self.ends.device), *_bytes_of(tensors)]
        left = _HEADER_BYTES + _size(expected) - sum(piece.numel() for piece in pieces)
        if left:  # FAILED and DIFFERENT are as long as what is expected
            pieces.append(torch.zeros(left, dtype=torch.uint8, device=self.ends.device))
        return self._isend(torch.cat(pieces))

    def _isend(self, memory: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        ends = self.ends
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, memory, ends.rank, ends.group, ends.tag)])
        return work, memory


@dataclass(slots=True)
class ReceivingChannel:
    """The end of a channel that receives."""

    ends: Ends
    history: _History = field(default_factory=_History)
    _posted: tuple[dist.Work, torch.Tensor] | None = None

    def post(self) -> None:
        """Post the receive of the next value, unless that was done."""
        if self._posted is None:
            self._posted = self._irecv(_HEADER_BYTES + _size(self.history.expected))

    def receive(self) -> Any:
        """Wait for the next value. Floating tensors that required gradients at the sender do so here. Returns FAILED if
        its worker has failed. Raises the errors of the backend."""
        self.post()
        work, memory = self._taken()
        work.wait()
        content, following = memory[:16].view(torch.int64).tolist()
        if content == _Content.FAILED:
            return FAILED
        signature, data = self.history.expected, memory[_HEADER_BYTES:]
        if content == _Content.DIFFERENT:
            signature = decode(self._received(following).cpu().numpy().tobytes())
            data = self._received(_size(signature))
        if signature is None:
            raise RuntimeError("a value without a signature: both ends of a channel must carry out the same program")
        self.history.add(signature)
        return unflatten(_tensors(data, signature), signature.structure)

    def _taken(self) -> tuple[dist.Work, torch.Tensor]:
        posted, self._posted = self._posted, None
        if posted is None:
            raise RuntimeError("receive() without post()")
        return posted

    def _received(self, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        work, memory = self._irecv(nbytes)
        work.wait()
        return memory

    def _irecv(self, nbytes: int) -> tuple[dist.Work, torch.Tensor]:
        ends = self.ends
        memory = torch.empty(nbytes, dtype=torch.uint8, device=ends.device)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, memory, ends.rank, ends.group, ends.tag)])
        return work, memory


def _size(signature: Signature | None) -> int:
    """Bytes of the tensors of a value, each filled up to a multiple of _LINE."""
    return sum(-(-facts.nbytes // _LINE) * _LINE for facts in signature.tensors) if signature is not None else 0


@functools.lru_cache(maxsize=256)
def _header(content: _Content, following: int, device: torch.device) -> torch.Tensor:
    """Not to be changed: it is kept for later messages."""
    numbers = torch.tensor([content, following, *(0,) * (_HEADER_BYTES // 8 - 2)], device="cpu")
    return numbers.view(torch.uint8).to(device)


def _bytes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor, filled up to a multiple of _LINE. Few calls, because a worker that has just waited makes each of
    them with cold caches, and the next one waits for it."""
    pieces = []
    for tensor in tensors:
        pieces.append(tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8))
        if left := -pieces[-1].numel() % _LINE:
            pieces.append(torch.zeros(left, dtype=torch.uint8, device=tensor.device))
    return pieces


def _tensors(memory: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
    tensors, first = [], 0
    for facts in signature.tensors:
        tensor = memory[first : first + facts.nbytes].view(facts.dtype).view(facts.shape)
        tensors.append(tensor.requires_grad_(facts.requires_grad))
        first += -(-facts.nbytes // _LINE) * _LINE
    return tensors
