"""A few thousand inputs of every target of the fuzzer; ``python -m tests.fuzz`` feeds millions."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import zmq
from fuzz import TARGETS, fuzz
from zmq.utils import garbage

INPUTS = 3000


@pytest.fixture(autouse=True, scope="module")
def zeromq_collector() -> Iterator[None]:
    """pyzmq's thread that frees memory sent without copying: one per process, started at the first use."""
    zmq.Frame(bytearray(1 << 20))
    yield
    garbage.gc.stop()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(disabled)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_does_what_it_should_not(name: str) -> None:
    fuzz(TARGETS[name], INPUTS, seed=1)
