"""What an owner of hosted states says to the server that keeps them, and the same steps made here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from byteps_py.kernels.optimizer_steps import StepSegment, bind_segments
from byteps_py.kernels.update_rules import Hyperparameters, StepKind, step_scalars
from byteps_py.tensors import DType
from byteps_py.wire.data_link import Header, Kind, SegmentNumbers, ShadowPartition, ShadowRecord, ShadowStep
from support.data_plane import Machine, random_values

RUN = 0xFEEDBEEF12345678


class ShadowedStates:
    """The owner's own: ``states`` are stepped here as they are to be on the server."""

    def __init__(self, kind: StepKind, count: int, index: int = 0, key: int = 7, generation: int = 1) -> None:
        self.kind, self.count, self.index, self.key, self.generation = kind, count, index, key, generation
        wide = np.float64 if kind.gradient is DType.FLOAT64 else np.float32
        values = [random_values(DType.FLOAT32, count, seed=index + 10 * i) for i in range(kind.states)]
        self.states: list[np.ndarray] = [
            np.abs(each).astype(wide) if i else each.astype(wide) for i, each in enumerate(values)
        ]
        self.step = 0

    def header(self, kind: Kind, sender: int, round_: int, **facts: Any) -> Header:
        names = {"key": self.key, "generation": self.generation, "index": self.index, "round": round_}
        return Header(kind, sender, epoch=1, **names, **facts)  # type: ignore[arg-type]

    def begin(self, machine: Machine, run: int = RUN, chunk: int = 64 << 10) -> None:
        """Send the states as they are."""
        part = ShadowPartition(
            run=run, name=f"gradients {self.key}", first=self.index * self.count, count=self.count,
            step_kind=self.kind.code, step=self.step,
        )  # fmt: skip
        machine.send(self.header(Kind.SHADOW_BEGIN, machine.index, self.step), part.pack())
        dtype = DType.FLOAT64 if self.states[0].itemsize == 8 else DType.FLOAT32
        for number, state in enumerate(self.states):
            data = state.tobytes()
            for offset in range(0, len(data), chunk):
                piece = data[offset : offset + chunk]
                place = {"segment": number, "offset": offset, "length": len(piece), "dtype": dtype}
                machine.send(self.header(Kind.SHADOW_STATE, machine.index, self.step, **place), piece)

    def give_sum(self, machine: Machine, round_: int, total: bytes) -> None:
        facts = {"dtype": self.kind.gradient, "length": len(total)}
        machine.send(self.header(Kind.SHADOW_SUM, machine.index, round_, **facts), total)

    def make_step(
        self, machine: Machine, round_: int, total: bytes, *, durable: int = 0, divisor: int = 2, run: int = RUN
    ) -> None:
        """Step with ``total`` here, and let the server do so."""
        before, self.step = self.step, self.step + 1
        numbers = Hyperparameters(lr=0.01, momentum=0.9, weight_decay=0.1)
        half = self.count // 2
        segments = [
            StepSegment(range(half), step_scalars(self.kind.rule, numbers, self.step)),
            StepSegment(range(half, self.count), step_scalars(self.kind.rule, numbers, self.step, unscale=0.5)),
        ]
        said = ShadowStep(
            run=run, step=self.step, before=before, durable=durable, divisor=divisor,
            segments=tuple(SegmentNumbers(each.elements.start, each.elements.stop, each.scalars) for each in segments),
        )  # fmt: skip
        machine.send(self.header(Kind.SHADOW_STEP, machine.index, round_), said.pack())
        gradient = np.frombuffer(bytearray(total), np.uint8)
        parameters = np.zeros(self.count * self.kind.parameter.itemsize, np.uint8)
        addresses = [state.ctypes.data for state in self.states]
        bind_segments(self.kind, addresses, [gradient.ctypes.data], [parameters.ctypes.data], divisor)(segments)

    def record(
        self, machine: Machine, size: int = 1, rank: int = 0, durable: int = 0, run: int = RUN, **said: Any
    ) -> None:
        record = ShadowRecord(run=run, step=self.step, durable=durable, rank=rank, size=size, **said)
        header = Header(Kind.SHADOW_RECORD, machine.index, epoch=1, key=run, index=rank, round=self.step)
        machine.send(header, record.pack())

    def attach(self, machine: Machine, attached: bytes, size: int, rank: int = 0, run: int = RUN) -> None:
        """Pieces of what is attached to the record of the latest step."""
        header = Header(Kind.SHADOW_ATTACHED, machine.index, epoch=1, key=run, index=rank, round=self.step)
        for start in range(0, len(attached), size):
            own = dataclasses.replace(header, offset=start, segment_offset=len(attached))
            machine.send(own, attached[start : start + size])


def held(machine: Machine) -> int:
    """The step that the server says it holds."""
    header, text = machine.receive()
    assert header.kind is Kind.SHADOW_HELD, (header, text)
    return header.round


def lacks(machine: Machine) -> tuple[int, str]:
    """The step, and the sentence."""
    header, text = machine.receive()
    assert header.kind is Kind.SHADOW_LACKS, header
    return header.round, text.decode()
