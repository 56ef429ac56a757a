"""States that are kept beside a rank from round to round, as its session sees them: those of hosted optimizers, which
its communication service keeps (see StateHost), and those of codecs.

A machine keeps a state for a tensor's codec in the memory of slots: CodedStates takes it from there, and puts it back.
Errors and momentum lie with the rank that is the first of its machine in the tensor's group (``Slot.coded_state``).
They belong to a name, shape, dtype and codec: only a tensor with the same ones goes on with them. For how many rounds a
codec has drawn is known to all ranks, which must agree on it. The caller holds the session's lock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from byteps_py.errors import UsageError, from_name
from byteps_py.kernels.optimizer_steps import StepSegment
from byteps_py.kernels.update_rules import StepKind
from byteps_py.session.base import CodedState, HostedShard, ShadowedStep, Slot, StateHost
from byteps_py.session.service.channel_session import ChannelSession
from byteps_py.tensors import TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import MAX_PIECES_BYTES, SegmentNumbers

#: Takes a message of the service, and removes descriptors that are kept from the list. The session's lock is held.
MessageHandler = Callable[[Any, list[int]], None]


class RemoteStateHost(StateHost):
    """``session``: whose states; ``view``: its memory at a place. ``handlers``: of the service's messages about
    them."""

    max_record_bytes = MAX_PIECES_BYTES - 64  # the service adds numbers
    paced_bytes = protocol.PACED_BYTES

    def __init__(self, session: ChannelSession, view: Callable[[protocol.Place, int], memoryview]) -> None:
        self._session, self._view = session, view
        self._asked: dict[int, HostedShard] = {}  # by request
        self._norms: dict[int, float] = {}  # by request
        self._servers: dict[int, tuple[str, ...]] = {}  # by request
        self._shards: set[int] = set()  # states that are kept
        self._released: deque[int] = deque()
        self._run, self._held, self._refused = 0, (0, False), 0
        self._recording: set[tuple[int, int]] = set()  # run and step of large records that no server has yet
        self.handlers: Mapping[type, MessageHandler] = {
            protocol.StatesKept: self._states_kept,
            protocol.NormMeasured: self._norm_measured,
            protocol.StepsHeld: self._steps_held,
            protocol.RecordTaken: self._record_taken,
            protocol.ServersKnown: self._servers_known,
        }

    def host(
        self, kind: StepKind, source: Slot, target: Slot, before: HostedShard | None = None, run: int = 0
    ) -> HostedShard:
        session = self._session
        self.report_released()
        request = session.next_request()
        shard = HostedShard(kind, source, target)
        with session.state:
            self._asked[request] = shard
        if run != self._run:
            self._run, self._held, self._refused = run, (0, False), 0
        before_id = before.id if before is not None else 0
        session.send(protocol.KeepStates(request, kind.code, source.id, target.id, before_id, run))
        session.wait_until(
            lambda: request not in self._asked or source.error is not None or target.error is not None,
            session.time_limit(None),
            lambda: f"the states of {source.spec.name!r}: not all ranks have declared it",
        )
        session.check_open()
        for error in (source.error, target.error, shard.error):
            if error is not None:
                raise error.with_traceback(None)
        return shard

    def begin_step(
        self,
        shard: HostedShard,
        segments: Sequence[StepSegment],
        is_last: bool = True,
        shadowed: ShadowedStep | None = None,
    ) -> None:
        made = ShadowedStep(0, 0, 0) if shadowed is None else shadowed
        numbers = tuple(
            SegmentNumbers(each.elements.start, each.elements.stop, tuple(each.scalars)) for each in segments
        )
        self._session.send(
            protocol.BeginStep(shard.id, shard.source.round, is_last, made.step, made.durable, made.is_whole, numbers)
        )

    def record_step(self, shadowed: ShadowedStep, common: bytes, attached: bytes) -> None:
        session = self._session
        if len(attached) >= self.paced_bytes:
            session.wait_until(
                lambda: not self._recording,
                session.time_limit(None),
                lambda: "no server has taken what this rank attached to the step before",
            )
            with session.state:
                self._recording.add((shadowed.run, shadowed.step))
        begin = protocol.BeginRecord(
            shadowed.run, shadowed.step, shadowed.durable, shadowed.is_whole, len(common), len(attached)
        )
        for message in protocol.record_messages(begin, common, attached):
            session.send(message)

    @property
    def held(self) -> tuple[int, bool]:
        self._session.read_available()
        return self._held

    def wait_until_held(self, step: int) -> None:
        self._session.wait_until(
            lambda: self._held[0] >= step or self._refused >= step,
            self._session.time_limit(None),
            lambda: f"no other machines hold step {step} of this rank",
        )
        self._session.check_open()

    @property
    def refused_step(self) -> int:
        return self._refused

    def wait_for_step(self, shard: HostedShard) -> None:
        self.square_sum(shard, ())  # there are sums again

    def skip_step(self, source: Slot) -> None:
        self._session.send(protocol.SkipStep(source.id, source.round))

    def square_sum(self, shard: HostedShard, ranges: Sequence[range], timeout_s: float | None = None) -> float:
        session, source = self._session, shard.source
        request = session.next_request()
        session.send(protocol.MeasureNorm(request, shard.id, tuple((each.start, each.stop) for each in ranges)))
        session.wait_until(
            lambda: request in self._norms or source.error is not None,
            session.time_limit(timeout_s),
            lambda: f"tensor {source.spec.name!r}, round {source.round}: no sum",
        )
        session.check_open()
        if source.error is not None:
            raise source.error.with_traceback(None)
        with session.state:
            return self._norms.pop(request)

    def server_addresses(self) -> tuple[str, ...]:
        session = self._session
        request = session.next_request()
        session.send(protocol.AskServers(request))
        session.wait_until(
            lambda: request in self._servers, session.time_limit(None), lambda: "the service names no servers"
        )
        session.check_open()
        with session.state:
            return self._servers.pop(request)

    def release_shard(self, shard: HostedShard) -> None:
        self._released.append(shard.id)  # told by the next ``host``: a garbage collection may call this anywhere

    def report_released(self) -> None:
        """Tell the service which states are needed no more."""
        while self._released:
            shard_id = self._released.popleft()
            with self._session.state:
                is_known = shard_id in self._shards
                self._shards.discard(shard_id)
            if is_known:
                self._session.send(protocol.DropStates(shard_id))

    # ---- messages of the service -------------------------------------------------------------------------

    def _states_kept(self, message: protocol.StatesKept, fds: list[int]) -> None:
        shard = self._asked.pop(message.request)
        shard.id = message.id
        self._shards.add(shard.id)
        nbytes = message.count * shard.kind.state_itemsize
        shard.states = tuple(self._view(place, nbytes) for place in message.states)
        shard.owners = message.owners
        if message.error:
            shard.error = from_name(message.error, message.message)

    def _norm_measured(self, message: protocol.NormMeasured, fds: list[int]) -> None:
        self._norms[message.request] = message.sum

    def _steps_held(self, message: protocol.StepsHeld, fds: list[int]) -> None:
        self._held = max(self._held, (message.step, message.is_whole))
        self._refused = max(self._refused, message.refused)

    def _servers_known(self, message: protocol.ServersKnown, fds: list[int]) -> None:
        self._servers[message.request] = message.addresses

    def _record_taken(self, message: protocol.RecordTaken, fds: list[int]) -> None:
        self._recording.discard((message.run, message.step))


_log = logging.getLogger("byteps_py")


class CodedStates:
    """Of one session."""

    def __init__(self) -> None:
        self._waiting: dict[str, CodedState] = {}  # of tensors that are not declared yet

    def drawn(self, spec: TensorSpec) -> int:
        """For how many rounds machines have drawn for a tensor that is to be declared."""
        state = self._waiting.get(spec.name)
        return state.codec.drawn if state is not None and _fits(state, spec) else 0

    def declared(self, slot: Slot) -> None:
        """A new slot, whose memory has zeros: it goes on with what waits for its name, if that is of the same kind."""
        slot.drawn = self.drawn(slot.spec)
        self._fill(slot)

    def _fill(self, slot: Slot) -> None:
        state, spec = self._waiting.pop(slot.spec.name, None), slot.spec
        if state is None or spec.codec is None:
            return
        if not _fits(state, spec):
            _log.warning(
                "tensor %r begins with errors and momentum of zeros: those that were there are of %s%s with %s, and it "
                "is %s now",
                spec.name, state.dtype.name.lower(), list(state.shape), state.codec, spec.describe(),
            )  # fmt: skip
        elif (
            slot.coded_state is not None and state.data
        ):  # else nothing is coded, or another rank of the machine has it
            slot.coded_state[:] = state.data

    def take(self, slots: Iterable[Slot], names: Collection[str] | None = None) -> dict[str, CodedState]:
        """Copies of those of ``slots``, and of those that wait. ``names``: of these only; None: of all. Raises
        UsageError if a round is under way."""
        found = {name: state for name, state in self._waiting.items() if names is None or name in names}
        for slot in _idle(slot for slot in slots if names is None or slot.spec.name in names):
            spec = slot.spec
            if spec.codec is not None:
                codec = replace(spec.codec, drawn=slot.drawn + slot.done_round) if spec.codec.draws else spec.codec
                found[spec.name] = CodedState(spec.shape, spec.dtype, codec, bytes(slot.coded_state or b""))
        return found

    def put(self, states: Mapping[str, CodedState], slots: Iterable[Slot]) -> None:
        """Go on with ``states`` and no others; what is declared already goes on drawing as it does. Raises UsageError
        if a round is under way."""
        slots = list(slots)
        _idle(slots)
        self._waiting = dict(states)
        for slot in slots:
            if slot.coded_state is not None:
                slot.coded_state[:] = bytes(len(slot.coded_state))
            self._fill(slot)


def _fits(state: CodedState, spec: TensorSpec) -> bool:
    """A tensor of this kind may go on with the state."""
    mine = spec.codec and replace(spec.codec, drawn=0)
    return (state.shape, state.dtype, replace(state.codec, drawn=0)) == (spec.shape, spec.dtype, mine)


def _idle(slots: Iterable[Slot]) -> list[Slot]:
    """Those that have a state, or draw. Raises UsageError for one with a round under way, which changes it at any
    time."""
    found = [slot for slot in slots if slot.coded_state is not None or (slot.spec.codec and slot.spec.codec.draws)]
    for slot in found:
        if slot.pending or slot.begun_bytes:
            raise UsageError(
                f"tensor {slot.spec.name!r} is on its way, so its error feedback and momentum can't be saved or loaded "
                "now: do it between two steps, after optimizer.step() or synchronize()"
            )
    return found
