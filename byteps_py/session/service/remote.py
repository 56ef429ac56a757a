"""The session of a rank beside a communication service: a channel for control messages, shared memory for tensors. Any
thread may call; see Session."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from byteps_py.errors import (
    BytePSError,
    ProtocolError,
    StallError,
    UsageError,
    from_name,
)
from byteps_py.session import failure_reports
from byteps_py.session.base import CodedState, MachineFacts, Observer, Slot
from byteps_py.session.round_recorder import RoundRecorder
from byteps_py.session.service.channel_session import PATIENCE_S, ChannelSession
from byteps_py.session.service.remote_states import CodedStates, MessageHandler, RemoteStateHost
from byteps_py.system.channel import Channel
from byteps_py.system.shm import Segment
from byteps_py.system.stack_dump import StackDump, open_stack_dump
from byteps_py.tensors import Layout, TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.chunks import CHUNK_BYTES


class Slots:
    """``map_segment(descriptor, nbytes)`` maps shared memory."""

    def __init__(self, map_segment: Callable[[int, int], Segment] = Segment) -> None:
        self._map_segment = map_segment
        self._segments: dict[int, Segment] = {}
        self._by_name: dict[str, Slot] = {}
        self._by_id: dict[int, Slot] = {}

    def named(self, name: str) -> Slot | None:
        """The slot of the name's latest declaration, or None."""
        return self._by_name.get(name)

    def is_current(self, slot: Slot) -> bool:
        """False if the name was declared again since, or if the declaration of this slot has failed."""
        return self._by_id.get(slot.id) is slot

    def add_segment(self, number: int, fd: int, nbytes: int) -> None:
        """Map the service's segment ``number``. Owns ``fd`` unless it raises ProtocolError or OSError."""
        if number in self._segments:
            raise ProtocolError(f"segment {number} comes twice")
        self._segments[number] = self._map_segment(fd, nbytes)

    def add(self, spec: TensorSpec, fields: protocol.SlotFields) -> Slot:
        """The slot that a Declared message describes for ``spec``; it replaces the earlier slot of the name. Raises
        ProtocolError if it lies outside of the segments."""
        inputs = tuple(self.view(place, spec.nbytes) for place in fields.inputs)
        result = self.view((fields.result_segment, fields.result_offset), fields.nbytes)
        slot = Slot(spec, inputs, result, fields.id)
        if fields.coded_state and spec.codec is not None:
            slot.coded_state = self.view(fields.coded_state[0], sum(spec.codec.state_nbytes(spec.count)))
        slot.round = slot.done_round = fields.round
        if (before := self._by_name.get(spec.name)) is not None:
            del self._by_id[before.id]
        self._by_name[spec.name] = self._by_id[slot.id] = slot
        return slot

    def view(self, place: protocol.Place, nbytes: int) -> memoryview:
        """Bytes of a segment. Raises ProtocolError if they lie outside of it."""
        number, offset = place
        view = self._segments[number].view
        if offset + nbytes > len(view):
            raise ProtocolError(f"{nbytes} bytes at {offset} of segment {number}, which has {len(view)}")
        return view[offset : offset + nbytes]

    def done(
        self,
        records: Iterable[tuple[int, int, int]],
        observer: Observer | None = None,
        flight: RoundRecorder | None = None,
    ) -> None:
        """Record delivered rounds: (slot id, round, nonfinite_ranks)."""
        for slot_id, round_, nonfinite_ranks in records:
            if (slot := self._by_id.get(slot_id)) is not None:
                slot.done_round, slot.nonfinite_ranks = round_, nonfinite_ranks
                if observer is not None:
                    observer.delivered(slot)
                if flight is not None:
                    flight.end(slot)

    def arrived(self, records: Iterable[tuple[int, int, int]]) -> None:
        """Record delivered chunks of results: (slot id, round, chunk)."""
        for slot_id, round_, chunk in records:
            if (slot := self._by_id.get(slot_id)) is not None and round_ > slot.done_round:
                slot.chunks.append(chunk)

    def fail(self, slot_ids: Iterable[int], error: BytePSError, flight: RoundRecorder | None = None) -> None:
        """Mark the declarations of these slots as failed with ``error``."""
        for slot_id in slot_ids:
            slot = self._by_id.pop(slot_id, None)
            if slot is not None:
                slot.error = error
                if flight is not None:
                    flight.end(slot, has_failed=True)
                if self._by_name.get(slot.spec.name) is slot:
                    del self._by_name[slot.spec.name]

    def current(self) -> list[Slot]:
        """Those of all names."""
        return list(self._by_name.values())

    def begun(self) -> Slot | None:
        """A slot that is handed over in part, if there is one."""
        return next((slot for slot in self._by_id.values() if slot.begun_bytes), None)

    def close(self) -> None:
        """Forget all slots and unmap the segments, where no views are left."""
        self._by_name.clear()  # slots hold views of the segments
        self._by_id.clear()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()  # memory that still has views is unmapped with the last of them


_log = logging.getLogger("byteps_py")


class RemoteSession(ChannelSession):
    """See Session. ``channel`` is connected to the machine's communication service.

    The constructor blocks until the cluster is complete. It raises RendezvousError or PeerLostError if that takes
    longer than ``start_timeout_s``. A service that is silent for ``silence_s`` while it is needed counts as lost.
    ``synced_in``: the ``since_epoch`` of the latest group whose state this rank has; 0 if it has none.
    """

    #: A rank that leaves and waits longer than this for others to take its pieces logs a warning.
    drain_notice_s: float = 10.0
    chunk_bytes: int = CHUNK_BYTES
    map_segment: Callable[[int, int], Segment] = staticmethod(Segment)
    open_stack_dump: Callable[[], StackDump | None] = staticmethod(open_stack_dump)

    def __init__(
        self,
        channel: Channel,
        local_rank: int,
        local_size: int,
        start_timeout_s: float,
        stall_limit_s: float,
        silence_s: float = 10.0,
        synced_in: int = 0,
    ) -> None:
        super().__init__(channel, silence_s, stall_limit_s)
        self._pid = os.getpid()
        self._stack: StackDump | None = None
        self._slots = Slots(self.map_segment)
        self._coded_states = CodedStates()
        self._layouts: weakref.WeakKeyDictionary[Slot, Layout] = weakref.WeakKeyDictionary()  # the latest of each slot
        self._asked: dict[int, Sequence[TensorSpec]] = {}  # by request: the specs of declarations without an answer
        self._declared: dict[int, list[Slot]] = {}
        self._barriers = self._released = 0
        self._last_joined: int | None = None
        self._has_given = False  # pieces of a gather or an exchange, which others take from here
        self._is_drained = False  # the others have taken all of them
        self._hosts = (False, False)
        self._has_left = False  # the service knows, and no longer answers
        self._state_host = RemoteStateHost(self, self._slots.view)
        self._handlers: dict[type, MessageHandler] = {
            protocol.RoundsDone: self._rounds_done,
            protocol.ChunksArrived: self._chunks_arrived,
            protocol.Welcome: self._welcomed,
            protocol.GiveSegment: self._on_segment,
            protocol.Declared: self._slots_declared,
            protocol.DeclarationsFailed: self._declarations_failed,
            protocol.BarrierReleased: self._barrier_released,
            protocol.AllJoined: self._all_joined,
            protocol.HostsChanged: self._hosts_changed,
            protocol.RelaysChanged: self._relays_changed,
            protocol.PeerInbox: self._on_peer_inbox,
            protocol.Introduced: self._introduced,
            protocol.Drained: self._drained,
            protocol.Fatal: self._failed,
            protocol.Pong: self._is_alive,
            **self._state_host.handlers,
        }
        self._declaring = threading.Lock()
        channel.send(protocol.encode(protocol.Hello.of(local_rank, local_size, self._pid, synced_in)))
        self.wait_until(
            lambda: self._is_welcome,
            start_timeout_s + PATIENCE_S,
            lambda: "the communication service of this machine did not answer",
        )
        self._stack = self.open_stack_dump()
        if self._stack is not None:
            channel.send(protocol.encode(protocol.GiveStackFile()), (self._stack.fd,))

    # ---- Session ---------------------------------------------------------------------------------------

    def declare(self, specs: Sequence[TensorSpec]) -> list[Slot]:
        for spec in specs:
            failure_reports.check_ranks(spec, self.rank, self.size)
        with self._declaring:
            new: dict[str, TensorSpec] = {}
            slots: dict[str, Slot] = {}  # kept here: they may fail while the new ones are declared
            for spec in specs:
                if not new.setdefault(spec.name, spec).agrees_with(spec):
                    raise UsageError(f"tensor {spec.name!r} is declared twice in one call, with different specs")
                if (slot := self._slots.named(spec.name)) and not self._needs_declaration(slot, spec):
                    slots[spec.name] = slot
                    del new[spec.name]
            rest = list(new.values())
            while rest:
                batch, rest = rest[: protocol.MAX_SPECS], rest[protocol.MAX_SPECS :]
                slots |= self._declare_new(batch)
            return [slots[spec.name] for spec in specs]

    def _needs_declaration(self, slot: Slot, spec: TensorSpec) -> bool:
        if slot.error is not None:
            return True
        if slot.spec.agrees_with(spec) and spec.fits_in(slot.spec):
            return False
        if slot.pending or slot.begun_bytes:
            raise UsageError(
                f"tensor {spec.name!r} is pending as {slot.spec.describe()}; wait for it before reusing the name "
                f"for {spec.describe()}"
            )
        return True

    def _declare_new(self, specs: Sequence[TensorSpec]) -> dict[str, Slot]:
        request = self.next_request()
        with self.state:
            self._asked[request] = specs
        sent = [self._of_incarnation(self._going_on(spec)) for spec in specs]
        self.send(protocol.Declare.of(request, sent))
        self.wait_until(
            lambda: request in self._declared,
            PATIENCE_S,
            lambda: "the communication service of this machine does not answer a declaration",
        )
        with self.state:
            return {spec.name: slot for spec, slot in zip(specs, self._declared.pop(request), strict=True)}

    def _going_on(self, spec: TensorSpec) -> TensorSpec:
        drawn = self._coded_states.drawn(spec) if spec.codec is not None else 0
        return replace(spec, codec=replace(spec.codec, drawn=drawn)) if spec.codec is not None and drawn else spec

    def _of_incarnation(self, spec: TensorSpec) -> TensorSpec:
        if not self.incarnation:
            return spec
        ownership = f"{spec.ownership}#{self.incarnation}" if spec.ownership else ""
        return replace(spec, name=f"{spec.name}#{self.incarnation}", ownership=ownership)

    def hand_over(self, slot: Slot, nbytes: int | None = None, layout: Layout | None = None) -> None:
        self.check_open()
        whole = slot.spec.nbytes
        nbytes = whole if nbytes is None else nbytes
        if slot.pending:
            raise UsageError(f"tensor {slot.spec.name!r} is pending; wait for it before handing it over again")
        if slot.error is None and not self._slots.is_current(slot):
            raise UsageError(
                f"tensor {slot.spec.name!r} was declared again: use the slot that its latest declaration returned"
            )
        if not slot.begun_bytes <= nbytes <= whole:
            raise UsageError(
                f"tensor {slot.spec.name!r}: {nbytes} bytes handed over, after {slot.begun_bytes} of {whole} bytes"
            )
        if slot.spec.op.bypasses_servers:
            self._send_layout(slot, layout)
        message = protocol.Ready(((slot.id, slot.round + 1, nbytes),))
        if not slot.begun_bytes:
            slot.chunks.clear()
        slot.begun_bytes = nbytes % whole if whole else 0
        if nbytes == whole:
            slot.round += 1  # before the message: its answer reads it
            if self.observer is not None:
                self.observer.begun(slot)
            if self.flight is not None:
                self.flight.begin(slot)
        self.send(message)  # even if the slot is void: the service must know which ranks have yet to learn that

    def _send_layout(self, slot: Slot, layout: Layout | None) -> None:
        """Send the layout of a round to the service, if it differs from that of the previous round."""
        known = self._layouts.get(slot)
        if layout is None and known is None:
            raise UsageError(f"tensor {slot.spec.name!r}: the first round of a {slot.spec.op.name} needs a layout")
        if layout is not None and layout != known:
            layout.check(slot.spec, len(slot.spec.members(self.size)))
            self.send(protocol.SetLayout.of(slot.id, layout))
            self._layouts[slot] = layout
            self._has_given = True

    def is_done(self, slot: Slot) -> bool:
        if self._closed or self.is_forked:
            return True  # ``wait`` raises
        if slot.pending and self._fatal is None:
            with self.state:
                while not self._reading and self._read(0):
                    pass
        return not slot.pending or self._fatal is not None

    def wait(self, slot: Slot, timeout_s: float | None = None) -> None:
        if slot.pending:
            self.wait_until(
                lambda: not slot.pending,
                self.time_limit(timeout_s),
                lambda: f"tensor {slot.spec.name!r}, round {slot.round}: no result",
            )
        self.check_open()
        if slot.error is not None and slot.done_round < slot.round:  # otherwise it became void after its last round
            raise slot.error.with_traceback(None)

    def request_chunks(self, slot: Slot) -> bool:
        if self.num_machines == 1 or len(slot.result) < 2 * self.chunk_bytes:
            return False
        self.send(protocol.WantChunks(slot.id))
        return True

    def wait_for_chunks(self, slot: Slot, timeout_s: float | None = None) -> list[int]:
        self.wait_until(
            lambda: bool(slot.chunks) or not slot.pending,
            self.time_limit(timeout_s),
            lambda: f"tensor {slot.spec.name!r}, round {slot.round}: no result",
        )
        with self.state:
            chunks, slot.chunks = slot.chunks, []
        return chunks if slot.pending else []

    def coded_states(self, names: Collection[str] | None = None) -> dict[str, CodedState]:
        self.read_available()  # rounds may be over
        self.check_open()
        with self.state:
            return self._coded_states.take(self._slots.current(), names)

    def set_coded_states(self, states: Mapping[str, CodedState]) -> None:
        self.check_open()
        with self.state:
            self._coded_states.put(states, self._slots.current())

    @property
    def state_host(self) -> RemoteStateHost:
        return self._state_host

    def barrier(self, timeout_s: float | None = None) -> None:
        self._barriers += 1
        sequence = self._barriers
        self.send(protocol.EnterBarrier(sequence))
        self.wait_until(
            lambda: self._released >= sequence,
            self.time_limit(timeout_s),
            lambda: "a barrier that not all ranks have reached",
        )

    def join(self, timeout_s: float | None = None) -> int:
        with self.state:
            if (begun := self._slots.begun()) is not None:
                raise UsageError(f"tensor {begun.spec.name!r} is handed over in part; hand over the rest before join()")
            self._last_joined = None
        if self._peers is not None:
            self._peers.join(lambda: self.send(protocol.Join()))
        else:
            self.send(protocol.Join())
        # Other ranks may have data for hours, so the stall limit does not apply.
        self.wait_until(lambda: self._last_joined is not None, timeout_s, lambda: "not all ranks have joined")
        with self.state:
            return -1 if self._last_joined is None else self._last_joined

    def hosts_changed(self) -> tuple[bool, bool]:
        self.read_available()
        return self._hosts

    def _drain(self) -> None:
        """Wait until other ranks have taken this rank's pieces of gathers and exchanges: the pieces lie in this rank's
        memory, and other ranks may be far behind. Not if an error ends this rank: the others may wait for operations
        that it will not start."""
        has_error = self._has_left or failure_reports.ending() is not None
        if not self._has_given or has_error or self.returning is not None or self._closed or self._fatal is not None:
            return
        self.send(protocol.Drain())
        try:
            waiting = "not all have taken what they are given"
            self.wait_until(lambda: self._is_drained, self.drain_notice_s, lambda: waiting)
        except StallError:
            limit_s = self.time_limit(None)
            _log.warning(
                "rank %d stays until others have taken what it has given them in a gather, an exchange or a send%s",
                self.rank, f", at most {limit_s:g} s" if limit_s else "",
            )  # fmt: skip
            self.wait_until(lambda: self._is_drained, limit_s, lambda: "not all have taken what they are given")

    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked child must not act for the rank or use its locks
            with contextlib.suppress(BytePSError):
                self._drain()
            if self.progress.steps and self._is_welcome:
                self.tell_progress(at_once=True)
            with self.state:
                if self._closed:
                    return
                self._closed = True
                self.state.notify_all()
            with contextlib.suppress(BytePSError):
                if not self._has_left:
                    reason, planned = self.returning or ("", False)
                    returns = protocol.Leave(return_reason=reason, planned=planned)
                    leave = returns if reason else failure_reports.leave_message()
                    self._channel.send(protocol.encode(leave or protocol.Leave(unfinished=not self.is_finished)))
            self._channel.shutdown()  # wakes the reading thread, which needs the descriptor until then
            with self.state:
                self.state.wait_for(lambda: not self._reading, PATIENCE_S)
        self._closed = True
        self._channel.close()
        self._slots.close()
        if self._peers is not None:
            self._peers.close(os.getpid() != self._pid)
        if self._stack is not None:
            self._stack.close()
            self._stack = None
        if self.flight is not None and os.getpid() == self._pid:
            self.flight.dump.close()

    def report_failure(self, error: BaseException) -> None:
        """Send the uncaught exception ``error``, which ends this process. Raises nothing."""
        if os.getpid() != self._pid or self._closed:
            return
        if self.flight is not None and isinstance(error, Exception):
            self.flight.dump.dump_at(error)
        if leave := failure_reports.leave_message_for(error):
            with contextlib.suppress(BytePSError):
                self._has_left = self._channel.try_send(protocol.encode(leave))

    def report_note(self, text: str) -> None:
        """Send a text for the messages of ranks that this rank keeps waiting. Raises nothing."""
        if os.getpid() == self._pid and not self._closed:
            with contextlib.suppress(BytePSError):
                self._channel.try_send(protocol.encode(protocol.Note(text)))

    # ---- messages of the service -------------------------------------------------------------------------

    def _handle(self, message: bytes, fds: list[int]) -> None:
        try:
            decoded = protocol.decode(message)
            handle = self._handlers.get(type(decoded))
            if handle is None:
                kind = type(decoded).__name__
                raise ProtocolError(f"the communication service sent a {kind} message, which only ranks send")
            try:
                handle(decoded, fds)
            except BytePSError:
                raise
            except (LookupError, ValueError, OverflowError, OSError) as error:
                kind = type(decoded).__name__
                raise ProtocolError(f"the communication service sent an invalid {kind} message: {error!r}") from error
        finally:
            for fd in fds:  # of a message that does not use it
                os.close(fd)

    # Each takes a message, and removes descriptors that are kept from ``fds``.

    def _welcomed(self, message: protocol.Welcome, fds: list[int]) -> None:
        if self._is_welcome:
            raise ProtocolError("the communication service welcomes this rank twice")
        self.rank, self.size = message.rank, message.size
        self.local_rank, self.local_size = message.local_rank, message.local_size
        self.is_continued, self.is_under_way = message.is_continued, message.is_under_way
        self.since_epoch = message.since_epoch
        self.machine_index, self.num_machines = message.machine_index, message.num_machines
        self.machine_facts = MachineFacts(
            message.slowest_mbit, message.replicated_gain, message.shadowed_gain, message.memory_bytes
        )
        self.is_homogeneous, self.has_shadow_servers = message.is_homogeneous, message.has_shadow_servers
        self._is_welcome = True

    def _on_segment(self, message: protocol.GiveSegment, fds: list[int]) -> None:
        self._slots.add_segment(message.id, fds[0], message.nbytes)
        del fds[0]

    def _slots_declared(self, message: protocol.Declared, fds: list[int]) -> None:
        # Right away: the next message may refer to these slots.
        pairs = zip(self._asked.pop(message.request), message.slots, strict=True)
        slots = self._declared[message.request] = [self._slots.add(spec, fields) for spec, fields in pairs]
        for slot in slots:
            self._coded_states.declared(slot)

    def _rounds_done(self, message: protocol.RoundsDone, fds: list[int]) -> None:
        self._slots.done(message.rounds, self.observer, self.flight)

    def _chunks_arrived(self, message: protocol.ChunksArrived, fds: list[int]) -> None:
        self._slots.arrived(message.chunks)

    def _declarations_failed(self, message: protocol.DeclarationsFailed, fds: list[int]) -> None:
        self._slots.fail(message.slots, from_name(message.error, message.message), self.flight)

    def _barrier_released(self, message: protocol.BarrierReleased, fds: list[int]) -> None:
        self._released = message.sequence

    def _all_joined(self, message: protocol.AllJoined, fds: list[int]) -> None:
        self._last_joined = message.last
        if self._peers is not None:
            self._peers.begin_era()

    def _hosts_changed(self, message: protocol.HostsChanged, fds: list[int]) -> None:
        self._hosts = (self._hosts[0] or message.added, self._hosts[1] or message.removed)

    def _relays_changed(self, message: protocol.RelaysChanged, fds: list[int]) -> None:
        if (peers := self.peers) is not None:
            peers.set_relays({each.rank: each.address for each in message.relays})

    def _on_peer_inbox(self, message: protocol.PeerInbox, fds: list[int]) -> None:
        if self._peers is None:
            raise ProtocolError("the communication service introduces a rank that has asked for none")
        self._peers.introduce(message.local_rank, fds[0])
        del fds[0]

    def _introduced(self, message: protocol.Introduced, fds: list[int]) -> None:
        if self._peers is None:
            raise ProtocolError("the communication service introduces a rank that has asked for none")
        self._peers.directory.introduced(message.key)

    def _drained(self, message: protocol.Drained, fds: list[int]) -> None:
        self._is_drained = True

    def _failed(self, message: protocol.Fatal, fds: list[int]) -> None:
        self._fail(from_name(message.error, message.message))

    def _is_alive(self, message: protocol.Pong, fds: list[int]) -> None: ...
