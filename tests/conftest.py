"""Every test ends clean: no thread, child process, descriptor or shared memory stays behind."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import garbage

sys.path.insert(0, str(Path(__file__).parent))  # tests import `support`

from support import warm
from support.processes import Snapshot

# Journals of schedulers that tests kill stay, as they should: not among the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="byteps-test-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Whoever starts the tests in the background (a shell's `&`) makes them ignore Ctrl-C, and with them all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    warm.start()


def pytest_unconfigure() -> None:
    warm.stop()


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something behind. What fixtures of a wider scope hold does not count."""
    if request.node.get_closest_marker("cuda"):
        import torch

        torch.ones(1, device="cuda", requires_grad=True).sum().backward()  # CUDA's own files and threads stay
    before = Snapshot.take()
    gc.freeze()  # what is there already need not be looked through after every test: torch alone is a million objects
    yield
    if completion := sys.modules.get("byteps_py.torch.collectives.completion"):
        completion.POOL.close()  # threads with nothing to do wait for more to do, for longer than the next test
    leaks = before.leaks()
    assert not leaks, "left behind: " + "; ".join(leaks)


@pytest.fixture(scope="module")
def zeromq_collector() -> Iterator[None]:
    """pyzmq's thread that frees memory sent without copying: one per process, started at the first use. For modules
    that send so in this process."""
    zmq.Frame(bytearray(1 << 20))
    yield
    garbage.gc.stop()
