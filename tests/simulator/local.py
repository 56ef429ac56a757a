"""What connects two processes of one simulated machine, or a process and its events: channels and loops.

Stands for byteps_py.system.channel and byteps_py.system.loop. A channel whose peer does not read takes a few
messages only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from byteps_py.errors import PeerLostError, RendezvousError

from .world import InvariantError, Process, Wire, World

Message = tuple[bytes, list[int]]
_ROOM = 6  # messages that a channel takes before its reader has taken any
_MANY = 12  # a frozen reader: who sends more than that would wait for it


class Loop:
    """Stands for EventLoop, whose ``run`` is the world's."""

    lateness_s = 0.0

    def __init__(self, world: World, process: Process, local: Local) -> None:
        self.readers: dict[Any, Callable[[], None]] = {}
        self.writers: dict[Any, Callable[[], None]] = {}
        self.stopped = False
        self.process = process
        self._world = world
        self._local = local

    def add_reader(self, source: Any, callback: Callable[[], None]) -> None:
        self.readers[source] = callback
        if isinstance(source, int) and source in self._local.sources:
            self._local.sources[source].poke()

    change_reader = add_reader

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        self.writers[fd] = callback

    def remove_writer(self, fd: int) -> None:
        self.writers.pop(fd, None)

    def remove(self, source: Any) -> None:
        self.readers.pop(source, None)
        self.writers.pop(source, None)

    def time(self) -> float:
        return self._world.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._world.after(delay_s, self.process, None, callback)

    def post(self, callback: Callable[[], None]) -> None:
        self._world.after(0.0, self.process, "", callback)

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None: ...


class Source:
    """Something with a descriptor that a loop may wait for. ``loop``: of the process that reads, if it has one."""

    def __init__(self, world: World, local: Local, process: Process) -> None:
        self.world = world
        self.process = process
        self.loop: Loop | None = None
        self.fd = local.new_fd(self)
        self._poked = False

    def fileno(self) -> int:
        return self.fd

    @property
    def is_readable(self) -> bool:
        raise NotImplementedError

    def poke(self) -> None:
        """Have the loop read, as soon as it comes to that: by then there may be more to read."""
        if self.loop is None or self._poked or not self.is_readable or self.fd not in self.loop.readers:
            return
        self._poked = True
        self.world.after(self.world.delay() if self.world.random.random() < 0.2 else 0.0, self.process, "", self._read)

    def _read(self) -> None:
        self._poked = False
        callback = self.loop.readers.get(self.fd) if self.loop else None
        if callback is not None and self.is_readable:
            callback()
            self.poke()


class Channel(Source):
    """One end. ``on_arrival``: told of each message, by an end that has no loop."""

    def __init__(self, world: World, local: Local, process: Process) -> None:
        super().__init__(world, local, process)
        self.inbox: deque[Message] = deque()
        self.is_over = False  # the peer has closed, and what it sent before has arrived
        self.is_closed = False
        self.is_muted = False  # the next ``send`` was sent already
        self.on_arrival: Callable[[], None] | None = None
        self.peer: Channel
        self.peer_pid = 0
        self._underway = 0  # towards this end, inbox included
        self.wire = Wire()  # towards this end
        self._taken: deque[Message] = deque()

    @property
    def is_readable(self) -> bool:
        return not self.is_closed and bool(self.inbox or self.is_over)

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        if self.is_muted:
            self.is_muted = False
            return
        peer = self.peer
        if not self.is_closed and peer.is_closed and self._underway > len(self.inbox):
            return  # before the other end was closed, as it were: in truth what was said there would lie here by now
        if self.is_closed or peer.is_closed or not peer.process.is_alive:
            raise PeerLostError(f"process {self.peer_pid} closed its local connection")
        if peer.process.is_paused and peer._underway >= _MANY:
            raise InvariantError(f"{self.process.name} waits for {peer.process.name}, which is frozen")
        peer._underway += 1
        self.world.carry(peer.wire, peer.process, "", lambda: peer._arrive((bytes(data), list(fds))))

    def try_send(self, data: bytes, fds: tuple[int, ...] = ()) -> bool:
        if self.peer._underway >= _ROOM and not self.peer.is_closed and self.peer.process.is_alive:
            return False
        self.send(data, fds)
        return True

    def receive(self, timeout_s: float) -> Message | None:
        if self._taken:
            return self._taken.popleft()
        if self.inbox:
            message = self.inbox.popleft()
            self._make_room()
            return message
        if self.is_over:
            raise PeerLostError(f"process {self.peer_pid} closed its local connection")
        if timeout_s:
            raise AssertionError("a simulated process must not block")
        return None

    def take(self) -> deque[Message]:
        """All that has arrived, to be looked at; ``receive`` gives it all the same."""
        while self.inbox:
            self._taken.append(self.inbox.popleft())
            self._make_room()
        return self._taken

    def _make_room(self) -> None:
        self._underway -= 1
        peer = self.peer
        if peer.loop is not None and self._underway < _ROOM and peer.fd in peer.loop.writers:
            self.world.after(0.0, peer.process, "", lambda: self._writable(peer))

    def _writable(self, peer: Channel) -> None:
        callback = peer.loop.writers.get(peer.fd) if peer.loop else None
        if callback is not None and self._underway < _ROOM:
            callback()

    def _arrive(self, message: Message) -> None:
        if self.is_closed:
            return
        self.world.note(self.process.name, f"channel message {message[0][0]} of {len(message[0])} bytes")
        self.inbox.append(message)
        self._tell()

    def _end(self) -> None:
        self.is_over = True
        self._tell()

    def _tell(self) -> None:
        if self.on_arrival is not None:
            self.on_arrival()
        else:
            self.poke()

    def shutdown(self) -> None: ...

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.world.carry(self.peer.wire, self.peer.process, "end of channel", self.peer._end)


class Listener(Source):
    def __init__(self, world: World, local: Local, process: Process, name: str) -> None:
        super().__init__(world, local, process)
        self.name = name
        self.pending: deque[Channel] = deque()
        self._local = local
        local.listeners[name] = self

    @property
    def is_readable(self) -> bool:
        return bool(self.pending)

    def accept(self) -> Channel:
        return self.pending.popleft()

    def close(self) -> None:
        self._local.listeners.pop(self.name, None)


class Death(Source):
    """Stands for a pidfd."""

    _is_due = False

    @property
    def is_readable(self) -> bool:
        return self._is_due

    def fire(self) -> None:
        self._is_due = True
        self.poke()


class Local:
    """All channels, by name and by descriptor."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.listeners: dict[str, Listener] = {}
        self.sources: dict[int, Source] = {}
        self.loops: dict[Process, Loop] = {}

    def new_fd(self, source: Source) -> int:
        fd = 10_000 + len(self.sources)
        self.sources[fd] = source
        source.loop = self.loops.get(source.process)
        return fd

    def new_loop(self, process: Process) -> Loop:
        self.loops[process] = Loop(self._world, process, self)
        return self.loops[process]

    def connect(self, name: str, process: Process) -> Channel:
        """Raises RendezvousError."""
        listener = self.listeners.get(name)
        if listener is None or not listener.process.is_alive:
            raise RendezvousError(f"no process of this job listens at the local socket {name!r}")
        near, far = Channel(self._world, self, process), Channel(self._world, self, listener.process)
        near.peer, far.peer = far, near
        near.peer_pid, far.peer_pid = listener.process.pid, process.pid
        process.on_end.append(near.close)
        listener.process.on_end.append(far.close)
        listener.pending.append(far)
        listener.poke()
        return near

    def open_pidfd(self, pid: int, process: Process) -> int:
        """A descriptor that ``process`` can read once process ``pid`` is gone."""
        world = self._world
        death = Death(world, self, process)
        target = next(p for p in world.processes if p.pid == pid)
        if target.is_gone:
            raise ProcessLookupError(f"no process {pid}")

        def announce() -> None:
            # What a process has sent is in the kernel's hands before it ends.
            sent = [s.peer.wire for s in self.sources.values() if isinstance(s, Channel) and s.process is target]
            arrived_s = max((wire.last_arrival_s - world.now_s for wire in sent), default=0.0)
            world.after(max(arrived_s, world.delay()), process, "a process ends", death.fire)

        target.on_end.append(announce)
        return death.fd
