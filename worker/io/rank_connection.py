"""The local ranks' connections: their words in, the service's words out, their shared memory.

Owned by the loop's thread. A rank that reads nothing for a while (it computes) never blocks the service:
what its socket does not take waits here, DONE records coalescing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from byteps_py.errors import BytePSError, PeerLostError
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.system.channel import Channel
from byteps_py.system.shm import Arena, Block
from byteps_py.wire import rank_link as protocol

MAX_NOTE_CHARS = 9000
_MOST_LINKS = 4096


@dataclass(slots=True)
class DirectWait:
    """A rank waits for others of its machine, without the service: for what, since when, and the global ranks."""

    name: str
    round: int
    since: float
    group: tuple[int, ...]


class RankConnection:
    """One process's connection. ``local_rank``, and ``arena``, which holds its slots, are known from ``enter`` on. The
    arena outlives the connection: kernels may still write there."""

    arena: Arena

    def __init__(self, runtime: Runtime, channel: Channel) -> None:
        self.local_rank = -1
        self.pid = channel.peer_pid
        self.barriers_before = 0  # passed before this rank came: its own count starts at 0
        self.barriers = 0  # how many it has come to
        self.rounds = 0  # results that it has been told of
        self.last_slot = 0  # of the last one
        self.last_done_s = 0.0
        self.note = ""  # what it said for the case that it keeps others waiting
        self.stack_fd = -1  # see stack_dump.py; -1: it has given none
        self.flight_fd = -1  # see flight_recorder.py; -1: it has given none
        self.inbox_fd = -1  # the way to it for its peers, see session/peers; -1: it has given none
        self.direct_waits: dict[int, DirectWait] = {}  # by id
        self.steps: list[pb.RankSteps] = []  # how far it was when it told it last, without its number
        self.progress: pb.RankProgress | None = None  # the same, of its training
        self._links: list[protocol.LinkUsed] = []  # what it sent to ranks of other machines, and nobody has taken
        self._announced = 0  # segments the rank has been given
        self._runtime = runtime
        self._loop = runtime.loop
        self._channel = channel
        self._backlog: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._done: list[tuple[int, int, int]] = []
        self._chunks: list[tuple[int, int, int]] = []
        self._fd = channel.fileno()
        self._pidfd = -1

    def watch_process(self) -> None:
        """From now on ``pidfd`` tells of its process's end. The socket of a dead rank may live on in a process that it
        forked; its pid tells the truth. Raises ProcessLookupError if the process has ended."""
        self._pidfd = self._runtime.open_pidfd(self.pid)

    def enter(self, local_rank: int, arena: Arena, barriers: int) -> None:
        """It takes part in a group that has passed ``barriers``. Raises ProcessLookupError if its process has ended."""
        self.forget()
        self.watch_process()
        self.local_rank, self.arena = local_rank, arena
        self.steps, self.progress = [], None
        self.barriers_before = self.barriers = barriers

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def pidfd(self) -> int:
        """Readable when the rank's process has ended; -1 if that is not watched."""
        return self._pidfd

    def receive(self) -> Any:
        """The next message, None if there is none now. Raises PeerLostError, ProtocolError."""
        received = self._channel.receive(0)
        if received is None:
            return None
        data, fds = received
        message = None
        try:
            message = protocol.decode(data)
        finally:
            for fd in fds:
                if isinstance(message, protocol.GiveStackFile) and self.stack_fd < 0:
                    self.stack_fd = fd
                elif isinstance(message, protocol.GiveFlightRecorder) and self.flight_fd < 0:
                    self.flight_fd = fd
                elif isinstance(message, protocol.AskIntroduction) and self.inbox_fd < 0:
                    self.inbox_fd = fd
                else:  # ranks have no others to give
                    self._runtime.close_fd(fd)
        return message

    def tell_steps(self, message: protocol.StepsBegun) -> None:
        """It has told how many steps it has begun."""
        self.steps = [
            pb.RankSteps(sequence=each.sequence, steps=each.steps, optimizers=each.optimizers)
            for each in message.counts
        ]

    def take_progress(self, message: protocol.ProgressMade) -> None:
        """It has told what it has done."""
        numbers = {name: getattr(message, name) for name in message.__slots__}
        self.progress = pb.RankProgress(**numbers)

    def tell_links(self, message: protocol.LinksUsed) -> None:
        """It has told what it sent to ranks of other machines."""
        self._links = [*self._links, *message.links][-_MOST_LINKS:]

    def take_link_reports(self) -> list[protocol.LinkUsed]:
        """What it has told of since this was called before."""
        links, self._links = self._links, []
        return links

    def take_flight_recorder(self) -> int:
        """The descriptor of its flight recorder, which the caller closes: others may ask what the rank did last when it
        has left. -1: it has given none."""
        fd, self.flight_fd = self.flight_fd, -1
        return fd

    def end_wait(self, message: protocol.WaitEnded) -> None:
        """It waits no more for this."""
        self.direct_waits.pop(message.id, None)

    def take_note(self, message: protocol.Note) -> None:
        """What others are told if it keeps them waiting."""
        self.note = message.text[:MAX_NOTE_CHARS]

    def allocate(self, nbytes: int) -> Block:
        """Memory for this rank, made known to it before the next message that names it."""
        block = self.arena.allocate(nbytes)
        self.announce()
        return block

    def announce(self) -> None:
        """Hand the rank descriptors of segments it does not know."""
        while self._announced < len(self.arena.segments):
            segment = self.arena.segments[self._announced]
            self.send(protocol.GiveSegment(self._announced, segment.nbytes), (segment.fd,))
            self._announced += 1

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Send now, or as soon as the rank's socket takes it; order is kept. Raises PeerLostError."""
        data = protocol.encode(message)
        if self._backlog or not self._channel.try_send(data, fds):
            if not self._backlog:
                self._loop.add_writer(self._fd, self._flush)
            self._backlog.append((data, tuple(os.dup(fd) for fd in fds)))  # theirs may be closed before

    def add_done(self, slot_id: int, round_: int, blame: int = 0) -> None:
        """Note a delivered round; ``send_done`` tells the rank."""
        self._done.append((slot_id, round_, blame))
        self.rounds += 1
        self.last_slot = slot_id

    def add_chunks(self, slot_id: int, round_: int, chunks: Iterable[int]) -> None:
        """Note parts of a result that are there; ``send_done`` tells the rank."""
        self._chunks += ((slot_id, round_, chunk) for chunk in chunks)

    def send_done(self, in_order: bool = False) -> None:
        """Tell the rank of all chunks and rounds noted, unless its socket is full: then with the next chance;
        ``in_order``: before whatever is sent next. Raises PeerLostError."""
        if self._done:
            self.last_done_s = self._loop.time()
        while self._chunks and (in_order or not self._backlog):
            chunks, self._chunks = self._chunks[: protocol.MAX_ROUNDS], self._chunks[protocol.MAX_ROUNDS :]
            self.send(protocol.ChunksArrived(tuple(chunks)))
        while self._done and (in_order or not self._backlog):
            rounds, self._done = self._done[: protocol.MAX_ROUNDS], self._done[protocol.MAX_ROUNDS :]
            self.send(protocol.RoundsDone(tuple(rounds)))

    def _flush(self) -> None:
        try:
            while self._backlog and self._channel.try_send(*self._backlog[0]):
                self._close(self._backlog.popleft()[1])
            if not self._backlog:
                self._loop.remove_writer(self._fd)
                self.send_done()
        except PeerLostError:  # what it said last is still to be read, and says why
            self._loop.remove_writer(self._fd)

    def _close(self, fds: Iterable[int]) -> None:
        for fd in fds:
            self._runtime.close_fd(fd)

    def turn_away(self, error: BytePSError) -> None:
        """Say why the rank can't take part, and close."""
        try:
            self._channel.send(protocol.encode(protocol.Fatal.of(error)))
        except PeerLostError:
            pass
        finally:
            self.close()

    def hang_up(self) -> None:
        """The rank has left: no more words. Its process may live on, and the end of that can still be waited for."""
        if self._fd < 0:
            return
        self._loop.remove(self._fd)
        self._fd = -1
        self._channel.close()
        self._close(fd for fd in (self.stack_fd, self.flight_fd, self.inbox_fd) if fd >= 0)
        self.stack_fd = self.flight_fd = self.inbox_fd = -1
        while self._backlog:
            self._close(self._backlog.popleft()[1])

    def forget(self) -> None:
        """Watch its process no more."""
        if self._pidfd >= 0:
            self._loop.remove(self._pidfd)
            self._runtime.close_fd(self._pidfd)
            self._pidfd = -1

    def close(self) -> None:
        self.hang_up()
        self.forget()
