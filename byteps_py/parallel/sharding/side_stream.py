"""Copies beside the computation: on a CUDA stream, or at once where there is none. One thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class SideStream(Protocol):
    """Runs copies in the order in which they are submitted."""

    def submit(self, copies: Callable[[], None]) -> Any:
        """Run ``copies`` after what has been computed so far. Returns a mark for ``wait``."""

    def wait(self, mark: Any) -> None:
        """Let later work of the caller's stream wait for the copies of ``mark``."""

    def finish(self) -> None:
        """Return when all copies are done."""


class NoStream:
    """Copies at once: for tensors of the CPU.

    >>> stream = NoStream()
    >>> stream.wait(stream.submit(lambda: print("copied")))
    copied
    """

    def submit(self, copies: Callable[[], None]) -> None:
        """Run ``copies`` now."""
        copies()

    def wait(self, mark: None) -> None:
        """There is nothing to wait for."""

    def finish(self) -> None:
        """There is nothing to wait for."""


class CudaSideStream:
    """A CUDA stream of its own on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, copies: Callable[[], None]) -> torch.cuda.Event:
        """Enqueue ``copies`` behind the device's current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies()
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def wait(self, mark: torch.cuda.Event) -> None:
        """Make the device's current stream wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """Block until the stream is empty."""
        self._stream.synchronize()
