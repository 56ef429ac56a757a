"""Loaded by every Python process of a job whose PYTHONPATH names this folder: counts the bytes that the service's
kernels, and ctypes, read and write, and leaves them in $PASSES_FOLDER when the process ends."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from byteps_py import kernels

LEAST = 1 << 16  # smaller ones are no gradients

_counts: Counter[str] = Counter()
_lock = threading.Lock()
_here = threading.local()  # .reducing: what the kernel itself copies with is counted already
_bind, _memmove = kernels.bind, ctypes.memmove


def _count(read: int, written: int) -> None:
    if read + written >= LEAST:
        with _lock:
            _counts.update(read=read, written=written)


def _counting_bind(
    op: Any, dtype: Any, inputs: Any, outputs: Any, count: int, divisor: int = 1, past_caches: bool = False
) -> Callable[[], None]:
    call = _bind(op, dtype, inputs, outputs, count, divisor, past_caches)
    nbytes = count * dtype.itemsize

    def run() -> None:
        _count(len(inputs) * nbytes, len(outputs) * nbytes)
        _here.reducing = True
        try:
            call()
        finally:
            _here.reducing = False

    return run


def _counting_reduce(*arguments: Any) -> None:
    _counting_bind(*arguments)()


def _counting_memmove(to: Any, source: Any, nbytes: int) -> Any:
    if not getattr(_here, "reducing", False):
        _count(nbytes, nbytes)
    return _memmove(to, source, nbytes)


def _report() -> None:
    role = next((word for word in ("worker", "server", "scheduler") if f"byteps_py.{word}" in sys.orig_argv), "rank")
    path = Path(os.environ["PASSES_FOLDER"], f"{role}-{os.getpid()}.json")
    path.write_text(json.dumps({"role": role, **_counts}))


if "PASSES_FOLDER" in os.environ:
    kernels.bind, kernels.reduce = _counting_bind, _counting_reduce
    ctypes.memmove = _counting_memmove
    atexit.register(_report)
