"""Steps of schedules without a flush, PipeDream and PipeDream-2BW: the weights change while parts are under way.

A step brings m new parts, numbered on from those of earlier steps. Between steps, parts stay between their forward and
backward passes, as many as the worker warms up with. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.groups import ReplicatedParameters
from byteps_py.parallel.pipe.program import Action, ActionKind, Program, WeightRule, backward, forward
from byteps_py.parallel.pipe.program_runner import ProgramRunner
from byteps_py.parallel.pipe.step_data import StepData


@dataclass(slots=True)
class EndlessActions:
    """The actions of a worker that holds ``stage``: ``warmup`` forward passes, then one backward and one forward pass
    in turn, without end.

    >>> endless = EndlessActions(stage=0, warmup=2)
    >>> [str(action.kind.value) + str(action.parts[0]) for action in endless.until(3)]
    ['F0', 'F1', 'B0', 'F2']
    >>> [str(action.kind.value) + str(action.parts[0]) for action in endless.flush()]
    ['B1', 'B2']
    """

    stage: int
    warmup: int
    forwards: int = 0
    backwards: int = 0

    def until(self, part: int) -> Iterator[Action]:
        """The actions up to the forward pass of the part before ``part``."""
        while self.forwards < part:
            if self.forwards - self.backwards >= self.warmup:
                yield self._backward()
            yield forward(self.stage, self.forwards)
            self.forwards += 1

    def flush(self) -> Iterator[Action]:
        """The backward passes that are left."""
        while self.backwards < self.forwards:
            yield self._backward()

    def _backward(self) -> Action:
        self.backwards += 1
        return backward(self.stage, self.backwards - 1)


@dataclass(slots=True)
class _Version:
    number: int  # updates before it
    leaves: dict[str, torch.Tensor]


@dataclass(slots=True)
class WeightVersions:
    """The versions of the weights of ``module`` that parts under way use. ``batch``: parts for each update."""

    module: nn.Module
    rule: WeightRule
    batch: int
    _versions: list[_Version] = field(default_factory=list)
    _used: dict[int, _Version] = field(default_factory=dict)  # by part
    updates: int = 0

    def apply_for(self, part: int) -> Callable[[nn.Module, Any], Any]:
        """The call of the module in the forward pass of ``part``, with the weights of its version. PipeDream: the
        newest ones; 2BW: those of the batch before the last one, W(max(batch - 1, 0))."""
        if not self._versions:
            self._versions = [self._copy()]
        version = self._versions[-1]
        if self.rule is WeightRule.DOUBLE_BUFFERED:
            number = max(part // self.batch - 1, 0)
            version = next(one for one in self._versions if one.number == number)
        self._used[part] = version
        return lambda module, value: functional_call(module, version.leaves, (value,))

    def is_update_due(self, part: int) -> bool:
        """True if the weights change after the backward pass of ``part``."""
        return (part + 1) % self.batch == 0

    def take_gradients(self, part: int) -> None:
        """Move the gradients of the version that ``part`` used to the parameters."""
        leaves = self._used[part].leaves
        for name, parameter in self.module.named_parameters():
            parameter.grad, leaves[name].grad = leaves[name].grad, None

    def updated(self, part: int) -> None:
        """The weights have changed after the backward pass of ``part``: keep the new ones, and drop versions that no
        part will use."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self.updates += 1
        self._versions.append(self._copy())
        for done in [one for one in self._used if one <= part]:
            del self._used[done]
        oldest = min((one.number for one in self._used.values()), default=self.updates)
        if self.rule is WeightRule.DOUBLE_BUFFERED:
            oldest = min(oldest, self.updates - 1)
        self._versions = [one for one in self._versions if one.number >= oldest]

    def restart(self) -> None:
        """No part is under way: number them from 0 again."""
        self._versions.clear()
        self._used.clear()
        self.updates = 0

    @property
    def count(self) -> int:
        """The number of versions that are kept."""
        return len(self._versions)

    def _copy(self) -> _Version:
        return _Version(
            self.updates,
            {
                name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
                for name, parameter in self.module.named_parameters()
            },
        )


@dataclass(slots=True)
class StaleSteps:
    """The steps of one of ``workers`` workers. ``replicas``: the parameters of its stage, if there are data-parallel
    copies. ``optimizer``: of its parameters."""

    workers: int
    endless: EndlessActions
    versions: WeightVersions
    replicas: ReplicatedParameters | None
    optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def of(
        cls, program: Program, worker: int, stage: int, module: nn.Module, replicas: ReplicatedParameters | None
    ) -> StaleSteps:
        """The versions of ``worker``, which holds ``stage``."""
        workers = len(program.workers)
        batch = 1 if program.rule is WeightRule.STASHED else program.micro_batches
        versions = WeightVersions(module, program.rule, batch)
        return cls(workers, EndlessActions(stage, workers - worker), versions, replicas)

    @property
    def parts(self) -> int:
        """The number of parts so far."""
        return self.endless.forwards

    def run(self, runner: ProgramRunner, data: StepData, parts: int) -> None:
        """Bring ``parts`` new ones. After a failure nothing is under way."""
        self._run(runner, data, self.endless.until(self.parts + parts))
        # As many parts are under way at most, and the others take them that many steps later.
        runner.finish(data, unfinished=-(-self.workers // parts))

    def flush(self, runner: ProgramRunner, data: StepData) -> None:
        """Carry out the backward passes that are left."""
        self._run(runner, data, self.endless.flush())
        runner.finish(data)
        self._restart()

    def fail(self, runner: ProgramRunner, data: StepData) -> None:
        """A rank has failed: receive, without computing, the messages of others for parts under way."""
        data.has_failed = True
        self.flush(runner, data)

    def _run(self, runner: ProgramRunner, data: StepData, actions: Iterable[Action]) -> None:
        def after(position: int, action: Action) -> None:
            (part,) = action.parts
            if action.kind is ActionKind.BACKWARD and self.versions.is_update_due(part):
                self._update(part, data)

        runner.run(list(actions), data, after, self.versions.apply_for)

    def _update(self, part: int, data: StepData) -> None:
        if not data.has_failed:
            self.versions.take_gradients(part)
        if self.replicas is not None:  # also after a failure: the other copies wait for this one
            try:
                self.replicas.launch()
            except UsageError as error:
                data.fail(error)
            self.replicas.finish()
        if not data.has_failed and self.optimizer is not None:
            self.optimizer.step()
            self.versions.updated(part)

    def _restart(self) -> None:
        self.endless.forwards = self.endless.backwards = 0
        self.versions.restart()
