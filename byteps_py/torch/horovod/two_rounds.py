"""An operation whose sizes only its first round tells: headers, then data.

    start ─ headers to all ─► wait ─ plan: lay out the data, or find that ranks disagree ─► data ─► wait ─ deliver
            └ caller's thread  └ the caller of a synchronous form, else a thread of the pool ┘  └ synchronize

Input tensors must not change before the operation is done: they are copied when the sizes are known.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from typing import Any

import torch

from byteps_py.torch.engine.completion import POOL
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.slot_view import SlotView


class TwoRounds(ABC):
    """One operation under way. ``device``: where its tensors lie."""

    def __init__(self, context: Context, device: torch.device) -> None:
        self._context = context
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.stream(torch.cuda.current_stream(device)) if is_cuda else contextlib.nullcontext()
        self._planned = threading.Event()
        self._planning = threading.Lock()
        self._error: Exception | None = None
        self._headers = self._send_headers()
        self._data: SlotView | None = None

    def go_on_alone(self) -> None:
        """Begin the second round as soon as possible, on a thread of the pool."""
        POOL.run(self._go_on)

    @property
    def done(self) -> bool:
        """True if ``complete`` would not block."""
        return self._planned.is_set() and (self._data is None or self._data.is_done)

    def complete(self) -> Any:
        """Wait, deliver and return the result. Raises what Session.wait raises."""
        self._go_on()
        if self._error is not None:
            raise self._error
        if self._data is not None:
            self._data.wait()
        return self._deliver(self._headers if self._data is None else self._data)

    def _go_on(self) -> None:
        with self._planning:
            if self._planned.is_set():
                return
            try:
                self._headers.wait()
                with self._stream:  # that of the caller of this operation
                    self._data = self._send_data(self._headers)
            except Exception as error:
                self._error = error
            self._planned.set()

    @abstractmethod
    def _send_headers(self) -> SlotView:
        """Hand over the first round."""

    @abstractmethod
    def _send_data(self, headers: SlotView) -> SlotView | None:
        """Read the others' headers, and hand over the second round; None if none is needed."""

    @abstractmethod
    def _deliver(self, view: SlotView) -> Any:
        """The result, from where it lies."""
