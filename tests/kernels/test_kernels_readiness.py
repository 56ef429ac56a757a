"""Work waits for its kernel, and nothing else does."""

from __future__ import annotations

import threading

import pytest

from byteps_py.kernels.readiness import Readiness
from byteps_py.kernels.thread_pool import ThreadPool
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import DType, Op

FLOATS, INTEGERS = (Op.SUM, DType.FLOAT32), (Op.MAX, DType.INT32)
PATIENCE_S = 30


class Compiler:
    """Stands for ``prepare``: each pair is ready, or refused, when the test says so."""

    def __init__(self):
        self.asked, self.refused = [], set()
        self.open = {pair: threading.Event() for pair in (FLOATS, INTEGERS)}

    def __call__(self, pairs):
        (pair,) = pairs
        self.asked.append(pair)
        assert self.open[pair].wait(PATIENCE_S)
        if pair in self.refused:
            raise OSError("no space left")


class Bench:
    def __init__(self, compiler):
        self.loop, self.pool = EventLoop(), ThreadPool(2, "ready")
        self.failures, self.done = [], []
        self.ready = Readiness(compiler, self.pool, self.loop, self.failures.append)

    def submit(self, pair, name, *, ends=False):
        def finished(error):
            self.done.append((name, error))
            if ends:
                self.loop.stop()

        self.ready.submit(pair, 0, lambda: None, finished)


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def bench(compiler):
    bench = Bench(compiler)
    yield bench
    for event in compiler.open.values():
        event.set()
    bench.pool.close()
    bench.loop.close()


def test_a_kernel_that_is_compiled_holds_up_nobody_else(bench, compiler):
    compiler.open[FLOATS].set()
    for number in range(3):  # more than there are threads
        bench.submit(INTEGERS, f"integers {number}")
    bench.submit(FLOATS, "floats", ends=True)
    bench.loop.run()
    assert bench.done == [("floats", None)]
    assert FLOATS in bench.ready
    assert INTEGERS not in bench.ready


def test_what_waited_runs_when_its_kernel_is_ready(bench, compiler):
    bench.ready.expect([INTEGERS, INTEGERS])
    bench.submit(INTEGERS, "first")
    bench.submit(INTEGERS, "second", ends=True)
    bench.loop.post(compiler.open[INTEGERS].set)
    bench.loop.run()
    bench.pool.close()
    assert sorted(bench.done) == [("first", None), ("second", None)]
    assert compiler.asked == [INTEGERS]


def test_what_waited_fails_with_its_kernel(bench, compiler):
    compiler.refused.add(INTEGERS)
    compiler.open[INTEGERS].set()
    bench.submit(INTEGERS, "integers", ends=True)
    bench.loop.run()
    ((name, error),) = bench.done
    assert (name, str(error), bench.failures) == ("integers", "no space left", [error])
    assert INTEGERS not in bench.ready


def test_a_broadcast_needs_no_kernel(bench, compiler):
    assert (Op.BROADCAST, DType.INT8) in bench.ready
    bench.ready.expect([(Op.BROADCAST, DType.INT8)])
    bench.pool.close()
    assert compiler.asked == []
