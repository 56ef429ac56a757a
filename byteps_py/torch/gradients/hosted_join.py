"""What a rank that has called join() means to a hosted optimizer. The training thread calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from byteps_py.errors import JoinedError

Step = Callable[..., Any]


def names_join(step: Step) -> Step:
    """``step`` of a hosted optimizer, whose JoinedError says so."""

    @functools.wraps(step)
    def named(*arguments: Any, **others: Any) -> Any:
        try:
            return step(*arguments, **others)
        except JoinedError as error:
            if str(error).startswith(_WHY):
                raise
            raise JoinedError(f"{_WHY} ({error})") from None

    return named


_WHY = (
    "a hosted optimizer does not go together with join(): a step needs the gradients of all ranks, each of which may "
    "own states. Give all ranks the same number of batches, or leave hosted, or shadow, out"
)
