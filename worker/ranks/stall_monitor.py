"""Finds out which tensors local ranks wait for, and whether they can still come. Owned by the loop's thread; time is an
argument.

``StackSampler`` shows what local ranks that keep others waiting are doing, for the log of every machine. Nothing is
asked of a rank's Python, which may be stuck: see stack_dump.py.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterable, Mapping

from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop
from byteps_py.system.stack_dump import SIGNAL
from byteps_py.tensors import FIRST_STEP
from byteps_py.wording import count_text
from byteps_py.worker.core.agreement import Agreement
from byteps_py.worker.core.deadlines import describe_waiting
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.piece_rounds import needs
from byteps_py.worker.core.tensor import RankSlot
from byteps_py.worker.io.network import Network
from byteps_py.worker.io.rank_connection import RankConnection
from byteps_py.worker.ranks.rank_server import RankServer
from byteps_py.worker.ranks.request_handler import RequestHandler

#: A rank that left may have contributed to rounds still under way: others wait this long before they give up.
DEPARTURE_GRACE_S = 1.0
_REMEDY = ": run the same number of steps on every rank, or call join()"
_REMEDY_OF_FIRST_STEP = ": use the same optimizers on every rank, unless those of some ranks have a process_set"


class StallMonitor:
    """``stay``: the service waits for ranks that come back; then a rank has left only when its process has ended.
    ``silence_s()``: after so long a silence a server counts as lost, and others begin to do its work."""

    needs = staticmethod(needs)

    def __init__(
        self,
        requests: RequestHandler,
        agreement: Agreement,
        direct: PieceExchange,
        network: Network | None,
        rank_server: RankServer,
        stay: bool,
        silence_s: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._agreement = agreement
        self._direct = direct
        self._network = network
        self._rank_server = rank_server
        self._stay = stay
        self._silence_s = silence_s
        self._departed: list[tuple[float, str, set[int]]] = []
        self._asked: float | None = None  # when vain() was called last
        self._awake_since = 0.0  # since then this process has had the processor
        self.is_unserved = False  # there is no summation service, and one may yet come

    def departed(self, now: float, sentence: str, ranks: set[int]) -> None:
        """These ranks of other machines have shut down."""
        self._departed.append((now, sentence, ranks))

    def longer_than(self, age_s: float, now: float) -> list[pb.Waiting]:
        """Tensors, and a barrier without a name, that local ranks have waited for longer than ``age_s``."""
        return [waiting for waiting, _ in self._longer_than(age_s, now)]

    def _longer_than(self, age_s: float, now: float) -> list[tuple[pb.Waiting, set[int]]]:
        """With the ranks that they wait for, or some of them."""
        topology = self._requests.topology
        first_rank, all_ranks = topology.first_rank, set(range(topology.size))
        found: list[tuple[pb.Waiting, set[int]]] = []

        def add(name: str, round_: int, slots: list[RankSlot], needed: set[int] | None = None) -> None:
            age = max((now - slot.ready_since for slot in slots), default=0.0)
            if age > age_s:
                ready = [first_rank + slot.local_rank for slot in slots]
                groups = {slot.spec.group for slot in slots}  # while they are not agreed, they may differ
                group = () if () in groups else sorted(set().union(*groups))
                waiting = pb.Waiting(name=name, round=round_, ready_ranks=ready, age_s=age, group=group)
                found.append((waiting, set(group or all_ranks) if needed is None else needed))

        for name, slots in self._agreement.undecided():
            add(name, 0, slots)
        oldest = now - age_s
        for tensor in self._agreement.tensors():  # thousands, of which few are late
            for slot in tensor.slots:
                if slot.ready_bytes >= 0 and slot.ready_since < oldest and slot.waits:
                    add(tensor.name, tensor.round, [slot for slot in tensor.slots if slot.waits])
                    break
        for channel, member in self._direct.members():
            if member.is_waited_for:
                add(channel.spec.name, member.round, [member.slot], self.needs(channel, member))
        for rank in self._requests.executor.ranks.values():
            for wait in rank.direct_waits.values():
                if (age := now - wait.since) > age_s:
                    ready, group = [first_rank + rank.local_rank], wait.group
                    waiting = pb.Waiting(name=wait.name, round=wait.round, ready_ranks=ready, age_s=age, group=group)
                    found.append((waiting, set(group or all_ranks)))
        there, waited_s = self._requests.at_barrier()
        if there and waited_s > age_s:
            found.append((pb.Waiting(ready_ranks=[first_rank + rank for rank in there], age_s=waited_s), all_ranks))
        return found

    @property
    def may_be_vain(self) -> bool:
        """Ranks have shut down, so others may wait for them in vain."""
        return bool(self._departed or self._left)

    def vain(self, now: float) -> tuple[str, bool]:
        """Why ranks wait for others that have shut down, when what these gave before has come to its end; else empty.
        Also whether the other machines may not know. To be called more often than every DEPARTURE_GRACE_S."""
        here = self._requests
        topology = here.topology
        if self._asked is None or now - self._asked > DEPARTURE_GRACE_S:
            # Answers may have come while this process did not run: they are handled after this call.
            self._awake_since = now
        self._asked = now
        left = {rank: since for rank, since in self._left.items() if now - since > DEPARTURE_GRACE_S}
        departed = [each for each in self._departed if now - each[0] > DEPARTURE_GRACE_S]
        if here.joining.here and (left or departed):
            joined = topology.describe_ranks(sorted(here.joining.here))
            leavers = f"{topology.describe_ranks(sorted(left))} shut down" if left else departed[0][1]
            return f"join(): {joined} wait for all others to join, but {leavers}", True
        idle_s = min(here.executor.idle_s(now), now - self._awake_since)
        if not (left or departed) or idle_s < DEPARTURE_GRACE_S or self.is_unserved:
            return "", False
        all_ranks = set(range(topology.size))
        if self._may_be_lost(idle_s) and (here.executor.lacks(all_ranks) or self._direct.keeps_for(all_ranks)):
            return "", False  # what these ranks gave is asked for once more, and what they took said once more
        waits = self._longer_than(DEPARTURE_GRACE_S, now)
        for waiting, needed in sorted(
            waits, key=lambda each: FIRST_STEP not in each[0].name
        ):  # they explain the others
            for _, sentence, ranks in departed:
                if needed & ranks:
                    return f"{describe_waiting(waiting)}, but {sentence}{_remedy(waiting)}", False
            if ours := [rank for rank in left if topology.first_rank + rank in needed]:
                why = f"{describe_waiting(waiting)}, but {topology.describe_ranks(ours)} shut down"
                return f"{why}{_remedy(waiting)}", True
        return "", False

    def _may_be_lost(self, idle_s: float) -> bool:
        """A server: one that is silent, or one that can't be reached (its link has a deadline of its own)."""
        is_whole = self._network is None or self._network.is_whole
        return idle_s < DEPARTURE_GRACE_S + self._silence_s() or not is_whole

    @property
    def _left(self) -> dict[int, float]:
        return self._rank_server.ranks.gone if self._stay else self._rank_server.ranks.left


def _remedy(waiting: pb.Waiting) -> str:
    return _REMEDY_OF_FIRST_STEP if FIRST_STEP in waiting.name else _REMEDY


#: A process that runs writes its stacks within a millisecond; one that does not run at all never does.
_WRITING_S = 0.3
_MAX_BYTES = 8_000


class StackSampler:
    """``ranks``: by local rank, those that are here; ``describe(local rank, pid)``: ``rank 3 (process 47 on a)``;
    ``name_of(slot id)``: of its tensor; ``tell(local rank, text)``: what there is to say."""

    def __init__(
        self,
        loop: EventLoop,
        ranks: Mapping[int, RankConnection],
        describe: Callable[[int, int], str],
        name_of: Callable[[int], str],
        tell: Callable[[int, str], None],
    ) -> None:
        self._loop = loop
        self._ranks = ranks
        self._describe = describe
        self._name_of = name_of
        self._tell = tell

    def sample(self, local_ranks: Iterable[int]) -> None:
        """See to these of the local ranks."""
        for local_rank in local_ranks:
            rank = self._ranks.get(local_rank)
            if rank is None:
                self._tell(local_rank, "has not come to the communication service of its machine, or has left it")
            elif rank.stack_fd < 0:
                self._say(rank, "its Python stack can't be had")
            else:
                try:
                    os.ftruncate(rank.stack_fd, 0)
                    os.lseek(rank.stack_fd, 0, os.SEEK_SET)  # the rank's own position: the description is one
                except OSError:  # it is no file
                    self._say(rank, "its Python stack can't be had")
                    continue
                try:
                    signal.pidfd_send_signal(rank.pidfd, SIGNAL)
                except ProcessLookupError:
                    continue  # its end is about to be reported
                self._loop.call_later(_WRITING_S, functools.partial(self._read, rank))

    def _read(self, rank: RankConnection) -> None:
        if self._ranks.get(rank.local_rank) is not rank:
            return  # it has left meanwhile
        text = os.pread(rank.stack_fd, _MAX_BYTES, 0).decode(errors="replace").rstrip()
        self._say(rank, f"its Python stack:\n{text}" if text else "its process does not run: stopped, or starved")

    def _say(self, rank: RankConnection, what: str) -> None:
        who = self._describe(rank.local_rank, rank.pid)
        if rank.rounds:
            ago_s, name = self._loop.time() - rank.last_done_s, self._name_of(rank.last_slot)
            last = f"has got {count_text(rank.rounds, 'result')}, the last {ago_s:.1f} s ago ({name})"
        else:
            last = "has not got any result yet"
        note = f"{rank.note}\n" if rank.note else ""
        self._tell(rank.local_rank, f"{who} {last}; {note}{what}")
