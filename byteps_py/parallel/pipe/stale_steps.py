"""Steps of schedules without a flush (weight_versions.py): the weights change while parts are under way. One thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Action, ActionKind
from byteps_py.parallel.pipe.program_runner import ProgramRunner, StepData
from byteps_py.parallel.pipe.replicas import ReplicatedParameters
from byteps_py.parallel.pipe.weight_versions import EndlessActions, WeightVersions


@dataclass(slots=True)
class StaleSteps:
    """The steps of one of ``workers`` workers. ``replicas``: the parameters of its stage, if there are data-parallel
    copies. ``optimizer``: of its parameters."""

    workers: int
    endless: EndlessActions
    versions: WeightVersions
    replicas: ReplicatedParameters | None
    optimizer: torch.optim.Optimizer | None = None

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
        """Some rank has failed: take what others send for parts under way, without computing."""
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
