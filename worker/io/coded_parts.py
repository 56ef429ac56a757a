"""Codes this machine's contributions, and decodes servers' answers: of tensors with a codec only.

Owns, of each partition, the error of a codec with error feedback, which is what the machine has not sent yet, the
momentum, and what machines have agreed on for a THC, all as float32. A contribution is coded once per round, and is
sent again as it is, so faults leave them alone. A server keeps no error: it could be lost with it. The loop's thread
calls the methods; the work that they return is for any thread, one per partition at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from byteps_py.codecs import Coding, Draw
from byteps_py.runtime import Codecs, Runtime
from byteps_py.tensor_codec import Codec
from byteps_py.worker.core.tensor import REDUCING, Compute, Part, Tensor


class CodedParts:
    """See above."""

    def __init__(self, runtime: Runtime, first_rank: int, machines: int) -> None:
        self._codecs = runtime.codecs
        self._new_buffer = runtime.new_buffer
        self._first_rank = first_rank
        self._machines = machines  # of the job
        self._states: dict[Part, npt.NDArray[np.uint8]] = {}

    def bind(self, compute: Compute, codec: Codec) -> Callable[[], None]:
        """The work of ``compute``: to code the sum of the local ranks, or to decode an answer for them."""
        part, tensor = compute.part, compute.part.tensor
        state, error, moments, agreed = self._state(part, codec)
        machines = tensor.machines or self._machines
        draw = Draw(tensor.key, tensor.round, part.offset // codec.item_bytes, self._first_rank)
        coding = Coding(codec, tensor.spec.dtype, part.count, error, moments, draw, agreed, machines)
        if part.stage is REDUCING:
            return functools.partial(_encode, self._codecs, coding, compute, state)
        given = tensor.contribution.address + part.offset
        return functools.partial(_decode, self._codecs, coding, compute, given, state)

    def _state(self, part: Part, codec: Codec) -> tuple[object, int, int, int]:
        """What holds error, momentum, and what is agreed on, and their addresses; 0 for what the codec has not."""
        sizes = (
            4 * part.count * codec.error_feedback,
            4 * part.count * (codec.momentum > 0),
            4 * (part.length // codec.item_bytes) * codec.is_thc,
        )
        if not any(sizes):
            return None, 0, 0, 0
        state = self._states.get(part)
        if state is None:
            state = self._states[part] = self._new_buffer(sum(sizes))
            state[:] = 0
        ends = itertools.accumulate(sizes, initial=int(state.ctypes.data))
        error, moments, agreed = (place if size else 0 for place, size in zip(ends, sizes, strict=False))
        return state, error, moments, agreed

    def forget(self, tensor: Tensor) -> None:
        """No kernel runs on the tensor, nor will."""
        for part in tensor.parts:
            self._states.pop(part, None)


# Work has the state with it: a kernel may outlive the group of ranks, and all that belongs to it.


def _encode(codecs: Codecs, coding: Coding, compute: Compute, state: object) -> None:
    report = codecs.encode(coding, compute.inputs, compute.outputs[0])
    if compute.part.tensor.spec.is_guarded:
        compute.report = report


def _decode(codecs: Codecs, coding: Coding, compute: Compute, given: int, state: object) -> None:
    codecs.decode(coding, compute.inputs[0], compute.outputs, compute.divisor, given)
