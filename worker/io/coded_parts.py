"""Codes this machine's contributions, and decodes servers' answers: of tensors with a codec only. Of a scattered sum it
decodes the other machines' contributions to its ranks' pieces, and adds them.

Parameters with a codec travel as what they change by in a step (see TensorSpec.codec): their owner's service adds what
its code decodes to to the results of its ranks, as the services of other machines do with theirs. So all ranks have the
same bits, and what one code lacks is in the next one.

Keeps, of each tensor, the error of a codec with error feedback, which is what the machine has not sent yet, the
momentum, and what machines have agreed on for a THC, all as float32. They lie in the memory of a local rank, which may
save and load them (see RankSlot). A contribution is coded once per round, and is sent again as it is, so faults leave
them alone. A server keeps no error: it could be lost with it. The loop's thread calls the methods; the work that they
return is for any thread, one per partition at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from byteps_py.codecs import Coding, Draw
from byteps_py.runtime import Codecs, Runtime
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import Op
from byteps_py.worker.core.hosted_steps import MakeStep
from byteps_py.worker.core.tensor import REDUCING, AccumulatedPart, Compute, Part, ScatterPart, Tensor


class CodedParts:
    """See above."""

    def __init__(self, runtime: Runtime, first_rank: int, machines: int) -> None:
        self._codecs = runtime.codecs
        self._new_buffer = runtime.new_buffer
        self._move = runtime.move
        self._first_rank = first_rank
        self._machines = machines  # of the job
        self._states: dict[Tensor, tuple[object, int]] = {}  # (what holds the memory, address)

    def bind(self, compute: Compute, codec: Codec) -> Callable[[], None]:
        """The work of ``compute``: to code the sum of the local ranks, or to decode an answer for them; of a piece of
        theirs, to add up what machines have sent."""
        part, tensor = compute.part, compute.part.tensor
        if tensor.spec.op is Op.BROADCAST:
            return functools.partial(_add_change, self._codecs, Coding(codec, tensor.spec.dtype, part.count), compute)
        state, error, moments, agreed = self._state(part, codec)
        machines = tensor.machines or self._machines
        draw = Draw(tensor.key, codec.drawn + tensor.round, part.offset // codec.item_bytes, self._first_rank)
        coding = Coding(codec, tensor.spec.dtype, part.count, error, moments, draw, agreed, machines)
        if part.stage is REDUCING:
            return functools.partial(_encode, self._codecs, coding, compute, state)
        if isinstance(part, AccumulatedPart):
            plain = Coding(codec, tensor.spec.dtype, part.count)  # the error is of what this machine gives
            own = tensor.contribution.address + part.contribution[1]
            changes = [each or own for each in part.changes]
            makes = CopyOfValues(part.copy_before, compute.outputs, part.dense_length, changes)
            return functools.partial(_make_changes, self._codecs, plain, makes, self._move)
        if isinstance(part, ScatterPart):
            return functools.partial(_add_up, self._codecs, coding, compute)
        given = tensor.contribution.address + part.offset
        return functools.partial(_decode, self._codecs, coding, compute, given, state)

    def change_of(self, step: MakeStep, results: Sequence[int]) -> ParameterChange | None:
        """How parameters that a step makes travel; None: as they are. ``results``: where this machine's ranks have
        those of the round before, and get the new ones."""
        codec = step.parameters.codec
        if codec is None or not step.is_last:
            return None
        block, sent_from = step.targets[0].contribution
        coding = Coding(codec, step.parameters.spec.dtype, step.part.count)
        memory = self._new_buffer(4 * coding.count)
        return ParameterChange(self._codecs, coding, memory, tuple(results), block.address + sent_from)

    def _state(self, part: Part, codec: Codec) -> tuple[object, int, int, int]:
        """What holds error, momentum, and what is agreed on, and their addresses; 0 for what the codec has not."""
        sizes = codec.state_nbytes(part.tensor.spec.count)
        if not any(sizes):
            return None, 0, 0, 0
        state, start = self._states.get(part.tensor) or self._begin(part.tensor, sum(sizes))
        element = part.dense_offset // part.tensor.spec.dtype.itemsize
        before = (4 * element, 4 * element, 4 * (part.offset // codec.item_bytes))
        starts = itertools.accumulate(sizes, initial=start)
        error, moments, agreed = (
            at + passed if size else 0 for at, passed, size in zip(starts, before, sizes, strict=False)
        )
        return state, error, moments, agreed

    def _begin(self, tensor: Tensor, nbytes: int) -> tuple[object, int]:
        slot = tensor.slots[0]
        if slot.coded_state is not None and not slot.is_coded:
            slot.is_coded = True
            self._states[tensor] = slot, slot.coded_state.address
        else:  # the rank that would have them has joined, or the slot had them for another tensor
            state: npt.NDArray[np.uint8] = self._new_buffer(nbytes)
            state[:] = 0
            self._states[tensor] = state, int(state.ctypes.data)
        return self._states[tensor]

    def forget(self, tensor: Tensor) -> None:
        """No kernel runs on the tensor, nor will."""
        self._states.pop(tensor, None)


@dataclass(frozen=True, slots=True)
class CopyOfValues:
    """A copy of accumulated values that is made of the one before, by address: ``outputs``, the last of which is where
    the machine keeps it; ``nbytes``: of each; ``changes``: codes."""

    before: int
    outputs: Sequence[int]
    nbytes: int
    changes: Sequence[int]


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """What a step changes parameters by. The step writes to ``values``, between ``begin`` and ``finish``, on any
    thread."""

    codecs: Codecs
    coding: Coding
    memory: npt.NDArray[np.uint8]
    results: tuple[int, ...]
    code: int

    @property
    def values(self) -> int:
        """The address of the memory that the step writes to."""
        return int(self.memory.ctypes.data)

    def begin(self, move: Callable[[int, int, int], object]) -> None:
        """A step may leave parameters as they are. ``move``: see Runtime."""
        move(self.values, self.results[0], 4 * self.coding.count)

    def finish(self) -> None:
        self.codecs.encode_change(self.coding, self.values, self.results, self.code)


# Work has the state with it: a kernel may outlive the group of ranks, and all that belongs to it.


def _encode(codecs: Codecs, coding: Coding, compute: Compute, state: object) -> None:
    report = codecs.encode(coding, compute.inputs, compute.outputs[0])
    if compute.part.tensor.spec.is_guarded:
        compute.report = report


def _decode(codecs: Codecs, coding: Coding, compute: Compute, given: int, state: object) -> None:
    codecs.decode(coding, compute.inputs[0], compute.outputs, compute.divisor, given)


def _add_up(codecs: Codecs, coding: Coding, compute: Compute) -> None:
    codecs.add_up(coding, compute.inputs, compute.outputs, compute.divisor)


def _make_changes(codecs: Codecs, coding: Coding, makes: CopyOfValues, move: Callable[[int, int, int], object]) -> None:
    """The same additions, in the same order, as the server has made: so the copy has the bits of its values."""
    *results, copy = makes.outputs
    move(copy, makes.before, makes.nbytes)
    for change in makes.changes:
        codecs.decode_change(coding, change, (copy,))
    for result in results:
        move(result, copy, makes.nbytes)


def _add_change(codecs: Codecs, coding: Coding, compute: Compute) -> None:
    codecs.decode_change(coding, compute.inputs[0], compute.outputs)
