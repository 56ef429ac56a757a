"""Codes this machine's contributions, and decodes servers' answers: of tensors with a codec only.

Owns the error of each partition with error feedback: what the machine has not sent yet, as float32. A contribution is
coded once per round, and is sent again as it is, so faults leave the error alone. A server keeps no error: it could be
lost with it. The loop's thread calls the methods; the work that they return is for any thread, one per partition at a
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from byteps_py.codecs import Coding
from byteps_py.runtime import Codecs, Runtime
from byteps_py.tensor_codec import Codec
from byteps_py.worker.core.tensor import REDUCING, Compute, Part, Tensor


class CodedParts:
    """See above."""

    def __init__(self, runtime: Runtime) -> None:
        self._codecs = runtime.codecs
        self._new_buffer = runtime.new_buffer
        self._errors: dict[Part, npt.NDArray[np.uint8]] = {}

    def bind(self, compute: Compute, codec: Codec) -> Callable[[], None]:
        """The work of ``compute``: to code the sum of the local ranks, or to decode an answer for them."""
        part = compute.part
        error = self._error(part) if codec.error_feedback else None
        address = int(error.ctypes.data) if error is not None else 0
        coding = Coding(codec, part.tensor.spec.dtype, part.count, address)
        if part.stage is REDUCING:
            return functools.partial(_encode, self._codecs, coding, compute, error)
        given = part.tensor.contribution.address + part.offset
        return functools.partial(_decode, self._codecs, coding, compute, given, error)

    def _error(self, part: Part) -> npt.NDArray[np.uint8]:
        error = self._errors.get(part)
        if error is None:
            error = self._errors[part] = self._new_buffer(4 * part.count)
            error[:] = 0
        return error

    def forget(self, tensor: Tensor) -> None:
        """No kernel runs on the tensor, nor will."""
        for part in tensor.parts:
            self._errors.pop(part, None)


# Work has the error with it: a kernel may outlive the group of ranks, and all that belongs to it.


def _encode(codecs: Codecs, coding: Coding, compute: Compute, error: object) -> None:
    report = codecs.encode(coding, compute.inputs, compute.outputs[0])
    if compute.part.tensor.spec.is_guarded:
        compute.report = report


def _decode(codecs: Codecs, coding: Coding, compute: Compute, given: int, error: object) -> None:
    codecs.decode(coding, compute.inputs[0], compute.outputs, compute.divisor, given)
