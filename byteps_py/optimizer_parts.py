"""What a rank and its service say about a step of an optimizer: its kind, and its segments with their numbers. Pure but
for ``run_segments``. Any thread."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.kernels.steps import bind_step, prepare_step
from byteps_py.kernels.update_rules import UpdateRule
from byteps_py.tensors import DType


@dataclass(frozen=True, slots=True)
class StepKind:
    """``gradient``: the dtype of the sums; ``parameter``: of the new parameters."""

    rule: UpdateRule
    gradient: DType
    parameter: DType

    @property
    def states(self) -> int:
        """The master and the moments."""
        return 1 + self.rule.moments

    @property
    def state_itemsize(self) -> int:
        """Bytes of one element of a state: of float32, or of float64 for float64 gradients."""
        return 8 if self.gradient is DType.FLOAT64 else 4

    def prepare(self) -> None:
        """Compile or load the kernel."""
        prepare_step(self.rule, (self.gradient, self.parameter))

    def to_json(self) -> list[int]:
        """For a message."""
        return [self.rule.code, self.gradient, self.parameter]

    @classmethod
    def from_json(cls, fields: Any) -> StepKind:
        """Raises ProtocolError."""
        try:
            code, gradient, parameter = fields
            kind = cls(UpdateRule.from_code(int(code)), DType(gradient), DType(parameter))
        except (ValueError, TypeError, UsageError) as error:
            raise ProtocolError(f"malformed kind of a step: {error}") from None
        if not (kind.gradient.is_floating and kind.parameter.is_floating):
            raise ProtocolError("a step is of floating dtypes")
        return kind


@dataclass(frozen=True, slots=True)
class StepSegment:
    """Elements of a part that make a step with the same numbers. ``scalars``: see step_scalars."""

    elements: range
    scalars: tuple[float, ...]

    def to_json(self) -> list[float]:
        """For a message."""
        return [self.elements.start, self.elements.stop, *self.scalars]


def segments_of(said: Any, scalars: int) -> list[StepSegment]:
    """The segments of a message. Raises ProtocolError unless they are ascending and have so many scalars."""
    found: list[StepSegment] = []
    at = 0
    try:
        for start, stop, *numbers in said:
            if not at <= start <= stop or len(numbers) != scalars:
                raise ProtocolError("segments of a step that are not in order")
            at = stop
            found.append(StepSegment(range(int(start), int(stop)), tuple(map(float, numbers))))
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"malformed segments of a step: {error}") from None
    return found


def run_segments(
    kind: StepKind, states: Sequence[int], source: int, target: int, segments: Sequence[StepSegment]
) -> None:
    """Make the step. ``states``, ``source``, ``target``: addresses, see ``make_step``."""
    run = _bound(kind, tuple(states), source, target)
    for segment in segments:
        run(segment.scalars, segment.elements)


@functools.lru_cache(maxsize=4096)  # a slot has two inputs at most, used in turn
def _bound(kind: StepKind, states: tuple[int, ...], source: int, target: int) -> Any:
    return bind_step(kind.rule, (kind.gradient, kind.parameter), states, [source], [target])
