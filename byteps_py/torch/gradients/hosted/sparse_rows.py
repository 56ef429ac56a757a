"""Sparse gradients of a hosted optimizer: a rank steps the touched rows of its piece, and all ranks get them.

    rows of all ranks, gathered and added (sparse_bucket.py) ─► own rows: states in the service's memory, step
                                                                    └─ GATHER new rows ─► parameters of all ranks

The states lie in the service. The rank makes the step itself, with torch's operations, so that the bits are those of
the optimizer on the ranks: it is of few rows, and a pass over a whole piece would read far more. The training thread
calls.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.update_rules import Hyperparameters, Method, UpdateRule
from byteps_py.session import Session
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.gradients.hosted.states import Factors, RowStates
from byteps_py.torch.gradients.sparse_bucket import SparseBucket

_ROOM_BYTES = 4096


class SummedRows:
    """The average of one sparse gradient, which its ``bucket`` has delivered, in a step."""

    def __init__(self, bucket: SparseBucket) -> None:
        self._bucket = bucket
        (self._param,), (self._name,) = bucket.params, bucket.names

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, values) of the average's rows, ascending, on the CPU."""
        grad = self._param.grad
        if grad is None or grad.layout is not torch.sparse_coo:
            raise UsageError(
                f"the gradient of {self._name!r} was replaced between synchronizing and step(): a hosted optimizer "
                "steps with the average that it has put there"
            )
        return grad.indices()[0].cpu(), grad.values().cpu()

    def own(self, session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        """``all`` of this rank's piece."""
        first, last = self._bounds(session)[session.rank]
        indices, values = self.all
        return indices[first:last], values[first:last]

    def _bounds(self, session: Session) -> list[tuple[int, int]]:
        """Which of ``all`` each rank owns: from, to."""
        indices, _ = self.all
        width = math.prod(self._param.shape[1:]) or 1
        pieces = [self._bucket.request.spec.piece(rank, session.size) for rank in range(session.size)]
        edges = torch.tensor([*(start // width for start, _ in pieces), self._param.shape[0]], device="cpu")
        found = torch.searchsorted(indices, edges).tolist()
        return list(itertools.pairwise(found))

    def check_rule(self, rule: UpdateRule, numbers: Hyperparameters) -> None:
        """Raises UsageError if a step of single rows is not defined, as in torch."""
        reason = ""
        if rule.method not in (Method.SGD, Method.ADAGRAD):
            reason = f"{rule.method.name} changes rows without a gradient, too"
        elif rule.momentum:
            reason = "momentum changes rows without a gradient, too"
        elif numbers.weight_decay:
            reason = "weight_decay changes rows without a gradient, too"
        elif self._bucket.dimensions != 1:
            reason = f"it has {self._bucket.dimensions} sparse dimensions, and a hosted one has 1"
        if reason:
            raise UsageError(
                f"hosted=True: the gradient of {self._name!r} is sparse, and {reason}. SGD without momentum and "
                "Adagrad step rows, both without weight_decay; or pass sparse_as_dense=True"
            )

    def step(self, states: RowStates, numbers: Hyperparameters, factors: Factors) -> None:
        """Make the step of this rank's rows, and take those of all ranks. All ranks call it."""
        session, param = states.session, self._param
        indices, _ = self.all
        bounds = self._bounds(session)
        states.steps[0] += 1
        updated = self._updated(states, numbers, factors)
        row_nbytes = math.prod(param.shape[1:]) * param.dtype.itemsize
        lengths = [(last - first) * row_nbytes for first, last in bounds]
        offsets = np.cumsum([0, *lengths]).tolist()
        shape = (_room(lengths[session.rank]), _room(offsets[-1]))
        spec = TensorSpec(f"{self._bucket.request.spec.name}.new rows", DType.UINT8, shape, Op.GATHER)
        (slot,) = session.declare([spec])
        _rows(slot.input, updated.dtype, len(updated), param.shape[1:]).copy_(updated)
        layout = Layout(((0, lengths[session.rank]),), tuple(zip(offsets, lengths, strict=False)))
        session.hand_over(slot, layout=layout)
        session.wait(slot)
        with torch.no_grad():
            rows = _rows(slot.result, param.dtype, len(indices), param.shape[1:])
            param[indices.to(param.device)] = rows.to(param.device)

    def _updated(self, states: RowStates, numbers: Hyperparameters, factors: Factors) -> torch.Tensor:
        """This rank's rows after the step."""
        session, param, rule = states.session, self._param, states.kind.rule
        all_indices, values = self.own(session)
        shape = (-1, *param.shape[1:])
        if not len(all_indices):
            return torch.empty((0, *param.shape[1:]), dtype=param.dtype, device="cpu")
        width = math.prod(param.shape[1:]) or 1
        indices = all_indices - self._bucket.request.spec.piece(session.rank, session.size)[0] // width
        master = states.master.view(shape)
        values = values.to(master.dtype)
        for factor in (factors.unscale, factors.clip):
            if factor != 1.0:
                values = values * factor
        if rule.maximize:
            values = -values
        own, kept = param.detach()[all_indices.to(param.device)].cpu(), master[indices]
        master[indices] = torch.where(kept.to(own.dtype) == own, kept, own.to(kept.dtype))  # the training may change it

        def rows(each: torch.Tensor) -> torch.Tensor:
            return torch.sparse_coo_tensor(
                indices.unsqueeze(0), each, master.shape, is_coalesced=True, check_invariants=False, device="cpu"
            )

        if rule.method is Method.SGD:
            master.add_(rows(values), alpha=-numbers.lr)
        else:  # as torch's Adagrad
            rate = numbers.lr / (1 + (states.steps[0] - 1) * numbers.lr_decay)
            squares = states.moment(0).view(shape)
            squares.add_(rows(values.pow(2)))
            scale = squares.sparse_mask(rows(values))._values().sqrt_().add_(numbers.eps)
            master.add_(rows(values / scale), alpha=-rate)
        return master[indices].to(param.dtype)


def _room(nbytes: int) -> int:
    return max(_ROOM_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)


def _rows(memory: memoryview, dtype: torch.dtype, count: int, shape: torch.Size) -> torch.Tensor:
    elements = count * math.prod(shape)
    if not elements:
        return torch.empty((count, *shape), dtype=dtype, device="cpu")
    octets = torch.from_numpy(np.frombuffer(memory, np.uint8, elements * dtype.itemsize))
    return octets.view(dtype).view(count, *shape)
