"""Threads that are begun while another thread ends them: what is joined has started, and nothing begins afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from byteps_py.session.peers.background_sender import LinkKeeper
from byteps_py.torch.collectives.completion import Pool

Act = Callable[[], None]
_HELD_S = 0.1


def of_keeper() -> tuple[Act, Act]:
    keeper = LinkKeeper(lambda: None, 60.0)
    return keeper.start, keeper.close


def of_pool() -> tuple[Act, Act]:
    pool = Pool("byteps-test")
    return lambda: pool.run(lambda: None), pool.close


@pytest.mark.parametrize("new", [of_keeper, of_pool])
def test_ending_a_thread_that_is_just_being_begun(
    new: Callable[[], tuple[Act, Act]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, end = new()
    is_beginning, has_ended, start = threading.Event(), threading.Event(), threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread is not other:
            is_beginning.set()
            has_ended.wait(_HELD_S)  # where the other thread waits for this one, it does not come
        start(thread)

    other = threading.Thread(target=begin)
    monkeypatch.setattr(threading.Thread, "start", start_late)
    other.start()
    assert is_beginning.wait(10.0)
    end()
    has_ended.set()
    other.join(10.0)
    end()


def test_a_keeper_that_is_closed_begins_nothing() -> None:
    keeper = LinkKeeper(lambda: None, 60.0)
    keeper.close()
    keeper.start()
    assert not any(thread.name == "byteps-links" for thread in threading.enumerate())
