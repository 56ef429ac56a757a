"""Waits for peers: a rank polls for a while, then sleeps, then tells the service which ranks it waits for.

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

from byteps_py.errors import BytePSError, StallError
from byteps_py.system.spin_policy import LOOK_S, SpinPolicy
from byteps_py.wire import rank_link as protocol

#: After this time the rank reports the wait to the communication service, which knows which ranks are alive, and
#: reports those that keep others waiting.
_TELL_AFTER_S = 0.3


class Host(Protocol):
    """The part of a session that PeerTransport calls."""

    state: threading.Condition

    @property
    def is_being_read(self) -> bool:
        """True if another thread is reading messages. Called with ``state`` held."""

    def check_open(self) -> None:
        """Raises the error that has ended the session."""

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None, what: Callable[[], str]) -> None:
        """Read messages until ``condition`` holds. Raises StallError with the text of ``what``, and the error that ends
        the session."""

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Send a message of rank_link.py to the communication service."""

    def tell(self, message: object) -> None:
        """Send a message if the channel has room now. Raises nothing: another one soon says it anew."""


@dataclass(slots=True, eq=False)
class Wait:
    """Something that this rank waits for. ``name``, ``number``: of the operation, for messages. ``missing``: the
    ranks that it waits for. ``since``: time.monotonic() of its beginning. ``id``: under which the service knows it; 0:
    it does not."""

    name: str
    number: int
    missing: Callable[[], Iterable[int]]
    since: float = 0.0
    id: int = 0


class PeerWaiter:
    """``take_message`` processes one message, if there is one; called with the host's ``state`` held while no other
    thread reads."""

    def __init__(self, host: Host, rank: int, take_message: Callable[[], bool]) -> None:
        self._host = host
        self._me = rank
        self._take_message = take_message
        self._spin_policy = SpinPolicy()
        self._waits = 0

    def spin_s(self) -> float:
        """The time, in seconds, to poll before the next wait, for a caller that polls by itself and then calls
        ``spun``."""
        return LOOK_S if self._spin_policy.is_due() else 0.0

    def spun(self, in_vain: bool) -> None:
        """Record whether polling for ``spin_s`` seconds was in vain."""
        self._spin_policy.ended(paid=not in_vain)

    def until(self, condition: Callable[[], bool], wait: Wait, timeout_s: float, has_spun: bool = False) -> None:
        """Return when ``condition`` holds. ``has_spun``: the caller has polled already. Raises StallError and the error
        that ends the session; then the wait is reported as over until the next call."""
        try:
            self._until(condition, wait, timeout_s, has_spun)
        except BaseException:  # even an interrupt may end the wait
            self.ended(wait)
            raise

    def _until(self, condition: Callable[[], bool], wait: Wait, timeout_s: float, has_spun: bool) -> None:
        host = self._host
        host.check_open()
        must_spin = not has_spun and timeout_s > LOOK_S and bool(self.spin_s())
        if must_spin and self._spin(condition):
            return
        if not wait.since:
            wait.since = time.monotonic()

        def what() -> str:
            missing = ", ".join(str(rank) for rank in sorted(wait.missing()))
            return (
                f"tensor {wait.name!r}, round {wait.number}: nothing came from rank{'s' * (',' in missing)} {missing}"
            )

        quiet_s = max(0.0, wait.since + _TELL_AFTER_S - time.monotonic())
        if wait.id or timeout_s <= quiet_s:
            host.wait_until(condition, timeout_s, what)
            return
        with contextlib.suppress(StallError):
            host.wait_until(condition, quiet_s, what)
            return
        self._report_wait(wait)
        try:
            host.wait_until(condition, timeout_s - quiet_s, what)
        except StallError as error:
            host.check_open()  # the service may have ended the session with a better message
            raise StallError(f"{what()} within {timeout_s:.3g} s") from error

    def _spin(self, condition: Callable[[], bool]) -> bool:
        """Process messages for a short time without sleeping. True if ``condition`` holds."""
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
                    os.sched_yield()  # in favour of a rank that shares this core, or the service
        return condition()

    def _report_wait(self, wait: Wait) -> None:
        self._waits += 1
        wait.id = self._waits
        group = sorted({self._me, *wait.missing()})
        age_s = time.monotonic() - wait.since
        self._host.send(protocol.WaitBegun(wait.id, wait.number, age_s, wait.name, tuple(group)))

    def ended(self, wait: Wait) -> None:
        """The wait is over, successful or not. The service ends the job for a wait whose end is never reported."""
        if wait.id:
            wait_id, wait.id = wait.id, 0
            with contextlib.suppress(BytePSError):  # the caller finds the error that has ended the session
                self._host.send(protocol.WaitEnded(wait_id))
