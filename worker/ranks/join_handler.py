"""Ranks that have no more data: what this machine does without them, and when all of them start anew.

A local rank that joins is left out from the next round on: of local sums, of votes, of barriers. Where it was the last
one of this machine in a tensor's group, the machine tells the servers round by round that it contributes nothing (see
RoundPipeline), so that it is never in doubt which ranks take part in a round, whatever news comes first. Rounds do
without the rank only once the scheduler knows: else another rank, which such a round lets go on and join, might be
heard first by the scheduler, and the wrong rank be told as the last one. What can't do without a rank (a broadcast)
ends after the last round that the rank takes part in, which its machine tells all.

Once all ranks have joined, every machine drops all names: rounds have not been the same everywhere. Owned by the loop's
thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from byteps_py.errors import BytePSError, JoinedError, PeerLostError, ProtocolError, UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import TensorSpec, unsupported
from byteps_py.wire import rank_link as protocol
from byteps_py.worker.core.agreement import Agreement, fail_all
from byteps_py.worker.core.events import AllRanksJoined, Fail, LocalRankJoined, RankJoined, Release, SlotJoined
from byteps_py.worker.core.piece_exchange import PieceExchange
from byteps_py.worker.core.tensor import RankSlot, Tensor
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.executor import Executor
from byteps_py.worker.io.rank_connection import RankConnection


class JoinHandler:
    """``_out``: those of the local ranks that have joined of which the scheduler has told all machines.
    ``everywhere``: global ranks of all machines that have joined, as it has told."""

    def __init__(
        self,
        topology: Topology,
        agreement: Agreement,
        direct: PieceExchange,
        executor: Executor,
        send: Callable[[pb.MemberMessage], None],
        fail: Callable[[BytePSError], None],
    ) -> None:
        self._out: set[int] = set()
        self.everywhere: list[int] = []
        self._topology = topology
        self._agreement = agreement
        self._direct = direct
        self._executor = executor
        self._send = send
        self._fail = fail
        self._lost: BytePSError | None = None
        self._void: list[RankSlot] = []  # direct ones, into which a copy may yet be under way

    @property
    def here(self) -> set[int]:
        """The local ranks that have joined."""
        return self._agreement.joined

    def join(self, rank: RankConnection) -> None:
        """A local rank has no more data. Raises ProtocolError if it said so before."""
        if rank.local_rank in self.here:
            raise ProtocolError(f"local rank {rank.local_rank} joined twice")
        ballots = self._agreement.handle(LocalRankJoined(rank.local_rank))
        if self._lost is not None:
            self.scheduler_lost(self._lost)
            return
        slots = [s for t in self._agreement.tensors() for s in t.slots if s.local_rank == rank.local_rank]
        self._tell(rank.local_rank, slots)  # before any ballot that lacks its vote
        self._executor.run(ballots)
        if len(self.here) == self._topology.local_size:
            self._executor.after_run = self._check_idle
            self._check_idle()

    def scheduler_lost(self, error: BytePSError) -> None:
        """The scheduler will not say any more which ranks have joined."""
        self._lost = error
        if self.here:
            self._fail(PeerLostError(f"join() needs the scheduler, but {error}"))

    def agreed(self, tensor: Tensor) -> None:
        """A tensor has begun its life, perhaps with ranks that have joined since they declared it."""
        if not self.here:
            return
        if tensor.spec.needs_all:
            for slot in [slot for slot in tensor.slots if slot.local_rank in self.here]:
                self._tell(slot.local_rank, [slot])
        else:
            self._leave_out(self._out, [tensor])

    def _leave_out(self, local_ranks: set[int], tensors: Iterable[Tensor]) -> None:
        slots = [slot for tensor in tensors for slot in tensor.slots if slot.local_rank in local_ranks]
        for slot in slots:
            if not slot.spec.needs_all:
                self._executor.handle(SlotJoined(slot))

    def _tell(self, local_rank: int, slots: Iterable[RankSlot]) -> None:
        """Tell all machines that a rank has joined, and in which rounds it took part last."""
        last = [
            pb.LastRound(
                name=slot.tensor.name,
                generation=slot.tensor.generation,
                round=slot.begun,
            )
            for slot in slots
            if slot.tensor is not None and slot.spec.needs_all
        ]
        members = self._direct.members(local_rank)
        last += [pb.LastRound(name=channel.spec.name, round=member.round) for channel, member in members]
        self._send(pb.MemberMessage(join=pb.Join(rank=self._topology.first_rank + local_rank, last=last)))

    def on_join(self, join: pb.Join) -> None:
        """A rank of any machine has joined."""
        last = {(each.name, each.generation): each.round for each in join.last}
        ended = self._agreement.handle(RankJoined(join.rank, last))
        if join.rank not in self.everywhere:
            self.everywhere.append(join.rank)
        for channel, member in self._direct.members():
            if member.is_open and (error := self.objection(channel.spec, member.round)) is not None:
                self._direct.abandon(member)
                self._executor.run([Fail((member.slot,), error)])
        self._executor.run(ended)
        new = self.here.intersection([join.rank - self._topology.first_rank]) - self._out
        self._out |= new
        self._leave_out(new, self._agreement.tensors())

    def objection(self, spec: TensorSpec, round_: int) -> JoinedError | None:
        """Why a round of a gather or an exchange can't be; None if it can."""
        members = spec.members(self._topology.size)
        joined = [rank for rank in self.everywhere if rank in members]
        absent = [rank for rank in joined if round_ > self._agreement.last_round(spec.name, rank)]
        return JoinedError(unsupported(spec, absent)) if absent else None

    def _check_idle(self) -> None:
        """Tell the scheduler once no rank waits for what it had handed over before it joined."""
        direct = any(member.is_waited_for for _, member in self._direct.members())
        if not direct and not self._agreement.is_awaited():
            self._executor.after_run = None
            round_ = max((member.round for _, member in self._direct.members()), default=0)
            self._send(pb.MemberMessage(idle=pb.Idle(direct_round=round_)))

    def all_joined(self, last: int, direct_round: int) -> None:
        """Every rank has joined, rank ``last`` as the last one: all goes on, with nothing declared."""
        self._out.clear()
        self.everywhere.clear()
        error = UsageError("tensor declared before all ranks joined (join()): declare it again")
        void = self._direct.start_anew(direct_round)
        actions = self._agreement.handle(AllRanksJoined(error))
        self._executor.run([*actions, Release(self._idle_since_before()), *fail_all(void, error)])
        self._void += void
        for rank in self._executor.ranks.values():
            with contextlib.suppress(PeerLostError):  # it is found out by its own connection
                rank.send(protocol.AllJoined(last))

    def _idle_since_before(self) -> tuple[RankSlot, ...]:
        """Slots void since ranks joined the time before, to be given back; not while one is copied to, for a round that
        was abandoned in the middle."""
        if any(slot.copies for slot in self._void):
            return ()
        void, self._void = self._void, []
        return tuple(void)
