"""Keeps torch.compile's tracer out of this backend.

The tracer examines every Python frame that begins while a compiled function runs, including frames that C++ calls (from
a reducer, for example). torch's own backends are not Python, so it never sees them. ``torch.compiler.disable`` would do
the same as this module, but it loads the compiler, which takes longer than all the rest of torch. Used at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch._C._dynamo import eval_frame

C = TypeVar("C", bound=type)


def not_traced(names: Iterable[str]) -> Callable[[C], C]:
    """A class decorator: the methods ``names``, and everything that they call, run untraced."""

    def decorate(cls: C) -> C:
        skip = eval_frame._FrameAction.SKIP
        for name in names:
            code = getattr(cls, name).__code__
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
        return cls

    return decorate
