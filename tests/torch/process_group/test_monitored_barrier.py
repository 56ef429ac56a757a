"""How a monitored barrier waits for a key of torch's store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest

from byteps_py.torch.process_group.byteps_process_group import appears


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class EmptyStore:
    """Nothing ever comes. Waits as torch's stores do: whole milliseconds, what is left over does not count."""

    def __init__(self, clock: Clock, fails_after_s: float = 1e9) -> None:
        self._clock, self._fails_after_s = clock, fails_after_s

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._clock.now += min(timeout // timedelta(milliseconds=1) / 1000, self._fails_after_s)
        raise RuntimeError("timeout, or the store is gone")


@pytest.mark.parametrize("left_s", [0.5, 0.4999, 0.0104, 0.0006, -1.0])
def test_what_does_not_come_in_time_is_missing(left_s: float) -> None:
    clock = Clock()
    assert not appears(cast(Any, EmptyStore(clock)), "key", clock.now + left_s, clock.monotonic)


def test_a_store_that_fails_before_that_says_so() -> None:
    clock = Clock()
    with pytest.raises(RuntimeError, match="the store is gone"):
        appears(cast(Any, EmptyStore(clock, fails_after_s=0.1)), "key", clock.now + 0.5, clock.monotonic)
