"""A rank whose communication service makes its optimizers' steps. Does what HostedStates does.

In a step of the program it hands over all gradients before it waits for anything that needs those of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from byteps_py.kernels.step_segments import StepSegment
from byteps_py.session import Slot
from byteps_py.session.state_host import HostedPart, ShadowedStep
from byteps_py.wire import rank_link as protocol

from .hosted_uses import HostedUse, Model
from .ledger import Ledger
from .memory import Wide, square_sum
from .rank import Rank
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
            self.hosted: dict[str, HostedPart] = {}  # by name of the gradients
        rng = self.random
        hosted = [HostedTurn(self, use) for use in step if isinstance(use, HostedUse)]
        rng.shuffle(hosted)
        before = hosted[: rng.randint(0, len(hosted))]
        for turn in before:
            yield from turn.hand_over()
        yield from super()._go([use for use in step if not isinstance(use, HostedUse)])
        for turn in hosted[len(before) :]:
            yield from turn.hand_over()
        for phase in (HostedTurn.begin, HostedTurn.measure_update, HostedTurn.apply):
            for turn in rng.sample(hosted, len(hosted)):
                yield from phase(turn)
        yield from self.has_begun_all()
        for turn in rng.sample(hosted, len(hosted)):
            yield from turn.wait()

    def has_begun_all(self) -> Life:
        """All steps of a step of the program."""
        yield from ()

    def host_states(self, model: Model, source: Slot, target: Slot, before: HostedPart | None) -> Life:
        session = self.session
        session.state_host.tell_released()
        before_id, request = before.id if before is not None else 0, session._requests + 1
        message = protocol.KeepStates(request, model.kind.code, source.id, target.id, before_id, self.run)
        yield from self._ask(message, protocol.StatesKept, lambda: not (source.error is target.error is None))
        part = self.hosted[model.name] = session.state_host.host(model.kind, source, target, before, self.run)
        self.ledger.owns(model.name, part.owners)

    def measure(self, part: HostedPart, ranges: list[range]) -> Life:
        said = tuple((each.start, each.stop) for each in ranges)
        message = protocol.MeasureNorm(self.session._requests + 1, part.id, said)
        yield from self._ask(message, protocol.NormMeasured)
        self.measured = self.session.state_host.square_sum(part, ranges, 1.0)


class HostedTurn:
    """One use by one rank."""

    def __init__(self, rank: HostedRank, use: HostedUse) -> None:
        self._rank, self._use, self._model = rank, use, use.model
        self._source: Slot
        self._target: Slot
        self._has_begun = self._has_hosted = False
        self._norms: Slot

    @property
    def _part(self) -> HostedPart | None:
        return self._rank.hosted.get(self._model.name)

    @property
    def _is_hosted(self) -> bool:
        """There are states, for these very slots."""
        part = self._part
        is_due = self._use.begins and not self._has_hosted
        return part is not None and not is_due and part.source is self._source and part.target is self._target

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

    def begin(self) -> Life:
        """The step."""
        rank, use = self._rank, self._use
        if self._has_begun:
            return
        if not (self._is_hosted or use.skips):  # a skip needs no states
            yield from self._host()
        part = self._part
        if use.measures and part is not None and self._is_hosted and self._places(part):
            yield from self._measure(part)
        yield rank.pause()
        self._step()

    def _measure(self, part: HostedPart) -> Life:
        """Of what is there of a sum, also between two phases."""
        rank, use, model = self._rank, self._use, self._model
        ranges = [each.elements for each in self._segments(part)] or [range(sum(map(len, self._places(part))))]
        rank.doing = f"waiting for a norm of {use.name} (use {use.id})"
        yield from rank.measure(part, ranges)
        average = np.concatenate([self._of_average(place) for place in self._places(part)])
        itemsize = model.kind.gradient.itemsize
        due = sum(square_sum(model.kind.gradient, average[r.start * itemsize : r.stop * itemsize]) for r in ranges)
        if not math.isclose(rank.measured, due, rel_tol=1e-9):
            raise InvariantError(f"{rank.name} hears the norm {rank.measured} of use {use.id}, not {due}")

    def measure_update(self) -> Life:
        """Between two phases: the states are this rank's to read, and say what it gives to the norms."""
        rank, use, part = self._rank, self._use, self._part
        if not use.has_phases or part is None:
            return
        if self._places(part):
            if rank.random.random() < 0.5:
                yield from self._measure(part)
            else:
                rank.doing = f"waiting for an update of {use.name} (use {use.id})"
                yield from rank.measure(part, [])
            self._check_states(use.middle)
        if use.norms is not None:
            (self._norms,) = yield from rank._declare([use.norms.spec(rank.number)])
            yield from Turn(rank, use.norms, self._norms).hand_over()

    def apply(self) -> Life:
        """The second phase, once the norms are known."""
        rank, use, part = self._rank, self._use, self._part
        if not use.has_phases or part is None:
            return
        if use.norms is not None:
            yield from Turn(rank, use.norms, self._norms).wait()
        yield rank.pause()
        if use.gives_up:
            rank.session.state_host.skip_step(self._source)
            rank.say(f"gives {use.name} (use {use.id}) up")
            return
        if self._places(part):
            self._begin_step(part, use.applied, is_last=True)
        rank.session.hand_over(self._target)
        rank.say(f"applies {use.name} (use {use.id})")

    def _host(self) -> Life:
        rank, use, model = self._rank, self._use, self._model
        before = self._part
        if use.begins and before is not None:
            rank.session.state_host.release_part(before)
            before = None
        rank.doing = f"waiting for the states of {model.name}"
        yield from rank.host_states(model, self._source, self._target, before)
        part, self._has_hosted = self._part, True
        if use.begins and part is not None:
            for number, state in enumerate(self._states(part)):
                self._set(part, state, model.fresh(use.id) if number == 0 else np.zeros_like(model.fresh(use.id)))

    def _step(self) -> None:
        rank, use, part = self._rank, self._use, self._part
        self._has_begun = True
        if use.skips:
            rank.session.state_host.skip_step(self._source)
            rank.say(f"skips {use.name} (use {use.id})")
            return
        if part is not None and self._places(part):
            if use.changes:
                self._set(part, self._states(part)[0], self._model.fresh(use.id))
            self._begin_step(part, use.segments, is_last=not use.has_phases)
        if not use.has_phases:
            rank.session.hand_over(self._target)
        rank.say(f"steps {use.name} (use {use.id})")

    def _begin_step(self, part: HostedPart, segments: tuple[StepSegment, ...], is_last: bool) -> None:
        self._rank.ledger.arms(self._rank.number, self._source.id, self._source.round, is_last)
        rank = self._rank
        rank.session.state_host.begin_step(part, list(self._own_segments(part, segments)), is_last, rank.shadowed)

    # ---- elements ----------------------------------------------------------------------------------------

    def _places(self, part: HostedPart) -> list[range]:
        """The elements that this rank owns, in the order of its states."""
        return [range(first, first + count) for first, count, rank in part.owners if rank == self._rank.number]

    def _segments(self, part: HostedPart) -> list[StepSegment]:
        return list(self._own_segments(part, self._use.segments))

    def _own_segments(self, part: HostedPart, segments: tuple[StepSegment, ...]) -> Iterator[StepSegment]:
        at = 0
        for place in self._places(part):
            for segment in segments:
                start, stop = max(place.start, segment.elements.start), min(place.stop, segment.elements.stop)
                if start < stop:
                    yield StepSegment(range(at + start - place.start, at + stop - place.start), segment.scalars)
            at += len(place)

    def _states(self, part: HostedPart) -> list[Wide]:
        dtype = self._model.fresh(0).dtype
        return [np.frombuffer(state, dtype) for state in part.states]

    def _set(self, part: HostedPart, state: Wide, values: Wide) -> None:
        if places := self._places(part):
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
        part = self._part
        if part is None:
            raise AssertionError("nothing is hosted")
        for number, state in enumerate(self._states(part)):
            whole = np.frombuffer(expected[number], state.dtype)
            due = [whole[place.start : place.stop].tobytes() for place in self._places(part)]
            if state.tobytes() != b"".join(due):
                raise InvariantError(f"{self._rank.name} has other states after use {self._use.id} than it should")

    def _check_parameters(self) -> None:
        """Of the elements that made a step; the others are not sent."""
        itemsize = self._model.kind.parameter.itemsize
        result = np.frombuffer(self._target.result, np.uint8)
        for segment in self._use.segments:
            at = slice(segment.elements.start * itemsize, segment.elements.stop * itemsize)
            if result[at].tobytes() != self._use.parameters[0][at].tobytes():
                raise InvariantError(f"{self._rank.name} got other parameters of use {self._use.id} than it should")
        result[:] = 0x5A  # the user may: it is theirs
