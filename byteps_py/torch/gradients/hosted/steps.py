"""The steps of a hosted optimizer: the services make them with the sums of a round, and the ranks take the parameters.

    reducer.finish(): sums are on their way ─► begin(): each is stepped when it is there ─► take()

Ranks make the steps of sparse gradients themselves (SummedRows), and find the trust ratios of LAMB
(``_begin_scaled_steps``). Must not know when a step is made. The training thread calls, or that of a delayed step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from byteps_py.errors import UsageError
from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import Hyperparameters, Method, UpdateRule, apply_scalars
from byteps_py.session import Session
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest, pieces
from byteps_py.torch.gradients.bucket import Bucket
from byteps_py.torch.gradients.hosted.agreement import Factors
from byteps_py.torch.gradients.hosted.delivery import ToOwner
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps, ShadowedTensor
from byteps_py.torch.gradients.hosted.states import BucketStates, HostedStates, Overlap, RowStates, pieces_of
from byteps_py.torch.gradients.hosted.states_mode import WholeModel
from byteps_py.torch.gradients.sparse_bucket import SparseBucket, room
from byteps_py.torch.optim import Node, adapts, node_sums, nodes, total, trust_ratio


@dataclass(frozen=True, slots=True)
class BucketStep:
    """The step of one bucket. ``taking_part``: which of its parameters. Once it has begun, they are to be taken."""

    bucket: Bucket
    states: HostedStates
    numbers: Hyperparameters
    taking_part: tuple[bool, ...]

    def begin(self, factors: Factors, shadow: ShadowedSteps | None) -> None:
        """Have the service begin it. Of LAMB, its first phase. ``shadow``: copies make it, too."""
        self.states.shadowed = shadow.next if shadow is not None else None
        self.states.begin_step(self.numbers, factors, self.taking_part)


class SumSteps:
    """The steps of one optimizer. ``whole``: the model that its parameters belong to."""

    def __init__(self, context: Context, delivery: ToOwner, states: BucketStates, whole: WholeModel) -> None:
        self._context, self._delivery, self.states, self.whole = context, delivery, states, whole

    @property
    def _due(self) -> list[tuple[Bucket, tuple[bool, ...]]]:
        """The buckets whose sums no step has taken, and which parameters take part. Sparse gradients are the last."""
        found = sorted(self.states.buckets, key=lambda bucket: isinstance(bucket, SparseBucket))
        return [(bucket, bucket.due) for bucket in found if bucket.due is not None]

    @property
    def are_due(self) -> bool:
        """True between ``finish`` of the reducer and ``begin``."""
        return bool(self._due)

    def skip(self) -> None:
        """Make no step with the sums. All ranks do so, or none."""
        self._delivery.skip(self.states.buckets)

    def square_sums(self) -> list[float]:
        """The sums of the squares of the averages that this rank owns, for each of the sums of ``whole``: NaN or
        infinite if one of them is. Waits for them."""
        totals = [0.0] * self.whole.sums
        for bucket, taking_part in self._due:
            if isinstance(bucket, SparseBucket):
                values = SummedRows(bucket).own(self._context.session)[1]
                for _, _, number in self.whole.shares(bucket.params[0])[:1]:  # rows of one are not told apart
                    totals[number] += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            elif bucket.slot_view is not None:
                for number, found in enumerate(self.states.hosted(bucket).square_sums(taking_part, self.whole)):
                    totals[number] += found
        return totals

    def begin(self, numbers: Sequence[Hyperparameters], factors: Factors) -> list[BucketStep]:
        """Step with the sums: ``numbers`` of each param_group. Returns when the services know all about the steps."""
        dense: list[BucketStep] = []
        sparse: list[tuple[SummedRows, RowStates, Hyperparameters]] = []
        groups, due = self.states.groups, self._due
        for bucket, taking_part in due:
            group = groups.group_of[bucket.params[0]]
            rule = groups.rule(bucket.params[0])
            if isinstance(bucket, SparseBucket):
                rows = SummedRows(bucket)
                rows.check_rule(rule, numbers[group])
                sparse.append((rows, self.states.rows(bucket), numbers[group]))
                continue
            if bucket.slot_view is None:
                continue  # of an earlier job
            states = self.states.hosted(bucket)
            if states.kind.rule != rule:
                raise UsageError(
                    f"param_groups[{group}] has changed: a hosted optimizer keeps the momentum (or none), amsgrad, "
                    "maximize and nesterov of its first step, and the side of 0.5 on which beta1 was"
                )
            dense.append(BucketStep(bucket, states, numbers[group], taking_part))
        for bucket, _ in due:
            if not isinstance(bucket, SparseBucket):
                bucket.due = None
        for step in dense:  # once nothing is wrong with any of them
            step.begin(factors, self.states.shadow)
        _begin_scaled_steps(self._context, [step for step in dense if step.states.kind.rule.method is Method.LAMB])
        for rows, row_states, its_numbers in sparse:
            rows.step(row_states, its_numbers, factors)
            rows.bucket.due = None
        return dense

    def record(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Have other machines hold what belongs to the step that has begun. Raises UsageError, see ShadowedSteps."""
        if self.states.shadow is not None:
            tensors = [
                ShadowedTensor(
                    bucket.request.spec.name, bucket.names, bucket.params, states.names, states.steps, states.last_step
                )
                for bucket in self.states.buckets
                if (states := self.states.in_services(bucket)) is not None
            ]
            self.states.shadow.record(tensors, groups)

    def take(self, begun: Sequence[BucketStep]) -> None:
        """Take the parameters of steps that have begun."""
        for each in begun:
            each.states.take_parameters(each.taking_part, self._context.mover(each.states.device))

    def bad_gradients(self) -> list[bool]:
        """True for each parameter, bucket by bucket, whose gradient on this rank is NaN or infinite."""
        return [
            param.grad is not None and not nonfinite.is_finite(param.grad)
            for bucket in self.states.buckets
            for param in bucket.params
        ]


# ---- sparse gradients ----------------------------------------------------------------------------------------------
#
#    rows of all ranks, gathered and added (sparse_bucket.py) ─► own rows: states of the rank, step
#                                                                    └─ GATHER new rows ─► parameters of all ranks
#
# The rank makes the step itself, with torch's operations, so that the bits are those of the optimizer on the ranks: it
# is of few rows, and a pass over a whole piece would read far more.


class SummedRows:
    """The average of one sparse gradient, which its ``bucket`` has delivered, in a step."""

    def __init__(self, bucket: SparseBucket) -> None:
        self.bucket = bucket
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
        first, last = self._bounds(session)[self._position(session)]
        indices, values = self.all
        return indices[first:last], values[first:last]

    def _position(self, session: Session) -> int:
        """Of this rank in the group."""
        return self.bucket.request.spec.members(session.size).index(session.rank)

    def _bounds(self, session: Session) -> list[tuple[int, int]]:
        """The rows of ``all`` that each rank of the group owns: from, to."""
        indices, _ = self.all
        width = math.prod(self._param.shape[1:]) or 1
        firsts = [start // width for start, _ in pieces_of(self.bucket.request.spec, session).values()]
        edges = torch.tensor([*firsts, self._param.shape[0]], device="cpu")
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
        elif self.bucket.dimensions != 1:
            reason = f"it has {self.bucket.dimensions} sparse dimensions, and a hosted one has 1"
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
        own_length, source = lengths[self._position(session)], self.bucket.request.spec
        shape = (room(own_length), room(offsets[-1]))
        spec = TensorSpec(f"{source.name}.new rows", DType.UINT8, shape, Op.GATHER, group=source.group)
        (slot,) = session.declare([spec])
        pieces(slot.input, updated.dtype, [updated.shape])[0].copy_(updated)
        layout = Layout(((0, own_length),), tuple(zip(offsets, lengths, strict=False)))
        session.hand_over(slot, layout=layout)
        session.wait(slot)
        with torch.no_grad():
            (rows,) = pieces(slot.result, param.dtype, [(len(indices), *param.shape[1:])])
            param[indices.to(param.device)] = rows.to(param.device)

    def _updated(self, states: RowStates, numbers: Hyperparameters, factors: Factors) -> torch.Tensor:
        """This rank's rows after the step."""
        session, param, rule = states.session, self._param, states.kind.rule
        all_indices, values = self.own(session)
        shape = (-1, *param.shape[1:])
        if not len(all_indices):
            return torch.empty((0, *param.shape[1:]), dtype=param.dtype, device="cpu")
        width = math.prod(param.shape[1:]) or 1
        indices = all_indices - pieces_of(self.bucket.request.spec, session)[session.rank][0] // width
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


# ---- LAMB's second phase -------------------------------------------------------------------------------------------
#
#    services: moments, updates ─► ranks: square sums of their parts ─ exchange ─► trust ratios ─► services: the step
#
# The same bits as bps.optim.LAMB, see torch/optim.py.


def _begin_scaled_steps(context: Context, due: Sequence[BucketStep]) -> None:
    """Wait for the updates, and begin the steps with them. All ranks call it with the same buckets."""
    exchanges: list[PieceView | None] = []
    for step in due:
        step.states.wait_for_update()
        has_others = step.bucket.options.members(context.session.size) > 1
        exchanges.append(_send(context, step) if _adapts(step) and has_others else None)
    for step, view in zip(due, exchanges, strict=True):
        sums: list[float] | None = None
        if view is not None:
            view.wait()
            sums = view.results[0].tolist()
        elif _adapts(step):
            sums = _own_sums(step)
        ratios = [1.0] * len(step.taking_part) if sums is None else _ratios(step, sums)
        segments = [
            StepSegment(
                range(overlap.place.start, overlap.place.stop),
                apply_scalars(step.numbers.lr * ratios[overlap.position]),
            )
            for overlap in step.states.overlaps
            if step.taking_part[overlap.position]
        ]
        step.states.begin_segments(segments, is_last=True)


def _adapts(step: BucketStep) -> bool:
    """True if ranks have to agree on norms."""
    return adapts(step.numbers.weight_decay, step.numbers.always_adapt)


def _send(context: Context, step: BucketStep) -> PieceView:
    own = torch.tensor(_own_sums(step), dtype=torch.float64, device="cpu")
    source = step.bucket.request.spec
    spec = TensorSpec(f"{source.name}.norms", DType.FLOAT64, (len(own),), Op.SUM, group=source.group)
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


def _own_sums(step: BucketStep) -> list[float]:
    """The sums of this rank's nodes in their places, of parameters and then of updates; 0 in those of others. So a
    sum over ranks changes no bits."""
    found: dict[tuple[int, Node], tuple[float, float]] = {}
    for overlap in step.states.overlaps if step.states.gives_to_all else ():
        if step.taking_part[overlap.position]:
            squares, updates = (_sums(step.states.master, overlap), _sums(step.states.update, overlap))
            found |= {(overlap.position, node): (squares[node], updates[node]) for node in squares}
    places = [found.get(place, (0.0, 0.0)) for place in _places(step.states)]
    return [both[which] for which in (0, 1) for both in places]


def _sums(state: torch.Tensor, overlap: Overlap) -> dict[Node, float]:
    return node_sums(state[overlap.place], overlap.inside.start)


def _ratios(step: BucketStep, sums: Sequence[float]) -> list[float]:
    """The trust ratio of each parameter."""
    places = _places(step.states)
    sizes = step.states.sizes
    wholes: list[list[float]] = []
    for first in (0, len(places)):
        by_position: list[dict[Node, float]] = [{} for _ in sizes]
        for number, (position, node) in enumerate(places):
            by_position[position][node] = sums[first + number]
        wholes.append([total(found, size) for found, size in zip(by_position, sizes, strict=True)])
    return [trust_ratio(param, update) for param, update in zip(*wholes, strict=True)]
