"""Steps of optimizers that the communication services make: what ranks give to each, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import (
    Hyperparameters,
    Method,
    Scalar,
    StepKind,
    UpdateRule,
    apply_scalars,
    step_scalars,
)
from byteps_py.tensor_codec import CHANGES, SCALED_BLOCK, Codec
from byteps_py.tensors import DType, Op, TensorSpec

from .codecs import INT8, Floats, coded, decoded
from .memory import Bytes, Wide, stored, update, wide_values
from .program import Name, Program
from .uses import Use, are_on_one_machine, values

_KINDS = (
    (DType.FLOAT32, DType.FLOAT32), (DType.FLOAT32, DType.FLOAT16), (DType.FLOAT16, DType.FLOAT16),
    (DType.FLOAT16, DType.FLOAT32), (DType.FLOAT64, DType.FLOAT64), (DType.FLOAT64, DType.FLOAT32),
)  # fmt: skip
_COUNTS = (1, 2, 15, 16, 17, 40, 64, 100)
#: Below, at and beyond the ends of blocks.
_CODED_COUNTS = (40, SCALED_BLOCK, SCALED_BLOCK + 1, 3 * SCALED_BLOCK + 17)
_MOMENTUM = 0.5


@dataclass(slots=True)
class Model:
    """Parameters in one tensor. ``states``: what they are at the end of the steps so far. ``given``: what ranks have
    where parameters travel as what a step changes."""

    name: str
    kind: StepKind
    gradients: TensorSpec
    parameters: TensorSpec
    states: list[Wide]
    given: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    @classmethod
    def make(
        cls,
        rng: random.Random,
        name: str,
        group: tuple[int, ...] = (),
        is_shadowed: bool = False,
        codec: Codec | None = None,
    ) -> Model:
        """``group``: the ranks that share it; () for all. ``codec``: of its gradients, if they can have one."""
        gradient, parameter = rng.choice(_KINDS)
        rule = UpdateRule(Method.SGD, momentum=rng.random() < 0.5)
        if rng.random() < 0.35:
            rule = UpdateRule(Method.LAMB)
        kind = StepKind(rule, gradient, parameter)
        count = rng.choice(_COUNTS)
        average = rng.random() < 0.5
        owned: dict[str, Any] = {"ownership": name, "is_replicated": rng.random() < 0.4, "group": group}
        if codec is not None:
            count = rng.choice(_CODED_COUNTS)
            codec = codec if gradient is not DType.FLOAT64 else None
            if codec is not None and not owned["is_replicated"] and count != _CODED_COUNTS[0]:
                parameter = DType.FLOAT32  # of which only changes travel
                kind = StepKind(rule, gradient, parameter)
        gradients = TensorSpec(name, gradient, (count,), Op.SUM, average, is_shadowed=is_shadowed, codec=codec, **owned)
        can_change = codec is not None and parameter is DType.FLOAT32 and not (is_shadowed or owned["is_replicated"])
        changes = CHANGES if can_change else None
        parameters = TensorSpec(f"{name}.parameters", parameter, (count,), Op.BROADCAST, codec=changes, **owned)
        return cls(name, kind, gradients, parameters, [])

    def of_each(self, spec: TensorSpec, size: int) -> tuple[TensorSpec | None, ...]:
        """``spec`` for the ranks that share the model."""
        members = self.gradients.members(size)
        return tuple(spec if rank in members else None for rank in range(size))

    @property
    def has_phases(self) -> bool:
        """Its steps have two."""
        return self.kind.rule.method is Method.LAMB

    def begin(self, seed: int) -> None:
        """With other values of parameters, and no moments."""
        self.given = self.fresh(seed).astype(np.float32)
        self.states = [self.fresh(seed), *(np.zeros_like(self.fresh(seed)) for _ in range(self.kind.states - 1))]

    @property
    def is_coded(self) -> bool:
        """Parameters travel as what a step changes."""
        return self.parameters.codec is not None

    def give(self, segments: Sequence[StepSegment], is_alone: bool) -> Bytes:
        """What ranks have after a step of these segments. ``is_alone``: they are on one machine."""
        change = np.zeros_like(self.given)
        for segment in segments:
            at = slice(segment.elements.start, segment.elements.stop)
            change[at] = self.states[0][at] - self.given[at]
            if is_alone:
                self.given[at] = self.states[0][at]
        if not is_alone:
            self.given += decoded(coded([change]))[: len(change)]
        return self.given.copy().view(np.uint8)

    def fresh(self, seed: int) -> Wide:
        """Parameters, as they are set from outside."""
        wide = DType.FLOAT64 if self.kind.gradient is DType.FLOAT64 else DType.FLOAT32
        return values(wide, seed * 72, self.gradients.count * wide.itemsize).view(wide.name.lower()).copy()


@dataclass(frozen=True, slots=True)
class HostedUse(Use):
    """A step with the sum of a round. ``segments``: of all elements; those of no segment stay as they are. ``skips``:
    the sum is given up. ``measures``: ranks ask for the norm first. ``begins``: with states of its own, from here on.
    ``changes``: the parameters are set from outside before. ``states``: what they are afterwards, by number.

    Of two phases: ``middle``: the states after the first one; ``norms``: what ranks add up before the second one, if
    anything; ``applied``: the segments of that; ``gives_up``: ranks give the sum up instead."""

    model: Model = field(kw_only=True)
    segments: tuple[StepSegment, ...] = ()
    skips: bool = False
    measures: bool = False
    begins: bool = False
    changes: bool = False
    average: list[Bytes] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    parameters: list[Bytes] = field(default_factory=list)
    middle: list[bytes] = field(default_factory=list)
    norms: Use | None = None
    applied: tuple[StepSegment, ...] = ()
    gives_up: bool = False

    @property
    def has_phases(self) -> bool:
        return self.model.has_phases and not self.skips

    @property
    def gives_parameters(self) -> bool:
        return not (self.skips or self.gives_up)

    def train(self, local_sizes: list[int]) -> None:
        """Find out what comes of it, once that is known of all before."""
        model, kind = self.model, self.model.kind
        if self.begins:
            model.begin(self.id)
        average = np.frombuffer(self.combined(local_sizes), np.uint8)
        if self.changes and not self.skips:
            model.states[0][:] = model.fresh(self.id)
        if not self.skips:
            gradient = wide_values(kind, average)
            for segment in self.segments:
                at = slice(segment.elements.start, segment.elements.stop)
                update([state[at] for state in model.states], gradient[at], segment.scalars)
            self.middle[:] = [state.tobytes() for state in model.states]
            for segment in self.applied:
                at = slice(segment.elements.start, segment.elements.stop)
                size = gradient.dtype.type(segment.scalars[Scalar.STEP])
                model.states[0][at] += model.states[-1][at] * size
        self.average.append(average)
        self.states[:] = [state.tobytes() for state in model.states]
        if not model.is_coded:
            self.parameters.append(stored(kind, model.states[0]))
        elif self.gives_parameters:
            group = model.gradients.group or range(sum(local_sizes))
            stepped = self.applied if model.has_phases else self.segments
            self.parameters.append(model.give(stepped, are_on_one_machine(group, local_sizes)))


@dataclass(slots=True)
class HostedProgram(Program):
    """``models``: whose steps are made beside all else. ``sums``: what ranks add up meanwhile."""

    #: States follow from steps alone: none are set, or given up half made.
    is_steady: ClassVar[bool] = False
    codec: ClassVar[Codec | None] = None
    models: list[Model] = field(default_factory=list)
    trained: list[HostedUse] = field(default_factory=list)
    sums: list[Use] = field(default_factory=list)

    def add_steps(self, rng: random.Random, names: list[Name]) -> None:
        first = len(self.steps)
        super(HostedProgram, self).add_steps(rng, names)  # slots make another class of this one
        if not self.models:
            count = rng.choice((1, 1, 2))
            groups = self._groups(rng, count)
            self.models = [
                Model.make(rng, f"h{i}", group, self.is_steady, self.codec) for i, group in enumerate(groups)
            ]
        for step in self.steps[first:]:
            if self._are_parts:
                if rng.random() < 0.8:
                    skips = rng.random() < 0.25
                    step += [self._new_use(rng, model, skips) for model in self.models]
                continue
            for model in self.models:
                if rng.random() < 0.8:
                    step.append(self._new_use(rng, model))

    def _add_uneven(self, rng: random.Random, names: list[Name]) -> None:
        """A rank that owns nothing has asked for its states first: no step waits for it, and it could still do so when
        another rank has made its last step and joined. (join() does not go together with hosted optimizers.)"""
        latest = {use.model.name: use for use in self.trained}
        if any(use.begins and (self.codec or use.model.gradients.count < self.size) for use in latest.values()):
            self.barriers.add(len(self.steps) - 1)
        super(HostedProgram, self)._add_uneven(rng, names)

    @property
    def _are_parts(self) -> bool:
        """The models are parts of one, which make a step together or skip it together."""
        return self.is_steady and any(model.gradients.group for model in self.models)

    def _groups(self, rng: random.Random, count: int) -> list[tuple[int, ...]]:
        """The ranks that share each model. Of two, sometimes disjoint groups, as those of a mesh."""
        own = random.Random(f"{rng.getstate()[1][:8]}")  # what else follows from the seed stays
        if self.size == 1 or (self.is_steady and count == 1) or own.random() < 0.5:
            return [()] * count
        first = tuple(sorted(own.sample(range(self.size), own.randint(1, self.size - 1))))
        others = tuple(rank for rank in range(self.size) if rank not in first)
        if self.is_steady:
            return [first, others]
        second = own.choice((others, (), tuple(sorted(own.sample(range(self.size), own.randint(1, self.size))))))
        return [first, second][:count]

    def _new_use(self, rng: random.Random, model: Model, all_skip: bool | None = None) -> HostedUse:
        is_first = not any(use.model is model for use in self.trained)
        begins = is_first or (not self.is_steady and rng.random() < 0.1)
        skips = not begins and (rng.random() < 0.25 if all_skip is None else all_skip)
        segments = () if skips else tuple(_segments(rng, model))
        gives_up = bool(segments) and model.has_phases and not self.is_steady and rng.random() < 0.15
        norms = None
        if segments and model.has_phases and rng.random() < 0.6:
            shape, group = (rng.choice((1, 20)),), model.gradients.group
            spec = TensorSpec(f"{model.name}.norms", DType.FLOAT64, shape, Op.SUM, group=group)
            norms = Use(self.uses, spec.name, model.of_each(spec, self.size))
            self.sums.append(norms)
            self.uses += 1
        use = HostedUse(
            self.uses,
            model.name,
            model.of_each(model.gradients, self.size),
            model=model,
            segments=segments,
            skips=skips,
            norms=norms,
            applied=() if gives_up or not model.has_phases else tuple(_applied(rng, segments)),
            gives_up=gives_up,
            measures=rng.random() < 0.3,
            begins=begins,
            changes=not self.is_steady and rng.random() < 0.2,
        )
        self.uses += 1
        self.trained.append(use)
        return use

    def train(self, local_sizes: list[int]) -> None:
        for use in self.trained:
            use.train(local_sizes)


class CodedHostedProgram(HostedProgram):
    """Machines code the gradients, and step with sums that they have decoded."""

    codec = INT8


def _segments(rng: random.Random, model: Model) -> Iterator[StepSegment]:
    """Now and then some elements stay, or make another step than others."""
    count = model.gradients.count
    cuts = sorted(rng.sample(range(count), min(count, rng.choice((0, 0, 1, 3)))))
    for start, stop in zip((0, *cuts), (*cuts, count), strict=True):
        if start < stop and (not cuts or rng.random() < 0.8):
            numbers = Hyperparameters(lr=2.0 ** -rng.randint(1, 6), momentum=_MOMENTUM, beta1=0.5, beta2=0.5)
            yield StepSegment(range(start, stop), step_scalars(model.kind.rule, numbers, step=2))


def _applied(rng: random.Random, segments: tuple[StepSegment, ...]) -> Iterator[StepSegment]:
    for segment in segments:
        yield StepSegment(segment.elements, apply_scalars(2.0 ** -rng.randint(1, 6)))
