"""A large tensor that other machines wait for is handed over while it is being copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.movers import HostMover
from byteps_py.wire.chunks import CHUNK_BYTES, TensorChunks

ROWS, WIDTH = 7, CHUNK_BYTES // 4
SIZE = 2


class Session:
    """Notes what of the slot is there at each hand-over."""

    size = SIZE

    def __init__(self, num_machines: int, spec: TensorSpec, view: torch.Tensor, wanted: torch.Tensor) -> None:
        self.num_machines = num_machines
        self.told: list[int | None] = []
        self._chunks = list(TensorChunks(spec, SIZE))
        self._view, self._wanted = view.view(-1), wanted.reshape(-1)

    def hand_over(self, slot: Any, nbytes: int | None = None, layout: object = None) -> None:
        self.told.append(nbytes)
        left = slot.spec.nbytes if nbytes is None else nbytes
        for offset, length in self._chunks:
            if left > 0:
                span = slice(offset // 4, (offset + length) // 4)
                assert torch.equal(self._view[span], self._wanted[span])
                left -= length
        assert left <= 0


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_in_chunks(scatters: bool, given: bool) -> None:
    spec = TensorSpec("g", DType.FLOAT32, (ROWS, WIDTH), scatters=scatters)
    view = torch.full((ROWS, WIDTH), 7.0)
    tensor = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH) if given else None  # sent as float32
    session = Session(2, spec, view, torch.zeros(ROWS, WIDTH) if tensor is None else tensor.float())
    HostMover().send(session, SimpleNamespace(spec=spec), [view], [tensor])
    assert len(session.told) == ROWS
    assert session.told[-1] == spec.nbytes


@pytest.mark.parametrize("why", ["one machine", "small", "a broadcast", "it lies there", "not as it lies"])
def test_as_a_whole(why: str) -> None:
    rows = 1 if why == "small" else ROWS
    broadcast = {"op": Op.BROADCAST, "root": 0} if why == "a broadcast" else {}
    spec = TensorSpec("g", DType.FLOAT32, (rows, WIDTH), **broadcast)
    view = torch.zeros(rows, WIDTH)
    tensor = torch.ones(rows, WIDTH)
    if why == "it lies there":
        tensor = view
    if why == "not as it lies":
        tensor = torch.ones(WIDTH, rows).t()
    session = Session(1 if why == "one machine" else 2, spec, view, tensor)
    HostMover().send(session, SimpleNamespace(spec=spec), [view], [tensor])
    assert session.told == [None]
