"""Counts this rank's optimizer steps, so that ranks whose optimizers differ are found out while they wait.

Ranks that train one model make the same steps in the same order: how many steps a rank has begun says how many of its
optimizers have stepped. Nothing is sent here; a session tells the counts while it waits (Session.steps_begun), and the
scheduler compares them. The training thread calls. Counts that may differ between ranks that do the same are dropped:
after a step that failed, and if several threads make steps.
"""

from __future__ import annotations

import threading

from byteps_py.session import Session


class StepCounts:
    """The counts of one session, since the latest join. ``joins``: how many there were: ranks join together, but hear
    of it one after another."""

    def __init__(self, joins: int = 0) -> None:
        self._since = f", since join {joins}" if joins else ""
        self._threads: dict[str, int] = {}  # by kind: the thread that makes the steps; 0: nothing is counted any more

    def begin(self, session: Session, kind: str, optimizers: int) -> None:
        """A step of ``kind`` begins. ``optimizers``: how many have stepped, this one included. Call it before the step
        waits for other ranks."""
        thread = threading.get_ident()
        if self._threads.setdefault(kind, thread) != thread:
            self.give_up(session, kind)
            return
        steps, _ = session.steps_begun.get(kind + self._since, (0, 0))
        session.steps_begun = {**session.steps_begun, kind + self._since: (steps + 1, optimizers)}

    def give_up(self, session: Session, kind: str) -> None:
        """Count no more steps of ``kind``."""
        self._threads[kind] = 0
        session.steps_begun = {
            name: counts for name, counts in session.steps_begun.items() if name != kind + self._since
        }
