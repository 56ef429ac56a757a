"""The loops of an optimizer's step, as LLVM instructions: contributions in, states and parameters updated in place.

Owns the order in which memory is read and written. ``UpdateRule`` says which arithmetic; it is torch's, operation by
operation, each rounded as torch's CPU kernels round it, so that the results are the same bits. These functions run
while a kernel is compiled and add instructions to it. No state; any thread.

    for each chunk:   in[0] + in[1] + … ─ round once ─ divide ─► gradient ─ unscale ─ clip ─► update ─► master, moments
                                                                                                 └ round ─► out[0], …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

from byteps_py.kernels.jit import vector
from byteps_py.kernels.jit.llvm import call
from byteps_py.kernels.jit.vector import filled
from byteps_py.kernels.update_rules import SCALARS, STATES, Decay, Method, Scalar, StepKind, UpdateRule
from byteps_py.tensors import DType

_I64 = ir.IntType(64)
_BITS = ir.IntType(32)
_WIDTH = 16
_SMALL = (DType.FLOAT16, DType.BFLOAT16)


class StepLoops:
    """Emits one kernel.

    ``arguments`` are the kernel's parameters: table, inputs, outputs, begin, end, divisor. ``table`` is the address of
    an array of 64-bit words: STATES addresses of the master and the moments, SCALARS numbers as float64, the inputs'
    addresses, the outputs' addresses. ``begin`` and ``end`` count elements.
    """

    def __init__(
        self,
        builder: ir.IRBuilder,
        kind: StepKind,
        arguments: Sequence[ir.Value],
    ) -> None:
        gradient = kind.gradient
        self._builder, self._rule, self._gradient, self._parameter = builder, kind.rule, gradient, kind.parameter
        self._table, self._inputs, self._outputs, self._begin, self._end, self._divisor = arguments
        self._real: ir.Type = ir.DoubleType() if gradient is DType.FLOAT64 else ir.FloatType()
        self._wide = DType.FLOAT64 if gradient is DType.FLOAT64 else DType.FLOAT32
        self._first_input = _I64(STATES + SCALARS)

    def emit(self) -> None:
        """Emit the whole kernel: chunks of several elements, then single ones."""
        builder = self._builder
        states = [self._word(_I64(place)) for place in range(STATES)]
        scalars = [self._scalar(place) for place in range(SCALARS)]
        length = builder.sub(self._end, self._begin)
        middle = builder.add(self._begin, builder.and_(length, _I64(-_WIDTH)))
        with cgutils.for_range_slice(builder, self._begin, middle, _I64(_WIDTH)) as (index, _):
            self._update(index, _WIDTH, states, scalars)
        with cgutils.for_range_slice(builder, middle, self._end, _I64(1)) as (index, _):
            self._update(index, 1, states, scalars)

    # ---- one chunk ---------------------------------------------------------------------------------------------

    def _update(self, index: ir.Value, width: int, states: Sequence[ir.Value], scalars: Sequence[ir.Value]) -> None:
        builder, size = self._builder, self._wide.itemsize
        places = [builder.add(state, builder.mul(index, _I64(size))) for state in states[: 1 + self._rule.moments]]
        arithmetic = Arithmetic(builder, [vector.splat(builder, scalar, width) for scalar in scalars])
        gradient = arithmetic.mul(self._sum(index, width), arithmetic.scalar(Scalar.UNSCALE))
        gradient = arithmetic.mul(gradient, arithmetic.scalar(Scalar.CLIP))
        values = [vector.load_stored(builder, self._wide, width, place) for place in places]
        parameter, *moments = _METHODS[self._rule.method](arithmetic, self._rule, gradient, values[0], values[1:])
        for place, value in zip(places, (parameter, *moments), strict=True):
            vector.store(builder, place, value)
        stored = self._rounded(parameter)
        with cgutils.for_range_slice(builder, _I64(0), self._outputs, _I64(1)) as (number, _):
            first = builder.add(self._first_input, self._inputs)
            address = self._word(builder.add(first, number))
            at = builder.add(address, builder.mul(index, _I64(self._parameter.itemsize)))
            vector.store(builder, at, stored)

    def _sum(self, index: ir.Value, width: int) -> ir.Value:
        """The contributions' sum, rounded as on its way between machines, then divided, in the type of the step."""
        builder, offset = self._builder, self._builder.mul(index, _I64(self._gradient.itemsize))
        with builder.goto_entry_block():  # LLVM keeps it in registers
            total = builder.alloca(ir.VectorType(self._real, width))
        builder.store(self._contribution(_I64(0), offset, width), total)
        with cgutils.for_range_slice(builder, _I64(1), self._inputs, _I64(1)) as (number, _):
            added = builder.fadd(builder.load(total), self._contribution(number, offset, width))
            builder.store(added, total)
        if self._gradient in _SMALL:
            with builder.if_then(builder.icmp_signed(">", self._inputs, _I64(1))):
                builder.store(self._through(builder.load(total)), total)
        with builder.if_then(builder.icmp_signed(">", self._divisor, _I64(1))):
            by = vector.splat(builder, builder.sitofp(self._divisor, self._real), width)
            builder.store(self._through(builder.fdiv(builder.load(total), by)), total)
        return builder.load(total)

    def _contribution(self, number: ir.Value, offset: ir.Value, width: int) -> ir.Value:
        address = self._builder.add(self._word(self._builder.add(self._first_input, number)), offset)
        return _widened(
            self._builder, self._gradient, vector.load_stored(self._builder, self._gradient, width, address)
        )

    def _through(self, wide: ir.Value) -> ir.Value:
        """Rounded to the gradient's dtype, and wide again."""
        return _widened(self._builder, self._gradient, _narrowed(self._builder, self._gradient, wide))

    def _rounded(self, parameter: ir.Value) -> ir.Value:
        if self._parameter is DType.FLOAT32 and self._wide is DType.FLOAT64:
            return self._builder.fptrunc(parameter, ir.VectorType(ir.FloatType(), parameter.type.count))
        return _narrowed(self._builder, self._parameter, parameter)

    # ---- the table -----------------------------------------------------------------------------------------------

    def _word(self, index: ir.Value) -> ir.Value:
        entry = self._builder.add(self._table, self._builder.mul(index, _I64(8)))
        return self._builder.load(self._builder.inttoptr(entry, _I64.as_pointer()))

    def _scalar(self, place: int) -> ir.Value:
        real = self._builder.bitcast(self._word(_I64(STATES + place)), ir.DoubleType())
        return real if self._wide is DType.FLOAT64 else self._builder.fptrunc(real, ir.FloatType())


class Arithmetic:
    """Operations on vectors, each rounded once."""

    def __init__(self, builder: ir.IRBuilder, scalars: Sequence[ir.Value]) -> None:
        self._builder, self._scalars = builder, scalars

    def scalar(self, which: Scalar) -> ir.Value:
        """A hyperparameter in every element."""
        return self._scalars[which]

    def mul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a · b"""
        return self._builder.fmul(a, b)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a + b"""
        return self._builder.fadd(a, b)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a − b"""
        return self._builder.fsub(a, b)

    def div(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a / b"""
        return self._builder.fdiv(a, b)

    def neg(self, a: ir.Value) -> ir.Value:
        """−a"""
        return self._builder.fneg(a)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a · b + c, rounded once"""
        return call(self._builder, "fma", a, b, c)

    def sqrt(self, a: ir.Value) -> ir.Value:
        """The square root, correctly rounded."""
        return call(self._builder, "sqrt", a)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger one; NaN if either is."""
        return call(self._builder, "maximum", a, b)

    def add_square(self, total: ir.Value, weight: Scalar, value: ir.Value) -> ir.Value:
        """total + weight · value², as torch's addcmul_"""
        return self.fma(self.mul(self.scalar(weight), value), value, total)

    def add_quotient(self, total: ir.Value, weight: Scalar, a: ir.Value, b: ir.Value) -> ir.Value:
        """total + weight · a / b, as torch's addcdiv_"""
        return self.add(total, self.div(self.mul(self.scalar(weight), a), b))


_Values = list[ir.Value]


def _decayed(by: Arithmetic, rule: UpdateRule, gradient: ir.Value, parameter: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(gradient, parameter) after maximize and weight decay."""
    if rule.maximize:
        gradient = by.neg(gradient)
    if rule.decay is Decay.COUPLED:
        gradient = by.fma(by.scalar(Scalar.DECAY), parameter, gradient)
    elif rule.decay is Decay.DECOUPLED:
        parameter = by.mul(parameter, by.scalar(Scalar.DECAY))
    return gradient, parameter


def _sgd(by: Arithmetic, rule: UpdateRule, gradient: ir.Value, parameter: ir.Value, moments: _Values) -> _Values:
    gradient, parameter = _decayed(by, rule, gradient, parameter)
    if rule.momentum:
        kept = by.mul(moments[0], by.scalar(Scalar.MOMENTUM))
        moments = [by.fma(by.scalar(Scalar.GAIN), gradient, kept)]
        gradient = by.fma(by.scalar(Scalar.NESTEROV), moments[0], gradient) if rule.nesterov else moments[0]
    return [by.fma(by.scalar(Scalar.STEP), gradient, parameter), *moments]


def _adam(by: Arithmetic, rule: UpdateRule, gradient: ir.Value, parameter: ir.Value, moments: _Values) -> _Values:
    gradient, parameter = _decayed(by, rule, gradient, parameter)
    mean, square, *largest = moments
    base = gradient if rule.is_mostly_new else mean  # as torch's lerp_
    mean = by.fma(by.scalar(Scalar.GAIN), by.sub(gradient, mean), base)
    square = by.add_square(by.mul(square, by.scalar(Scalar.MOMENTUM)), Scalar.SQUARE_GAIN, gradient)
    if rule.amsgrad:
        largest = [by.maximum(largest[0], square)]
    root = by.sqrt(largest[0] if rule.amsgrad else square)
    scale = by.add(by.div(root, by.scalar(Scalar.ROOT)), by.scalar(Scalar.EPS))
    return [by.add_quotient(parameter, Scalar.STEP, mean, scale), mean, square, *largest]


def _adagrad(by: Arithmetic, rule: UpdateRule, gradient: ir.Value, parameter: ir.Value, moments: _Values) -> _Values:
    gradient, parameter = _decayed(by, rule, gradient, parameter)
    square = by.fma(gradient, gradient, moments[0])
    scale = by.add(by.sqrt(square), by.scalar(Scalar.EPS))
    return [by.add_quotient(parameter, Scalar.STEP, gradient, scale), square]


def _lamb(by: Arithmetic, rule: UpdateRule, gradient: ir.Value, parameter: ir.Value, moments: _Values) -> _Values:
    mean, square, _ = moments
    base = gradient if rule.is_mostly_new else mean
    mean = by.fma(by.scalar(Scalar.GAIN), by.sub(gradient, mean), base)
    square = by.add_square(by.mul(square, by.scalar(Scalar.MOMENTUM)), Scalar.SQUARE_GAIN, gradient)
    scale = by.add(by.div(by.sqrt(square), by.scalar(Scalar.ROOT)), by.scalar(Scalar.EPS))
    update = by.div(by.div(mean, by.scalar(Scalar.BIAS)), scale)
    return [parameter, mean, square, by.fma(by.scalar(Scalar.DECAY), parameter, update)]


_METHODS: dict[Method, Callable[[Arithmetic, UpdateRule, ir.Value, ir.Value, _Values], _Values]] = {
    Method.SGD: _sgd,
    Method.ADAM: _adam,
    Method.ADAGRAD: _adagrad,
    Method.LAMB: _lamb,
}


def _widened(builder: ir.IRBuilder, dtype: DType, stored: ir.Value) -> ir.Value:
    """To the type of the step, in the order of memory."""
    if dtype is DType.FLOAT16:
        return vector.widen_float16(builder, stored)
    if dtype is DType.BFLOAT16:
        bits = builder.zext(stored, ir.VectorType(_BITS, stored.type.count))
        return builder.bitcast(builder.shl(bits, filled(bits, 16)), ir.VectorType(ir.FloatType(), stored.type.count))
    return stored


def _narrowed(builder: ir.IRBuilder, dtype: DType, wide: ir.Value) -> ir.Value:
    """To the form in memory, rounded to nearest even, in the order of memory. Any NaN stays one."""
    if dtype is DType.FLOAT16:
        return vector.round_float16(builder, wide)
    if dtype is DType.BFLOAT16:
        bits = builder.bitcast(wide, ir.VectorType(_BITS, wide.type.count))
        odd = builder.and_(builder.lshr(bits, filled(bits, 16)), filled(bits, 1))
        nearest = builder.add(bits, builder.add(odd, filled(bits, 0x7FFF)))
        kept = builder.select(builder.fcmp_unordered("uno", wide, wide), filled(bits, 0x7FC00000), nearest)
        return builder.trunc(builder.lshr(kept, filled(bits, 16)), ir.VectorType(ir.IntType(16), wide.type.count))
    return wide
