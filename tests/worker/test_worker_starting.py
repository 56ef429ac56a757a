"""When a communication service says that its machine's processes have started."""

from __future__ import annotations

import itertools

import pytest

from byteps_py.worker.core.deadlines import Starting

EVENTS = ("one rank", "all ranks", "kernels")


@pytest.mark.parametrize("order", list(itertools.permutations(EVENTS)))
def test_it_has_started_once_kernels_are_loaded_and_all_ranks_have_come(order: tuple[str, ...]) -> None:
    told: list[str] = []
    starting = Starting(2, lambda: told.append("started"))
    assert not starting.has_had_ranks
    for position, event in enumerate(order):
        if event == "kernels":
            starting.loaded()
        else:
            starting.ranks_here(2 if event == "all ranks" else 1)
        complete = {"all ranks", "kernels"} <= set(order[: position + 1])
        assert told == (["started"] if complete else [])
    starting.ranks_here(0)  # they end
    starting.ranks_here(2)
    assert told == ["started"]
    assert starting.has_had_ranks
