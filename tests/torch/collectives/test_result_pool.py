"""Memory of results that have died is used again, and never while a tensor still shows it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import torch

from byteps_py.torch.collectives.result_pool import LEAST_BYTES, ResultPool

COUNT = LEAST_BYTES // 4


def test_the_memory_of_a_dead_result_is_used_again() -> None:
    pool = ResultPool()
    first = pool.empty((COUNT,), torch.float32)
    address = first.data_ptr()
    del first
    second = pool.empty((4, COUNT // 4), torch.float32)
    assert second.data_ptr() == address
    assert second.shape == (4, COUNT // 4)
    assert second.is_contiguous()


def test_memory_stays_while_anything_shows_it() -> None:
    pool = ResultPool()
    first = pool.empty((COUNT,), torch.float32).fill_(1.0)
    address = first.data_ptr()
    views = [first[10:20], first.numpy(), first.detach(), first.view(torch.uint8)]
    del first
    while views:
        other = pool.empty((COUNT,), torch.float32).fill_(2.0)
        assert other.data_ptr() != address
        views.pop()
    assert pool.empty((COUNT,), torch.float32).data_ptr() == address


def test_results_of_a_graph_live_as_long_as_the_graph() -> None:
    pool = ResultPool()
    weight = torch.ones(COUNT, requires_grad=True)
    loss = (pool.empty((COUNT,), torch.float32).fill_(3.0) * weight).sum()
    assert pool.free_bytes == 0
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((COUNT,), 3.0))
    del loss
    assert pool.free_bytes >= LEAST_BYTES


def test_small_results_are_torchs_own() -> None:
    pool = ResultPool()
    for shape in ((3, 0, 2), (COUNT - 1,)):
        assert pool.empty(shape, torch.float32).shape == shape
    assert pool.free_bytes == 0


def test_the_pool_keeps_no_more_than_was_in_use_at_one_time() -> None:
    pool = ResultPool(kept_bytes=0)
    for count in range(COUNT, 9 * COUNT, COUNT):
        pool.empty((count,), torch.float32)
        assert pool.free_bytes <= 10 * LEAST_BYTES
    both = [pool.empty((4 * COUNT,), torch.float32) for _ in range(2)]
    both.clear()
    assert 4 * LEAST_BYTES <= pool.free_bytes <= 10 * LEAST_BYTES


def test_results_may_die_in_any_thread_and_in_the_garbage_collector() -> None:
    pool = ResultPool()
    failures = []

    def work() -> None:
        try:
            for number in range(50):
                tensor = pool.empty((COUNT,), torch.float32).fill_(number)
                ring = [tensor]
                ring.append(ring)  # type: ignore[arg-type]
                assert bool((tensor == number).all())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.collect()
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert pool.free_bytes <= 150 * LEAST_BYTES


def test_a_forked_child_has_results_of_its_own() -> None:
    result = ResultPool().empty((COUNT,), torch.float32).fill_(1.0)
    child = os.fork()
    if not child:
        ctypes.memset(result.data_ptr(), 0, result.nbytes)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((result == 1.0).all())


def test_clear_gives_memory_back() -> None:
    pool = ResultPool()
    kept = pool.empty((COUNT,), torch.float32)
    pool.empty((COUNT,), torch.float32)
    assert pool.free_bytes
    pool.clear()
    assert not pool.free_bytes
    del kept
    assert pool.free_bytes
