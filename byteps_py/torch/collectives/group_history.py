"""The operations of torch.distributed's groups before the first step. Ranks repeat them with a rank that was started
again.

    its script:    init_process_group ─► new_group … all_gather … broadcast ─► restore() ─► …  ─► the first step
    other ranks:   meet again         ─► begin_anew, the same calls again   ─► states   ─► …  ─► the step under way

Groups end with the session that they belong to, but their objects stay, and all that refers to them: ``begin_anew``
gives them the next session. A newcomer's script makes its groups, and a mesh or a pipeline exchanges facts by them. The
other ranks do their part of it: each call again, in the same order, with the inputs that it had, and with results that
nobody reads.

Large tensors of a broadcast, such as parameters, are not copied: their present values are sent. The script's restore()
replaces them. The training thread calls.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.work import Work
from byteps_py.wording import bytes_text

#: Tensors that are larger are not copied if they are broadcast.
_SMALL_BYTES = 1 << 20
#: The most bytes of copies.
_MOST_BYTES = 256_000_000
_MOST_CALLS = 100_000
_BROADCAST = "broadcast"


class Renewable(Protocol):
    """A process group."""

    def begin_anew(self) -> None:
        """Be a group of the context's present session."""

    def rank(self) -> int:
        """The position of this rank."""


@dataclass(frozen=True, slots=True)
class _Made:
    group: Renewable

    def again(self) -> None:
        self.group.begin_anew()


@dataclass(frozen=True, slots=True)
class _Called:
    """``method``: of the group, not recorded. ``sends``: large tensors of this rank are sent, and not replaced."""

    method: Callable[..., object]
    given: tuple[Any, ...]
    named: dict[str, Any]
    sends: bool

    def again(self) -> object:
        return self.method(*_scratch(self.given, self.sends), **_scratch(self.named, self.sends))


@dataclass(slots=True)
class GroupHistory:
    """Of the groups of one world. ``meet_again``: ranks meet in a new store, and groups use that. ``groups``: all that
    this rank is in now, as torch knows them. ``calls``: how many operations there were; after the first step perhaps
    not counted."""

    meet_again: Callable[[], None]
    groups: Callable[[], Iterable[object]] = tuple
    calls: int = 0
    _refusal: str = ""
    _events: list[_Made | _Called] = field(default_factory=list)
    _restored_at: int | None = None
    _is_over: bool = False
    _copied: int = 0
    _watched: list[tuple[Renewable, tuple[str, ...]]] = field(default_factory=list)
    _renewed: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)
    _within: int = 0  # the thread that is within a call: what it calls belongs to that

    # ---- before the first step ----------------------------------------------------------------------------------

    def made(self, group: Renewable, calls: Iterable[str]) -> None:
        """``group`` was made, just now. ``calls``: the names of its methods that members call together: until the first
        step, these are recorded."""
        if self._is_over:
            self.refuse("a group was made after the first step")
            return
        self._events.append(_Made(group))
        self._watched.append((group, tuple(calls)))
        for name in calls:
            setattr(group, name, functools.partial(self._call, group, name, getattr(group, name)))

    def _call(self, group: Renewable, name: str, method: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
        self.calls += 1
        thread = threading.get_ident()
        if self._is_over or self._within == thread:
            return method(*given, **named)
        if len(self._events) >= _MOST_CALLS:
            self.refuse(f"before the first step, there were more than {_MOST_CALLS:,} operations of torch.distributed")
        if not self._refusal:
            try:
                sends = name == _BROADCAST and _root_of(given, named) == group.rank()
                is_large_kept = name == _BROADCAST
                event = _Called(method, self._kept(given, is_large_kept), self._kept(named, is_large_kept), sends)
                if not self._refusal:
                    self._events.append(event)
            except (LookupError, TypeError, AttributeError):  # arguments that the method refuses
                return method(*given, **named)
        self._within = thread
        try:
            return method(*given, **named)
        finally:
            self._within = 0

    def renew_with(self, method: Callable[[], None]) -> None:
        """After a loss, call a method of an object, if it is still there: what ranks have told each other by groups is
        not known to all."""
        self._renewed.append(weakref.WeakMethod(method))

    def restored(self) -> None:
        """Ranks exchange states now, which is not done by groups."""
        if self._restored_at is None:
            self._restored_at = len(self._events)

    def over(self, counts: bool = True) -> None:
        """The first step begins. ``counts``: calls are counted in ``calls`` from now on."""
        if self._is_over:
            return
        self._is_over = True
        if not counts:
            self._stop()
        if self._restored_at is None:
            self.refuse("the script has called no restore(), and has no RunState")

    def refuse(self, why: str) -> None:
        """Groups can't begin anew, because ``why``."""
        self._refusal = self._refusal or why
        self._events.clear()
        self._stop()

    def _stop(self) -> None:
        self._is_over = True
        for group, calls in self._watched:
            for name in calls:
                delattr(group, name)
        self._watched.clear()

    @property
    def refusal(self) -> str:
        """Why the groups can't begin anew; "": they can."""
        if not self._refusal:
            known = {id(event.group) for event in self._events if isinstance(event, _Made)}
            if any(id(group) not in known for group in self.groups()):
                self.refuse("a group has another backend than byteps")
        return self._refusal

    # ---- after a loss -------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """All groups belong to the present session, and all was done by them that came before restore(). All ranks
        call it, or run their scripts. Raises the errors of the session."""
        self.meet_again()
        self._again(self._events[: self._restored_at])

    def go_on(self) -> None:
        """The same for what came between restore() and the first step. Then objects begin anew that use groups."""
        self._again(self._events[self._restored_at :])
        for method in self._renewed:
            if (begin_anew := method()) is not None:
                begin_anew()

    def _again(self, events: Sequence[_Made | _Called]) -> None:
        works: list[Work] = []
        self._within = threading.get_ident()
        try:
            for event in events:
                if isinstance(event, _Made):
                    _wait(works)
                    event.again()
                elif isinstance(work := event.again(), Work):
                    works.append(work)
            _wait(works)
        finally:
            self._within = 0

    def _kept(self, value: Any, is_large_kept: bool) -> Any:
        """A copy of arguments, for calls to come."""
        if isinstance(value, torch.Tensor):
            if is_large_kept and value.nbytes > _SMALL_BYTES:
                return value.detach()
            self._copied += 0 if value.is_sparse else value.nbytes
            if self._copied > _MOST_BYTES:
                most = bytes_text(_MOST_BYTES)
                self.refuse(f"before the first step, operations of torch.distributed had more than {most}")
                return value
            return value.detach().clone()
        if isinstance(value, dict):
            return {name: self._kept(each, is_large_kept) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._kept(each, is_large_kept) for each in value)
        return value


def _root_of(given: tuple[Any, ...], named: dict[str, Any]) -> int:
    options = given[1] if len(given) > 1 else named["opts"]
    return int(options.rootRank)


def _scratch(value: Any, sends: bool) -> Any:
    """Arguments for one call, whose results are dropped."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse or value.nbytes <= _SMALL_BYTES:
            return value.clone()
        return value if sends else torch.empty_like(value)
    if isinstance(value, dict):
        return {name: _scratch(each, sends) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_scratch(each, sends) for each in value)
    return value


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()
    works.clear()


#: Of the world that a context's process has made in a job whose ranks are started again.
_histories: weakref.WeakKeyDictionary[Context, GroupHistory] = weakref.WeakKeyDictionary()
#: A group that is still there when Python has ended keeps its threads, which can abort the process.
atexit.register(_histories.clear)


def begin_history(context: Context, meet_again: Callable[[], None]) -> GroupHistory:
    """The history of the world that is about to be made."""
    groups: Any = dist.distributed_c10d._world.pg_map
    history = _histories[context] = GroupHistory(meet_again, lambda: [*groups])
    return history


def end_history(context: Context) -> None:
    """The world has ended."""
    _histories.pop(context, None)


def history_of(context: Context) -> GroupHistory | None:
    """None if there are no groups, or if these can't begin anew: without BYTEPS_MAX_RESTARTS."""
    return _histories.get(context)
