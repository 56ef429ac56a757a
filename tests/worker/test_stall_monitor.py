"""When a communication service gives up waiting for ranks that have shut down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from byteps_py.worker.ranks.stall_monitor import DEPARTURE_GRACE_S, StallMonitor

TICK_S, SILENCE_S = 0.25, 2.0


class IdleExecutor:
    """Lacks a result of round 0, and has done nothing since ``moved_at``."""

    def __init__(self) -> None:
        self.moved_at = 0.0
        self.ranks: dict[int, Any] = {}

    def idle_s(self, now: float) -> float:
        return now - self.moved_at

    def lacks(self, ranks: set[int]) -> bool:
        return True


@pytest.fixture
def waits() -> StallMonitor:
    topology = SimpleNamespace(first_rank=0, size=2, describe_ranks=str)
    slot = SimpleNamespace(ready_since=0.0, spec=SimpleNamespace(group=()), local_rank=0)
    requests = SimpleNamespace(
        topology=topology, executor=IdleExecutor(), joining=SimpleNamespace(here=[]), at_barrier=lambda: ([], 0.0)
    )
    made: Any = StallMonitor(
        requests,  # type: ignore[arg-type]
        SimpleNamespace(undecided=lambda: [("t", [slot])], tensors=list),  # type: ignore[arg-type]
        SimpleNamespace(members=list, keeps_for=lambda ranks: False),  # type: ignore[arg-type]
        None,
        SimpleNamespace(ranks=SimpleNamespace(gone={}, left={})),  # type: ignore[arg-type]
        True,
        lambda: SILENCE_S,
    )
    made.departed(0.0, "rank 1 has shut down", {1})
    return made


def first_refusal(waits: StallMonitor, start: float, stop: float) -> float | None:
    now = start
    while now < stop:
        why, _ = waits.vain(now)
        if why:
            assert "rank 1 has shut down: run the same number of steps on every rank, or call join()" in why
            return now
        now += TICK_S
    return None


def test_a_service_gives_up_after_the_grace_and_the_silence(waits: StallMonitor) -> None:
    found = first_refusal(waits, 0.0, 20.0)
    assert found is not None
    assert DEPARTURE_GRACE_S + SILENCE_S <= found <= DEPARTURE_GRACE_S + SILENCE_S + 2 * TICK_S


def test_time_without_the_processor_does_not_count(waits: StallMonitor) -> None:
    """Answers that came meanwhile are handled after the first tick."""
    assert first_refusal(waits, 0.0, 1.0) is None
    woken = 9.0
    found = first_refusal(waits, woken, 30.0)
    assert found is not None
    assert found >= woken + DEPARTURE_GRACE_S + SILENCE_S
