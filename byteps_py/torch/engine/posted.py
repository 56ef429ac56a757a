"""A receive that is posted for every member because a receive from anybody does not know whose message comes first.

One that is not used stays, for a later receive of that member and tag, of whatever size: a message of another size than
was asked for stays at its sender, and the receive is given again. Any thread may call.
"""

from __future__ import annotations

import threading

import torch

from byteps_py.errors import MismatchError, StallError
from byteps_py.tensors import Sizes
from byteps_py.torch.engine.operation import LaneOperation
from byteps_py.torch.engine.service_messages import MessageQueue, PendingMessage
from byteps_py.torch.engine.work import Pending
from byteps_py.torch.process_group.arguments import nbytes_of


class Posted(PendingMessage):
    """``wanted``: receives as many bytes as this has. ``received``: the message, when it is over."""

    def __init__(self, channel: MessageQueue, what: str, like: torch.Tensor) -> None:
        super().__init__(channel.around, what, torch.empty_like(like), channel.around.timeout_s, channel.peer)
        self._channel = channel
        self._is_final = False
        self._was_final = False  # when it was given last
        self._asked = threading.Event()  # for something else since then
        self.received = self.tensor

    @property
    def sizes(self) -> Sizes:
        return Sizes.CHECKED if self._is_final else Sizes.TENTATIVE

    def given(self, operation: LaneOperation) -> Pending:
        """It keeps its lane until it is over, however often it is given."""
        self._was_final, self.received = self._is_final, self.tensor
        self._asked.clear()
        return self

    def ask_for(self, like: torch.Tensor, is_final: bool) -> None:
        """Receive as many bytes as ``like`` has. ``is_final``: if the message has another size, that is an error."""
        with self._channel.lock:
            if is_final > self._is_final or nbytes_of(like) != nbytes_of(self.tensor):
                self.tensor, self._is_final = torch.empty_like(like), is_final
                self._asked.set()

    @property
    def differs(self) -> bool:
        """True if the message is there, and has another size than was asked for."""
        operation = self.operation
        return operation is not None and self._is_to_be_given_again(operation) and not self._asked.is_set()

    def _is_to_be_given_again(self, operation: LaneOperation) -> bool:
        return not self._was_final and isinstance(operation.exception(), MismatchError)

    def _receive(self, operation: LaneOperation, deadline: float) -> None:
        self._slices(deadline, operation.settle)
        while self._is_to_be_given_again(operation):
            self._slices(deadline, self._asked_within)
            operation = self._channel.again(self)
            self._slices(deadline, operation.settle)
        operation.wait()

    def _asked_within(self, timeout_s: float) -> None:
        if not self._asked.wait(timeout_s):
            raise StallError(f"{self.what}: a message of another size is there")

    def _is_received(self, operation: LaneOperation) -> bool:
        if self._is_to_be_given_again(operation) and self._asked.is_set():
            operation = self._channel.again(self)
        return operation.is_completed() and not self._is_to_be_given_again(operation)
