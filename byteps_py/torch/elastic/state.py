"""The state that a training process commits and restores: of picklable objects, and of modules and optimizers.

``run`` calls a training function again, from the last commit, when the job fails:

sync ─► function ─┬─ returns ───────────────────────► its result
  ▲               ├─ HorovodInternalError ─► leave, join again, restore ─► on_reset ─┐
  │               └─ HostsUpdatedInterrupt ► leave, join again ──────────► on_reset ─┤
  └──────────────────────────────────────────────────────────────────────────────────┘

The training thread calls; any thread may call ``on_hosts_updated``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch

from byteps_py.errors import (
    BytePSError,
    DismissedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    RendezvousError,
    UsageError,
)
from byteps_py.session import CodedState
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.horovod.allreduce import push_pull
from byteps_py.torch.horovod.api import init, rank, shutdown
from byteps_py.torch.operations.broadcasts import allgather_object, broadcast_object
from byteps_py.torch.operations.reductions import Max
from byteps_py.torch.operations.state_broadcast import StateListener, broadcast_optimizer_state, broadcast_parameters


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

    #: For the log, how training goes on after a failure.
    going_on = "going back to the last commit"

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


# ---- modules and optimizers ----------------------------------------------------------------------------------


class StateHandler(ABC):
    """Saves one attribute of a TorchState: keeps a copy of its ``state_dict``."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def prepare(self) -> None:  # noqa: B027  most values need nothing
        """Do what may fail, because other ranks have a part in it, before any value is saved."""

    def save(self) -> None:
        """Keep a copy of the current ``state_dict``."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy."""
        # A copy again, because an optimizer uses the tensors of a loaded state, and would change the saved ones.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    @abstractmethod
    def sync(self) -> None:
        """Make all ranks' values equal to rank 0's."""

    def on_reset(self) -> None:  # noqa: B027  most values need nothing
        """The rank is part of another group, or of the same one anew."""

    def set_value(self, value: Any) -> None:
        """Save ``value`` from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Saves a torch.nn.Module."""

    def sync(self) -> None:
        state = self.value.state_dict()
        broadcast_parameters({name: t for name, t in state.items() if isinstance(t, torch.Tensor)}, 0)


class OptimizerStateHandler(StateHandler):
    """Saves a torch.optim.Optimizer, distributed or not. Gradients are not saved; ``restore`` sets them to None."""

    _prepared: Any = None

    def prepare(self) -> None:
        self._prepared = copy.deepcopy(self.value.state_dict())

    def save(self) -> None:
        if self._prepared is None:
            self.prepare()
        self._saved, self._prepared = self._prepared, None

    def restore(self) -> None:
        self._prepared = None
        super().restore()
        for group in self.value.param_groups:
            for param in group["params"]:
                param.grad = None  # of the failed step; the script may not zero them before its next backward

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, 0)

    def on_reset(self) -> None:
        if isinstance(self.value, StateListener) and self.value._is_lost():
            super().restore()  # what was saved last: hosts change at a commit


class CodedStateHandler(StateHandler):
    """Saves what this rank has for its machine of codecs with error feedback or momentum: each machine's own."""

    _prepared: dict[str, CodedState] | None = None

    def __init__(self) -> None:
        super().__init__(None)

    def prepare(self) -> None:
        context = contexts.current()
        self._prepared = context.session.coded_states() if context.is_open else {}

    def save(self) -> None:
        if self._prepared is None:
            self.prepare()
        self._saved, self._prepared = self._prepared or {}, None

    def restore(self) -> None:
        self._prepared = None
        context = contexts.current()
        if context.is_open:
            context.session.set_coded_states(self._saved)

    def sync(self) -> None:
        """All ranks draw from the same round on, those that are new, too."""
        session = contexts.current().session
        states = session.coded_states()
        drawn = {name: replace(state, data=b"") for name, state in states.items() if state.codec.draws}
        for of_rank in allgather_object(drawn, name="elastic.drawn"):
            for name, state in of_rank.items():
                own = states.get(name, state)
                states[name] = replace(own, codec=max(own.codec, state.codec, key=lambda codec: codec.drawn))
        session.set_coded_states(states)


class FactorStateHandler(StateHandler):
    """Saves what this rank has of Compression.powersgd: the factors that all ranks have, and its own errors."""

    _prepared: dict[str, Any] | None = None
    _goes_back = False  # to what was saved, in the next ``sync``

    def __init__(self) -> None:
        super().__init__(None)

    @staticmethod
    def _present() -> dict[str, Any]:
        context = contexts.current()
        if not context.is_open:
            return {}
        return dict(pair for each in list(context.keeping_factors) for pair in each.factor_states().items())

    def prepare(self) -> None:
        self._prepared = self._present()

    def save(self) -> None:
        if self._prepared is None:
            self.prepare()
        self._saved, self._prepared = self._prepared or {}, None
        self._goes_back = False

    def restore(self) -> None:
        self._prepared, self._goes_back = None, True
        if contexts.current().is_open:
            self._load(self._saved)

    def sync(self) -> None:
        """All ranks get the factors of rank 0. Errors stay those of each rank; new ranks have none."""
        own = self._saved if self._goes_back else {**self._saved, **self._present()}
        shared = broadcast_object({key: {**state, "error": None} for key, state in own.items()}, 0)
        nothing: dict[str, Any] = {}
        self._load({key: {**state, "error": own.get(key, nothing).get("error")} for key, state in shared.items()})

    @staticmethod
    def _load(states: Mapping[str, Any]) -> None:
        for each in list(contexts.current().keeping_factors):
            each.load_factor_states(states)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken and put back."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go back to a state."""


class ObjectStateHandler(StateHandler):
    """Saves other objects with a state_dict: learning-rate schedulers, gradient scalers, samplers."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0))


@runtime_checkable
class LocalTraining(Protocol):
    """A training of which each rank keeps what it has, whoever else is there: DiLoCo."""

    outer_steps: int

    def rejoin(self) -> None:
        """Go on with the present ranks. All of them call it."""


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (Stateful, ObjectStateHandler),
]


def get_handler_registry() -> Registry:
    """The handler of each type, as (type, handler) pairs. The first pair that matches is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the registry, for states that are made later."""
    _registry[:] = registry


class TorchState(ObjectState):
    """The state of a training: modules, optimizers, schedulers, ElasticSamplers, and any picklable objects.

    Each argument becomes an attribute. Modules and the like are saved by their ``state_dict``; other objects are
    copied. An attribute that is replaced (by another model, for example) is saved at once. A DiLoCo, which has the
    model, is not saved: ranks go on with what they have learned. The training thread calls. Raises UsageError for a
    DiLoCo beside a model or an optimizer.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = torch.nn.Linear(1, 1)
    >>> state = bps.elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
    >>> state.epoch += 1
    >>> state.commit()
    >>> _ = torch.nn.init.zeros_(model.weight); state.epoch += 1
    >>> state.restore()
    >>> bool(model.weight != 0), state.epoch
    (True, 1)
    >>> bps.shutdown()
    """

    _handlers: dict[str, StateHandler]
    _local: dict[str, LocalTraining]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        everything = {**kwargs, "model": model, "optimizer": optimizer}
        self._local = {name: value for name, value in everything.items() if isinstance(value, LocalTraining)}
        handlers = {name: _handler(value) for name, value in everything.items() if name not in self._local}
        self._handlers = {name: handler for name, handler in handlers.items() if handler is not None}
        if self._local and (others := _of_a_model(handlers)):
            raise UsageError(
                f"TorchState: {', '.join(others)} would go back to the last commit, and the DiLoCo "
                f"{next(iter(self._local))!r} keeps what its ranks have learned: give the DiLoCo alone, which has "
                "the model"
            )
        for name, value in {**{name: each.value for name, each in self._handlers.items()}, **self._local}.items():
            super().__setattr__(name, value)
        if self._local:
            self.going_on = "going on"  # with the errors of codecs, too
        else:
            self._handlers |= {"": CodedStateHandler(), " ": FactorStateHandler()}  # beside the attributes
        missing = [name for name, value in (("model", model), ("optimizer", optimizer)) if value is None]
        for name in missing:  # not to be sent as an object
            super().__setattr__(name, None)
        kept = {*self._handlers, *self._local, *missing}
        super().__init__(**{name: value for name, value in everything.items() if name not in kept})

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep the present state in memory: all of it, or nothing."""
        for handler in self._handlers.values():
            handler.prepare()
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the state that was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    @property
    def commits(self) -> int:
        """The number of commits, and of a DiLoCo's outer steps."""
        return super().commits + sum(each.outer_steps for each in self._local.values())

    def on_reset(self) -> None:
        """Called once the rank is part of another group: see register_reset_callbacks."""
        for handler in self._handlers.values():
            handler.on_reset()
        super().on_reset()

    def sync(self) -> None:
        """Make all ranks' states equal to rank 0's current one, and save it: all of it, or nothing. A DiLoCo only goes
        on."""
        for each in self._local.values():
            each.rejoin()
        for handler in self._handlers.values():
            handler.sync()
        super().sync()  # may fail: then nothing was saved, so that ranks restore a whole state
        for handler in self._handlers.values():
            handler.prepare()
        for handler in self._handlers.values():
            handler.save()

    def _agree(self, timestamp: int, changes: int) -> tuple[int, int]:
        notice = push_pull(torch.tensor([timestamp, changes], device="cpu"), name="elastic.hosts_updated", op=Max)
        return int(notice[0]), int(notice[1])


def _of_a_model(handlers: Mapping[str, StateHandler | None]) -> list[str]:
    """The names of those that save parameters."""
    kinds = (ModelStateHandler, OptimizerStateHandler)
    return [repr(name) for name, handler in handlers.items() if isinstance(handler, kinds)]


def _handler(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")

#: After this many failures in a row without a commit between them the error is raised: it would repeat forever.
FRUITLESS_LIMIT = 3
_log = logging.getLogger("byteps_py")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function whose first argument is a State. It is called again after a failure of the job.

    Before each call, all ranks' states are made equal to rank 0's. After a HorovodInternalError (any
    CommunicationError), this rank leaves the job, joins it again and restores the last commit. After a
    HostsUpdatedInterrupt it restores nothing. All collective calls must be inside ``func``.

    In an elastic job (BYTEPS_ELASTIC, ``bpslaunch --elastic``) the group may have changed: ask ``rank()`` and
    ``size()`` again. In other jobs the same ranks must come back, so training goes on only after errors that every rank
    sees and survives, such as a tensor that ranks disagree about.

    If the function returns while a DiLoCo's rank waits for its next group, it is called again with that group.

    Raises the function's other errors; the job's error after three failures in a row without a commit between them and
    with the same number of ranks; RendezvousError if the job can't be joined again; SystemExit, with status 0, on a
    machine that was told to leave the job.

    >>> import byteps_py as bps
    >>> bps.init()
    >>> @bps.elastic.run
    ... def train(state):
    ...     while state.batch < 3:
    ...         state.batch += 1
    ...         state.commit()
    ...     return "done"
    >>> train(bps.elastic.TorchState(batch=0))
    'done'
    >>> bps.shutdown()
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        fruitless = 0
        lost: Exception | None = None  # the reason for joining the job again
        skip_sync = False
        size = contexts.current().session.size
        while True:
            if lost is not None:
                skip_sync = rejoin(lost) and skip_sync
                before, size = size, contexts.current().session.size
                fruitless = fruitless if size == before else 0
            commits = state.commits
            try:
                if lost is not None:
                    if isinstance(lost, HorovodInternalError):
                        state.restore()
                    lost = None
                    state.on_reset()
                if not skip_sync:
                    _agree_on_steps()  # before a rank gets a whole state, for which others need not wait
                    state.sync()
                contexts.current().session.note_synced()
                result = func(state, *args, **kwargs)
                if contexts.current().is_between:  # its last steps were made without the others
                    raise HostsUpdatedInterrupt
                return result
            except HorovodInternalError as error:
                fruitless = 1 if state.commits > commits else fruitless + 1
                if fruitless == FRUITLESS_LIMIT:
                    raise
                _log.warning("elastic: %s after %s: %s", state.going_on, type(error).__name__, error)
                lost, skip_sync = error, False
            except HostsUpdatedInterrupt as interrupt:
                _log.warning("elastic: %s", interrupt)
                lost, skip_sync = interrupt, interrupt.skip_sync

    return wrapper  # type: ignore[return-value]  # the argument has a name, which a Callable cannot express


def _agree_on_steps() -> None:
    """A rank that joins counts its steps from where the others are: metrics and traces are by these numbers."""
    context = contexts.current()
    if context.session.size > 1:
        steps = push_pull(torch.tensor([context.progress.steps], device="cpu"), name="elastic.steps", op=Max)
        context.go_on_from(int(steps[0]))


def rejoin(why: Exception) -> bool:
    """Leave the job and join it again. True if all ranks are equal: they were in the group before and left in order.

    Raises SystemExit, with status 0, if this machine was told to leave an elastic job; RendezvousError if the job can't
    be joined again.
    """
    context = contexts.current()
    is_elastic = context.settings.elastic
    if context.is_open:
        context.session.returning = (f"{type(why).__name__}: {why}", isinstance(why, HostsUpdatedInterrupt))
    if not context.is_between:
        with contextlib.suppress(BytePSError):  # of unfinished operations, whose results are not needed any more
            shutdown()
    # The incarnation keeps names of one group apart from those of the next. In an elastic job the service does that,
    # and a new rank could not know the number of earlier groups.
    if not is_elastic:
        context.incarnation += 1
    try:
        init()
    except DismissedError as dismissed:
        raise SystemExit(0) from dismissed
    except BytePSError as error:
        remedy = "" if is_elastic else (
            ". Only an elastic job (BYTEPS_ELASTIC=1, bpslaunch --elastic) goes on without a process that is gone, or "
            "with others; this one goes on with the same ranks only. Start the job again, from a checkpoint"
        )  # fmt: skip
        raise RendezvousError(
            f"elastic: the job can't be joined again after {type(why).__name__}: {error}{remedy}"
        ) from why
    return context.session.is_continued or not is_elastic
