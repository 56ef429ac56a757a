"""A server that can't be reached is accused twice, with the scheduler's question in between."""

from __future__ import annotations

from byteps_py.worker.accusations import Accusations


def test_only_an_answer_is_sure() -> None:
    accusations = Accusations()
    assert not accusations.is_sure(7, now=1.0)
    accusations.asked(7, now=1.1, valid_s=2.0)
    assert not accusations.is_sure(8, now=2.0)  # nobody has asked about that one
    assert accusations.is_sure(7, now=2.0)
    assert not accusations.is_sure(7, now=3.0)  # each question is answered once


def test_a_question_of_long_ago_is_about_another_time() -> None:
    accusations = Accusations()
    accusations.asked(7, now=1.0, valid_s=2.0)
    assert not accusations.is_sure(7, now=3.1)
