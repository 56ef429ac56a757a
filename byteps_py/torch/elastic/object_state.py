"""The state that a training process commits and restores. Must not know torch modules and optimizers: see state.py.

The training thread calls; any thread may call ``on_hosts_updated``.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Sequence
from typing import Any

from byteps_py.errors import HostsUpdatedInterrupt
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.horovod.api import rank
from byteps_py.torch.operations.objects import broadcast_object


class HostUpdateResult:
    """Changes of the set of hosts. The values are bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """Base class of states. Subclasses define ``save``, ``restore`` and ``sync``.

    bcast_object: returns rank 0's object on every rank. get_rank: returns this rank's number.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._notices: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._last_update = 0  # timestamp of the last notice that all ranks have acted on
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call ``callbacks`` in order each time the job was joined again, for example to adapt a learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the job was joined again. Forgets notices of hosts, then calls ``reset`` and the callbacks."""
        self._notices = queue.SimpleQueue()
        self._last_update = 0  # new ranks, which must agree, know of no notice
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int = HostUpdateResult.added) -> None:
        """Note that hosts were added or will be removed: the next ``check_host_updates`` raises on all ranks.

        timestamp: increases from notice to notice. update_res: a HostUpdateResult. Any thread may call it.
        """
        self._notices.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state in memory, then ``check_host_updates``. After a later failure, training continues from here.

        Copies the whole state: commit every few batches, not every batch. All ranks must call it equally often. Raises
        HostsUpdatedInterrupt, which ``run`` catches.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    @property
    def commits(self) -> int:
        """The number of commits."""
        return self._commits

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if any rank has got a notice since the last call.

        All ranks must call it equally often.
        """
        latest, changes = self._last_update, HostUpdateResult.no_update
        if host_changes := _host_changes():
            latest, changes = latest + 1, host_changes
        while not self._notices.empty():
            timestamp, change = self._notices.get()
            if timestamp > self._last_update:
                latest = max(latest, timestamp)
                changes |= change
        before = self._last_update
        self._last_update, changes = self._agree(latest, changes)
        if self._last_update > before:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def _agree(self, timestamp: int, changes: int) -> tuple[int, int]:
        """The newest notice, the same on all ranks. Here rank 0's; TorchState takes the newest of all ranks."""
        agreed: tuple[int, int] = self._bcast_object((timestamp, changes))
        return agreed

    def save(self) -> None:
        """Keep the present state in memory."""
        raise NotImplementedError(f"{type(self).__name__} must define save()")

    def restore(self) -> None:
        """Return to the state that was saved last."""
        raise NotImplementedError(f"{type(self).__name__} must define restore()")

    def sync(self) -> None:
        """Make all ranks' states equal to rank 0's."""
        raise NotImplementedError(f"{type(self).__name__} must define sync()")

    def reset(self) -> None:
        """Called when the job was joined again, perhaps with another size. For subclasses."""


def _host_changes() -> int:
    """Changes of hosts that an elastic job has announced: the group will soon be replaced."""
    context = contexts.current()
    if not context.is_open:
        return HostUpdateResult.no_update
    added, removed = context.session.hosts_changed()
    return (HostUpdateResult.added if added else 0) | (HostUpdateResult.removed if removed else 0)


class ObjectState(State):
    """A state of picklable Python objects. Each keyword argument becomes an attribute. The training thread calls.

    >>> state = ObjectState(lambda value: value, lambda: 0, epoch=1, seen=[])
    >>> state.epoch, _ = 2, state.seen.append(7)
    >>> state.restore()
    >>> state.epoch, state.seen
    (1, [])
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = copy.deepcopy(kwargs)

    def __getattr__(
        self, name: str
    ) -> Any:  # for type checkers: the attributes are the constructor's keyword arguments
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def save(self) -> None:
        """Keep copies of all objects."""
        self._saved = copy.deepcopy(self._values())  # an object changed in place must not change what was saved

    def restore(self) -> None:
        """Set the attributes to copies of the saved objects."""
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Make all ranks' objects equal to rank 0's present ones, and save them."""
        if self._names:
            for name, value in self._bcast_object(self._values()).items():
                setattr(self, name, value)
        ObjectState.save(self)
