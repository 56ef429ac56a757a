"""Operations of a process group, whose waits end when the group does: their shared state, rounds of slots, and
operations made of others. Any thread may call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import Store

from byteps_py.errors import MismatchError, StallError
from byteps_py.session import Session
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.members import Members
from byteps_py.torch.collectives.slot_view import SlotView
from byteps_py.torch.collectives.work import Call, NotYetError, Work

#: Calls that a member remembers: another member may be that far behind.
_REMEMBERED = 256


class CallLog:
    """A log of the latest calls of each member of a group, compared when an operation takes long.

    If members call different operations of kinds that are new, the service detects the difference at once, because the
    operations have the same name. If one of them calls a kind that was agreed on long ago, each waits under a name of
    its own. So a member that waits for long writes its latest calls to torch's store, and reads those that other
    waiting members have written: ``record`` every call; ``compare`` when an operation takes long. ``store``: of the
    process group, for the members of one group.
    """

    def __init__(self, members: Members, store: Store) -> None:
        self._members = members
        self._store = store
        self._lock = threading.Lock()
        self._calls: deque[tuple[int, tuple[object, ...], str]] = deque(maxlen=_REMEMBERED)
        self.count = 0  # calls so far

    def record(self, what: tuple[object, ...], name: str) -> int:
        """The number of this call, from 1. ``what``: a description that must be the same on all members. ``name``: that
        of its tensor or stream."""
        with self._lock:
            self.count += 1
            self._calls.append((self.count, what, name))
            return self.count

    def compare(self, number: int) -> str:
        """Describes which operations the other waiting members have called. Raises MismatchError if a member has called
        another operation as its ``number``-th one, or an earlier one."""
        with self._lock:
            own = {number: (": ".join(map(str, what)), name) for number, what, name in self._calls}
        key = f"{self._members.prefix}/calls"
        written: dict[int, bytes] = {}
        with contextlib.suppress(RuntimeError):  # the store's process has ended, which is reported elsewhere
            self._store.set(f"{key}/{self._members.position}", json.dumps(list(own.items())))
            for position, rank in enumerate(self._members.ranks):
                if position != self._members.position and self._store.check([f"{key}/{position}"]):
                    written[rank] = self._store.get(f"{key}/{position}")
        found: list[str] = []
        for rank, text in written.items():
            theirs = _read(text)
            self._check(number, own, rank, theirs)
            if not theirs:  # its call is just beginning, or it is another version: nothing to compare
                continue
            last = max(theirs)
            found.append(f"rank {rank} has called {theirs[last][0]} (its operation {last} of the group)")
        return "; ".join(found)

    def _check(
        self, number: int, own: dict[int, tuple[str, str]], rank: int, theirs: dict[int, tuple[str, str]]
    ) -> None:
        # Where both have one name, the service is about to report the difference, and the group stays usable.
        differing = [n for n in own if n <= number and n in theirs and theirs[n][0] != own[n][0]]
        differing = [n for n in differing if theirs[n][1] != own[n][1]]
        if differing:
            first = min(differing)
            group = ", ".join(map(str, self._members.ranks))
            me = self._members.ranks[self._members.position]
            raise MismatchError(
                f"operation {first} of a process group of ranks {group}: rank {me} called {own[first][0]}, rank {rank} "
                f"{theirs[first][0]}; call the same operations in the same order, with the same shapes and dtypes, on "
                "every rank. The group can't be used any more"
            )


def _read(text: bytes) -> dict[int, tuple[str, str]]:
    """The calls that a member has written, by number; empty if the text is something else."""
    try:
        return {int(number): (str(what), str(name)) for number, (what, name) in json.loads(text)}
    except (ValueError, TypeError, OverflowError, RecursionError):
        return {}


#: After waits of these lengths, in seconds, a member compares calls with the others; the second comparison finds the
#: calls of members that wrote theirs after the first one.
_FIRST_CHECKS_S = (3.0, 1.0)


class GroupContext:
    """The shared state of the operations of one group. ``aborted``, or the end of the session, ends their waits and
    prevents new ones.

    ``timeout_s``: the default timeout. ``check_interval_s``: how often a long wait checks for that. The session must
    have enough time to ask a silent service whether it is alive, and to conclude that it does not answer.
    """

    def __init__(self, session: Session, timeout_s: float, journal: CallLog, check_interval_s: float) -> None:
        self._session = session
        self.timeout_s = timeout_s
        self.check_interval_s = check_interval_s
        self.journal = journal
        self.aborted: Exception | None = None
        self.progress = session.progress

    def check(self) -> None:
        """Raises the error that every operation of the group would raise."""
        if self.aborted is not None:
            raise type(self.aborted)(*self.aborted.args)
        self._session.check_open()  # a StallError that ends the session must not look like that of a single wait

    def wait_in_slices(self, wait: Callable[[float], None]) -> None:
        """Call ``wait(seconds)`` repeatedly before an operation begins, until it returns without StallError. Raises
        StallError after the group's timeout, or the error that has ended the group; then the group is unusable, because
        the other members do not know that this one has left a call out."""
        deadline = time.monotonic() + self.timeout_s
        for interval_s in itertools.chain(_FIRST_CHECKS_S, itertools.repeat(self.check_interval_s)):
            self.check()
            left = deadline - time.monotonic()
            try:
                wait(max(0.0, min(left, interval_s)))
                return
            except StallError as error:
                if left <= interval_s:
                    self.aborted = error
                    raise
            self.compare(self.journal.count)

    def finish(self, work: Work | None) -> None:
        """Return when ``work``, which occupies a slot or stream that the caller needs, is over. An error of it stays
        with it. Raises StallError; then the group is unusable, because the other members do not know that this one has
        left a call out."""
        if work is None:
            return
        try:
            work.complete()
        except StallError as error:
            self.aborted = error
            raise

    def compare(self, number: int) -> str:
        """Describes the operations of the other members. Raises MismatchError if they differ; then the group is
        unusable, because rounds that some members have begun are never completed."""
        try:
            return self.journal.compare(number)
        except MismatchError as error:
            self.aborted = error
            raise


class GroupWork(Work):
    """``number``: of the call in its group, from 1; 0 for an operation that not all members call."""

    def __init__(self, group_context: GroupContext, call: Call) -> None:
        super().__init__(call)
        self.number = 0
        self._group_context = group_context
        self._progress = group_context.progress

    def _others(self) -> str:
        try:
            return self._group_context.compare(self.number) if self.number else ""
        except MismatchError as error:
            return str(error)

    def _wait_in_slices(self, deadline: float, wait: Callable[[float], None]) -> None:
        """Call ``wait(seconds)`` until ``deadline``, and from time to time check whether the group has ended, and
        compare calls."""
        for interval_s in itertools.chain(_FIRST_CHECKS_S, itertools.repeat(self._group_context.check_interval_s)):
            self._group_context.check()
            left = deadline - time.monotonic()
            try:
                wait(max(0.0, min(left, interval_s)))
                return
            except StallError as error:
                if self._gave_up():
                    raise
                if left <= interval_s:
                    raise NotYetError from error
            if self.number:
                self._group_context.compare(self.number)

    def _gave_up(self) -> bool:
        """True if the service itself has ended the round."""
        return False


class CompletedWork(GroupWork):
    """An operation that was complete before its call returned."""

    def __init__(self, group_context: GroupContext, call: Call) -> None:
        super().__init__(group_context, call)
        self._over = True


class ServiceWork(GroupWork):
    """A round of a slot of the communication service. ``call.finish`` copies the result to the outputs. ``failed`` is
    called if the round fails before that. ``completer`` completes its future; None: a thread of the pool
    does, in no order with others."""

    def __init__(
        self,
        group_context: GroupContext,
        completer: Completer | None,
        call: Call,
        view: SlotView,
        device: torch.device,
        failed: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(group_context, call)
        self._completer = completer
        self._view: SlotView | None = view
        self._device = device
        self._failed = failed

    def _complete(self, deadline: float) -> None:
        view = self._view
        if view is None:
            return
        self._wait_in_slices(deadline, view.wait)
        self._failed = None  # a later error is local: members have agreed on this kind and continue to use it
        if self._finish is not None:
            self._finish()
        if self._device.type != "cpu":
            self._queued = view.queued(self._device)

    def _is_ready(self) -> bool:
        return self._group_context.aborted is not None or self._view is None or self._view.is_done

    def _gave_up(self) -> bool:
        return self._view is not None and self._view.has_failed

    def _release(self) -> None:
        view, self._view, self._finish = self._view, None, None
        if view is not None and view.occupant is self:
            view.clear()
        if self._error is not None and self._failed is not None:
            self._failed()

    def _hand_to_pool(self) -> None:
        if self._completer is not None:
            self._completer.add(self)
        else:
            super()._hand_to_pool()


class CombinedWork(GroupWork):
    """Several works as one. ``call.finish`` is called after all of them are over."""

    def __init__(self, group_context: GroupContext, call: Call, works: Sequence[Work]) -> None:
        super().__init__(group_context, call)
        self._works = list(works)

    def _complete(self, deadline: float) -> None:
        for work in self._works:
            self._wait_in_slices(deadline, work.complete)
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._comes_after(self._works)

    def _is_ready(self) -> bool:
        return all(work.is_completed() for work in self._works)
