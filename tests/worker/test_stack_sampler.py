"""What is said about a rank that keeps others waiting: who it is, what it did last, where its Python is."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from support.clusters import bpslaunch
from support.sessions import end, give, got, spec, start

from byteps_py.system import stack_dump as stack

PROGRAM = Path(__file__).parents[1] / "programs" / "stuck.py"


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow)])
def test_every_machine_logs_where_the_missing_rank_is(machines: int, tmp_path: Path) -> None:
    run = bpslaunch(
        ["-np", str(2 // machines), "--machines", str(machines)],
        [PROGRAM, tmp_path / "flag"],
        BYTEPS_STALL_WARN_S="0.5",
        BYTEPS_STALL_LIMIT_S="4",
        BYTEPS_LOG_LEVEL="WARNING",
    )
    output = run.stdout + run.stderr
    assert "StallError: tensor 'layer.weight': rank 0 waits for other ranks longer than" in output
    assert output.count("has waited 0.") >= machines
    assert output.count("rank 1, which is waited for: rank 1 (process ") >= machines
    assert "has got 1 result, the last " in output
    assert "ago ('layer.weight'); its Python stack:" in output
    assert "in stuck_in_a_data_loader" in output


def test_one_process_has_one_and_a_signal_that_comes_late_does_nothing() -> None:
    first = stack.open_stack_dump()
    assert first is not None
    assert stack.open_stack_dump() is None
    signal.pthread_kill(threading.get_ident(), stack.SIGNAL)
    assert b"test_one_process_has_one" in os.pread(first.fd, 1 << 16, 0)
    first.close()
    signal.pthread_kill(threading.get_ident(), stack.SIGNAL)
    second = stack.open_stack_dump()
    assert second is not None
    second.close()


def test_a_signal_of_the_users_own_is_left_alone() -> None:
    before = signal.signal(stack.SIGNAL, lambda *_: None)
    try:
        assert stack.open_stack_dump() is None
    finally:
        signal.signal(stack.SIGNAL, before)


def test_a_rank_that_has_given_no_file_can_still_be_waited_for() -> None:
    service = start()
    ranks = [service.rank(0), service.rank(1)]  # in one process: the second has no file
    try:
        slots = [session.declare([spec("w")])[0] for session in ranks]
        for session, slot in zip(ranks, slots, strict=True):
            give(session, slot, 1.0)
        assert [got(session, slot) for session, slot in zip(ranks, slots, strict=True)] == [[2.0] * 3] * 2
    finally:
        for session in ranks:
            session.close()
        end(service)
