"""Memory that other processes may read by RDMA, and the reads of theirs: one agent, a thread that polls it, and a pool.

    loop's thread   registers memory, begins reads, hears that they have ended
    polling thread  starts reads and asks the agent for them, only while reads are under way, here or at another end

An agent can only be polled. While nothing is under way, the polling thread waits for an event, and costs nothing.
Memory is registered by segments, once: the arenas that are watched, and the pool in which what is read arrives. A block
of the pool is free again when the last user of its array is gone.

Knows nothing of messages (placed_messages.py, between services; session/peers/placed_payloads.py, between ranks). The
loop's thread owns a lane, in a rank the thread that receives; a lock keeps its two threads apart at the
agent, which is not thread-safe.
"""

from __future__ import annotations

import bisect
import collections
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from byteps_py.errors import CommunicationError, PeerLostError
from byteps_py.system.log import logger
from byteps_py.system.shm import Arena, Block

#: Payloads of fewer bytes travel over the connection: a read costs what TCP takes for some 600 KB (measured).
LEAST_BYTES = 512 << 10
#: The same where no card reads, which is for tests.
_LEAST_EMULATED_BYTES = 4 << 10
_PAUSE_S = 50e-6
_CLOSE_S = 5.0


class RdmaAgent(Protocol):
    """The library that moves bytes. ``name``: unique among all agents. ``is_hardware``: a network card reads this
    process's memory. Otherwise its processor does, in ``advance``."""

    name: str
    is_hardware: bool

    def register(self, address: int, nbytes: int) -> None:
        """Other agents that know ``describe`` may read there, until ``close``. Raises ConfigurationError."""

    def describe(self) -> bytes:
        """Everything registered, for other agents."""

    def meet(self, description: bytes) -> str:
        """Make another agent's memory known, or more of it. Returns its name. Raises PeerLostError."""

    def part(self, name: str) -> None:
        """Forget another agent."""

    def read(self, name: str, there: int, here: int, nbytes: int) -> object:
        """Begin to read from address ``there`` of another agent. Raises PeerLostError."""

    def is_done(self, read: object) -> bool:
        """True once all bytes of a read are here. Raises PeerLostError if they never will be."""

    def release(self, read: object) -> None:
        """Forget a read."""

    def advance(self) -> None:
        """Let reads of this process's memory go on."""

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class MemoryRead:
    """A read under way. ``done``: called on the loop's thread, with why it failed, or "". Not if it was taken back."""

    name: str
    there: int
    memory: npt.NDArray[np.uint8]
    done: Callable[[str], None]
    handle: object = None
    taken_back_s: float = 0.0  # when; 0: somebody waits for it
    began_s: float = 0.0
    until_s: float = 0.0  # when it was last seen to be under way, which is less late than when its end was seen


class Poster(Protocol):
    """The thread that owns a lane."""

    def post(self, work: Callable[[], None]) -> None:
        """Have it call ``work``. Any thread."""


class RdmaLane:
    """The memory of one process that others may read, and its reads of theirs. ``patience_s``: how long no read of
    another process may end before it counts as lost."""

    def __init__(self, agent: RdmaAgent, loop: Poster, patience_s: float, arena: type[Arena] = Arena) -> None:
        self._agent = agent
        self._loop = loop
        self.patience_s = patience_s
        self.least_bytes = LEAST_BYTES if agent.is_hardware else _LEAST_EMULATED_BYTES
        self.bytes_read = 0
        self._lock = threading.Lock()  # for the agent
        self._pool = arena()
        self._watched: dict[Arena, set[int]] = {self._pool: set()}  # and which of its segments are registered
        self._ranges: list[tuple[int, int]] = []  # addresses that are registered, in order
        self._mapped: list[object] = []  # keeps what is registered mapped
        self._freed: collections.deque[Block] = collections.deque()  # any thread appends
        self._known: collections.Counter[str] = collections.Counter()  # agents, by connections
        self._parting: set[str] = set()  # to be forgotten once no read of them is under way
        self._held = 0  # payloads that other ends are to read
        self._new: collections.deque[MemoryRead] = collections.deque()
        self._reads: list[MemoryRead] = []  # polled
        self._ended: collections.deque[tuple[MemoryRead, str]] = collections.deque()  # and why they have failed
        self._lost: list[object] = []  # memory that may yet be written
        self._wake = threading.Event()
        self._is_closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._poll, name="rdma", daemon=True)
        self._thread.start()

    # ---- memory that others read ---------------------------------------------------------------------------------

    def watch(self, arena: Arena) -> None:
        """Others may read the segments of ``arena``: those that there are, and those that it makes later. A segment is
        registered when something in it is to be read."""
        self._watched.setdefault(arena, set())

    def address_of(self, payload: bytes | bytearray | memoryview) -> int | None:
        """Where others can read ``payload``; None: it lies in no memory that they may read."""
        address: int = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
        end = address + len(payload)
        return address if self._has(address, end) or self._register(address, end) else None

    def _has(self, start: int, end: int) -> bool:
        at = bisect.bisect_right(self._ranges, (start, end)) - 1
        candidates = self._ranges[max(0, at) : at + 2]
        return any(first <= start and end <= last for first, last in candidates)

    def _register(self, start: int, end: int) -> bool:
        """Register the segment that has these addresses. False if there is none. Raises ConfigurationError."""
        for arena, registered in self._watched.items():
            for number, segment in enumerate(arena.segments):
                if segment.address <= start and end <= segment.address + segment.nbytes and number not in registered:
                    with self._lock:
                        self._agent.register(segment.address, segment.nbytes)
                    registered.add(number)
                    self._mapped.append(segment.view)
                    bisect.insort(self._ranges, (segment.address, segment.address + segment.nbytes))
                    return True
        return False

    @property
    def segments(self) -> int:
        """How many are registered: ``describe`` says more once there are more."""
        return len(self._ranges)

    def describe(self) -> bytes:
        """What another process needs in order to read here."""
        with self._lock:
            return self._agent.name.encode() + b"\0" + self._agent.describe()

    def hold(self, count: int) -> None:
        """So many more payloads are to be read at other ends; negative: have been read, or never will be."""
        self._held += count
        if count > 0:
            self._wake.set()

    # ---- memory of others ----------------------------------------------------------------------------------------

    def meet(self, description: bytes, is_first: bool) -> str:
        """Make the memory of another process known; ``is_first`` of a connection. Returns its agent's name. Raises
        PeerLostError."""
        name, _, rest = description.partition(b"\0")
        known = name.decode(errors="replace")
        with self._lock:
            if known in self._parting:
                self._part(known)
            if (said := self._agent.meet(rest)) != known:
                raise PeerLostError(f"its RDMA agent calls itself {known!r} and {said!r}")
        self._known[known] += is_first
        return known

    def part(self, name: str) -> None:
        """A connection to that agent has ended."""
        self._known[name] -= 1
        if self._known[name] <= 0:
            del self._known[name]
            with self._lock:
                self._parting.add(name)
            self._wake.set()

    def read(self, name: str, there: int, nbytes: int, done: Callable[[str], None]) -> MemoryRead:
        """Begin to read ``nbytes`` at address ``there`` of another agent."""
        read = MemoryRead(name, there, self._new_memory(nbytes), done)
        self._new.append(read)
        self._wake.set()
        return read

    def take_back(self, read: MemoryRead) -> None:
        """Nobody waits for this read any more."""
        read.taken_back_s = time.monotonic()

    def _new_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Of the pool, until nobody has the array, or a view of it, any more."""
        while self._freed:
            self._pool.free(self._freed.popleft())
        block = self._pool.allocate(nbytes)
        if not self._has(block.address, block.address + nbytes):
            self._register(block.address, block.address + nbytes)
        array = np.frombuffer(self._pool.segments[block.segment].view, np.uint8, nbytes, block.offset)
        weakref.finalize(array, self._freed.append, block).atexit = False
        return array

    def _tell_ended(self) -> None:
        while self._ended:
            read, why = self._ended.popleft()
            if not read.taken_back_s:
                self.bytes_read += 0 if why else read.memory.nbytes
                read.done(why)

    # ---- the polling thread --------------------------------------------------------------------------------------

    def _poll(self) -> None:
        try:
            self._poll_until_closed()
        except Exception as error:  # of the library: the service ends with it
            self._failure = error
            self._loop.post(self._raise)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _poll_until_closed(self) -> None:
        while not self._is_closed:
            if not (self._new or self._reads or self._held or self._parting):
                self._wake.wait()
                self._wake.clear()
                continue
            with self._lock:
                ended = self._look()
            if ended:
                self._ended.extend(ended)
                self._loop.post(self._tell_ended)
            # A card needs nobody here: connections are all that has to be looked after.
            time.sleep(_PAUSE_S if self._reads or not self._agent.is_hardware else 20 * _PAUSE_S)

    def _look(self) -> list[tuple[MemoryRead, str]]:
        """Start what is new, and ask for the rest. Returns what has ended, and why it failed."""
        ended: list[tuple[MemoryRead, str]] = []
        while self._new:
            read = self._new.popleft()
            if read.taken_back_s:
                continue
            try:
                read.began_s = read.until_s = time.monotonic()
                here = read.memory.__array_interface__["data"][0]
                read.handle = self._agent.read(read.name, read.there, here, read.memory.nbytes)
                self._reads.append(read)
            except CommunicationError as error:
                ended.append((read, str(error)))
        going = []
        for read in self._reads:
            try:
                if self._agent.is_done(read.handle):
                    ended.append((read, ""))
                elif not read.taken_back_s or time.monotonic() - read.taken_back_s < self.patience_s:
                    read.until_s = time.monotonic()
                    going.append(read)
                    continue
                else:
                    self._lost.append(read.memory)
            except CommunicationError as error:
                ended.append((read, str(error)))
            self._agent.release(read.handle)
        self._reads = going
        self._agent.advance()
        for name in [name for name in self._parting if all(read.name != name for read in going)]:
            self._part(name)
        return ended

    def _part(self, name: str) -> None:
        """Forget an agent. Reads of it may still write to their memory, which is not used again."""
        for read in [read for read in self._reads if read.name == name]:
            self._lost.append(read.memory)
            self._reads.remove(read)
            self._agent.release(read.handle)
        self._parting.discard(name)
        self._agent.part(name)

    def close(self) -> None:
        """End all reads. Nobody can read here any more."""
        logger.info("read by RDMA: %d bytes, in memory of %d segments", self.bytes_read, self.segments)
        self._is_closed = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the RDMA agent has not answered for %g s: it is left as it is", _CLOSE_S)
            return
        self._agent.close()
        for held in (self._new, self._reads, self._ended, self._mapped, self._watched, self._ranges, self._lost):
            held.clear()
        self._failure = None  # its frames have memory
        self._pool.close()  # what somebody still has stays mapped
