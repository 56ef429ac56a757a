"""Kernels in a process: the GIL, threads, the cache on disk, and processors that lack instructions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from numba.core.caching import CacheImpl
from support.arithmetic import assert_same, moderate_values, reference, run

from byteps_py.kernels import prepare, reduce
from byteps_py.kernels.jit import numba_kernels, vector
from byteps_py.tensors import DType, Op


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gil_is_released(ranks):
    """With a switch interval of an hour another thread runs only if reduce() lets it."""
    count = 1 << 18
    arrays = [np.ones(count, np.float32) for _ in range(ranks)]
    out = np.zeros(count, np.float32)
    addresses = [array.ctypes.data for array in arrays]
    prepare([(Op.SUM, DType.FLOAT32)])
    started, seen, rounds = threading.Event(), [], 0

    def watch():
        started.wait(60)
        seen.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        started.set()
        while not seen and rounds < 20_000:
            reduce(Op.SUM, DType.FLOAT32, addresses, [out.ctypes.data], count)
            rounds += 1
        progressed = bool(seen)
    finally:
        sys.setswitchinterval(interval_s)
        watcher.join(60)
    assert progressed


def test_threads_reduce_at_the_same_time():
    rng = np.random.default_rng(6)
    arrays = [moderate_values(rng, DType.FLOAT16, 5000) for _ in range(3)]
    expected = reference(Op.SUM, DType.FLOAT16, arrays)
    results = {}

    def work(name):
        for _ in range(20):
            results[name] = run(Op.SUM, DType.FLOAT16, arrays)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    for result in results.values():
        assert_same(DType.FLOAT16, result, expected)


CACHE_PROBE = """
import sys, threading
from byteps_py.kernels import prepare, reduction
assert "numba" not in sys.modules
from byteps_py.tensors import DType, Op
prepare([(Op[name.split(".")[0]], DType[name.split(".")[1]]) for name in sys.argv[1:]])
print(*(sum(kernel.stats.cache_hits.values()) for kernel in reduction._kernels.values()))
assert threading.active_count() == 1
import numpy as np
for op, dtype, _ in reduction._kernels:
    a, b, out = (np.full(200, value, dtype.name.lower()) for value in (6, 3, 0))
    reduction.reduce(op, dtype, [a.ctypes.data, b.ctypes.data], [out.ctypes.data], 199)
    assert out.tolist() == [{Op.SUM: 9, Op.PRODUCT: 18}[op]] * 199 + [0], (op, dtype, out)
"""


@pytest.mark.slow
def test_kernels_of_several_processes_are_kept_on_disk_and_stay_apart(tmp_path):
    """Each process numbers what it compiles from one: nothing may be mixed up when a later one loads it all."""
    kernels = ["SUM.FLOAT32", "PRODUCT.FLOAT16"]

    def probe(*names):
        command = [sys.executable, "-c", CACHE_PROBE, *names]
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        ran = subprocess.run(command, env=environment, timeout=100, check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split()

    assert [probe(name) for name in kernels] == [["0"], ["0"]]
    assert probe(*kernels) == ["1", "1"]
    assert len(list(tmp_path.rglob("*.nbi"))) == 2


def test_kernels_work_where_nothing_can_be_written(monkeypatch, caplog):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with caplog.at_level("INFO", logger="byteps_py"):
        kernel = numba_kernels.build(Op.SUM, DType.INT16)
    assert "NUMBA_CACHE_DIR" in caplog.text
    values = np.array([5, 6], np.int16)
    table = np.array([values.ctypes.data] * 3, np.uint64)
    kernel(table.ctypes.data, 2, 1, values.nbytes, 1)
    assert values.tolist() == [10, 12]


@pytest.mark.parametrize("op", [Op.SUM, Op.PRODUCT], ids=lambda op: op.name)
def test_float16_without_the_processor_s_help(monkeypatch, op):
    """The conversions by integer arithmetic, which processors without F16C use, give the same bits."""
    monkeypatch.setattr(vector, "_has_float16", lambda: False)
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])  # the cache must not hold what this test compiles
    monkeypatch.setattr(numba_kernels, "version_of", lambda *_: "test_float16")
    kernel = numba_kernels.build(op, DType.FLOAT16)
    everything = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for step, divisor in ((1, 1), (5003, 1), (20011, 7), (33333, 4096)):
        arrays = [everything, np.roll(everything, step)]
        out = np.zeros_like(everything)
        table = np.array([array.ctypes.data for array in (*arrays, out)], np.uint64)
        kernel(table.ctypes.data, 2, 1, out.nbytes, divisor)
        assert_same(DType.FLOAT16, out, reference(op, DType.FLOAT16, arrays, divisor))
