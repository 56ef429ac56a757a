"""Cores that are broken on purpose, in ways that show where networks fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from byteps_py.server import rounds
from byteps_py.worker.executor import Executor
from byteps_py.worker.scatter import ScatterPart
from byteps_py.worker.service import Service
from byteps_py.worker.tensor import Part, Stage


def keep_what_was_given_in_earlier_epochs(core: pytest.MonkeyPatch) -> None:
    """A partition comes back to a server where something is left of the time before it went."""
    core.setattr(rounds, "_is_left", lambda given, epoch: False)


def leave_at_once_without_a_scheduler(core: pytest.MonkeyPatch) -> None:
    """Whoever lost its connection meanwhile has yet to ask for what is here for it, and so for the size of nothing."""
    real = Service._go

    def go(self: Service) -> None:
        real(self)
        if self._is_headless:
            self._farewell.dismissed()

    core.setattr(Service, "_go", go)


def count_on_nobody_who_has_yet_to_ask(core: pytest.MonkeyPatch) -> None:
    """What other machines have not asked for can't be lost on the way."""
    real: Callable[[Part], bool] = Executor._is_due

    def is_due(part: Part) -> bool:
        if isinstance(part, ScatterPart):
            return part.stage is Stage.IN_FLIGHT and bool(part.missing)
        return real(part)

    core.setattr(Executor, "_is_due", staticmethod(is_due))


#: Each with a seed that shows it.
OUTAGE_MUTATIONS: dict[Callable[[pytest.MonkeyPatch], Any], int] = {
    keep_what_was_given_in_earlier_epochs: 11647,
    leave_at_once_without_a_scheduler: 1310,
    count_on_nobody_who_has_yet_to_ask: 3400,
}
