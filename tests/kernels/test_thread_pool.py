"""The thread pool's promises: order, one done for each submit, a clean end."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from byteps_py.errors import CommunicationError, StallError, UsageError
from byteps_py.kernels.thread_pool import ThreadPool, default_threads

PATIENCE_S = 30


@pytest.fixture
def pool():
    before = set(threading.enumerate())
    pool = ThreadPool(1, "test-sum")
    yield pool
    pool.close()
    assert set(threading.enumerate()) == before


class Gate:
    """Work that holds its thread until it is opened."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)


class Results:
    """Collects what ``done`` was given, and by which thread."""

    def __init__(self, expected):
        self._expected, self.items, self.threads = expected, [], set()
        self._complete = threading.Event()

    def done(self, name):
        def collect(error):
            self.items.append((name, error))
            self.threads.add(threading.current_thread().name)
            if len(self.items) == self._expected:
                self._complete.set()

        return collect

    def wait(self):
        assert self._complete.wait(PATIENCE_S), self.items
        return [name for name, _ in self.items]


def test_higher_priority_first_then_first_come(pool):
    gate, results = Gate(), Results(6)
    pool.submit(0, gate, results.done("gate"))
    assert gate.entered.wait(PATIENCE_S)
    for name, priority in [("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0)]:
        pool.submit(priority, lambda: None, results.done(name))
    gate.opened.set()
    assert results.wait() == ["gate", "b", "d", "a", "e", "c"]
    assert results.threads == {"test-sum-0"}


def test_an_error_goes_to_done_and_the_thread_lives_on(pool):
    results = Results(3)

    def fail(error):
        raise error

    pool.submit(0, lambda: fail(ValueError("bad partition")), results.done("a"))
    pool.submit(0, lambda: fail(SystemExit(3)), results.done("b"))
    pool.submit(0, lambda: None, results.done("c"))
    results.wait()
    assert [(name, type(error)) for name, error in results.items] == [
        ("a", ValueError),
        ("b", SystemExit),
        ("c", type(None)),
    ]


def test_a_failing_done_is_logged_and_the_thread_lives_on(pool, caplog):
    results = Results(1)

    def done(error):
        raise RuntimeError("defect")

    pool.submit(0, lambda: None, done)
    pool.submit(0, lambda: None, results.done("next"))
    assert results.wait() == ["next"]
    assert "defect" in caplog.text


def test_threads_work_at_the_same_time():
    pool = ThreadPool(2, "pair")
    meeting = threading.Barrier(2)
    results = Results(2)
    for name in "ab":
        pool.submit(0, lambda: meeting.wait(PATIENCE_S) and None, results.done(name))
    results.wait()
    pool.close()
    assert [error for _, error in results.items] == [None, None]
    assert results.threads == {"pair-0", "pair-1"}


def test_close_finishes_what_runs_and_fails_what_waits():
    pool = ThreadPool(1, "closing")
    gate, results = Gate(), Results(3)
    ran = []
    pool.submit(0, gate, results.done("running"))
    assert gate.entered.wait(PATIENCE_S)
    pool.submit(9, lambda: ran.append(1), results.done("waiting"))
    pool.submit(0, lambda: ran.append(2), results.done("waiting too"))
    with pytest.raises(StallError, match="closing-0 still busy"):
        pool.close(timeout_s=0)
    with pytest.raises(UsageError, match="closed"):
        pool.submit(0, lambda: None, results.done("late"))
    gate.opened.set()
    pool.close()
    assert not ran
    assert results.wait() == ["running", "waiting", "waiting too"]
    assert [type(error) for _, error in results.items] == [type(None), CommunicationError, CommunicationError]


def test_every_submit_is_done_exactly_once_when_close_races():
    pool = ThreadPool(3, "race")
    accepted, finished = [0] * 4, []
    under_way = threading.Event()

    def done(error):
        finished.append(error)
        if len(finished) > 500:
            under_way.set()

    def submit(index):
        with contextlib.suppress(UsageError):
            while accepted[index] < 100_000:
                pool.submit(index, lambda: None, done)
                accepted[index] += 1

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    assert under_way.wait(PATIENCE_S)
    pool.close(PATIENCE_S)
    done_at_close = len(finished)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sum(accepted) == done_at_close == len(finished)


def test_finished_work_is_forgotten(pool):
    class Partition:
        def __init__(self, gone):
            self._gone = gone

        def __call__(self):
            pass

        def __del__(self):
            self._gone.set()

    gone = threading.Event()
    pool.submit(0, Partition(gone), lambda error: None)
    assert gone.wait(PATIENCE_S)


def test_no_threads_is_refused():
    with pytest.raises(UsageError, match="at least one"):
        ThreadPool(0, "none")


def test_default_threads():
    assert default_threads(7) == 7
    assert default_threads(0) == min(len(os.sched_getaffinity(0)), 4)
