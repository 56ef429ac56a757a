"""The place of a hosted optimizer's states, as users ask for it or as it is chosen for them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import byteps_py as bps
from byteps_py.errors import UsageError
from byteps_py.session.base import MachineFacts
from byteps_py.torch.gradients.hosted.states_mode import StatesMode, asked_for, choose

GB = 10**9


def session(machines: int = 4, **facts: Any) -> Any:
    known = {"slowest_mbit": 1000.0, "replicated_gain": 1.14, "memory_bytes": 64 * GB, **facts}
    return cast(Any, SimpleNamespace(num_machines=machines, machine_facts=MachineFacts(**known)))


@pytest.mark.parametrize(
    ("around", "states_bytes", "mode", "reason"),
    [
        (
            session(),
            GB,
            "machine",
            "links of 1 Gbit/s bound a step, which takes 1.14 times as long with sharded states",
        ),
        (session(machines=1), GB, "sharded", "the ranks of one machine share its states in any case"),
        (session(replicated_gain=1.0), GB, "sharded", "states on each machine would make no step shorter"),
        (session(slowest_mbit=100_000.0), GB, "sharded", "with links of 100 Gbit/s, processors bound a step"),
        (session(slowest_mbit=0.0), GB, "sharded", "with links of unknown rates"),
        (session(), 33 * GB, "sharded", "all states take 33.0 GB, and a machine has 32.0 GB for them"),
    ],
)
def test_the_choice(around: Any, states_bytes: int, mode: str, reason: str) -> None:
    choice = choose(around, states_bytes, is_elastic=False)
    assert choice.mode is StatesMode(mode)
    assert reason in choice.reason


def test_a_shadow_changes_the_choice() -> None:
    around = session(replicated_gain=1.14, shadowed_gain=1.0)
    modes = [choose(around, GB, is_elastic=False, is_shadowed=each).mode for each in (False, True)]
    assert modes == [StatesMode.MACHINE, StatesMode.SHARDED]


def test_ranks_of_an_elastic_job_choose_alike_whenever_they_come() -> None:
    assert choose(session(), GB, is_elastic=True).mode is StatesMode.SHARDED


def test_what_users_ask_for() -> None:
    assert asked_for(True) is None
    assert [asked_for(mode.value) for mode in StatesMode] == list(StatesMode)


@pytest.mark.parametrize("hosted", ["machines", 1, None, ""])
def test_what_names_no_mode_is_refused(hosted: object) -> None:
    with pytest.raises(UsageError, match=f"hosted is {hosted!r}: give True, 'machine' or 'sharded', or False"):
        asked_for(hosted)


def test_the_first_rank_logs_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    bps.init()
    try:
        with caplog.at_level(logging.INFO, "byteps_py"):
            bps.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), hosted=True)
    finally:
        bps.shutdown()
    assert "hosted=True takes hosted='sharded': the ranks of one machine share its states in any case" in caplog.text
