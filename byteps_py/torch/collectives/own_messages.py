"""Sends of a rank to itself, as in the batches of a pipeline whose next stage is on the same rank. Any thread."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import torch

from byteps_py.errors import MismatchError, StallError
from byteps_py.torch.collectives.group_work import CompletedWork, GroupContext, GroupWork
from byteps_py.torch.collectives.work import Call, Work


class _Message:
    """A copy of what was sent."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.event = torch.cuda.current_stream(tensor.device).record_event()

    def copy_to(self, target: torch.Tensor, what: str) -> torch.cuda.Event | None:
        """Returns an event after the copy, if the target is on a GPU. Raises MismatchError."""
        if self.tensor.nbytes != target.nbytes:
            raise MismatchError(
                f"{what}: a message of {self.tensor.nbytes} bytes came, {target.nbytes} were expected; give matching "
                "sizes on both"
            )
        if self.event is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.event)
            self.tensor.record_stream(torch.cuda.current_stream(self.tensor.device))
        target.detach().copy_(self.tensor.view(-1).view(target.dtype).view(target.shape))
        return torch.cuda.current_stream(target.device).record_event() if target.is_cuda else None


class OwnMessages:
    """By tag, in order: the n-th receive with a tag takes the n-th send with it, whichever comes first."""

    def __init__(self, group_context: GroupContext) -> None:
        self._group_context = group_context
        self._lock = threading.Lock()
        self._sent: dict[int, deque[_Message]] = defaultdict(deque)
        self._waiting: dict[int, deque[OwnReceive]] = defaultdict(deque)

    def send(self, call: Call, tag: int) -> Work:
        """Keep a copy of the call's tensor for a receive. The Work is over."""
        message = _Message(call.outputs[0])
        with self._lock:
            waiting = self._waiting[tag]
            if waiting:
                waiting.popleft().give(message)
            else:
                self._sent[tag].append(message)
        return CompletedWork(self._group_context, call)

    def receive(self, call: Call, tag: int, position: int) -> Work:
        """Receive into the call's tensor. ``position``: of this member."""
        work = OwnReceive(self._group_context, call, position)
        with self._lock:
            if self._sent[tag]:
                work.give(self._sent[tag].popleft())
            else:
                self._waiting[tag].append(work)
        return work


class OwnReceive(GroupWork):
    """A receive from the own rank."""

    def __init__(self, group_context: GroupContext, call: Call, position: int) -> None:
        super().__init__(group_context, call)
        self._position = position
        self._message: _Message | None = None
        self._is_there = threading.Event()

    def give(self, message: _Message) -> None:
        """The message has been sent."""
        self._message = message
        self._is_there.set()

    def _complete(self, deadline: float) -> None:
        self._wait_in_slices(deadline, self._await)
        message, self._message = self._message, None
        if message is not None:
            self._event = message.copy_to(self._outputs[0], self.what)

    def _await(self, timeout_s: float) -> None:
        if not self._is_there.wait(timeout_s):
            raise StallError(f"{self.what}: this rank has not sent it")

    def _is_ready(self) -> bool:
        return self._is_there.is_set()

    def source_rank(self) -> int:
        return self._position
