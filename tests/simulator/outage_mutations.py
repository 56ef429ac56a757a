"""Cores that are broken on purpose, as in mutations.py, in ways that show where networks fail."""

from __future__ import annotations

from typing import Any

from byteps_py.failure_detector import FailureDetector
from byteps_py.scheduler.core import SchedulerCore
from byteps_py.scheduler.health import LivenessMonitor
from byteps_py.scheduler.member_links.links import MemberLinks
from byteps_py.worker.core.deadlines import FailureSuspicions
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.scatter import ScatterPart
from byteps_py.worker.core.tensor import Part, Stage
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.ranks.rank_server import RankServer
from byteps_py.worker.ranks.stall_monitor import StallMonitor

from .mutations import Mutation
from .parts import Parts


class CountOnNobodyWhoHasYetToAsk(Mutation):
    """What other machines have not asked for can't be lost on the way."""

    class executor(Executor):
        @staticmethod
        def _is_due(part: Part) -> bool:
            if isinstance(part, ScatterPart):
                return part.stage is Stage.IN_FLIGHT and bool(part.missing)
            return Executor._is_due(part)


class BlameWhoeverHasLeft(Mutation):
    """For what others have yet to take."""

    class waits(StallMonitor):
        @staticmethod
        def needs(channel: Any, member: Any) -> set[int]:
            return set(channel.ranks)

    class direct(PieceExchange):
        def keeps_for(self, gone: set[int]) -> bool:
            return False


class BelieveEveryAccusation(Mutation):
    """A machine that reaches nobody takes the others' servers away."""

    class suspicions(FailureSuspicions):
        def is_sure(self, member_id: int, now: float) -> bool:
            return True


class TakeWhoShutsDownLateForDone(Mutation):
    """All ranks shut down, to initialize again, and one hears only afterwards that another has gone back."""

    class rank_server(RankServer):
        def _returning_shut_down(self, *given: Any) -> Any:
            return self._returning_ended(*given)


class ForgetWhoWasLate(Mutation):
    """One timeout for all, as if no machine were ever busy."""

    class member_links(MemberLinks):
        class core_class(SchedulerCore):
            class liveness_class(LivenessMonitor):
                class detector_class(FailureDetector):
                    def on_heartbeat(self, after_s: float) -> None:
                        pass


#: Each with a seed that shows it.
OUTAGE_MUTATIONS: dict[type[Parts], int] = {
    CountOnNobodyWhoHasYetToAsk: 3400,
    BlameWhoeverHasLeft: 3660,
}
ELASTIC_OUTAGE_MUTATIONS: dict[type[Parts], int] = {
    BelieveEveryAccusation: 616,
    TakeWhoShutsDownLateForDone: 5176,
}
BUSY_MUTATIONS: dict[type[Parts], int] = {
    ForgetWhoWasLate: 15,
}
