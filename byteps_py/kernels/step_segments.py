"""The segments of an optimizer's step, which a rank sends to its service: ranges of elements with the same numbers.
Pure but for ``run_segments``. Any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from byteps_py.errors import ProtocolError
from byteps_py.kernels.steps import bind_step
from byteps_py.kernels.update_rules import Method, Scalar, StepKind, UpdateRule
from byteps_py.tensors import DType


@dataclass(frozen=True, slots=True)
class StepSegment:
    """Elements of a part that make a step with the same numbers. ``scalars``: see step_scalars."""

    elements: range
    scalars: tuple[float, ...]


def check_order(segments: Sequence[StepSegment], scalars: int) -> None:
    """Raises ProtocolError unless the segments are ascending and have so many scalars."""
    at = 0
    for each in segments:
        if not at <= each.elements.start <= each.elements.stop or len(each.scalars) != scalars:
            raise ProtocolError("segments of a step that are not in order")
        at = each.elements.stop


def bind_segments(
    kind: StepKind,
    states: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    divisor: int = 1,
    bind: Callable[..., Callable[[Sequence[float], range], None]] = bind_step,
) -> Callable[[Sequence[StepSegment]], None]:
    """A function that makes the step of segments. The arguments are those of ``bind_step``, which ``bind`` stands for.
    Of LAMB, segments of the first phase change the moments, and those of the second one the parameters; only these
    write to ``outputs``."""
    if kind.rule.method is not Method.LAMB:
        update = apply = bind(kind, states, inputs, outputs, divisor)
    else:
        wide = DType.FLOAT64 if kind.gradient is DType.FLOAT64 else DType.FLOAT32
        update = bind(kind, states, inputs, [], divisor)
        # With the update in place of the gradient, what is left is SGD.
        apply = bind(StepKind(UpdateRule(Method.SGD), wide, kind.parameter), states[:1], states[3:], outputs)

    def run(segments: Sequence[StepSegment]) -> None:
        for segment in segments:
            (apply if segment.scalars[Scalar.PHASE] else update)(segment.scalars, segment.elements)

    return run


def run_segments(
    kind: StepKind, states: Sequence[int], source: int, target: int, segments: Sequence[StepSegment]
) -> None:
    """Make the step. ``states``, ``source``, ``target``: addresses, see ``make_step``."""
    bind_segments(kind, states, [source], [target])(segments)
