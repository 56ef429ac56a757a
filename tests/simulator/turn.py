"""One rank's part in one use: it hands its contribution over, waits, and compares what it gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Protocol

import numpy as np

from byteps_py.errors import MismatchError, UsageError
from byteps_py.session import Slot
from byteps_py.session.service.remote import RemoteSession
from byteps_py.wire.chunks import TensorChunks, chunk_at

from .memory import Bytes, Memory, address_of
from .uses import Use
from .world import InvariantError

#: What a rank's life yields: a time to spend, or what to wait for.
Life = Generator[float | Callable[[], bool], None, None]


class Taker(Protocol):
    """A rank."""

    name: str
    doing: str
    memory: Memory
    random: random.Random
    session: RemoteSession
    number: int
    results: dict[int, bytes]  # by use: what all get, or, of an error, what all are told
    in_chunks: set[int]  # slots whose results are taken so
    chunk_bytes: int

    @property
    def now_s(self) -> float: ...

    def check_waited(self, since_s: float) -> None: ...

    def pause(self) -> float: ...

    def say(self, what: str) -> None: ...


class Turn:
    def __init__(self, rank: Taker, use: Use, slot: Slot) -> None:
        self._rank = rank
        self._use = use
        self._slot = slot
        self._what = f"{use.name} (use {use.id})"

    # ---- giving ------------------------------------------------------------------------------------------

    def hand_over(self) -> Life:
        rank, use, slot = self._rank, self._use, self._slot
        rank.doing = f"handing over {self._what}"
        if rank.random.random() < 0.3 and slot.error is None and rank.session.request_chunks(slot):
            rank.in_chunks.add(slot.id)
        data = use.contribution(rank.number)
        target = np.frombuffer(slot.input, np.uint8)
        self._check_ours(target)
        if use.pieces is not None:
            target[: len(data)] = data
            layout = use.pieces.layout(use.position(rank.number))
            rank.session.hand_over(slot, layout=layout)
        else:
            yield from self._write(data, target)
        rank.say(f"has handed over {self._what}")

    def _write(self, data: Bytes, target: Bytes) -> Life:
        """Now and then in several parts, in the order that the service expects."""
        rank, slot = self._rank, self._slot
        cuts = rank.random.sample(range(len(data)), min(len(data), rank.random.choice((0, 0, 1, 3))))
        order = list(TensorChunks(slot.spec, rank.session.size, rank.chunk_bytes))
        start = 0
        for cut in sorted(cuts):
            _copy(order, data, target, start, cut)
            rank.session.hand_over(slot, cut)
            start = cut
            yield rank.pause()
            if slot.error is not None:
                break
        if slot.error is None:
            self._check_ours(target)
            _copy(order, data, target, start, len(data))
        rank.session.hand_over(slot)

    def _check_ours(self, target: Bytes) -> None:
        if len(target):
            self._rank.memory.at(address_of(target), len(target))

    # ---- taking ------------------------------------------------------------------------------------------

    def wait(self) -> Life:
        rank, use, slot, session = self._rank, self._use, self._slot, self._rank.session
        rank.doing = f"waiting for {self._what}"
        since_s = rank.now_s
        try:
            if slot.id in rank.in_chunks:
                yield from self._take_chunks()
            yield lambda: session.is_done(slot)
            rank.check_waited(since_s)
            session.wait(slot, 1.0)
        except UsageError as error:
            if not use.is_unsupported or use.name not in str(error) or "joined" not in str(error):
                raise
            return
        except MismatchError as error:
            self._disagreed(error)
            return
        if use.is_unsupported:
            raise InvariantError(f"{rank.name} got {self._what} though ranks have joined")
        if use.is_mismatch or (use.pieces is not None and use.pieces.must_fail(use.position(rank.number))):
            raise InvariantError(f"{rank.name} got a result of {self._what}, about which ranks disagree")
        result = np.frombuffer(slot.result, np.uint8)
        self._compare(result)
        result[:] = 0x5A  # the user may: it is theirs

    def _take_chunks(self) -> Life:
        """Each comes once, and as it stays."""
        session, slot = self._rank.session, self._slot
        seen: set[int] = set()
        while slot.pending:
            yield lambda: session.is_done(slot) or bool(slot.chunks)
            for chunk in session.wait_for_chunks(slot, 1.0):
                if chunk in seen:
                    raise InvariantError(f"{self._rank.name} is shown chunk {chunk} of {self._what} twice")
                seen.add(chunk)
                offset, length = chunk_at(chunk, len(slot.result), self._rank.chunk_bytes)
                self._compare(np.frombuffer(slot.result, np.uint8), offset, offset + length)
            yield self._rank.pause()

    def _disagreed(self, error: MismatchError) -> None:
        use, rank = self._use, self._rank
        if use.name not in str(error):
            raise InvariantError(f"an error does not name its tensor: {error}") from None
        if use.pieces is not None:
            if not use.pieces.may_fail(use.position(rank.number)):
                raise error
            rank.say(f"has not got {self._what}")
            return
        if not use.is_mismatch:
            raise error
        expected = rank.results.setdefault(use.id, str(error).encode())
        if str(error).encode() != expected:
            raise InvariantError(f"{rank.name} hears another reason than others why {self._what} is void")

    def _compare(self, result: Bytes, begin: int = 0, end: int | None = None) -> None:
        """Results are what the contract says; from ``begin`` to ``end`` if they come in chunks."""
        use, rank = self._use, self._rank
        whole = end is None
        end = len(result) if end is None else end
        if use.pieces is None:
            due = [(0, use.share(rank.number, rank.results[use.id]))]
        else:
            due = use.gathered(rank.number)
        for offset, data in due:
            first, last = max(begin, offset), min(end, offset + len(data))
            if first < last and result[first:last].tobytes() != data[first - offset : last - offset]:
                part = "another result" if whole else f"bytes {begin} to {end}, not as they stay,"
                raise InvariantError(f"{rank.name} got {part} of {self._what} than it should")
        if whole:
            rank.say(f"has got {self._what}")


def _copy(order: list[tuple[int, int]], data: Bytes, target: Bytes, start: int, end: int) -> None:
    """Bytes ``start`` to ``end``, counted in the order of these ranges."""
    at = 0
    for offset, length in order:
        first, last = max(start, at), min(end, at + length)
        if first < last:
            target[offset + first - at : offset + last - at] = data[offset + first - at : offset + last - at]
        at += length
