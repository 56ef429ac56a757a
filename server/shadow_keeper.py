"""Carries out what the rules of shadowed states decide (shadow.py): memory, kernels, answers.

Owns the memory of states and the steps under way. Must not know of rounds or sockets. The loop's thread calls it;
pool threads write states while a step is applied.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from byteps_py.codecs import Coding, Draw
from byteps_py.config.settings import Settings
from byteps_py.dataplane.listener import Peer
from byteps_py.errors import CommunicationError, ProtocolError
from byteps_py.kernels.optimizer_steps import StepSegment, bind_segments
from byteps_py.kernels.update_rules import StepKind
from byteps_py.runtime import Codecs, Kernels, Runtime
from byteps_py.server.reducer import FrameMemory, PayloadMemory, Reducer
from byteps_py.server.shadow import LONGEST_HOLD_S, ShadowStore
from byteps_py.server.shadow_state import (
    AllocateStates,
    ApplyStep,
    DeliverStates,
    FillStates,
    HeldStep,
    HoldAsked,
    HoldOver,
    NoMemory,
    OwnerMessage,
    PartFacts,
    PoolStarted,
    ReadAsked,
    RefuseRead,
    RefuseShadow,
    ReplacedRun,
    RoundSummed,
    ShadowEvent,
    ShadowReply,
    StatesCopy,
    StepApplied,
    StepNotBegun,
)
from byteps_py.system.log import logger
from byteps_py.system.stage_recorder import SHADOW_STEP, StageRecorder
from byteps_py.tensor_codec import Codec
from byteps_py.wire.data_link import (
    MAX_PIECES_BYTES,
    MAX_READ_BYTES,
    AttachedRead,
    Header,
    Kind,
    PayloadRecord,
    ShadowPartition,
    ShadowRecord,
    ShadowStep,
    StatesQuery,
    StatesRead,
    name_of,
)
from byteps_py.wording import count_text

_LINE = 64
#: Of a peer, at the same time.
_MOST_IN_PIECES = 16
#: What messages are packed as. They may come in pieces.
_PACKED: Mapping[Kind, type[PayloadRecord]] = {
    Kind.SHADOW_BEGIN: ShadowPartition,
    Kind.SHADOW_STEP: ShadowStep,
    Kind.SHADOW_RECORD: ShadowRecord,
    Kind.DESCRIBE_STATES: StatesQuery,
    Kind.READ_STATES: StatesRead,
    Kind.READ_ATTACHED: AttachedRead,
}
#: Steps are applied when no sum waits for a thread.
_PRIORITY = -1
#: What new states leave of the memory that is available: for sums in flight, and for other programs.
_RESERVE_BYTES = 256 << 20
#: Steps that wait to be applied may take this share of the memory that is available at the start.
WAITING_SHARE = 0.25


class StatesMemory:
    """Memory for all states of a partition, one after another, each aligned to a cache line. ``buffer``: of
    ``needed_bytes``."""

    __slots__ = ("_start", "_stride", "address", "buffer")

    def __init__(self, facts: PartFacts, buffer: Any) -> None:
        self.buffer = buffer
        base = int(buffer.__array_interface__["data"][0])
        self._start = -base % _LINE
        self._stride = _rounded(facts.state_nbytes)
        self.address = base + self._start

    @staticmethod
    def needed_bytes(facts: PartFacts) -> int:
        return facts.kind.states * _rounded(facts.state_nbytes) + _LINE

    def address_of(self, state: int) -> int:
        return self.address + state * self._stride

    def bytes_of(self, state: int, start: int, stop: int) -> bytes:
        """A copy of bytes ``start`` to ``stop`` of a state."""
        first = self._start + state * self._stride
        return bytes(memoryview(self.buffer)[first + start : first + stop])


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class ShadowKeeper:
    """The states that a server keeps. ``store``: of this server, or of one before it in this process."""

    def __init__(self, store: ShadowStore, runtime: Runtime, reducer: Reducer) -> None:
        self.store = store
        self._runtime = runtime
        self._loop = runtime.loop
        self._reducer = reducer
        self._prepared: set[tuple[StepKind, Codec | None]] = set()
        self._under_way: dict[StatesCopy, tuple[HeldStep, list[BaseException | None]]] = {}
        self._waiting: deque[ApplyStep] = deque()
        # One thread stays free for sums, if there are several.
        self._most_under_way = max(1, reducer.threads - 1)
        #: Of messages that are not whole: their bytes by offset.
        self._pieces: weakref.WeakKeyDictionary[Peer, dict[tuple[int, ...], dict[int, bytes]]]
        self._pieces = weakref.WeakKeyDictionary()
        self._has_warned = False
        self.stages: StageRecorder | None = None  # for a trace
        self._action_handlers: Mapping[type, Callable[[Any], None]] = {
            AllocateStates: self._allocate,
            FillStates: self._fill,
            ApplyStep: self._apply,
            ShadowReply: _reply,
            RefuseShadow: _refuse,
            DeliverStates: _deliver,
            RefuseRead: lambda action: _refuse_read(action.read.header, action.read.origin, action.text),
            ReplacedRun: _log_replaced,
        }

    def start(self) -> None:
        """Go on with what was kept before."""
        self._handle(PoolStarted())

    # ---- messages --------------------------------------------------------------------------------------------

    def on_message(self, header: Header, origin: Peer, payload: FrameMemory) -> None:
        """A SHADOW_… message of a CS, or a reader's. Raises ProtocolError for one that no correct peer sends."""
        try:
            match said := self._said(header, origin, payload):
                case None:
                    pass
                case StatesQuery(hold_s):
                    self._describe(header, origin, hold_s)
                case StatesRead():
                    self._handle(ReadAsked(header, origin, said))
                case AttachedRead():
                    self._read_attached(header, origin, said)
                case _:
                    self._handle(OwnerMessage(header, origin, said))
        except ProtocolError as error:
            origin.refuse(header, f"{ProtocolError.__name__}\n{error}")
            raise

    def _said(self, header: Header, origin: Peer, payload: FrameMemory) -> Any:
        """The contents of a message, or its bytes. None if more of it has to come."""
        packed = _PACKED.get(header.kind)
        if packed is None:
            return payload
        whole = self._assembled(header, origin, payload) if header.segment_offset else payload
        return packed.unpack(whole.message().bytes) if whole is not None else None

    def _assembled(self, header: Header, origin: Peer, payload: FrameMemory) -> FrameMemory | None:
        """A message that is longer than a partition comes in pieces, in any order. None if more have to come."""
        total = header.segment_offset
        if not payload.nbytes or not header.offset + payload.nbytes <= total <= MAX_PIECES_BYTES:
            raise ProtocolError(
                f"bytes {header.offset} to {header.offset + payload.nbytes} of {total} of a {header.kind.name}, which "
                f"has at most {MAX_PIECES_BYTES}"
            )
        messages = self._pieces.setdefault(origin, {})
        name = (header.kind, *name_of(header))
        pieces = messages.pop(name, {})
        pieces[header.offset] = bytes(payload.message().buffer)
        if sum(map(len, pieces.values())) < total:
            messages[name] = pieces
            if len(messages) > _MOST_IN_PIECES:
                del messages[next(iter(messages))]  # the rest was lost with a connection, or came twice
            return None
        return FrameMemory(zmq.Frame(b"".join(pieces[offset] for offset in sorted(pieces))))

    def summed(self, header: Header, result: PayloadMemory | None) -> None:
        """This server has taken the sum of a round. It is kept if it lies in a message: that belongs to this process,
        and nobody writes to it any more. A sum in shared memory belongs to this machine's CS, whose states are kept
        elsewhere."""
        if isinstance(result, FrameMemory) and self.store.is_awaited(header):
            self._handle(RoundSummed(header, result))

    # ---- readers ---------------------------------------------------------------------------------------------

    def _describe(self, header: Header, origin: Peer, hold_s: float) -> None:
        """Say what can be read. For ``hold_s`` from now on it stays so."""
        self._handle(HoldAsked(hold_s))
        if hold_s > 0:
            self._loop.call_later(min(hold_s, LONGEST_HOLD_S), lambda: self._handle(HoldOver()))
        packed = self.store.describe(self._loop.time()).pack()
        header.segment_offset = len(packed)
        for header.offset in range(0, len(packed), MAX_READ_BYTES):
            origin.answer(header, zmq.Frame(packed[header.offset : header.offset + MAX_READ_BYTES]))

    def _read_attached(self, header: Header, origin: Peer, wanted: AttachedRead) -> None:
        places = range(wanted.start, min(wanted.stop, wanted.start + MAX_READ_BYTES))
        data = self.attached(wanted.run, wanted.rank, wanted.step, places)
        if data is None:
            text = f"the record of rank {wanted.rank} of step {wanted.step} is not kept here any more"
            _refuse_read(header, origin, text)
            return
        origin.answer(header, zmq.Frame(data))

    def attached(self, run: int, rank: int, step: int, places: range) -> bytes | None:
        """Return the bytes at ``places`` of the attachment to a record, as far as it has them; None if it is not kept
        here."""
        pieces = self.store.read_attached(run, rank, step)
        if pieces is None:
            return None
        found: list[tuple[FrameMemory, int, int]] = list(pieces.cut(places.start, places.stop))  # type: ignore[arg-type]  # see SizedMemory
        return b"".join(memoryview(piece.message().buffer)[first:last] for piece, first, last in found)

    # ---- actions ---------------------------------------------------------------------------------------------

    def _handle(self, event: ShadowEvent) -> None:
        for action in self.store.handle(event, self._loop.time()):
            self._action_handlers[type(action)](action)

    def _fill(self, action: FillStates) -> None:
        target = action.copy.memory.address_of(action.state) + action.offset
        self._runtime.move(target, action.data.address, action.data.nbytes)

    def _apply(self, action: ApplyStep) -> None:
        self._waiting.append(action)
        self._apply_next()

    def _allocate(self, action: AllocateStates) -> None:
        copy, spare, facts = action.copy, action.spare, action.copy.facts
        needed = StatesMemory.needed_bytes(facts)
        if spare is not None and len(spare.buffer) == needed:
            copy.memory = StatesMemory(facts, spare.buffer)
        else:
            # Memory that has been allocated and not written yet still counts as available.
            left = self._runtime.available_memory() - self.store.copies_bytes[1] - _RESERVE_BYTES
            if needed > left:
                text = (
                    f"no memory for the states of {facts}: they take {needed} bytes, and {max(0, int(left))} are left"
                )
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("%s, beside %d in reserve (logged once)", text, _RESERVE_BYTES)
                self._handle(NoMemory(copy, text))
                return
            copy.memory = StatesMemory(facts, self._runtime.new_buffer(needed))
        if (facts.kind, facts.codec) not in self._prepared:
            self._prepared.add((facts.kind, facts.codec))
            prepare = functools.partial(self._prepare, facts)
            self._reducer.run_later(prepare, _PRIORITY, lambda error: None)  # what fails, fails again when it is needed

    def _prepare(self, facts: PartFacts) -> None:
        self._runtime.kernels.prepare_step(facts.kind)
        if facts.codec is not None:
            self._runtime.codecs.prepare(facts.codec, facts.kind.gradient)

    def _apply_next(self) -> None:
        if not self._waiting or len(self._under_way) >= self._most_under_way:
            return
        action = self._waiting.popleft()
        copy, step = action.copy, action.step
        outcome: list[BaseException | None] = []
        self._under_way[copy] = step, outcome
        kind, memory = copy.facts.kind, copy.memory
        if self.stages is not None:
            nbytes = copy.facts.state_nbytes
            self.stages.begin(SHADOW_STEP, f"{copy.facts.key:#018x}", copy.facts.index, step.header.round, nbytes)
        total: PayloadMemory = step.total  # type: ignore[assignment]  # the core passes it through
        work = functools.partial(
            apply_step,
            kernels=self._runtime.kernels,
            kind=kind,
            states=[memory.address_of(state) for state in range(kind.states)],
            total=total.address,
            divisor=step.divisor,
            segments=step.segments,
            code=self._code_of(copy.facts, step),
        )

        def done(error: BaseException | None) -> None:  # on a pool thread
            outcome.append(error)
            self._loop.post(lambda: self._applied(copy))

        self._reducer.run_later(work, _PRIORITY, done)

    def _code_of(self, facts: PartFacts, step: HeldStep) -> CodedTotal | None:
        if (codec := facts.codec) is None:
            return None
        draw = Draw(facts.key, codec.drawn + step.round, facts.first // codec.block)
        coding = Coding(codec, facts.kind.gradient, facts.count, draw=draw)
        memory = self._runtime.new_buffer(facts.count * coding.dtype.itemsize)
        return CodedTotal(self._runtime.codecs, coding, memory)

    def _applied(self, copy: StatesCopy) -> None:
        step, outcome = self._under_way.pop(copy)
        if self.stages is not None:
            self.stages.end(SHADOW_STEP, f"{copy.facts.key:#018x}", copy.facts.index)
        if outcome[0] is not None:
            logger.error("step %d of the states of %s failed: %r", step.number, copy.facts, outcome[0])
        self._handle(StepApplied(copy, outcome[0]))
        self._apply_next()

    def close(self) -> None:
        """After the pool's end, by the loop's thread, which runs no more. The store can go on with another pool."""
        now = self._loop.time()
        for copy, (step, outcome) in self._under_way.items():
            error = outcome[0] if outcome else CommunicationError("the thread pool ended")
            if isinstance(error, CommunicationError):  # of the thread pool: it has not begun
                self.store.handle(StepNotBegun(copy, step), now)
            else:
                self.store.handle(StepApplied(copy, error), now)
        for action in self._waiting:
            self.store.handle(StepNotBegun(action.copy, action.step), now)
        self._under_way.clear()
        self._waiting.clear()
        if self.store.applied_steps:
            logger.debug("%d steps of shadowed states were applied here", self.store.applied_steps)


def _reply(action: ShadowReply) -> None:
    origin: Peer = action.origin  # type: ignore[assignment]  # the core passes it through
    if action.text:
        logger.debug("shadow: %s", action.text)
    origin.tell(action.header, action.text.encode())


def _refuse(action: RefuseShadow) -> None:
    origin: Peer = action.origin  # type: ignore[assignment]  # the core passes it through
    logger.warning("refused a message of machine %d: %s", origin.machine, action.text)
    origin.refuse(action.header, f"{ProtocolError.__name__}\n{action.text}")


def _log_replaced(action: ReplacedRun) -> None:
    run, count = action.run, count_text(len(action.run.parts), "partition")
    text = "the states of run %#018x (%s here, as of step %d) are dropped: run %#018x is whole"
    logger.info(text, run.number, count, run.durable, action.by.number)


def _deliver(action: DeliverStates) -> None:
    read, facts, size = action.read, action.copy.facts, action.copy.facts.kind.state_itemsize
    wanted: StatesRead = read.wanted
    origin: Peer = read.origin  # type: ignore[assignment]  # the core passes it through
    is_there = wanted.state < facts.kind.states and wanted.start <= wanted.stop <= facts.count
    if not is_there or (wanted.stop - wanted.start) * size > MAX_READ_BYTES:
        text = f"{facts} has {facts.kind.states} states of {facts.count} elements; {MAX_READ_BYTES} bytes go at once"
        _refuse_read(read.header, origin, f"elements {wanted.start} to {wanted.stop} of state {wanted.state}: {text}")
        return
    data = action.copy.memory.bytes_of(wanted.state, wanted.start * size, wanted.stop * size)
    origin.answer(read.header, zmq.Frame(data))


def _refuse_read(header: Header, origin: Peer, text: str) -> None:
    origin.refuse(header, f"{CommunicationError.__name__}\n{text}")


def new_store(settings: Settings, runtime: Runtime) -> ShadowStore:
    """An empty store for this machine."""
    return ShadowStore(settings.max_partition_bytes, WAITING_SHARE * runtime.available_memory())


@dataclass(frozen=True, slots=True)
class CodedTotal:
    """How a sum is decoded, and to where."""

    codecs: Codecs
    coding: Coding
    memory: npt.NDArray[np.uint8]

    def decode(self, code: int) -> int:
        """Returns the address of the sum whose code lies at the address ``code``."""
        place = int(self.memory.ctypes.data)
        self.codecs.decode(self.coding, code, (place,), 1, 0)
        return place


def apply_step(
    kernels: Kernels,
    kind: StepKind,
    states: list[int],
    total: int,
    divisor: int,
    segments: Sequence[StepSegment],
    code: CodedTotal | None = None,
) -> None:
    """Step states with a sum. ``states``, ``total``: addresses. ``code``: of the sum, if it is coded. Any thread."""
    total = code.decode(total) if code is not None else total
    bind_segments(kind, states, [total], [], divisor, kernels.bind_step)(segments)
