"""The second phase of LAMB's hosted step: ranks agree on norms of whole parameters, and services make the step.

    services: moments, updates ─► ranks: square sums of their parts ─ exchange ─► trust ratios ─► services: the step

The same bits as bps.optim.LAMB, see torch/optim.py. The training thread calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from byteps_py.kernels.step_segments import StepSegment
from byteps_py.kernels.update_rules import Hyperparameters, apply_scalars
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.gradients.hosted.states import HostedStates, Overlap
from byteps_py.torch.optim import Node, adapts, node_sums, nodes, total, trust_ratio


@dataclass(frozen=True, slots=True)
class UpdatePhase:
    """A bucket whose updates the service computes."""

    name: str
    states: HostedStates
    numbers: Hyperparameters
    participates: Sequence[bool]

    @property
    def adapts(self) -> bool:
        """True if ranks have to agree on norms."""
        return adapts(self.numbers.weight_decay, self.numbers.always_adapt)


def begin_scaled_steps(context: Context, due: Sequence[UpdatePhase]) -> None:
    """Wait for the updates, and begin the steps with them. All ranks call it with the same buckets."""
    exchanges: list[PieceView | None] = []
    for phase in due:
        phase.states.wait_for_update()
        exchanges.append(_send(context, phase) if phase.adapts and context.session.size > 1 else None)
    for phase, view in zip(due, exchanges, strict=True):
        sums: list[float] | None = None
        if view is not None:
            view.wait()
            sums = view.results[0].tolist()
        elif phase.adapts:
            sums = _own_sums(phase)
        ratios = [1.0] * len(phase.participates) if sums is None else _ratios(phase, sums)
        segments = [
            StepSegment(
                range(overlap.place.start, overlap.place.stop),
                apply_scalars(phase.numbers.lr * ratios[overlap.position]),
            )
            for overlap in phase.states.overlaps
            if phase.participates[overlap.position]
        ]
        phase.states.begin_segments(segments, is_last=True)


def _send(context: Context, phase: UpdatePhase) -> PieceView:
    own = torch.tensor(_own_sums(phase), dtype=torch.float64, device="cpu")
    spec = TensorSpec(f"{phase.name}.norms", DType.FLOAT64, (len(own),), Op.SUM)
    (view,) = context.slot_views([TensorRequest(spec, torch.float64, ((len(own),),), own.device)])
    view.contribute([own])
    return view


def _places(states: HostedStates) -> list[tuple[int, Node]]:
    """(position of a parameter, node), of all ranks in order. Each has a place for two sums in what ranks exchange."""
    return [
        (overlap.position, node)
        for overlaps in states.overlaps_of_all
        for overlap in overlaps
        for node in nodes(overlap.inside.start, overlap.inside.stop)
    ]


def _own_sums(phase: UpdatePhase) -> list[float]:
    """The sums of this rank's nodes in their places, of parameters and then of updates; 0 in those of others. So a
    sum over ranks changes no bits."""
    found: dict[tuple[int, Node], tuple[float, float]] = {}
    for overlap in phase.states.overlaps:
        if phase.participates[overlap.position]:
            squares, updates = (_sums(phase.states.master, overlap), _sums(phase.states.update, overlap))
            found |= {(overlap.position, node): (squares[node], updates[node]) for node in squares}
    places = [found.get(place, (0.0, 0.0)) for place in _places(phase.states)]
    return [both[which] for which in (0, 1) for both in places]


def _sums(state: torch.Tensor, overlap: Overlap) -> dict[Node, float]:
    return node_sums(state[overlap.place], overlap.inside.start)


def _ratios(phase: UpdatePhase, sums: Sequence[float]) -> list[float]:
    """The trust ratio of each parameter."""
    places = _places(phase.states)
    sizes = phase.states.sizes
    wholes: list[list[float]] = []
    for first in (0, len(places)):
        by_position: list[dict[Node, float]] = [{} for _ in sizes]
        for number, (position, node) in enumerate(places):
            by_position[position][node] = sums[first + number]
        wholes.append([total(found, size) for found, size in zip(by_position, sizes, strict=True)])
    return [trust_ratio(param, update) for param, update in zip(*wholes, strict=True)]
