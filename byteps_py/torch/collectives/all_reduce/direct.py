"""One large sum over connections: each member adds a share of the tensor, chunk by chunk, and sends the sums to all
others.

    give    to each other member, the part of its own tensor that the other adds
    add     the parts of all members, as they come, to the chunk's sum
    take    the sums that the others have added

Each member sends and receives 2 (n - 1) / n of the tensor, the least possible without spare machines. What it gives and
takes does not pass through other memory: only the parts that it adds do. The order of the additions and the precision
are those of the service's kernels, so the result has the same bits.

One thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from byteps_py.session.peers import PeerTransport, PendingSend, StreamReceipt
from byteps_py.torch.collectives.all_reduce.shares import Chunks, add_up
from byteps_py.torch.collectives.router import Route

#: The largest piece that a member sends to another one at a time. On loopback, 2 and 4 members, 16 MB: 512 KB take 19.5
#: and 60 ms, 1 MB 18.5 and 53, 2 MB 17 and 52.
CHUNK_BYTES = 2 << 20
#: Chunks of its own share that a member can receive before it has added the first of them.
_SLOTS = 4


class DirectAllReduce:
    """The sums of one group, one at a time. ``own``: this member's position. ``others``: the ranks of the other
    members, by position. ``contributions``: by which an average is divided, if each member brings a sum of several
    (0: each brings one)."""

    route = Route.DIRECT

    def __init__(self, transport: PeerTransport, own: int, others: Mapping[int, int], contributions: int = 0) -> None:
        self.transport, self.own, self.others = transport, own, others
        self.count = len(others) + 1
        self.contributions = contributions
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def start(
        self, source: torch.Tensor, target: torch.Tensor | None, average: bool, name: str, scatters: bool = False
    ) -> DirectSum:
        """See SharedMemorySum. ``name`` differs for tensors that differ in size: members that add different tensors do
        not receive from each other, and find out by the log of their calls."""
        return DirectSum(self, name, source, target, average, scatters)

    def slots(self, like: torch.Tensor, elements: int) -> Sequence[Mapping[int, torch.Tensor]]:
        """Memory for parts of ``elements`` elements: in each slot, one from each other member, by position."""
        share = -(-elements * like.itemsize // 64) * 64
        if self._memory.numel() < share * _SLOTS * len(self.others):
            self._memory = torch.empty(share * _SLOTS * len(self.others), dtype=torch.uint8, device="cpu")
        parts = iter(self._memory.split(share))
        return [
            {position: next(parts)[: elements * like.itemsize].view(like.dtype) for position in self.others}
            for _ in range(_SLOTS)
        ]


class DirectSum:
    """Adds every member's ``source``, a flat and contiguous tensor, into ``target``: see SharedMemorySum."""

    def __init__(
        self,
        sums: DirectAllReduce,
        name: str,
        source: torch.Tensor,
        target: torch.Tensor | None,
        average: bool,
        scatters: bool,
    ) -> None:
        self._sums, self._transport = sums, sums.transport
        self._given = sums.transport.stream(f"{name}.parts", sums.others.values())
        self._taken = sums.transport.stream(f"{name}.sums", sums.others.values())
        # A member that does not need the result takes the others' sums all the same: they do not know.
        self._target = torch.empty_like(source) if target is None else target
        self._source, self._average, self._scatters = source, average, scatters
        self._chunks = Chunks(source.numel(), source.itemsize, sums.count, CHUNK_BYTES * sums.count, scatters)
        self._slots: Sequence[Mapping[int, torch.Tensor]] = ()
        self._receipts: list[StreamReceipt] = []  # of the chunks of the own share
        self._added = 0  # chunks
        self._rest: StreamReceipt | None = None  # for the sums of others
        self._unsent: list[PendingSend] = []
        self.has_begun = False

    def run(self, deadline: float) -> None:
        """Complete the sum. If a wait ends early, a further call continues. ``deadline``: of time.monotonic(). Raises
        StallError, JoinedError (no member completes it) and the error that ends the session."""
        transport = self._transport
        if not self.has_begun:
            self._begin()
        while self._added < len(self._receipts):
            transport.collect(self._receipts[self._added], deadline - time.monotonic())
            self._add(self._added)
            self._added += 1
        if self._rest is not None:
            transport.collect(self._rest, deadline - time.monotonic())
        transport.wait_until_sent(self._unsent, deadline - time.monotonic())

    def _begin(self) -> None:
        sums, transport, chunks = self._sums, self._transport, self._chunks
        if joined := transport.joined_among(sums.others.values()):
            raise transport.joined_error(self._given, joined)
        self.has_begun = True
        # The last shares are smaller. A member with an empty one, too, receives something of each other member, so that
        # it knows if one has joined instead.
        count = max(1, sum(chunks.of(sums.own, chunk)[1] > 0 for chunk in range(chunks.count)))
        self._slots = sums.slots(self._source, chunks.chunk_elements)
        for chunk in range(min(_SLOTS, count)):
            self._expect_parts(chunk)
        if not self._scatters:
            self._expect_sums(self._target)
        self._give()
        for _ in range(_SLOTS, count):
            self._receipts.append(StreamReceipt(self._given, is_mutual=True, owner=self))

    def _expect_parts(self, chunk: int) -> None:
        elements = self._chunks.of(self._sums.own, chunk)[1]
        receipt = StreamReceipt(self._given, is_mutual=True, owner=self)
        if chunk < len(self._receipts):
            self._receipts[chunk] = receipt
        else:
            self._receipts.append(receipt)
        for position, part in self._slots[chunk % _SLOTS].items():
            nbytes = elements * self._source.itemsize
            receipt.expect(self._sums.others[position], ((part.data_ptr(), nbytes),), nbytes)

    def _expect_sums(self, target: torch.Tensor) -> None:
        receipt = self._rest = StreamReceipt(self._taken, owner=self)
        for chunk in range(self._chunks.count):
            for position, rank in self._sums.others.items():
                first, elements = self._chunks.of(position, chunk)
                if elements:
                    nbytes = elements * target.itemsize
                    receipt.expect(rank, ((target.data_ptr() + first * target.itemsize, nbytes),), nbytes)
        receipt.left.reverse()

    def _give(self) -> None:
        """Begin with the member after this one, so that not all send to the same one first."""
        sums, source = self._sums, self._source
        for chunk in range(max(1, self._chunks.count)):
            for step in range(1, sums.count):
                position = (sums.own + step) % sums.count
                first, elements = self._chunks.of(position, chunk)
                if elements or not chunk:
                    span = source.data_ptr() + first * source.itemsize, elements * source.itemsize
                    self._unsent += self._transport.send(
                        self._given, (sums.others[position],), (span,), False, owner=self
                    )

    def _add(self, chunk: int) -> None:
        """All parts of a chunk of the own share have come."""
        sums = self._sums
        first, elements = self._chunks.of(sums.own, chunk)
        if not elements:
            return
        own = self._source[first : first + elements]
        parts = {position: part[:elements] for position, part in self._slots[chunk % _SLOTS].items()}
        before = sums.own * self._chunks.share if self._scatters else 0
        total = self._target[first - before : first - before + elements]
        rows = [parts.get(position, own) for position in range(sums.count)]
        if sums.own > 1 and total.data_ptr() == own.data_ptr():  # a row after the first two is read after a write
            rows[sums.own] = own.clone()
        add_up(rows, total, self._average, sums.contributions)
        if chunk + _SLOTS < len(self._receipts):
            self._expect_parts(chunk + _SLOTS)
        if not self._scatters:
            span = total.data_ptr(), total.nbytes
            self._unsent = [part for part in self._unsent if not part.has_arrived]
            self._unsent += self._transport.send(self._taken, tuple(sums.others.values()), (span,), False, owner=self)
