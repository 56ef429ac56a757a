"""Spans of a simulated training with a mesh of four dimensions, vectorised over its ranks, with causes of slowness.

Each step: the forward passes of all micro-batches, then the backward passes. A stage receives its input, computes, has
one collective over the context group and one over the tensor group (or, without both, over the data-parallel group, as
if parameters were gathered), and sends its output. A step ends with a sum over the data-parallel group. Each rank has a
clock of its own. A forward pass takes 1 s, a backward pass 2 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from byteps_py.tools.slow_rank import COMPUTES, DATA, LINK, LINK_IN, LINK_OUT, PAUSES
from byteps_py.tools.spans import SpanGroup, Spans

CAUSES = (COMPUTES, DATA, PAUSES, LINK, LINK_OUT, LINK_IN)
OPERATIONS = ("all_gather", "all_reduce", "reduce_scatter", "send", "recv")
GATHER, REDUCE, SCATTER, SEND, RECV = range(len(OPERATIONS))
MESSAGE_S, INSIDE_S, ACROSS_S, SUM_S = 0.05, 0.02, 0.05, 0.3
_DELAY_S = 1e-3  # until a program goes on

Times = npt.NDArray[np.float64]
Mesh = tuple[int, int, int, int]  # dp, pp, cp, tp


@dataclass(frozen=True, slots=True)
class Cause:
    """``factor``: of compute, or of transfers. ``share``: of a step's compute, that a rank waits or pauses. ``often``:
    the share of steps with a pause."""

    reason: str
    rank: int
    factor: float = 2.0
    share: float = 0.3
    often: float = 0.4


@dataclass(frozen=True, slots=True)
class Training:
    """``uneven``: how much passes differ with their data, as a deviation of the logarithm; ``noise``: how much all
    times do."""

    mesh: Mesh
    steps: int = 10
    micro_batches: int = 2
    noise: float = 0.02
    uneven: float = 0.0
    seed: int = 0
    causes: tuple[Cause, ...] = ()


class _Simulation:
    def __init__(self, training: Training) -> None:
        self.training, self.shape = training, training.mesh
        self.random = np.random.default_rng(training.seed)
        self.rank_of = np.arange(int(np.prod(self.shape))).reshape(self.shape)
        self.groups: list[SpanGroup] = []
        self.columns: list[list[Times]] = []
        self.of_dp, of_cp, of_tp = (self.add_groups(name, axis) for name, axis in (("dp", 0), ("cp", 2), ("tp", 3)))
        cp, tp = self.shape[2:]
        self.inner = [(of_cp, 1, GATHER, ACROSS_S)] * (cp > 1) + [(of_tp, 2, REDUCE, INSIDE_S)] * (tp > 1)
        self.inner = self.inner or [(self.of_dp, 0, GATHER, ACROSS_S)]
        self.pairs = self.add_pairs()
        self.compute, self.outgoing, self.incoming = (np.ones(self.shape) for _ in range(3))
        self.data_s = np.zeros(self.shape)
        self.pauses: dict[tuple[int, ...], tuple[float, set[int]]] = {}
        for cause in training.causes:
            self.add_cause(cause)
        self.link = np.maximum(self.outgoing, self.incoming)
        self.clock = np.zeros(self.shape)
        self.offset = self.random.uniform(-1e3, 1e3, self.shape)
        self.sent: dict[int, Times] = {}  # by stage: when its output was ready

    def add_groups(self, dimension: str, axis: int) -> npt.NDArray[np.int64]:
        """The number of each rank's group."""
        of = np.empty(self.rank_of.size, np.int64)
        for members in np.moveaxis(self.rank_of, axis, -1).reshape(-1, self.shape[axis]):
            of[members] = len(self.groups)
            self.groups.append(SpanGroup(f"{dimension}{len(self.groups)}", dimension, tuple(members.tolist())))
        return of.reshape(self.shape)

    def add_pairs(self) -> npt.NDArray[np.int64]:
        """Numbers of the groups of two neighbouring stages."""
        dp, pp, cp, tp = self.shape
        first = len(self.groups)
        for stage in range(pp - 1):
            for one, other in zip(self.rank_of[:, stage].ravel(), self.rank_of[:, stage + 1].ravel(), strict=True):
                self.groups.append(SpanGroup(f"pp{len(self.groups)}", "pp", (int(one), int(other))))
        return np.arange(first, len(self.groups)).reshape(pp - 1, dp, cp, tp)

    def add_cause(self, cause: Cause) -> None:
        place = tuple(int(at) for at in np.unravel_index(cause.rank, self.shape))
        whole_s = 3.0 * self.training.micro_batches
        if cause.reason == COMPUTES:
            self.compute[place] = cause.factor
        elif cause.reason == DATA:
            self.data_s[place] = cause.share * whole_s
        elif cause.reason == PAUSES:
            steps = self.training.steps
            which = self.random.choice(steps, min(steps, max(4, round(cause.often * steps))), replace=False)
            self.pauses[place] = (cause.share * whole_s, set(which.tolist()))
        if cause.reason in (LINK, LINK_OUT):
            self.outgoing[place] = cause.factor
        if cause.reason in (LINK, LINK_IN):
            self.incoming[place] = cause.factor

    def noise(self, shape: tuple[int, ...]) -> Times:
        return np.exp(self.training.noise * self.random.standard_normal(shape))

    def record(
        self, step: int, group: object, at: object, number: int, operation: int, start: Times, end: Times
    ) -> None:
        """``at``: index of the ranks in the mesh."""
        shape = np.shape(start)
        offset = self.offset[at]  # type: ignore[index]
        values = (step, group, self.rank_of[at], number, operation, start + offset, end + offset)  # type: ignore[index]
        self.columns.append([np.broadcast_to(np.asarray(value, float), shape).ravel() for value in values])

    def collective(self, axis: int, came: Times, takes_s: float, link: Times) -> Times:
        """When its ranks go on."""
        size = tuple(1 if at == axis else n for at, n in enumerate(came.shape))
        slowest = link.max(axis=axis, keepdims=True)
        until = came.max(axis=axis, keepdims=True) + takes_s * slowest * self.noise(size)
        return until + _DELAY_S * self.noise(came.shape)

    def step(self, step: int) -> None:
        training, (dp, pp, cp, tp) = self.training, self.shape
        load = np.exp(training.uneven * self.random.standard_normal((training.micro_batches, dp, cp, 1)))
        self.clock = self.clock + (0.05 + self.data_s) * self.noise(self.shape)
        pausing = {
            place: (self.random.integers(training.micro_batches), self.random.integers(2)) for place in self.pauses
        }
        for backward in (0, 1):
            for micro in range(training.micro_batches):
                number = (step * 2 + backward) * training.micro_batches + micro
                for stage in reversed(range(pp)) if backward else range(pp):
                    if 0 <= (before := stage + (1 if backward else -1)) < pp:
                        self.message(step, before, stage, number)
                    extra = np.zeros((dp, cp, tp))
                    for place, (often_s, steps) in self.pauses.items():
                        if step in steps and place[1] == stage and pausing[place] == (micro, backward):
                            extra[place[0], place[2], place[3]] = often_s
                    work = (1.0 + backward) * load[micro] * self.compute[:, stage]
                    self.one_pass(step, stage, number, work, extra)
        if dp > 1:
            ends = self.collective(0, self.clock, SUM_S, self.link)
            self.record(step, self.of_dp, np.s_[:], 2 * number + 1, SCATTER, self.clock, ends)
            self.clock = ends

    def message(self, step: int, sender: int, receiver: int, number: int) -> None:
        at, now = self.sent[sender], self.clock[:, receiver]
        takes = MESSAGE_S * self.noise(now.shape) * np.maximum(self.outgoing[:, sender], self.incoming[:, receiver])
        ends = np.maximum(at, now) + takes
        pair = self.pairs[min(sender, receiver)]
        self.record(step, pair, np.s_[:, sender], number, SEND, at, ends)
        self.record(step, pair, np.s_[:, receiver], number, RECV, now, ends)
        self.clock[:, receiver] = ends

    def one_pass(self, step: int, stage: int, number: int, work: Times, extra: Times) -> None:
        now = self.clock[:, stage] + extra
        for of, axis, operation, takes_s in self.inner:
            now = now + work / len(self.inner) * self.noise(now.shape)
            link = np.ones(now.shape) if operation == REDUCE else self.link[:, stage]  # tensor groups: in a machine
            ends = self.collective(axis, now, takes_s, link)
            self.record(step, of[:, stage], np.s_[:, stage], 2 * number, operation, now, ends)
            now = ends
        self.sent[stage] = now
        self.clock[:, stage] = now


def simulate(training: Training) -> Spans:
    """The same seed gives the same spans."""
    simulation = _Simulation(training)
    for step in range(training.steps):
        simulation.step(step)
    step_, group, rank, sequence, operation, started_s, ended_s = (
        np.concatenate(parts) for parts in zip(*simulation.columns, strict=True)
    )
    numbers = [column.astype(np.int64) for column in (step_, group, rank, sequence, operation)]
    hosts = {rank: f"host{rank // training.mesh[3]}" for rank in range(simulation.rank_of.size)}
    size = np.full(len(rank), 1 << 20)
    return Spans(simulation.groups, OPERATIONS, *numbers, size, started_s, started_s, ended_s, hosts)


def step_s(spans: Spans) -> float:
    """The mean step of the first rank."""
    mine = spans.rank == spans.rank[0]
    return float((spans.ended_s[mine].max() - spans.started_s[mine].min()) / (spans.step.max() + 1))


def random_training(
    random: np.random.Generator, reason: str | None, uneven: float = 0.15, most: int = 256
) -> tuple[Training, float]:
    """A training whose rank has this cause, and the share of a step that it costs: 0.05 or more. None: no cause.
    ``most``: ranks; the mesh is random, and of 4,096 and more it is that of all of them."""
    while True:
        mesh = tuple(int(random.choice(sizes)) for sizes in ((2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 4, 8)))
        mesh = (most // 512, 8, 8, 8) if most >= 4096 else mesh
        ranks = int(np.prod(mesh))
        # Which rank's link it is, is seen where it communicates in several dimensions.
        if not 8 <= ranks <= most or (reason in (LINK, LINK_OUT, LINK_IN) and mesh[1] == 1):
            continue
        rank = int(random.integers(ranks))
        if reason == DATA:  # the first stage reads it
            place = list(np.unravel_index(rank, mesh))
            rank = int(np.ravel_multi_index((place[0], 0, *place[2:]), mesh))
        factor = float(random.uniform(1.3, 3) if reason == COMPUTES else random.uniform(3, 10))
        cause = Cause(reason or "", rank, factor, float(random.uniform(0.2, 0.6)), float(random.uniform(0.3, 0.6)))
        training = Training(
            (mesh[0], mesh[1], mesh[2], mesh[3]),
            int(random.integers(8, 25)) if most < 4096 else 6,
            int(random.integers(1, 5)) if most < 4096 else 2,
            uneven=float(random.uniform(0, uneven)) * int(random.integers(2)),
            seed=int(random.integers(1 << 30)),
            causes=(cause,) if reason else (),
        )
        if reason is None:
            return training, 0.0
        from dataclasses import replace

        price = 1 - step_s(simulate(replace(training, causes=()))) / step_s(simulate(training))
        if price >= 0.05:
            return training, price
