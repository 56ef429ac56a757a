"""What a run is, not only its weights: ``RunState``, the loop that a restarted job goes on with, bit for bit.

    constructor ── restore() ──► weights, optimizer; ``_put_back``: the rest
    for batch in run:  the record of the step before is completed ─► the next batch ─► the loop's body
                       └─ what is attached is as it was at the end of the body, so also after scheduler.step()

With ``shadow=True`` a step's record would be made in ``step()``. A RunState makes it when the next batch is there
(LoopRecords in hosted/replication.py). So a crash in the rest of a body, or between epochs, repeats one body.

The training thread calls.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from byteps_py.config import launchers
from byteps_py.errors import UsageError
from byteps_py.torch.collectives import context as contexts, parameter_owners
from byteps_py.torch.elastic.state import Stateful
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.hosted.replication import LoopRecords, ShadowedSteps
from byteps_py.torch.gradients.hosted.restore import restore
from byteps_py.torch.gradients.hosted.stepper import HostedStepper
from byteps_py.torch.gradients.hosted.whole_steps import WholeStepTiming, make_steps_whole
from byteps_py.torch.local import DiLoCo
from byteps_py.torch.operations.broadcasts import allgather_object, broadcast_object, pickled
from byteps_py.torch.run.compression_state import compression_state_dict, load_of_machine
from byteps_py.torch.run.loader_position import position_of, random_states, set_random_states
from byteps_py.torch.run.retried_call import RetriedCall, RunParts
from byteps_py.torch.run.trainjob_progress import TrainJobProgress

P = ParamSpec("P")
T = TypeVar("T")

#: Of what is attached. Another one is refused.
_FORMAT = "byteps_py.RunState 1"


class RunState(LoopRecords):
    """All that a training run needs to go on: put back by itself, and with ``shadow=True`` attached to every step.

    Two lines make a training loop one that loses nothing: make a RunState, and take the batches from it. A restarted
    job continues with the next batch, as if it had not ended: the same weights, bit for bit.

    optimizer: of ``DistributedOptimizer(…, shadow=True)``, before its first step: the constructor calls
    ``bps.restore(model, optimizer, path)``. Any other optimizer, or several: use ``state_dict``, see there.
    scheduler, scaler: one, or a list: objects with state_dict() and load_state_dict().
    loader: torchdata's StatefulDataLoader, or another one with state_dict() and load_state_dict(); or torch's
    DataLoader with a dataset that has indices, and a sampler of torch's own or ``bps.elastic.ElasticSampler``. Other
    numbers of ranks divide the rest of the epoch of an ElasticSampler anew. RunState calls the sampler's set_epoch().
    extra: a dict of other objects. One with state_dict() and load_state_dict() is put back in place; any other, which
    can be pickled, takes its place in the dict again.

    Attributes: ``epoch``, from 0; ``batch``: how many batches of it were taken; ``iteration``: how many were taken in
    all epochs, or numbers of ``iterations``; ``extra``: the dict.

    Also kept: the random states of Python, numpy, torch and CUDA. They are put back when the first batch is taken, and
    so is all else: what the script does between the constructor and then is done once only, in the first run.

    What belongs to a step is as it was when the next batch was taken. So the loop's body may step schedulers, update a
    scaler and draw random numbers in any order, and do so between epochs; a crash there repeats the last body. It calls
    ``optimizer.step()`` once, or in only one of several bodies.

    All ranks make it, and call in the same order. Raises UsageError for a loader without state, for what can't be
    attached, if what is held is of another run, and in ``step()`` outside of the loop or twice in a body; and as
    ``bps.restore`` does.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    >>> loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2, shuffle=True)
    >>> run = bps.RunState(model, optimizer, scheduler=scheduler, loader=loader)  # optimizer: usually with shadow=True
    >>> for epoch in run.epochs(2):
    ...     for batch in run:
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     scheduler.step()
    >>> run.epoch, run.iteration
    (2, 6)
    >>> bps.shutdown()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | DiLoCo | Sequence[torch.optim.Optimizer],
        *,
        scheduler: object = None,
        scaler: object = None,
        loader: object = None,
        extra: MutableMapping[str, Any] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._model = model
        self._optimizers = _optimizers(optimizer)
        self._stateful = {"scheduler": _stateful("scheduler", scheduler), "scaler": _stateful("scaler", scaler)}
        self.extra: MutableMapping[str, Any] = {} if extra is None else extra
        self._position = None if loader is None else position_of(loader)
        self.epoch = self.batch = self.iteration = 0
        #: Of the current epoch; None: it has not begun.
        self._batches: Iterator[Any] | None = None
        self._is_over = False  # the epoch: its batches are used, or its loop was left
        self._may_step = False
        #: What is to be put back before the next batch, and if it is of as many ranks as there are.
        self._returns_to: tuple[dict[str, Any], bool] | None = None
        self._shadow = self._shadow_of(path)
        self._check_extra()
        target = launchers.trainjob_status(os.environ)
        reports = target is not None and contexts.current().session.rank == 0
        self._progress = TrainJobProgress(target) if target is not None and reports else None
        self._total = 0  # of epochs or iterations
        if self._shadow is not None:
            self._restore(self._shadow, path)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of epochs from the current one on, which may have begun, up to ``total``. Take the batches of
        each with ``for batch in run``."""
        self._total = total
        while True:
            self._end_epoch()
            if self.epoch >= total:
                break
            yield self.epoch
            self._leave_epoch()
        self._end()

    def __iter__(self) -> Iterator[Any]:
        """The batches of an epoch that have yet to be used. Ask for the next one after the step with the one before."""
        position = self._position
        if position is None:
            raise UsageError("this RunState has no loader: give it loader=…, or write `for step in run.iterations(n)`")
        self._end_epoch()
        try:
            while True:
                self._complete()
                if self._batches is None:
                    self._batches = position.begin(self.epoch)
                try:
                    batch = next(self._batches)
                except StopIteration:
                    return
                position.note_batch()
                self.batch += 1
                self._begin_body()
                yield batch
        finally:
            self._may_step = False
            self._leave_epoch()

    def iterations(self, total: int) -> Iterator[int]:
        """For a run without a loader: the numbers from ``iteration`` on, up to ``total``, one for each batch that the
        script makes itself."""
        self._total = total
        while True:
            self._complete()
            if self.iteration >= total:
                break
            self._begin_body()
            yield self.iteration - 1
        self._end()

    def _complete(self) -> None:
        """The body before is done: the record of its step has what is so now. Or go back to another one's end."""
        if self._returns_to is not None:
            self._go_back(*self._returns_to)
        elif self._shadow is not None and self._shadow.owes_record:
            if self._shadow.loop is not self:
                raise UsageError("another RunState of this optimizer was made later: take batches from that one")
            self._shadow.complete_record()

    def _begin_body(self) -> None:
        if self._shadow is not None:
            self._shadow.send_record()
        self._may_step = True
        if self._progress is not None and self._total:
            self._progress.report(self._share)
        self.iteration += 1

    @property
    def _share(self) -> float:
        """Of the run that is done, from 0 to 1, before the current body."""
        if self._position is None:
            return self.iteration / self._total
        batches = self._position.batches
        return (self.epoch + (max(0, self.batch - 1) / batches if batches else 0.0)) / self._total

    def _leave_epoch(self) -> None:
        """Its loop has ended, or was left; unless the run goes back to a place in an epoch."""
        self._is_over = self._returns_to is None

    def _end_epoch(self) -> None:
        """If the epoch is over, the next one is the current one."""
        if self._is_over:
            self.epoch, self.batch, self._batches, self._is_over = self.epoch + 1, 0, None, False

    def _end(self) -> None:
        """The loop has ended: the record of the last step needs no more batch."""
        self._may_step = False
        self._complete()
        if self._shadow is not None:
            self._shadow.send_record()
        if self._progress is not None:
            self._progress.finish()

    def check_step(self, is_second: bool) -> None:
        """See LoopRecords."""
        if is_second:
            raise UsageError(
                "RunState: step() was called twice in the body of the loop, and a restarted job could not go on "
                "between the two: take one batch for each step"
            )
        if not self._may_step:
            raise UsageError(
                "RunState: step() was called outside of the loop: write `for batch in run: …`, or `for step in "
                "run.iterations(n): …`, around it"
            )

    def retry(self, step: Callable[P, T]) -> Callable[P, T]:
        """A decorator, for a function of the script's own with all that ranks do together in a step: with
        ``bpslaunch --max-restarts``, ranks that have lost one call it again once that is back, in the same processes.

        All ranks call the function alike. It computes gradients and calls ``optimizer.step()`` once; or evaluates, and
        computes no gradients, in the loop's body or between epochs. It may call any operation of bps and of
        torch.distributed, and ``training.backward`` of ``parallelize_model``. It may compute several times for one
        call, with the same arguments: what it computes follows from these, the model's parameters and buffers, random
        states, and what the RunState has. What it does beside that, such as printing, it may do more than once. A
        gradient that is there when it is called, it zeroes. Before and after the loop, and without ``--max-restarts``
        or ``shadow=True``, it is called as it is.

        Raises UsageError in the loop, and with ``step_in_backward``. A call raises it if the function has left
        gradients without a step.

        >>> import torch, byteps_py as bps
        >>> bps.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        >>> run = bps.RunState(model, optimizer)  # optimizer: usually with shadow=True
        >>> @run.retry
        ... def step(inputs):
        ...     optimizer.zero_grad()
        ...     loss = model(inputs).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return bps.allreduce(loss.detach())
        >>> losses = [step(torch.ones(4, 2)) for _ in run.iterations(3)]
        >>> bps.shutdown()
        """
        shadow = self._shadow
        if shadow is None:
            return step
        if self._may_step or shadow.owes_record:
            raise UsageError("RunState.retry was called in the loop: decorate functions before it")
        stepper: HostedStepper = self._optimizers[0]._stepper
        make_steps_whole(stepper)
        run = RunParts(self._model, lambda: copy.deepcopy(self._parts()), self._put_parts_back)

        @functools.wraps(step)
        def call(*given: P.args, **named: P.kwargs) -> T:
            timing, is_within = stepper.timing, self._may_step or shadow.owes_record
            if not (isinstance(timing, WholeStepTiming) and is_within):
                return step(*given, **named)
            return timing.make_whole(stepper, RetriedCall(run, stepper, functools.partial(step, *given, **named)))

        return call

    # ---- checkpoints of the script's own -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, for torch.save() on one rank: the same on all ranks, which call it together. Call it at the end of
        the loop's body, or between epochs, once everything has stepped. torch.load() takes it with weights_only=True if
        it takes ``extra``. It has the ``compression_state_dict()`` of all machines.

        Raises UsageError for a model in parts: parameters that are cut, or other ones on other ranks.
        """
        parameter_owners.check_whole(
            self._model.named_parameters(), range(contexts.current().session.size), "RunState.state_dict()", _IN_PARTS
        )
        layout = [(name, list(value.shape)) for name, value in self._model.named_parameters()]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()
        attached = {**self.attached(), "compression": compression_state_dict()}
        of_ranks = allgather_object((digest, attached), name="RunState.attached")
        for rank, (other, _) in enumerate(of_ranks):
            if other != of_ranks[0][0]:
                raise UsageError(f"RunState.state_dict(): rank {rank} has another model than rank 0. {_IN_PARTS}")
        return {
            "format": _FORMAT,
            "model": self._model.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "ranks": [attached for _, attached in of_ranks],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a ``state_dict``, the same on all ranks. Call it before the loop. With another number of machines,
        error feedback and momentum of codecs begin with zeros, and a warning says so. Raises UsageError if it is of
        another kind of run."""
        if state_dict.get("format") != _FORMAT:
            raise UsageError(f"RunState.load_state_dict(): this is no state_dict of a RunState ({_FORMAT!r})")
        saved, rank = state_dict["ranks"], contexts.current().session.rank
        if len(state_dict["optimizers"]) != len(self._optimizers):
            raise UsageError(
                f"RunState.load_state_dict(): it has {len(state_dict['optimizers'])} optimizers, and this run "
                f"{len(self._optimizers)}"
            )
        attached = saved[rank] if rank < len(saved) else _for_new_rank(saved[0])
        attached = self._checked(attached)
        self._model.load_state_dict(state_dict["model"])
        for optimizer, state in zip(self._optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        load_of_machine([each.get("compression") for each in saved])
        self._put_back({**attached, "compression": None})

    # ---- what is attached --------------------------------------------------------------------------------------

    def attached(self) -> dict[str, Any]:
        """All but weights and the optimizer's states, as it is now."""
        if self._returns_to is not None:
            return self._returns_to[0]
        is_begun = self.batch > 0 and not self._is_over
        was_used = self.iteration > 0
        return {
            "format": _FORMAT,
            "size": contexts.current().session.size,
            "epoch": self.epoch + self._is_over,
            "batch": 0 if self._is_over else self.batch,
            "iteration": self.iteration,
            "loader_kind": None if self._position is None else self._position.kind,
            "loader": self._position.state(is_begun) if self._position is not None and was_used else None,
            **self._parts(),
        }

    def _parts(self) -> dict[str, Any]:
        """Of what is attached, all but the position."""
        return {
            "random": random_states(),
            "groups": [[numbers_of(group) for group in optimizer.param_groups] for optimizer in self._optimizers],
            "extra": {name: _state_of(each) for name, each in self.extra.items()},
            **{kind: [each.state_dict() for each in objects] for kind, objects in self._stateful.items()},
        }

    def _put_parts_back(self, parts: dict[str, Any]) -> None:
        self._load(copy.deepcopy(parts))
        for scaler in self._stateful["scaler"]:
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                scaler._per_optimizer_states.clear()

    def _checked(self, attached: object) -> dict[str, Any]:
        """``attached``, with its type. Raises UsageError if it can't be put back here."""
        if not isinstance(attached, dict) or attached.get("format") != _FORMAT:
            raise UsageError(
                f"RunState: what the run before has attached is of another program: not a dict of {_FORMAT!r}. Use "
                "bps.restore() and optimizer.shadow_extra, as it did"
            )
        facts: Sequence[tuple[str, object, object]] = (
            ("loader", attached["loader_kind"], None if self._position is None else self._position.kind),
            ("number of optimizers", len(attached["groups"]), len(self._optimizers)),
            *((f"number of {kind}s", len(attached[kind]), len(objects)) for kind, objects in self._stateful.items()),
        )
        for what, before, now in facts:
            if before != now:
                raise UsageError(
                    f"RunState: the run before had another {what}: {before}, and now it is {now}. Restart it as it was"
                )
        return attached

    def _put_back(self, attached: dict[str, Any]) -> None:
        """Go on from the end of the body to which this belongs, in this process, once weights and the optimizer's
        states are those of its step. All but the loader is put back now, and once more when the next batch is taken."""
        is_same_size = attached["size"] == contexts.current().session.size
        self.epoch, self.batch, self.iteration = attached["epoch"], attached["batch"], attached["iteration"]
        self._batches, self._is_over, self._may_step = None, False, False
        self._load(attached)
        self._returns_to = attached, is_same_size

    def _go_back(self, attached: dict[str, Any], is_same_size: bool) -> None:
        self._returns_to = None
        self.epoch, self.batch = attached["epoch"], attached["batch"]
        own = random_states()
        if self._position is not None and attached["loader"] is not None:
            self._batches = self._position.go_back(attached["loader"], self.epoch, is_same_size)
        set_random_states(own)  # of a rank that was not there before, they stay
        self._load(attached)

    def _load(self, attached: dict[str, Any]) -> None:
        for optimizer, groups in zip(self._optimizers, attached["groups"], strict=True):
            _mark_stepped(optimizer)
            for group, numbers in zip(optimizer.param_groups, groups, strict=True):
                for name, value in numbers.items():
                    set_number(group, name, value)
        for kind, objects in self._stateful.items():
            for each, state in zip(objects, attached[kind], strict=True):
                each.load_state_dict(state)
        for name, state in attached["extra"].items():
            there = self.extra.get(name)
            if isinstance(there, Stateful):
                there.load_state_dict(state)
            else:
                self.extra[name] = state
        if attached["random"] is not None:
            set_random_states(attached["random"])

    # ---- shadow=True -------------------------------------------------------------------------------------------

    def _shadow_of(self, path: object) -> ShadowedSteps | None:
        """The copies of the optimizer's states that servers make. Raises UsageError, see the class."""
        found = [
            each._stepper.shadow
            for each in self._optimizers
            if isinstance(each, HostedOptimizerMixin) and each._stepper.shadow is not None
        ]
        if found and len(self._optimizers) > 1:
            raise UsageError(
                "RunState: with shadow=True there is one optimizer, because a restarted job goes on from one "
                "optimizer's steps: give all parameters to one optimizer, in param_groups"
            )
        if not found and path is not None:
            raise UsageError(
                "RunState: path= is a folder of `bps checkpoint`, which needs an optimizer with shadow=True. Save "
                "state_dict() instead, and call load_state_dict()"
            )
        return found[0] if found else None

    def _check_extra(self) -> None:
        """Raises UsageError, which names it, for something in ``extra`` that can't be pickled."""
        for name, each in self.extra.items():
            try:
                pickled(_state_of(each))
            except Exception as error:  # classes of the user may raise anything
                raise UsageError(f"RunState: extra[{name!r}] can't be pickled: {error}") from error

    def _restore(self, shadow: ShadowedSteps, path: str | os.PathLike[str] | None) -> None:
        shadow.extra = None
        shadow.loop = self
        shadow.check_extra()
        if restore(self._model, self._optimizers[0], path) is None:
            return
        attached: object = shadow.extra
        shadow.extra = None
        if not contexts.current().settings.max_restarts:  # otherwise there are no new ranks, and only some ranks call
            are_missing = [each is None for each in allgather_object(attached, name="RunState.found")]
            if any(are_missing):  # ranks that were not there before
                common = broadcast_object(attached, name="RunState.common")
                if attached is None and isinstance(common, dict):
                    attached = _for_new_rank(common)
        self._put_back(self._checked(attached))


_IN_PARTS = (
    "A model in parts is saved by bps.parallel's checkpoints, or goes on from the copies of shadow=True, with which "
    "nothing has to be saved"
)


def _optimizers(given: object) -> list[Any]:
    """One torch.optim.Optimizer or DiLoCo, or several. Raises UsageError for anything else."""
    found: list[Any] = []
    for each in given if isinstance(given, list | tuple) else (given,):
        if not isinstance(each, torch.optim.Optimizer | DiLoCo):
            raise UsageError(f"RunState: optimizer is a {type(each).__name__}: give a torch.optim.Optimizer, or a list")
        found.append(each)
    return found


def _stateful(what: str, given: object) -> list[Stateful]:
    """One object, or several. Raises UsageError for one without state."""
    found: list[Stateful] = []
    for each in () if given is None else given if isinstance(given, list | tuple) else (given,):
        if not isinstance(each, Stateful):
            raise UsageError(
                f"RunState: {what} is a {type(each).__name__}, which has no state_dict() and load_state_dict()"
            )
        found.append(each)
    return found


def _state_of(each: object) -> object:
    return each.state_dict() if isinstance(each, Stateful) else each


def _for_new_rank(common: dict[str, Any]) -> dict[str, Any]:
    """Of what rank 0 has attached, the part that is for all: random states are each rank's own."""
    return {**common, "random": None}


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of all in a param_group but its parameters."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """It has stepped, in the run before: a scheduler that steps first now, at an epoch's end, does not warn."""
    for each in (optimizer, getattr(optimizer, "_wrapped", optimizer)):
        each._opt_called = True  # type: ignore[union-attr]


def set_number(group: dict[str, Any], name: str, value: Any) -> None:
    """Put it into a param_group, in the memory of the one before if that is a tensor."""
    there = group.get(name)
    if isinstance(there, torch.Tensor):  # graphs and compiled steps have its memory
        there.copy_(value)
    else:
        group[name] = value
