"""How a rank waits for its peers: first it looks again and again, then it sleeps, then it says for whom it waits.

Owns no message; knows the session only as a Host. Any thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from byteps_py import rank_protocol as protocol
from byteps_py.errors import BytePSError, StallError
from byteps_py.spin_policy import LOOK_S, SpinPolicy

#: After so long the communication service is told, which knows who is alive, and says who keeps others waiting.
_TELL_AFTER_S = 0.3


class Host(Protocol):
    """What Neighbours need of the session that they belong to."""

    state: threading.Condition

    @property
    def is_being_read(self) -> bool:
        """Another thread takes messages just now. Called with ``state`` held."""

    def check_open(self) -> None:
        """Raises whatever has ended the session."""

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None, what: Callable[[], str]) -> None:
        """Take messages until ``condition``. Raises StallError with ``what``, and whatever ends the session."""

    def tell(self, message: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send to the communication service."""


@dataclass(slots=True, eq=False)
class Wait:
    """Something that this rank waits for: the name and number of it in messages; ``missing``: the local ranks without
    which it does not come. ``id``: under which the service knows of it; 0 while it does not."""

    name: str
    number: int
    missing: Callable[[], Iterable[int]]
    since: float = 0.0
    id: int = 0


class Patience:
    """``take_message``: takes one, if there is any; called with the host's ``state`` held while nobody else reads."""

    def __init__(
        self, host: Host, local_rank: int, local_size: int, first_rank: int, take_message: Callable[[], bool]
    ) -> None:
        self._host = host
        self._me = local_rank
        self._first_rank = first_rank
        self._take_message = take_message
        self._spin_policy = SpinPolicy()
        self._waits = 0

    def look_s(self) -> float:
        """How long to look before the next wait, for who does so by itself and then says what came of it."""
        return LOOK_S if self._spin_policy.is_due() else 0.0

    def looked(self, in_vain: bool) -> None:
        self._spin_policy.ended(paid=not in_vain)

    def until(self, condition: Callable[[], bool], wait: Wait, timeout_s: float, has_looked: bool = False) -> None:
        """Return when ``condition`` holds. ``has_looked``: the caller has done so by itself. Raises StallError and what
        ends the session; then the service is told that nobody waits, until this is called again."""
        try:
            self._until(condition, wait, timeout_s, has_looked)
        except BaseException:  # an interrupt, too, may be the end of it
            self.ended(wait)
            raise

    def _until(self, condition: Callable[[], bool], wait: Wait, timeout_s: float, has_looked: bool) -> None:
        host = self._host
        host.check_open()
        is_to_look = not has_looked and timeout_s > LOOK_S and bool(self.look_s())
        if is_to_look and self._spin(condition):
            return
        if not wait.since:
            wait.since = time.monotonic()

        def what() -> str:
            missing = ", ".join(str(self._first_rank + rank) for rank in sorted(wait.missing()))
            return (
                f"tensor {wait.name!r}, round {wait.number}: nothing came from rank{'s' * (',' in missing)} {missing}"
            )

        patience_s = max(0.0, wait.since + _TELL_AFTER_S - time.monotonic())
        if wait.id or timeout_s <= patience_s:
            host.wait_until(condition, timeout_s, what)
            return
        with contextlib.suppress(StallError):
            host.wait_until(condition, patience_s, what)
            return
        self._tell(wait)
        try:
            host.wait_until(condition, timeout_s - patience_s, what)
        except StallError as error:
            host.check_open()  # that is what the service says of all that wait
            raise StallError(f"{what()} within {timeout_s:.3g} s") from error

    def _spin(self, condition: Callable[[], bool]) -> bool:
        """Look for messages for a while."""
        host = self._host
        with host.state:
            host.check_open()
            limit = time.perf_counter() + LOOK_S
            while not host.is_being_read:
                if self._take_message():
                    if condition():
                        self._spin_policy.ended(paid=True)
                        return True
                elif time.perf_counter() > limit:
                    self._spin_policy.ended(paid=False)
                    break
                else:
                    os.sched_yield()  # to a rank that shares this core, or to the service
        return condition()

    def _tell(self, wait: Wait) -> None:
        self._waits += 1
        wait.id = self._waits
        group = sorted(self._first_rank + rank for rank in {self._me, *wait.missing()})
        age_s = time.monotonic() - wait.since
        self._host.tell(
            protocol.pack(
                protocol.RankMessageKind.WAITS, id=wait.id, name=wait.name, round=wait.number, age_s=age_s, group=group
            )
        )

    def ended(self, wait: Wait) -> None:
        """It has come, or nobody waits for it any more: the service ends the job for a wait that it never hears the end
        of."""
        if wait.id:
            told, wait.id = wait.id, 0
            with contextlib.suppress(BytePSError):  # what has ended the session is the caller's to find out
                self._host.tell(protocol.pack(protocol.RankMessageKind.WAITED, id=told))
