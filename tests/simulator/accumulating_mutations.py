"""Cores that are broken on purpose, as in mutations.py, where machines add to values in their own time."""

from __future__ import annotations

import dataclasses
from typing import Any

from byteps_py.server.accumulators import Accumulators
from byteps_py.server.round_state import Accumulator, Merge
from byteps_py.server.rounds import Rounds
from byteps_py.wire.data_link import Header
from byteps_py.worker.core.events import Answered, ClockTold
from byteps_py.worker.core.round_pipeline import RoundPipeline
from byteps_py.worker.core.tensor import AccumulatedPart
from byteps_py.worker.io.executor import Executor

from .mutations import Mutation


def _rounds(kind: type[Accumulators[Any]]) -> type[Rounds[Any]]:
    return type("Rounds", (Rounds,), {"accumulators_class": kind})


class AddWhatIsResent(Mutation):
    """Though it is in the values already."""

    class _Kind(Accumulators[Any]):
        def _merge_next(self, found: Accumulator[Any]) -> Any:
            actions = super()._merge_next(found)
            return [
                dataclasses.replace(each, adds=each.contribution.header.round > 1)
                if isinstance(each, Merge) and each.contribution.header.is_resent
                else each
                for each in actions
            ]

    rounds = _rounds(_Kind)


class WaitForNobody(Mutation):
    """However far ahead a machine is."""

    class _Kind(Accumulators[Any]):
        def _merge_next(self, found: Accumulator[Any]) -> Any:
            before, found.header = found.header, dataclasses.replace(found.header, staleness=1 << 15)
            actions = super()._merge_next(found)
            found.header = before
            return actions

    rounds = _rounds(_Kind)


class WaitForTheJoined(Mutation):
    class _Kind(Accumulators[Any]):
        def _merge_next(self, found: Accumulator[Any]) -> Any:
            before, found.joined = found.joined, set()
            actions = super()._merge_next(found)
            found.joined = before
            return actions

    rounds = _rounds(_Kind)


class ForgetTheJoinedWithAPeer(Mutation):
    """Found by the simulator: a connection ends, and whoever has joined is waited for again."""

    class _Kind(Accumulators[Any]):
        def on_origin_lost(self, origin: object) -> None:
            super().on_origin_lost(origin)
            for found in self._all():
                if not (found.given or found.clocks or found.has_served):
                    found.joined.clear()

    rounds = _rounds(_Kind)


class LoadAnyCopy(Mutation):
    """Not the newest."""

    class _Kind(Accumulators[Any]):
        def _gather(self, found: Accumulator[Any], now: float) -> Any:
            actions = super()._gather(found, now)
            if found.source >= 0 and found.working is None:
                found.source = min(found.clocks, key=lambda machine: sum(found.clocks[machine]))
                if not any(found.clocks[found.source]):
                    found.source = max(found.clocks, key=lambda machine: sum(found.clocks[machine]))
                actions = [dataclasses.replace(each, machines=(found.source,)) for each in actions]
            return actions

    rounds = _rounds(_Kind)


class TakeAnswersOfBefore(Mutation):
    """A machine that takes what a server answers in an epoch that is over."""

    class executor(Executor):
        def _answered_early(self, part: AccumulatedPart, header: Header, frame: Any, server: int) -> bool:
            if self.network is not None and header.epoch != self.network.epoch and frame is not None:
                header.epoch, server = self.network.epoch, part.server
            return super()._answered_early(part, header, frame, server)


class KeepNoCopy(Mutation):
    """A machine has its answer only where the user may write."""

    class pipeline(RoundPipeline):
        def _answered(self, event: Answered, now: float) -> Any:
            actions = super()._answered(event, now)
            if isinstance(event.part, AccumulatedPart):
                outputs = event.part.tensor.results(event.part.offset)
                return [
                    dataclasses.replace(each, outputs=outputs) if getattr(each, "outputs", ()) else each
                    for each in actions
                ]
            return actions


class TellTheClockOfTheNextCopy(Mutation):
    """Before it has that copy."""

    class pipeline(RoundPipeline):
        def _clock_told(self, event: ClockTold, now: float) -> Any:
            actions = super()._clock_told(event, now)
            event.part.clock = event.clock
            return actions


class AskOnlyOnce(Mutation):
    """For clocks and copies, which may get lost."""

    class _Kind(Accumulators[Any]):
        def tick(self, now: float) -> Any:
            actions = super().tick(now)
            for found in self._wanting:
                found.want_at = max(found.want_at, now + 1e9 * bool(actions))
            return actions

    rounds = _rounds(_Kind)


class WaitForOneLess(Mutation):
    """Than the quorum."""

    class _Kind(Accumulators[Any]):
        def _advance(self, found: Accumulator[Any], now: float) -> Any:
            before = found.header
            found.header = dataclasses.replace(before, quorum=max(before.quorum - 1, min(before.quorum, 1)))
            actions = super()._advance(found, now)
            found.header = before
            return actions

    rounds = _rounds(_Kind)


class LetWavesStayOpen(Mutation):
    """A machine that was answered in a wave still counts as one that is to be answered."""

    class _Kind(Accumulators[Any]):
        def merged(self, merge: Merge[Any], error: BaseException | None, now: float) -> Any:
            found = merge.accumulator
            before = set(found.waves.open)
            actions = super().merged(merge, error, now)
            found.waves.open |= before
            return actions

    rounds = _rounds(_Kind)


#: With a seed of an AccumulatingOutageCluster that shows it.
ACCUMULATING_MUTATIONS: dict[type[Mutation], int] = {
    AddWhatIsResent: 34,
    WaitForNobody: 3,
    WaitForTheJoined: 3,
    ForgetTheJoinedWithAPeer: 194,
    LoadAnyCopy: 26,
    TakeAnswersOfBefore: 1230,
    KeepNoCopy: 26,
    TellTheClockOfTheNextCopy: 51,
    AskOnlyOnce: 20,
    WaitForOneLess: 173,
    LetWavesStayOpen: 28,
}
