"""Cores that are broken on purpose, as in mutations.py, in ways that show in sums with codecs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from byteps_py.codecs import Coding, encode
from byteps_py.worker.core.tensor import REDUCING
from byteps_py.worker.io.coded_parts import CodedParts
from byteps_py.worker.io.executor import Executor

from .mutations import Mutation
from .parts import Parts


class UpdateTheErrorWhenResent(Mutation):
    """A contribution that has been sent again, to another server, is coded a second time: the error moves on."""

    class executor(Executor):
        class coded_parts_class(CodedParts):
            def bind(self, compute: Any, codec: Any) -> Callable[[], None]:
                work: Any = super().bind(compute, codec)
                part, coding = compute.part, work.args[1]
                if part.stage is REDUCING or not part.is_resent or not coding.error:
                    return work  # type: ignore[no-any-return]
                zeros = np.zeros(4 * part.count, np.uint8)
                code = np.zeros(codec.coded_nbytes(part.count), np.uint8)
                encode(coding, [zeros.ctypes.data], code.ctypes.data)
                return work  # type: ignore[no-any-return]


class DrawAnewWhenResent(Mutation):
    """Not by the round alone."""

    class executor(Executor):
        class coded_parts_class(CodedParts):
            def bind(self, compute: Any, codec: Any) -> Callable[[], None]:
                work: Any = super().bind(compute, codec)
                coding: Coding = work.args[1]
                if compute.part.is_resent:
                    draw = dataclasses.replace(coding.draw, round=coding.draw.round + 1000)
                    anew = dataclasses.replace(coding, draw=draw)
                    return type(work)(work.func, work.args[0], anew, *work.args[2:])  # type: ignore[no-any-return]
                return work  # type: ignore[no-any-return]


class KeepTheErrorOfAnotherTensor(Mutation):
    """What is declared anew goes on with the error of what had its place."""

    class executor(Executor):
        class coded_parts_class(CodedParts):
            def _begin(self, tensor: Any, nbytes: int) -> tuple[object, int]:
                before: Any = self.__dict__.setdefault("before", {})
                tensor.slots[0].is_coded = True
                place = tensor.name, nbytes
                state = before[place] = self._states[tensor] = before.get(place) or super()._begin(tensor, nbytes)
                return state  # type: ignore[no-any-return]


#: Each with a seed that shows it.
CODED_MUTATIONS: dict[type[Parts], int] = {
    UpdateTheErrorWhenResent: 64,
    DrawAnewWhenResent: 110,
    KeepTheErrorOfAnotherTensor: 170,
}
