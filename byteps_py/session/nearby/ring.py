"""Two slots in which a rank lays, step by step, what the other ranks of a group are to have, while they do the same.

So a tensor of any size needs no more shared memory than that, and what is laid is read while it is in the caches.
Nobody says that a slot has been read: who lays a step has read all of the others' steps before it.

    wait until all others have laid step s - 1, for which they have read step s - 2 of this rank
    read step s - 1 of the others; write step s where step s - 2 was; lay it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from byteps_py.errors import JoinedError, MismatchError
from byteps_py.session.nearby import messages
from byteps_py.session.nearby.ledger import Ledger, Parcel, Stream
from byteps_py.session.nearby.memory import Incoming, Outgoing
from byteps_py.session.nearby.messages import Kind
from byteps_py.session.nearby.post import Outbox
from byteps_py.session.nearby.receipts import joined
from byteps_py.session.nearby.waiting import Patience, Wait
from byteps_py.shm import Block, Segment

SLOTS = 2
_LAID, _MORE = int(Kind.LAID), int(Kind.MORE)


@dataclass(frozen=True, slots=True)
class Slot:
    """``address``: where its ``memory`` lies in this process."""

    address: int
    memory: memoryview


class Ring:
    """Of one group: ``others`` are the local ranks of its other members. ``first_rank``: the global rank of local rank
    0. ``announce`` tells a neighbour of memory. One operation at a time, all members' in the same order."""

    def __init__(
        self,
        me: int,
        first_rank: int,
        others: Sequence[int],
        slot_bytes: int,
        books: threading.Lock,
        ledger: Ledger,
        outgoing: Outgoing,
        incoming: Incoming,
        outboxes: Mapping[int, Outbox],
        patience: Patience,
        announce: Callable[[Outbox], None],
    ) -> None:
        self._me, self._first_rank, self._others, self._slot_bytes = me, first_rank, others, slot_bytes
        self._books, self._ledger, self._outgoing, self._incoming = books, ledger, outgoing, incoming
        self._outboxes, self._patience, self._announce = outboxes, patience, announce
        self.block: Block | None = None  # where its slots are
        self._mine: list[Slot] = []
        self._theirs: dict[int, tuple[tuple[int, int], list[Slot]]] = {}  # by source; where they are: segment, offset
        self._era = -1
        self._first = 0  # steps of operations before this one, in this era
        # Of the operation under way:
        self._stream: Stream | None = None
        self._steps = self._laid = self._id = 0
        self._numbers: dict[int, int] = {}
        self._parcels: dict[int, Parcel] = {}
        self._wait: Wait | None = None

    def prepare(self) -> None:
        """The first step of the next operation may be written from now on, whether or not it comes to it."""
        if self._era != self._ledger.era:
            self._era, self._first = self._ledger.era, 0
        if self.block is None:
            with self._books:
                self.block, segment = self._outgoing.allocate(SLOTS * self._slot_bytes)
            self._mine = self._slots(segment, self.block.offset)

    def begin(self, stream: Stream, steps: int, name: str = "") -> None:
        """The next operation: every member lays ``steps`` steps in it. ``name``: what to call it where somebody waits
        for it too long; that of the stream by default. Raises JoinedError if one has no more data."""
        ledger = self._ledger
        if missing := [source for source in self._others if source in ledger.joined]:
            raise self._joined(stream, missing[0])
        self.prepare()
        with self._books:
            self._id = ledger.new_id()
        self._stream, self._steps, self._laid = stream, steps, 0
        self._numbers = {source: stream.expect(source) for source in self._others}
        self._parcels = {}
        self._wait = Wait(name or stream.name, max(self._numbers.values()), self._missing)

    def mine(self, step: int) -> Slot:
        """Where this rank lays ``step``."""
        return self._mine[(self._first + step) % SLOTS]

    @property
    def knows_all(self) -> bool:
        """Where the others' slots are, from an operation before. Who has heard by other means that all others have
        written their first step need not wait for it."""
        return len(self._theirs) == len(self._others)

    def theirs(self, source: int, step: int) -> Slot:
        """Where a member has laid ``step``, for which this rank has waited."""
        return self._theirs[source][1][(self._first + step) % SLOTS]

    def lay(self, steps: int = 1) -> None:
        """The next step, or so many, is written, and what the others have laid before it has been read: tell them."""
        block, stream, era = self.block, self._stream, self._ledger.era
        if block is None or stream is None:
            raise ValueError("lay() without begin()")
        is_more, self._laid = self._laid > 0, self._laid + steps
        ready, total = self._laid * self._slot_bytes, self._steps * self._slot_bytes
        for target in self._others:
            outbox = self._outboxes[target]
            if is_more:
                outbox.send(messages.pack(_MORE, self._me, era, 0, 0, 0, total, ready, self._id, 0, -1))
                continue
            if outbox.announced <= block.segment:
                self._announce(outbox)
            outbox.send(
                messages.pack(
                    _LAID, self._me, era, block.segment, stream.key, stream.send(target), total, ready, self._id,
                    block.offset, self._first,
                )
            )  # fmt: skip

    def await_step(self, step: int, timeout_s: float) -> None:
        """Return when all other members have laid ``step``. Raises StallError, MismatchError (they do something else),
        JoinedError (one has no more data; nobody has laid more than the first step), ProtocolError and what ends the
        session."""
        deadline = time.monotonic() + timeout_s
        ready = (step + 1) * self._slot_bytes
        for source in self._others:
            parcel = self._parcels.get(source)
            if parcel is None or parcel.ready < ready:
                self._await(source, ready, deadline)

    def end(self) -> None:
        """All steps of all have been laid, and read."""
        if self._stream is None or self._wait is None:
            return
        for source, number in self._numbers.items():
            del self._stream.flows[source].parcels[number]
        self._patience.ended(self._wait)
        self._first += self._steps
        self._stream = None

    def _slots(self, segment: Segment, offset: int) -> list[Slot]:
        begins = [offset + number * self._slot_bytes for number in range(SLOTS)]
        return [Slot(segment.address + begin, segment.view[begin : begin + self._slot_bytes]) for begin in begins]

    def _missing(self) -> list[int]:
        least = min((parcel.ready for parcel in self._parcels.values()), default=0)
        return [s for s in self._others if s not in self._parcels or self._parcels[s].ready == least]

    def _await(self, source: int, ready: int, deadline: float) -> None:
        stream, wait = self._stream, self._wait
        if stream is None or wait is None:
            raise ValueError("await_step() without begin()")
        parcels, number = stream.flows[source].parcels, self._numbers[source]

        def has_come() -> bool:
            parcel = parcels.get(number)
            return bool(self._absent(stream)) if parcel is None else parcel.ready >= ready

        if not has_come():
            self._patience.until(has_come, wait, deadline - time.monotonic())
        parcel = parcels.get(number)
        if parcel is None:  # perhaps it knows already that another one has joined
            raise self._joined(stream, self._absent(stream)[0])
        if source not in self._parcels:
            self._check(source, parcel)
            where = parcel.segment, parcel.offset
            if source not in self._theirs or self._theirs[source][0] != where:
                segment = self._incoming.find(source, parcel.segment, parcel.offset + SLOTS * self._slot_bytes)
                self._theirs[source] = where, self._slots(segment, parcel.offset)
            self._parcels[source] = parcel

    def _check(self, source: int, parcel: Parcel) -> None:
        own = (self._first, self._steps * self._slot_bytes)
        if (parcel.due, parcel.total) != own:
            name = self._stream.name if self._stream is not None else ""
            raise MismatchError(
                f"tensor {name!r}: rank {self._first_rank + source} lays {parcel.total} bytes after {parcel.due} "
                f"steps, rank {self._first_rank + self._me} {own[1]} after {own[0]}; call the same operations in the "
                "same order on every rank"
            )

    def _absent(self, stream: Stream) -> list[int]:
        """Members that have joined, and have not begun this operation."""
        gone, flows = self._ledger.joined, stream.flows
        return [s for s in self._others if s in gone and self._numbers[s] not in flows[s].parcels]

    def _joined(self, stream: Stream, source: int) -> JoinedError:
        if self._wait is not None:
            self._patience.ended(self._wait)
        return joined(stream.name, self._first_rank + source)
