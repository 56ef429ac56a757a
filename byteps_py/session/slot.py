"""A declared tensor in a training process."""

from __future__ import annotations

from dataclasses import dataclass, field

from byteps_py.tensors import TensorSpec


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """The memory of a declared tensor in this process, and the state of its current round.

    ``inputs``: the buffers for contributions, used in turn; each is a writable view of ``spec.nbytes`` bytes.
    ``result``: a writable view of the result, valid once ``wait`` has returned. ``result`` may be the same memory as an
    input.
    """

    spec: TensorSpec
    inputs: tuple[memoryview, ...]
    result: memoryview
    id: int = 0
    round: int = 0  # rounds handed over so far
    done_round: int = 0  # rounds delivered so far
    begun_bytes: int = 0  # of the next round: handed over in part so far
    chunks: list[int] = field(default_factory=list)  # of the current result: delivered, not yet taken by the caller
    blame: int = 0  # the ranks that made the latest result NaN or infinite, if the spec asks: see blame.py
    error: Exception | None = None

    @property
    def input(self) -> memoryview:
        """The buffer for the next contribution, of ``spec.nbytes`` bytes."""
        return self.inputs[self.round % len(self.inputs)]

    @property
    def pending(self) -> bool:
        """True if a round was handed over and is neither delivered nor failed."""
        return self.error is None and self.done_round < self.round
