"""Cores that are broken on purpose, as in mutations.py, where ranks keep their places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from byteps_py.scheduler.elastic import Elastic, Open, Reforming

from .elastic_mutations import with_elastic, with_reforming
from .mutations import Mutation
from .parts import Parts


class _NewcomersLast(Reforming):
    def _chosen(self, candidates: Any) -> Any:
        places = {each.id: each.place for each in candidates}
        return sorted(super()._chosen(candidates), key=lambda member: places[member[0]] < 0)


class OrderMachinesThatComeAgainLast(Mutation):
    """Their ranks get other numbers."""

    member_links = with_reforming(_NewcomersLast)


class _Forgets(Reforming):
    def decide(self, candidates: Any, now_s: float) -> Any:
        decision = super().decide(candidates, now_s)
        return replace(decision, is_under_way=False) if isinstance(decision, Open) else decision


class ForgetThatTrainingIsUnderWay(Mutation):
    """Ranks that are started again begin, while the others go on."""

    member_links = with_reforming(_Forgets)


class _EndsWithTheLast(Elastic):
    @property
    def waits_for_all(self) -> bool:
        return False


class EndWithTheLastMachine(Mutation):
    """It would have come again."""

    member_links = with_elastic(_EndsWithTheLast)


class _GoesOnWithFewer(Reforming):
    def decide(self, candidates: Any, now_s: float) -> Any:
        self.min_ranks = 0
        return super().decide(candidates, now_s)


class GoOnWithFewerRanks(Mutation):
    """The next group begins without those who are about to come again."""

    member_links = with_reforming(_GoesOnWithFewer)


#: Each with a seed that shows it.
IN_PLACE_MUTATIONS: dict[type[Parts], int] = {
    OrderMachinesThatComeAgainLast: 6,
    ForgetThatTrainingIsUnderWay: 2,
    EndWithTheLastMachine: 1,
    GoOnWithFewerRanks: 0,
}
