"""A rank whose communication service makes its optimizers' steps. Does what HostedStates does.

In a step of the program it hands over all gradients before it waits for anything that needs those of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from byteps_py.errors import StallError
from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.session import Slot
from byteps_py.session.base import HostedShard, ShadowedStep
from byteps_py.wire import rank_link as protocol

from .codecs import Floats
from .hosted_uses import HostedUse, Model
from .ledger import Ledger
from .memory import Wide, square_sum
from .rank import PATIENCE_S, Rank
from .turn import Life, Turn
from .uses import Use
from .world import InvariantError


class HostedRank(Rank):
    """``run``, ``shadowed``: of what other machines keep in step, if they do."""

    ledger: Ledger
    run = 0
    shadowed: ShadowedStep | None = None

    def _go(self, step: list[Use]) -> Life:
        if not hasattr(self, "hosted"):
            self.hosted: dict[str, HostedShard] = {}  # by name of the gradients
            self.given: dict[str, Floats] = {}  # what parameters are, where only changes travel
        rng = self.random
        hosted = [HostedTurn(self, use) for use in step if isinstance(use, HostedUse)]
        rng.shuffle(hosted)
        before = hosted[: rng.randint(0, len(hosted))]
        for turn in before:
            yield from turn.hand_over()
        yield from super()._go([use for use in step if not isinstance(use, HostedUse)])
        for turn in hosted[len(before) :]:
            yield from turn.hand_over()
        for turn in sorted(hosted, key=lambda each: each.name):  # in the same order on all ranks
            yield from turn.begin_with_parameters()
        for phase in (HostedTurn.begin, HostedTurn.measure_update, HostedTurn.apply):
            for turn in rng.sample(hosted, len(hosted)):
                yield from phase(turn)
        yield from self.has_begun_all()
        for turn in rng.sample(hosted, len(hosted)):
            yield from turn.wait()

    def has_begun_all(self) -> Life:
        """All steps of a step of the program."""
        yield from ()

    def host_states(self, model: Model, source: Slot, target: Slot, before: HostedShard | None) -> Life:
        session = self.session
        session.state_host.report_released()
        before_id, request = before.id if before is not None else 0, session._requests + 1
        message = protocol.KeepStates(request, model.kind.code, source.id, target.id, before_id, self.run)
        limit_s = self._settings.stall_limit_s + PATIENCE_S
        due_s = self.world.now_s + limit_s
        self.world.after(limit_s, self, None, self._on_arrival)
        self.world.expect_quiet(limit_s)
        yield from self._ask(
            message,
            protocol.StatesKept,
            lambda: not (source.error is target.error is None) or self.world.now_s >= due_s,
        )
        if self.world.now_s >= due_s:
            raise StallError(f"the states of {source.spec.name!r}: not all ranks have declared it")
        shard = self.hosted[model.name] = session.state_host.host(model.kind, source, target, before, self.run)
        self.ledger.owns(model.name, shard.owners, self.machine, source.spec.is_replicated)

    def measure(self, shard: HostedShard, ranges: list[range]) -> Life:
        said = tuple((each.start, each.stop) for each in ranges)
        message = protocol.MeasureNorm(self.session._requests + 1, shard.id, said)
        yield from self._ask(message, protocol.NormMeasured)
        self.measured = self.session.state_host.square_sum(shard, ranges, 1.0)


class HostedTurn:
    """One use by one rank."""

    def __init__(self, rank: HostedRank, use: HostedUse) -> None:
        self._rank, self._use, self._model = rank, use, use.model
        self._source: Slot
        self._target: Slot
        self._has_begun = self._has_hosted = False
        self._norms: Slot

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def _shard(self) -> HostedShard | None:
        return self._rank.hosted.get(self._model.name)

    @property
    def _is_hosted(self) -> bool:
        """There are states, for these very slots."""
        shard = self._shard
        is_due = self._use.begins and not self._has_hosted
        return shard is not None and not is_due and shard.source is self._source and shard.target is self._target

    # ---- giving ------------------------------------------------------------------------------------------

    def hand_over(self) -> Life:
        """The gradients."""
        rank, model = self._rank, self._model
        if rank.random.random() < 0.5:
            self._source, self._target = yield from rank._declare([model.gradients, model.parameters])
        else:
            (self._source,) = yield from rank._declare([model.gradients])
            yield rank.pause()
            (self._target,) = yield from rank._declare([model.parameters])
        yield from Turn(rank, self._use, self._source).hand_over()
        if self._is_hosted and not self._use.measures and rank.random.random() < 0.5:
            yield rank.pause()
            self._step()

    def begin_with_parameters(self) -> Life:
        """Where changes travel, ranks agree on what these are added to, before any of them begins a step."""
        rank, use, model = self._rank, self._use, self._model
        if not model.is_coded or self._has_begun or self._is_hosted or use.skips:
            return
        yield from self._host()
        if use.begins:
            rank.given[model.name] = model.fresh(use.id).astype(np.float32)
        np.frombuffer(self._target.result, np.float32)[:] = rank.given[model.name]
        there = rank.ledger.begins_with(model.name, use.id, rank.number)
        due = sum(spec is not None for spec in use.specs)
        rank.doing = f"waiting for other ranks' parameters of {model.name}"
        while len(there) < due:
            rank.session.read_available()
            rank.session.check_open()  # ranks that are lost never come
            yield rank.pause()

    def begin(self) -> Life:
        """The step."""
        rank, use = self._rank, self._use
        if self._has_begun:
            return
        if not (self._is_hosted or use.skips):  # a skip needs no states
            yield from self._host()
        shard = self._shard
        if use.measures and shard is not None and self._is_hosted and self._places(shard):
            yield from self._measure(shard)
        yield rank.pause()
        self._step()

    def _measure(self, shard: HostedShard) -> Life:
        """Of what is there of a sum, also between two phases."""
        rank, use, model = self._rank, self._use, self._model
        ranges = [each.elements for each in self._segments(shard)] or [range(sum(map(len, self._places(shard))))]
        rank.doing = f"waiting for a norm of {use.name} (use {use.id})"
        yield from rank.measure(shard, ranges)
        average = np.concatenate([self._of_average(place) for place in self._places(shard)])
        itemsize = model.kind.gradient.itemsize
        due = sum(square_sum(model.kind.gradient, average[r.start * itemsize : r.stop * itemsize]) for r in ranges)
        if not math.isclose(rank.measured, due, rel_tol=1e-9):
            raise InvariantError(f"{rank.name} hears the norm {rank.measured} of use {use.id}, not {due}")

    def measure_update(self) -> Life:
        """Between two phases: the states are this rank's to read, and say what it gives to the norms."""
        rank, use, shard = self._rank, self._use, self._shard
        if not use.has_phases or shard is None:
            return
        if self._places(shard):
            if rank.random.random() < 0.5:
                yield from self._measure(shard)
            else:
                rank.doing = f"waiting for an update of {use.name} (use {use.id})"
                yield from rank.measure(shard, [])
            self._check_states(use.middle)
        if use.norms is not None:
            (self._norms,) = yield from rank._declare([use.norms.spec(rank.number)])
            yield from Turn(rank, use.norms, self._norms).hand_over()

    def apply(self) -> Life:
        """The second phase, once the norms are known."""
        rank, use, shard = self._rank, self._use, self._shard
        if not use.has_phases or shard is None:
            return
        if use.norms is not None:
            yield from Turn(rank, use.norms, self._norms).wait()
        yield rank.pause()
        if use.gives_up:
            rank.session.state_host.skip_step(self._source)
            rank.say(f"gives {use.name} (use {use.id}) up")
            return
        if self._places(shard):
            self._begin_step(shard, use.applied, is_last=True)
        rank.session.hand_over(self._target)
        rank.say(f"applies {use.name} (use {use.id})")

    def _host(self) -> Life:
        rank, use, model = self._rank, self._use, self._model
        before = self._shard
        if use.begins and before is not None:
            rank.session.state_host.release_shard(before)
            before = None
        rank.doing = f"waiting for the states of {model.name}"
        yield from rank.host_states(model, self._source, self._target, before)
        shard, self._has_hosted = self._shard, True
        if use.begins and shard is not None:
            for number, state in enumerate(self._states(shard)):
                self._set(shard, state, model.fresh(use.id) if number == 0 else np.zeros_like(model.fresh(use.id)))

    def _step(self) -> None:
        rank, use, shard = self._rank, self._use, self._shard
        self._has_begun = True
        if use.skips:
            rank.session.state_host.skip_step(self._source)
            rank.say(f"skips {use.name} (use {use.id})")
            return
        if shard is not None and self._places(shard):
            if use.changes:
                self._set(shard, self._states(shard)[0], self._model.fresh(use.id))
            self._begin_step(shard, use.segments, is_last=not use.has_phases)
        if not use.has_phases:
            rank.session.hand_over(self._target)
        rank.say(f"steps {use.name} (use {use.id})")

    def _begin_step(self, shard: HostedShard, segments: tuple[StepSegment, ...], is_last: bool) -> None:
        self._rank.ledger.arms(self._rank.number, self._source.id, self._source.round, is_last)
        rank = self._rank
        rank.session.state_host.begin_step(shard, list(self._own_segments(shard, segments)), is_last, rank.shadowed)

    # ---- elements ----------------------------------------------------------------------------------------

    def _places(self, shard: HostedShard) -> list[range]:
        """The elements that this rank owns, in the order of its states."""
        return [range(first, first + count) for first, count, rank in shard.owners if rank == self._rank.number]

    def _segments(self, shard: HostedShard) -> list[StepSegment]:
        return list(self._own_segments(shard, self._use.segments))

    def _own_segments(self, shard: HostedShard, segments: tuple[StepSegment, ...]) -> Iterator[StepSegment]:
        at = 0
        for place in self._places(shard):
            for segment in segments:
                start, stop = max(place.start, segment.elements.start), min(place.stop, segment.elements.stop)
                if start < stop:
                    yield StepSegment(range(at + start - place.start, at + stop - place.start), segment.scalars)
            at += len(place)

    def _states(self, shard: HostedShard) -> list[Wide]:
        dtype = self._model.fresh(0).dtype
        return [np.frombuffer(state, dtype) for state in shard.states]

    def _set(self, shard: HostedShard, state: Wide, values: Wide) -> None:
        if places := self._places(shard):
            state[:] = np.concatenate([values[place.start : place.stop] for place in places])

    def _of_average(self, place: range) -> Wide:
        itemsize = self._model.kind.gradient.itemsize
        return self._use.average[0][place.start * itemsize : place.stop * itemsize]

    # ---- taking ------------------------------------------------------------------------------------------

    def wait(self) -> Life:
        rank, use, session = self._rank, self._use, self._rank.session
        slots = [self._source, self._target] if use.gives_parameters else [self._source]
        for slot in rank.random.sample(slots, len(slots)):
            rank.doing = f"waiting for {slot.spec.name} (use {use.id})"
            since_s = rank.now_s
            yield lambda slot=slot: session.is_done(slot)  # type: ignore[misc]
            rank.check_waited(since_s)
            session.wait(slot, 1.0)
        self._check_states(use.states)
        if use.gives_parameters:
            self._check_parameters()
        rank.say(f"has got {use.name} (use {use.id})")
        yield rank.pause()

    def _check_states(self, expected: list[bytes]) -> None:
        shard = self._shard
        if shard is None:
            raise AssertionError("nothing is hosted")
        for number, state in enumerate(self._states(shard)):
            whole = np.frombuffer(expected[number], state.dtype)
            due = [whole[place.start : place.stop].tobytes() for place in self._places(shard)]
            if state.tobytes() != b"".join(due):
                raise InvariantError(f"{self._rank.name} has other states after use {self._use.id} than it should")

    def _check_parameters(self) -> None:
        """Of the elements that made a step; the others are not sent."""
        itemsize = self._model.kind.parameter.itemsize
        result = np.frombuffer(self._target.result, np.uint8)
        if self._model.is_coded:
            if result.tobytes() != self._use.parameters[0].tobytes():
                raise InvariantError(f"{self._rank.name} has other parameters after use {self._use.id} than it should")
            self._rank.given[self._model.name] = result.view(np.float32).copy()
            return
        for segment in self._use.segments:
            at = slice(segment.elements.start * itemsize, segment.elements.stop * itemsize)
            if result[at].tobytes() != self._use.parameters[0][at].tobytes():
                raise InvariantError(f"{self._rank.name} got other parameters of use {self._use.id} than it should")
        result[:] = 0x5A  # the user may: it is theirs
