"""Cores that are broken on purpose, in ways that show where networks fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from byteps_py.failure_detector import FailureDetector
from byteps_py.worker import waits
from byteps_py.worker.accusations import Accusations
from byteps_py.worker.direct import Direct
from byteps_py.worker.elastic_desk import ElasticDesk
from byteps_py.worker.executor import Executor
from byteps_py.worker.scatter import ScatterPart
from byteps_py.worker.tensor import Part, Stage


def count_on_nobody_who_has_yet_to_ask(core: pytest.MonkeyPatch) -> None:
    """What other machines have not asked for can't be lost on the way."""
    real: Callable[[Part], bool] = Executor._is_due

    def is_due(part: Part) -> bool:
        if isinstance(part, ScatterPart):
            return part.stage is Stage.IN_FLIGHT and bool(part.missing)
        return real(part)

    core.setattr(Executor, "_is_due", staticmethod(is_due))


def blame_whoever_has_left(core: pytest.MonkeyPatch) -> None:
    """For what others have yet to take."""
    core.setattr(waits, "needs", lambda channel, member: set(channel.ranks))
    core.setattr(Direct, "keeps_for", lambda self, gone: False)


def believe_every_accusation(core: pytest.MonkeyPatch) -> None:
    """A machine that reaches nobody takes the others' servers away."""
    core.setattr(Accusations, "is_sure", lambda self, member_id, now: True)


def take_who_shuts_down_late_for_done(core: pytest.MonkeyPatch) -> None:
    """All ranks shut down, to initialize again, and one hears only afterwards that another has gone back."""
    core.setattr(ElasticDesk, "_former_shut_down", ElasticDesk._forget_former)


def forget_who_was_late(core: pytest.MonkeyPatch) -> None:
    """One timeout for all, as if no machine were ever busy."""
    core.setattr(FailureDetector, "heard", lambda self, after_s: None)


#: Each with a seed that shows it.
OUTAGE_MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    count_on_nobody_who_has_yet_to_ask: 3400,
    blame_whoever_has_left: 3660,
}
ELASTIC_OUTAGE_MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    believe_every_accusation: 616,
    take_who_shuts_down_late_for_done: 21054,
}
BUSY_MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    forget_who_was_late: 15,
}
