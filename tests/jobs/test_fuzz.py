"""A few thousand inputs of every target of the fuzzer; ``python -m tests.fuzz`` feeds millions."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fuzz import TARGETS, fuzz

INPUTS = 3000


pytestmark = pytest.mark.usefixtures("zeromq_collector")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(disabled)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_does_what_it_should_not(name: str) -> None:
    fuzz(TARGETS[name], INPUTS, seed=1)
