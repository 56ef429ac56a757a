"""Does what the pure core asks: kernels, messages, memory. Owned by the loop's thread.

Kernels run on the pool's threads, except those that would be done here before the thread pool and back: small
ones, and on a machine alone the last piece of a tensor, whose end the loop would only wait for.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import zmq

from byteps_py.arrivals import ArrivalLog, LoggedChange
from byteps_py.errors import BytePSError, PeerLostError, ProtocolError, UsageError, from_name
from byteps_py.kernels.readiness import Pair, Readiness
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.shm import Block
from byteps_py.system.stage_recorder import EXCHANGE, LOCAL_BROADCAST, LOCAL_REDUCE, OPTIMIZER_STEP, StageRecorder
from byteps_py.tensors import Checks, Op, TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import Header, Kind, unpack_changes, unpack_clock, unpack_names
from byteps_py.worker.core.events import (
    Action,
    Answered,
    BeginTensor,
    ClockTold,
    Computed,
    CopyWanted,
    DirectAction,
    Fail,
    Lend,
    MessagesLost,
    Push,
    Release,
    ResultWanted,
    RoundDone,
    RoundEvent,
    RoundsAwaited,
    SendBallot,
    ServersChanged,
    Show,
    StepEnded,
    Supply,
    TellClock,
    TensorAgreed,
    TensorEnded,
    TensorForgotten,
    TensorVoid,
    Withdraw,
)
from byteps_py.worker.core.hosted_steps import AllSummed, Forget, MakeStep, OwnedPart, SumForOwner
from byteps_py.worker.core.owners import OwnedPiece
from byteps_py.worker.core.pace import RankPace
from byteps_py.worker.core.tensor import (
    DELIVERING,
    IN_FLIGHT,
    QUEUED,
    REDUCING,
    AccumulatedPart,
    Compute,
    Part,
    RankSlot,
    ScatterPart,
    Tensor,
    TensorState,
)
from byteps_py.worker.io.coded_parts import CodedParts
from byteps_py.worker.io.network import Network
from byteps_py.worker.io.nonfinite_guard import NonFiniteGuard
from byteps_py.worker.io.piece_executor import Cores, PieceExecutor
from byteps_py.worker.io.rank_connection import RankConnection
from byteps_py.worker.io.slot_memory import SlotMemory

_ENDING = TensorState.ENDING
#: What a summation service sends. Globals: see __init__.py.
_ANSWER, _REFUSED, _WANT, _AWAITED, _CLOCK = Kind.ANSWER, Kind.REFUSED, Kind.WANT, Kind.AWAITED, Kind.CLOCK
_FROM_SERVERS = (_ANSWER, _REFUSED, _WANT, _AWAITED, _CLOCK)
_OF_SHADOWS = (Kind.SHADOW_HELD, Kind.SHADOW_LACKS)


class StepMaker(Protocol):
    """The states of optimizers, see worker/ranks/hosting.py."""

    def bind(self, step: MakeStep) -> Callable[[], None]:
        """The work of a step, for any thread."""

    def stepped(self, step: MakeStep) -> None:
        """That work is done."""

    def summed(self, slot: RankSlot) -> None:
        """All sums of the slot's rank are there."""

    def is_behind(self, part: OwnedPart) -> bool:
        """A sum for an owner is to wait until ``Executor.catch_up``."""

    def on_shadow_message(self, header: Header, text: str, server: int) -> None:
        """A server has said what it holds, or lacks, of the states that it keeps in step."""

    def on_reconnected(self, server: int) -> None:
        """There is a new connection to a server."""


class Executor:
    """``send``: to the scheduler. ``fail`` is called with an error that ends the job, ``on_begin`` with a tensor that
    all ranks agree on, ``after_run``, if set, when all that followed from an event has been done."""

    piece_executor_class: type[PieceExecutor] = PieceExecutor
    coded_parts_class: type[CodedParts] = CodedParts
    on_begin: Callable[[Tensor], None]
    steps: StepMaker

    def __init__(
        self,
        runtime: Runtime,
        ready: Readiness,
        memory: SlotMemory,
        cores: Cores,
        first_rank: int,
        send: Callable[[pb.MemberMessage], None],
        fail: Callable[[BytePSError], None],
    ) -> None:
        self.ranks: dict[int, RankConnection] = {}
        self.network: Network | None = None  # None: this machine is the only one
        pipeline = cores.pipeline
        self.piece_executor = self.piece_executor_class(runtime, ready, memory, cores, self.run, self._owe)
        self.rounds = 0  # partitions delivered
        self.after_run: Callable[[], None] | None = None
        self._loop = runtime.loop
        self.runtime = runtime
        self.kernels = runtime.kernels
        self._thresholds = runtime.thresholds
        self._ready = ready
        self._memory = memory
        self._pipeline = pipeline
        self._agreement = cores.agreement
        self._direct = cores.direct
        self._first_rank = first_rank
        self._guard = NonFiniteGuard(first_rank, pipeline.size)
        self.coded_parts = self.coded_parts_class(runtime, first_rank, memory.machines)
        self.pace = RankPace(first_rank)
        self.send = send
        self._fail = fail
        self._at_work = 0  # kernels
        self._moved_at = 0.0
        self._due: deque[Action | DirectAction] = deque()
        self._running = False
        self._is_abandoned = False
        self._parts: dict[tuple[int, int, int], Part] = {}  # (key, generation, index)
        self._frames: dict[Part, zmq.Frame] = {}  # answers that a kernel reads
        self._behind: dict[Part, SumForOwner] = {}  # sums that wait, see ``catch_up``
        self.stages: StageRecorder | None = None  # for a trace
        self.arrivals: ArrivalLog | None = None  # for a replay
        self._ballots: list[pb.Ballot] = []
        self._owed: dict[int, RankConnection] = {}  # by local rank: have rounds that they were not told of
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            Compute: self._compute,
            Push: self._push,
            Withdraw: self._withdraw,
            Supply: self._supply,
            TellClock: self._tell_clock,
            Show: self._show,
            RoundDone: self._round_done,
            Fail: self._tell_failed,
            SendBallot: self._send_ballot,
            BeginTensor: self._begin,
            TensorVoid: self._retire,
            TensorForgotten: self._forget,
            Release: self._release,
            MakeStep: self._make_step,
            SumForOwner: self._sum_for_owner,
            Forget: self._forget_owned,
            AllSummed: self._all_summed,
        }

    def time(self) -> float:
        """The service's clock."""
        return self._loop.time()

    def idle_s(self, now: float) -> float:
        """For how long no kernel has worked and no answer has come."""
        return min(0.0 if self._at_work else now - self._moved_at, self.piece_executor.idle_s(now))

    def abandon(self) -> None:
        """The ranks are a group no more: nothing is done any more but what kernels are at."""
        self._is_abandoned = True
        self._due.clear()
        self._behind.clear()
        self.ranks.clear()
        self.after_run = None

    def expect(self, specs: Iterable[TensorSpec]) -> None:
        """These tensors are being declared: their kernels will be needed."""
        specs = [spec for spec in specs if not spec.op.bypasses_servers]
        self._ready.expect((spec.op.kernel, spec.dtype, spec.codec) for spec in specs if spec.codec is not None)
        self._ready.expect((spec.op.kernel, spec.dtype) for spec in specs if spec.codec is None or self.network is None)
        self._ready.expect((spec.op, spec.dtype, Checks.FINITE) for spec in specs if spec.is_guarded)

    def start(self, tensor: Tensor, pieces: Sequence[tuple[int, int, int]] | Sequence[OwnedPiece]) -> None:
        """Begin the life of an agreed tensor."""
        actions = self._pipeline.handle(TensorAgreed(tensor, pieces), self._loop.time())
        for part in tensor.parts:
            self._parts[tensor.key, tensor.generation, part.index] = part
        self.run(actions)

    def _begin(self, action: BeginTensor) -> None:
        self.on_begin(action.tensor)

    def _retire(self, action: TensorVoid) -> None:
        tensor = action.tensor
        for part in tensor.parts:
            if self.network is not None:
                self.network.pace.forget(part)
        if not action.is_kept:
            self._drop_parts(tensor)
        self.handle(action)
        for part in tensor.parts:
            self.catch_up(part)

    def _forget(self, action: TensorForgotten) -> None:
        self._drop_parts(action.tensor)
        self.handle(action)

    def _drop_parts(self, tensor: Tensor) -> None:
        for part in tensor.parts:
            self._parts.pop((tensor.key, tensor.generation, part.index), None)

    def handle(self, event: RoundEvent) -> None:
        """Tell the pipeline what has happened, and carry out what follows. Raises ProtocolError."""
        self.run(self._pipeline.handle(event, self._loop.time()))

    def run(self, actions: Iterable[Action | DirectAction]) -> None:
        """Carry out ``actions`` and what follows from them."""
        if self._is_abandoned:
            return
        self._due.extend(actions)
        if self._running:
            return
        self._running = True
        try:
            while self._due:
                self._carry_out(self._due.popleft())
        finally:
            self._running = False
        if self._ballots:  # together: what is declared together is placed together
            ballots, self._ballots = self._ballots, []
            self.send(pb.MemberMessage(declare=pb.Declare(ballots=ballots)))
        if self._owed:
            owed, self._owed = self._owed, {}
            for rank in owed.values():
                self._to_rank(rank, rank.send_done)
        if self.after_run is not None:
            self.after_run()

    def _carry_out(self, action: Action | DirectAction) -> None:
        handler = self._handlers.get(type(action))
        if handler is not None:
            handler(action)
        else:
            self.piece_executor.carry_out(cast(Lend | DirectAction, action))

    def _push(self, action: Push) -> None:
        if self.stages is not None:
            self.stages.begin(EXCHANGE, action.part.tensor.name, action.part.index, action.round, action.part.length)
        if self.network is None:
            return
        try:
            self.network.push(action.part, action.round)
        except UsageError as error:  # it is not in the run that is replayed
            self._fail(error)

    def _supply(self, action: Supply) -> None:
        if self.network is not None:
            self.network.supply(action.part, action.round, action.server)

    def _tell_clock(self, action: TellClock) -> None:
        if self.network is not None:
            self.network.tell_clock(action.part)

    def _withdraw(self, action: Withdraw) -> None:
        if self.network is not None:
            self.network.withdraw(action.part, action.round, action.server)

    def _round_done(self, action: RoundDone) -> None:
        self.rounds += len(action.tensor.parts)
        blame, action.tensor.blame = action.tensor.blame, 0
        for local_rank, slot_id, round_ in action.slots:
            self._owe(local_rank, slot_id, round_, blame)
            self.pace.delivered(local_rank, action.tensor.spec, self._loop.time())
        if action.tensor.state is _ENDING and action.tensor.round > action.tensor.last_round:
            self.run(self._agreement.handle(TensorEnded(action.tensor)))

    def _show(self, action: Show) -> None:
        if rank := self.ranks.get(action.slot.local_rank):
            rank.add_chunks(action.slot.id, action.slot.round, action.chunks)
            self._owed[rank.local_rank] = rank

    def _owe(self, local_rank: int, slot_id: int, round_: int, blame: int = 0) -> None:
        """A rank is to be told that a round of its is delivered."""
        if rank := self.ranks.get(local_rank):
            rank.add_done(slot_id, round_, blame)
            self.pace.done(local_rank, slot_id, self._loop.time())
            self._owed[local_rank] = rank

    # ---- kernels ---------------------------------------------------------------------------------------

    def _compute(self, compute: Compute) -> None:
        part = compute.part
        self._at_work += 1
        if self.stages is not None:
            stage = LOCAL_REDUCE if part.stage is REDUCING else LOCAL_BROADCAST
            self.stages.begin(stage, part.tensor.name, part.index, part.tensor.round, part.length)
        dtype, is_delivery = part.tensor.spec.dtype, part.stage is DELIVERING
        # A result that a server has summed, it has looked at as well.
        is_guarded = part.tensor.spec.is_guarded and part.stage is REDUCING
        codec = part.tensor.codec
        if isinstance(part, AccumulatedPart) and compute.op is Op.BROADCAST and not (is_delivery and part.changes):
            codec = None  # values
        pair: Pair = (compute.op, dtype, Checks.FINITE) if is_guarded else (compute.op, dtype)
        if codec is not None:
            pair = (Op.SUM, dtype, codec)
        is_ready = pair in self._ready
        sizes = self._thresholds
        work = compute.work
        if work is None:
            call = compute.op, dtype, compute.inputs, compute.outputs, part.count, compute.divisor
            if codec is not None:
                work = self.coded_parts.bind(compute, codec)
            elif is_guarded:
                work = compute.work = functools.partial(self._guard.reduce, self.kernels, compute)
            elif is_ready:
                is_cold = is_delivery and part.tensor.spec.nbytes >= sizes.past_caches
                work = compute.work = self.kernels.bind(*call, past_caches=is_cold)
            else:  # to bind a kernel that is not there yet would keep all ranks waiting
                work = functools.partial(self.kernels.reduce, *call)
        touched = part.dense_length * (len(compute.inputs) + len(compute.outputs))
        is_last = part.tensor.is_alone and part is part.tensor.parts[-1]
        limit = sizes.inline_delivery if is_delivery else sizes.last_inline_sum if is_last else sizes.inline_sum
        if touched <= limit and is_ready:
            work()
            self._computed(compute, None)
        else:
            self._ready.submit(
                pair,
                part.tensor.spec.priority,
                work,
                lambda error: self._loop.post(lambda: self._computed(compute, error)),
            )

    def _sum_for_owner(self, action: SumForOwner) -> None:
        part = action.part
        if self.steps.is_behind(part) and not part.tensor.state.is_void:
            self._behind[part] = action
            return
        block = self._memory.give_answer_block(part)
        self._compute(Compute(part, part.tensor.spec.op, action.inputs, (block.address,), 1))

    def catch_up(self, part: Part) -> None:
        """A sum for an owner, if there is one that waits, is to wait no more: also one of a later generation, which the
        partition's owner may not have shown to ``steps`` yet."""
        place = part.tensor.key, part.index
        waiting = [each for each in self._behind if (each.tensor.key, each.index) == place]
        self.run([self._behind.pop(each) for each in waiting])

    def _computed(self, compute: Compute, error: BaseException | None) -> None:
        if error is not None:
            raise error
        part = compute.part
        if compute.report is not None:
            self._guard.note(compute)
        if self.stages is not None:
            stage = LOCAL_REDUCE if part.stage is REDUCING else LOCAL_BROADCAST
            self.stages.end(stage, part.tensor.name, part.index)
        self._at_work -= 1
        self._moved_at = self._loop.time()
        if self._is_abandoned:
            return
        # Servers that keep states may yet need the code of a sum that its owner steps with: see ``detach_sum``.
        is_kept = part.stage is REDUCING or (isinstance(part, OwnedPart) and part.is_sum)
        if not is_kept or part.tensor.state.is_void:
            self._forget_sum(part)
        self.handle(Computed(part))

    def _forget_owned(self, action: Forget) -> None:
        self._forget_sum(action.part)

    def _all_summed(self, action: AllSummed) -> None:
        self.steps.summed(action.slot)

    def _make_step(self, step: MakeStep) -> None:
        self._at_work += 1
        if self.stages is not None:
            part = step.part
            self.stages.begin(OPTIMIZER_STEP, part.tensor.name, part.index, part.tensor.round, part.length)
        work = self.steps.bind(step)
        parameter_bytes = sum(target.length for target in step.targets)
        if len(step.inputs) * step.part.length + 4 * parameter_bytes <= self._thresholds.inline_sum:
            work()
            self._stepped(step, None)
            return
        self._ready.run(work, lambda error: self._loop.post(lambda: self._stepped(step, error)))

    def _stepped(self, step: MakeStep, error: BaseException | None) -> None:
        if error is not None:
            raise error
        self._at_work -= 1
        self._moved_at = self._loop.time()
        if self.stages is not None:
            self.stages.end(OPTIMIZER_STEP, step.part.tensor.name, step.part.index)
        self.steps.stepped(step)
        if not self._is_abandoned:
            if step.is_last:
                self._forget_sum(step.part)
            self.handle(StepEnded(step))

    def _forget_sum(self, part: Part) -> None:
        self._frames.pop(part, None)
        self._memory.take_answer_block(part)

    def detach_sum(self, part: Part) -> Block | zmq.Frame | None:
        """The memory of a partition's sum, which is the caller's from now on: a block of ``Memory.machine``, or an
        answer. None: there is none."""
        frame, block = self._frames.pop(part, None), part.answer
        if frame is None:
            part.answer = None
        return frame if frame is not None else block

    def run_kernel(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run work that belongs to no round on a pool thread. ``done`` is called on the loop's thread, unless the
        group is over."""
        self._at_work += 1

        def ended(error: BaseException | None) -> None:
            self._at_work -= 1
            self._moved_at = self._loop.time()
            if not self._is_abandoned:
                done(error)

        self._ready.run(work, lambda error: self._loop.post(lambda: ended(error)))

    # ---- the network -----------------------------------------------------------------------------------

    def answered(self, header: Header, frame: zmq.Frame | None, server: int) -> None:
        """A summation service has sent a message."""
        if header.kind in _OF_SHADOWS:
            text = (frame.bytes if frame is not None else b"").decode(errors="replace")
            self.steps.on_shadow_message(header, text, server)
            return
        if header.kind not in _FROM_SERVERS:
            raise ProtocolError(f"a summation service sent a {header.kind.name} message, which only workers send")
        if header.kind is _AWAITED:
            names = unpack_names(frame.bytes if frame is not None else b"")
            rounds = [(self._parts[name[:3]], name[3]) for name in names if name[:3] in self._parts]
            self.handle(RoundsAwaited(rounds))
            return
        part = self._parts.get((header.key, header.generation, header.index))
        if isinstance(part, AccumulatedPart) and self._answered_early(part, header, frame, server):
            return
        if part is not None and header.kind is _WANT:
            self.handle(ResultWanted(part, header.round, server))
            return
        if self._memory.take_abandoned(header, server) or part is None or not self._pipeline.awaits(part, header.round):
            return  # of a tensor that is void by now, or a repetition: a kernel may be reading the first answer
        if header.kind is _REFUSED:
            if server != part.server:
                return  # it adds other partitions by now
            error, _, text = (frame.bytes if frame is not None else b"").decode(errors="replace").partition("\n")
            self._fail(from_name(error, f"tensor {part.tensor.name!r}: {text}"))
            return
        source = 0
        if frame is None:  # of the service of this machine
            if server != part.server:
                return  # of a place that was given up
            if part.wants_result:
                if part.answer is None or header.answer_place != (part.answer.segment, part.answer.offset):
                    raise ProtocolError(
                        f"tensor {part.tensor.name!r}: an answer lies in memory that was not given for it"
                    )
                source = part.answer.address
        elif part.wants_result:
            due = part.dense_length if isinstance(part, AccumulatedPart) else part.length
            if len(frame) != due and not (isinstance(part, AccumulatedPart) and header.is_coded):
                raise ProtocolError(f"tensor {part.tensor.name!r}: an answer of {len(frame)} bytes, {due} were due")
            # The server before may answer while the service of this machine, which has the partition now, does too.
            self._memory.abandon_answer_block(part, part.server)
            self._frames[part] = frame
            source = ctypes.addressof(ctypes.c_char.from_buffer(frame.buffer))
        if isinstance(part, AccumulatedPart):
            part.told_epoch, part.changes = header.epoch, self._changes_of(part, header, frame, source)
        self._moved_at = self._loop.time()
        if self.network is not None:
            self.network.pace.answered(part, header.waited_us / 1e6, self.pace.step, self._moved_at)
        part.tensor.blame |= header.nonfinite_ranks
        if self.stages is not None:
            self.stages.end(EXCHANGE, part.tensor.name, part.index)
        self.handle(Answered(part, header.round, source))
        if self.arrivals is not None and isinstance(part, AccumulatedPart) and part.told[0] == header.round:
            _, clock, added_at = part.told
            place = part.tensor.name, part.tensor.generation, part.index, header.round
            self.arrivals.add(LoggedChange(self.arrivals.machine, *place, added_at, clock))

    def _changes_of(
        self, part: AccumulatedPart, header: Header, frame: zmq.Frame | None, source: int
    ) -> tuple[int, ...]:
        """The addresses of the codes that an answer brings. Raises ProtocolError."""
        codec = part.tensor.codec
        if codec is None or frame is None or self.network is None or not header.is_coded:
            return ()
        if part.copied_round != header.round - 1:
            raise ProtocolError(f"tensor {part.tensor.name!r}: changes of values that this machine does not have")
        places = unpack_changes(frame.buffer, self.network.machine_index, codec.coded_nbytes(part.count))
        return tuple(source + place if place >= 0 else 0 for place in places)

    def _answered_early(self, part: AccumulatedPart, header: Header, frame: zmq.Frame | None, server: int) -> bool:
        """A server has sent a message about what it accumulates. False if it is an answer that counts."""
        is_old = self.network is None or header.epoch != self.network.epoch or server != part.server
        if header.kind is _CLOCK and not is_old:
            self.handle(ClockTold(part, header.round, *unpack_clock(frame.bytes if frame is not None else b"")))
        elif header.kind is _WANT and not is_old:
            self.handle(CopyWanted(part, is_whole=header.is_supply))
        elif header.kind in (_ANSWER, _REFUSED):
            if is_old:
                self._memory.take_abandoned(header, server)
            return is_old
        return True

    def lacks(self, ranks: set[int]) -> bool:
        """Something was given to a round in which these ranks take part, and the result is not there, or what was given
        has not been taken."""
        return self._direct.lacks(ranks) or any(
            self._is_due(part)
            for part in self._parts.values()
            if part.tensor.slots
            and not part.tensor.state.is_void
            and (not part.tensor.spec.group or ranks.intersection(part.tensor.spec.group))
        )

    @staticmethod
    def _is_due(part: Part) -> bool:
        """Its result, what other machines have for it, or its way to them."""
        if isinstance(part, ScatterPart):
            return part.stage is IN_FLIGHT
        is_given = part.stage is IN_FLIGHT or (part.stage is QUEUED and part.is_resent)
        return part.server >= 0 and is_given

    def move(self, server_of: Callable[[Part], int]) -> int:
        """A new epoch: what its placement gives to other servers goes there. Returns how many partitions moved."""
        moves = [
            (part, server)
            for part in self._sent
            # Accumulators begin anew in each epoch, see server/accumulators.py.
            if (server := server_of(part)) != part.server or isinstance(part, AccumulatedPart)
        ]
        moved = sum(server != part.server for part, server in moves)
        self._moved_at = self._loop.time()
        self.handle(ServersChanged(moves))
        return moved

    def on_reconnected(self, server: int) -> None:
        """Messages to a server that it has not answered are lost, or may be."""
        self.handle(MessagesLost([part for part in self._sent if part.server == server]))
        self.steps.on_reconnected(server)

    @property
    def _sent(self) -> list[Part]:
        """Partitions that servers add."""
        return [part for part in self._parts.values() if part.server >= 0 and not part.tensor.state.is_void]

    # ---- ranks, scheduler, memory ----------------------------------------------------------------------

    def _to_rank(self, rank: RankConnection, send: Callable[[], None]) -> None:
        """Send to a rank; one that is gone is found out by its own connection."""
        try:
            send()
        except PeerLostError:
            return

    def _tell_failed(self, action: Fail) -> None:
        for local_rank, rank in self.ranks.items():
            slots = [slot.id for slot in action.slots if slot.local_rank == local_rank]
            for slot_id in slots:
                self.pace.done(local_rank, slot_id, self._loop.time())
            if slots:
                error = action.error
                message = protocol.DeclarationsFailed(tuple(slots), type(error).__name__, str(error))
                self._to_rank(rank, functools.partial(rank.send_done, in_order=True))  # a slot's last round, perhaps
                self._to_rank(rank, functools.partial(rank.send, message))

    def _send_ballot(self, action: SendBallot) -> None:
        votes = [
            pb.Vote(ranks=[self._first_rank + r for r in ranks], spec=protocol.pack_spec(spec))
            for spec, ranks in action.votes
        ]
        self._ballots.append(
            pb.Ballot(name=action.name, generation=action.generation, votes=votes, rounds=action.rounds)
        )

    def _release(self, action: Release) -> None:
        for slot in action.slots:
            self._memory.free_slot(slot)
        if action.tensor is not None:
            self.coded_parts.forget(action.tensor)
            self._memory.free_contributions(action.tensor)
            # An answer block in flight is not given back: the server of this machine may yet write to it.
