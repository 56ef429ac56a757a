"""The optimizers whose steps a service makes: what they keep for each element, and the numbers of a step. Pure, without
torch; any thread.

The arithmetic is that of torch's CPU optimizers (foreach=False), operation by operation; square roots are correctly
rounded. torch's own are those of the library that it is built with, which on some processors round otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, auto

from byteps_py.errors import UsageError
from byteps_py.tensors import DType


class Method(IntEnum):
    """The family of an optimizer. AdamW is ADAM with DECOUPLED decay."""

    SGD = 0
    ADAM = auto()
    ADAGRAD = auto()
    LAMB = auto()


class Decay(IntEnum):
    """The effect of weight decay: none, a term of the gradient, or a smaller parameter."""

    NONE = 0
    COUPLED = auto()
    DECOUPLED = auto()


class Scalar(IntEnum):
    """The numbers of a step, by their place in a kernel's table."""

    UNSCALE = 0  # the gradient is multiplied by it, then by CLIP
    CLIP = auto()
    DECAY = auto()  # COUPLED: the weight decay. DECOUPLED: what the parameter is multiplied by
    MOMENTUM = auto()  # what is kept of the moment (ADAM: of the second one)
    GAIN = auto()  # the weight of what is new in it (ADAM: in the first one)
    NESTEROV = auto()
    SQUARE_GAIN = auto()  # ADAM: the weight of the new square
    ROOT = auto()  # ADAM: the root of the second bias correction
    EPS = auto()
    STEP = auto()  # minus the step's size
    BIAS = auto()  # LAMB: the first bias correction
    PHASE = auto()  # LAMB: 0 if moments and updates are due, 1 if the step with these is


SCALARS = len(Scalar)
#: Addresses of a kernel's table: the master and up to three moments.
STATES = 4


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """An optimizer's arithmetic, without its numbers. ``is_mostly_new``: ADAM's or LAMB's beta1 is at most 0.5."""

    method: Method
    decay: Decay = Decay.NONE
    momentum: bool = False
    nesterov: bool = False
    amsgrad: bool = False
    maximize: bool = False
    is_mostly_new: bool = False

    @property
    def moments(self) -> int:
        """How many numbers are kept for each element, beside the master."""
        if self.method is Method.ADAM:
            return 3 if self.amsgrad else 2
        if self.method is Method.LAMB:
            return 3  # the last one is the update, which waits for its norm
        return 1 if self.method is Method.ADAGRAD else int(self.momentum)

    @property
    def code(self) -> int:
        """A number that stands for this rule; see ``from_code``."""
        flags = (self.momentum, self.nesterov, self.amsgrad, self.maximize, self.is_mostly_new)
        return self.method | self.decay << 2 | sum(flag << 4 + place for place, flag in enumerate(flags))

    @classmethod
    def from_code(cls, code: int) -> UpdateRule:
        """The rule whose ``code`` this is. Raises UsageError if there is none.

        >>> rule = UpdateRule(Method.ADAM, Decay.DECOUPLED, amsgrad=True)
        >>> UpdateRule.from_code(rule.code) == rule
        True
        """
        if not 0 <= code < 1 << 9 or code & 3 > max(Method) or code >> 2 & 3 > max(Decay):
            raise UsageError(f"{code} is no rule of an optimizer")
        return cls(Method(code & 3), Decay(code >> 2 & 3), *(bool(code >> 4 + place & 1) for place in range(5)))


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

    @property
    def code(self) -> int:
        """A number that stands for this kind; see ``from_code``."""
        return self.rule.code | self.gradient << 9 | self.parameter << 13

    @classmethod
    def from_code(cls, code: int) -> StepKind:
        """The kind whose ``code`` this is. Raises UsageError if there is none.

        >>> kind = StepKind(UpdateRule(Method.SGD), DType.BFLOAT16, DType.FLOAT32)
        >>> StepKind.from_code(kind.code) == kind
        True
        """
        try:
            kind = cls(UpdateRule.from_code(code & 0x1FF), DType(code >> 9 & 0xF), DType(code >> 13))
        except ValueError as error:
            raise UsageError(f"{code} is no kind of a step: {error}") from None
        if not (kind.gradient.is_floating and kind.parameter.is_floating):
            raise UsageError(f"{code} is no kind of a step: it is of floating dtypes")
        return kind


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The numbers of a param_group, as torch names them. Those that the optimizer does not have are without effect."""

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr_decay: float = 0.0
    always_adapt: float = 0.0


def step_scalars(
    rule: UpdateRule, numbers: Hyperparameters, step: int, unscale: float = 1.0, clip: float = 1.0
) -> tuple[float, ...]:
    """The numbers of an element's ``step``-th step, from 1, in the order of Scalar. ``unscale``, ``clip``: the gradient
    is multiplied by them. Raises UsageError for a step below 1.

    >>> rule = UpdateRule(Method.SGD, momentum=True)
    >>> step_scalars(rule, Hyperparameters(lr=0.5, momentum=0.9), step=1)[Scalar.STEP]
    -0.5
    """
    if step < 1:
        raise UsageError(f"steps count from 1, not from {step}")
    found = dict.fromkeys(Scalar, 0.0)
    found[Scalar.UNSCALE], found[Scalar.CLIP], found[Scalar.EPS] = unscale, clip, numbers.eps
    found[Scalar.DECAY] = numbers.weight_decay
    if rule.decay is Decay.DECOUPLED:
        found[Scalar.DECAY] = 1 - numbers.lr * numbers.weight_decay
    found[Scalar.STEP] = -numbers.lr
    if rule.method is Method.SGD:
        # The first moment is the first gradient itself.
        found[Scalar.MOMENTUM], found[Scalar.GAIN] = numbers.momentum, 1 - numbers.dampening
        if step == 1:
            found[Scalar.MOMENTUM], found[Scalar.GAIN] = 0.0, 1.0
        found[Scalar.NESTEROV] = numbers.momentum
    elif rule.method in (Method.ADAM, Method.LAMB):
        weight = 1 - numbers.beta1
        found[Scalar.GAIN] = weight - 1 if rule.is_mostly_new else weight
        found[Scalar.MOMENTUM], found[Scalar.SQUARE_GAIN] = numbers.beta2, 1 - numbers.beta2
        found[Scalar.STEP] = -(numbers.lr / (1 - numbers.beta1**step))
        found[Scalar.ROOT] = math.sqrt(1 - numbers.beta2**step)
        found[Scalar.BIAS] = 1 - numbers.beta1**step
    else:
        found[Scalar.STEP] = -(numbers.lr / (1 + (step - 1) * numbers.lr_decay))
    return tuple(found[each] for each in Scalar)


def apply_scalars(size: float) -> tuple[float, ...]:
    """The numbers of LAMB's second phase, which changes the parameter by minus ``size`` times its update."""
    found = dict.fromkeys(Scalar, 0.0)
    found[Scalar.UNSCALE] = found[Scalar.CLIP] = found[Scalar.PHASE] = 1.0
    found[Scalar.STEP] = -size
    return tuple(found[each] for each in Scalar)
