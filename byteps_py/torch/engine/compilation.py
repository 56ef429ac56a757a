"""Keeps torch.compile's tracer out of this backend.

The tracer looks at every Python frame that begins while a compiled function runs, those that C++ calls included (a
reducer's, say). torch's own backends are not Python and never meet it. ``torch.compiler.disable`` would do, but loads
the compiler, which takes longer than all the rest of torch; so what it does in the end is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch._C._dynamo import eval_frame

C = TypeVar("C", bound=type)


def not_traced(names: Iterable[str]) -> Callable[[C], C]:
    """A class decorator: methods of these names, and all that they call, run as they are."""

    def decorate(cls: C) -> C:
        skip = eval_frame._FrameAction.SKIP
        for name in names:
            code = getattr(cls, name).__code__
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
        return cls

    return decorate
