"""``bind_step``: add contributions, update an optimizer's states and write the new parameters, in one pass over memory.

Knows addresses, a rule and dtypes; must not know tensors' names, ranks or sockets. Any thread; the GIL is released
while a kernel runs. The caller guarantees that the addresses stay valid and that nobody else uses what lies there
meanwhile.

``StepSegment``: a range of elements that make a step with the same numbers. A rank sends the segments to its service.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.kernels.update_rules import SCALARS, STATES, Method, Scalar, StepKind, UpdateRule
from byteps_py.tensors import DType

if TYPE_CHECKING:
    from byteps_py.kernels.jit.numba_kernels import StepKernel


_kernels: dict[StepKind, StepKernel] = {}
_build_lock = threading.Lock()


def bind_step(
    kind: StepKind,
    states: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    divisor: int = 1,
) -> Callable[[Sequence[float], range], None]:
    """A function of scalars and elements, which makes a step of these elements and returns when it is made. One call at
    a time.

    states: addresses of the master and of the rule's moments: float32, or float64 for contributions of float64. inputs:
    addresses of the contributions, which are added first to last as ``reduce`` does, rounded once, and divided by
    ``divisor`` if that is above 1. outputs: addresses where the parameters go, each; there may be none. scalars: see
    ``step_scalars``. elements: counted from each address. An output may be an input of the same dtype.

    Raises UsageError for dtypes that are not floating, a parameter wider than the master, or a wrong number of states.

    >>> from byteps_py.kernels.update_rules import Hyperparameters, Method, UpdateRule, step_scalars
    >>> kind = StepKind(UpdateRule(Method.SGD), DType.FLOAT32, DType.FLOAT32)
    >>> gradient, master = array("f", [1.0, 2.0]), array("f", [1.0, 1.0])
    >>> addresses = [values.buffer_info()[0] for values in (master, gradient)]
    >>> make_step = bind_step(kind, addresses[:1], addresses[1:], addresses[1:])
    >>> make_step(step_scalars(kind.rule, Hyperparameters(lr=0.5), step=1), range(2))
    >>> list(master), list(gradient)
    ([0.5, 0.0], [0.5, 0.0])
    """
    if len(states) != kind.states or not inputs:
        method = kind.rule.method.name
        raise UsageError(f"a step of {method} has {kind.states} states, not {len(states)}, and an input")
    kernel = _kernel_of(kind)
    table = array("Q", (*states, *[0] * (STATES - len(states) + SCALARS), *inputs, *outputs))
    count, places = len(inputs), len(outputs)

    def run(scalars: Sequence[float], elements: range) -> None:
        table[STATES : STATES + SCALARS] = array("Q", array("d", scalars).tobytes())
        kernel(table.buffer_info()[0], count, places, elements.start, elements.stop, divisor)

    return run


def prepare_step(kind: StepKind) -> None:
    """Compile or load the kernel of ``kind``. Raises UsageError as ``bind_step`` does."""
    _kernel_of(kind)


def _kernel_of(kind: StepKind) -> StepKernel:
    kernel = _kernels.get(kind)
    if kernel is not None:
        return kernel
    gradient, parameter = kind.gradient, kind.parameter
    if not gradient.is_floating or not parameter.is_floating:
        raise UsageError(f"an optimizer's step is of floating dtypes, not {gradient.name} and {parameter.name}")
    if parameter is DType.FLOAT64 and gradient is not DType.FLOAT64:
        raise UsageError("parameters of FLOAT64 need gradients of FLOAT64: otherwise their master is FLOAT32")
    if gradient is DType.FLOAT64 and parameter in (DType.FLOAT16, DType.BFLOAT16):
        raise UsageError(f"gradients of FLOAT64 belong to parameters of FLOAT64 or FLOAT32, not {parameter.name}")
    # Imported here, so that importing this package does not load a compiler.
    from byteps_py.kernels.jit import numba_kernels

    with _build_lock:
        if kind not in _kernels:
            _kernels[kind] = numba_kernels.build_step(kind)
        return _kernels[kind]


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
    """Make the step. ``states``, ``source``, ``target``: addresses, see ``bind_step``."""
    bind_segments(kind, states, [source], [target])(segments)
