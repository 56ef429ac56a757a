"""Operations whose sizes are not known in advance: a first round exchanges headers, a second round the data.

    start ─ headers to all ─► wait ─ lay out the data, or find that ranks disagree ─ send data ─► wait ─ deliver
    └ caller's thread ────┘   └ caller of a synchronous function, or a thread of the pool ────┘   └ synchronize ┘

Input tensors must not change before the operation is done: they are copied when the sizes are known.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from typing import Any

import torch

from byteps_py.torch.collectives.completion import POOL
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import SlotView


class TwoRoundOperation(ABC):
    """A running operation. ``device``: of its tensors. Any thread may wait for it."""

    def __init__(self, context: Context, device: torch.device) -> None:
        self._context = context
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.stream(torch.cuda.current_stream(device)) if is_cuda else contextlib.nullcontext()
        self._is_data_sent = threading.Event()
        self._sending = threading.Lock()
        self._error: Exception | None = None
        self._headers = self._send_headers()
        self._data: SlotView | None = None

    def run_in_background(self) -> None:
        """Let a thread of the pool send the data as soon as the headers have arrived."""
        POOL.run(self._send_data_once)

    @property
    def done(self) -> bool:
        """True if ``complete`` would not block."""
        return self._is_data_sent.is_set() and (self._data is None or self._data.is_done)

    def complete(self) -> Any:
        """Wait, deliver and return the result. Raises as Session.wait does."""
        self._send_data_once()
        if self._error is not None:
            raise self._error
        if self._data is not None:
            self._data.wait()
        return self._deliver(self._headers if self._data is None else self._data)

    def _send_data_once(self) -> None:
        with self._sending:
            if self._is_data_sent.is_set():
                return
            try:
                self._headers.wait()
                with self._stream:  # the stream that was current when the operation was started
                    self._data = self._send_data(self._headers)
            except Exception as error:
                self._error = error
            self._is_data_sent.set()

    @abstractmethod
    def _send_headers(self) -> SlotView:
        """Hand over the first round."""

    @abstractmethod
    def _send_data(self, headers: SlotView) -> SlotView | None:
        """Read the other ranks' headers and hand over the second round; None if it is not needed."""

    @abstractmethod
    def _deliver(self, view: SlotView) -> Any:
        """The result, read from ``view``: the second round's, or the first's if there was no second."""
