"""Cores that are broken on purpose, as in mutations.py, where partitions pass through a communication service."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from byteps_py.worker.actions import Action, Push
from byteps_py.worker.credit import PushQueue
from byteps_py.worker.pipeline import Pipeline
from byteps_py.worker.tensor import Part, RankSlot, Tensor


def ignore_credit(core: pytest.MonkeyPatch) -> None:
    real = PushQueue.take

    def take(self: PushQueue, now: float) -> Part | None:
        self.in_flight_bytes = 0
        return real(self, now)

    core.setattr(PushQueue, "take", take)


def wait_for_other_machines(core: pytest.MonkeyPatch) -> None:
    """Without the rules, machines that filled their credit with different partitions wait for each other."""
    core.setattr(PushQueue, "_write_off", lambda self, pushed_before: None)
    core.setattr(PushQueue, "hasten", lambda self, parts: None)


def local_ranks_backwards(core: pytest.MonkeyPatch) -> None:
    real = Pipeline._local_sum

    def local_sum(self: Pipeline, part: Part) -> Any:
        compute = real(self, part)
        if compute is not None:
            compute.inputs = compute.inputs[::-1]
        return compute

    core.setattr(Pipeline, "_local_sum", local_sum)


def release_under_a_kernel(core: pytest.MonkeyPatch) -> None:
    def release(self: Pipeline, tensor: Tensor) -> Any:
        running, tensor.running = tensor.running, 0
        try:
            return real(self, tensor)
        finally:
            tensor.running = running

    real = Pipeline._release
    core.setattr(Pipeline, "_release", release)


def accept_repeated_answers(core: pytest.MonkeyPatch) -> None:
    core.setattr(Pipeline, "awaits", lambda self, part, round_: not part.tensor.retired)


def hand_over_void_tensors(core: pytest.MonkeyPatch) -> None:
    """What was handed over before the rank knew of the mismatch takes credit, for ever."""
    real = Pipeline.ready

    def ready(self: Pipeline, slot: RankSlot, *args: Any) -> Any:
        was_retired = slot.tensor is not None and slot.tensor.retired
        if slot.tensor is not None:
            slot.is_kept, slot.tensor.retired = False, False
        try:
            return real(self, slot, *args)
        finally:
            if slot.tensor is not None:
                slot.is_kept = slot.tensor.retired = was_retired

    core.setattr(Pipeline, "ready", ready)


def keep_the_credit_of_what_moves(core: pytest.MonkeyPatch) -> None:
    def again(self: Pipeline, part: Part) -> list[Action]:
        part.is_resent = True
        if not part.tensor.slots:
            return [Push(part, part.tensor.round)]
        self._enqueue(part)
        return []

    core.setattr(Pipeline, "_again", again)


def hasten_what_is_void(core: pytest.MonkeyPatch) -> None:
    """Though it has left the queue."""
    real = Pipeline.awaited

    def awaited(self: Pipeline, rounds: Iterable[tuple[Part, int]], now: float) -> list[Action]:
        known = list(rounds)
        void = [part.tensor for part, _ in known if part.tensor.retired]
        for tensor in void:
            tensor.retired = False
        try:
            return real(self, known, now)
        finally:
            for tensor in void:
                tensor.retired = True

    core.setattr(Pipeline, "awaited", awaited)


PIPELINE_MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    ignore_credit: 5,
    wait_for_other_machines: 7,
    local_ranks_backwards: 3,
    release_under_a_kernel: 2162,
    accept_repeated_answers: 3,
    hand_over_void_tensors: 72,
    keep_the_credit_of_what_moves: 18,
    hasten_what_is_void: 10157,
}
