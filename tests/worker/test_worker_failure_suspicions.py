"""A server that can't be reached is accused twice, with the scheduler's question in between."""

from __future__ import annotations

from byteps_py.worker.core.deadlines import FailureSuspicions


def test_only_an_answer_is_sure() -> None:
    suspicions = FailureSuspicions()
    assert not suspicions.is_sure(7, now=1.0)
    suspicions.asked(7, now=1.1, valid_s=2.0)
    assert not suspicions.is_sure(8, now=2.0)  # nobody has asked about that one
    assert suspicions.is_sure(7, now=2.0)
    assert not suspicions.is_sure(7, now=3.0)  # each question is answered once


def test_a_question_of_long_ago_is_about_another_time() -> None:
    suspicions = FailureSuspicions()
    suspicions.asked(7, now=1.0, valid_s=2.0)
    assert not suspicions.is_sure(7, now=3.1)
