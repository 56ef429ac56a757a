"""Where local ranks come to: takes their messages, knows who is here, who has left, who died.

Owned by the loop's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from byteps_py import rank_protocol as protocol
from byteps_py.channel import Channel, Listener
from byteps_py.errors import BytePSError, PeerLostError, ProtocolError, UsageError
from byteps_py.log import logger
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.runtime import Runtime
from byteps_py.unauthenticated_connections import MOST, PATIENCE_S
from byteps_py.wording import count_text
from byteps_py.worker.ranks import RankConnection
from byteps_py.worker.requests import Requests

_READY = int(RankMessageKind.READY)  # a plain integer: by far the most frequent
_MOST_EPOCHS = 1 << 32
MAX_NOTE_CHARS = 9000
_DRAIN = 256  # messages taken from a rank before others get their turn


class RankServer:
    """``on_death(sentence)``: a rank ended without leaving. ``on_change()``: a rank came, wants to leave, or left, or
    has left and its process has ended by now."""

    def __init__(
        self,
        runtime: Runtime,
        listener: Listener,
        local_size: int,
        on_death: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._loop = runtime.loop
        self._listener = listener
        self._local_size = local_size
        self._on_death = on_death
        self._on_change = on_change
        self._strangers: dict[int, Channel] = {}
        self._waiting: list[tuple[Channel, int]] = []  # said HELLO before the cluster was complete
        self._open: Requests | None = None
        self.failure: BytePSError | None = None
        self.left: dict[int, float] = {}  # local ranks that were here and have left, and when
        self.gone: dict[int, float] = {}  # those whose process has ended, too: they can't come back
        self._may_return: dict[int, RankConnection] = {}  # those whose process has not
        self._loop.add_reader(listener.fileno(), self._accept)

    def open(self, requests: Requests) -> None:
        """The cluster is complete: welcome whoever waits."""
        self._open = requests
        waiting, self._waiting = self._waiting, []
        for channel, local_rank in waiting:
            if self.failure is not None:  # one of them has died meanwhile
                self._turn_away(channel, self.failure)
            else:
                self._welcome(channel, local_rank)

    @property
    def ranks_here(self) -> int:
        return len(self._waiting) + (len(self._open.executor.ranks) if self._open else 0)

    def fail(self, error: BytePSError) -> None:
        """Nothing works any more: tell every rank, also those that come later."""
        self.failure = error
        for channel, _ in self._waiting:
            self._turn_away(channel, error)
        self._waiting.clear()
        if self._open:
            message = protocol.pack(RankMessageKind.FATAL, error=type(error).__name__, message=str(error))
            for rank in list(self._open.executor.ranks.values()):
                self._guard(rank, functools.partial(rank.send, message))

    # ---- coming ----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            channel = self._listener.accept()
        except (BytePSError, OSError) as error:
            logger.warning("turned away: %s", error)
            return
        if len(self._strangers) >= MOST:
            self._expire(next(iter(self._strangers.values())))
        self._strangers[channel.fileno()] = channel
        self._loop.add_reader(channel.fileno(), functools.partial(self._greet, channel))
        self._loop.call_later(PATIENCE_S, functools.partial(self._expire, channel))

    def _expire(self, channel: Channel) -> None:
        """It has not said in time who it is."""
        fd = channel.fileno()
        if self._strangers.get(fd) is channel:
            del self._strangers[fd]
            self._loop.remove(fd)
            channel.close()

    def _greet(self, channel: Channel) -> None:
        """The first message of a connection must be HELLO."""
        fd = channel.fileno()
        self._loop.remove(fd)
        del self._strangers[fd]
        try:
            message = channel.receive(0)
            for descriptor in message[1] if message is not None else ():
                self._runtime.close_fd(descriptor)
            if message is None or protocol.kind_of(message[0]) is not RankMessageKind.HELLO:
                raise ProtocolError(f"process {channel.peer_pid} did not say who it is")
            local_rank, synced_in = self._check_hello(protocol.fields_of(message[0]))
        except BytePSError as error:
            logger.warning("turned away process %d: %s", channel.peer_pid, error)
            self._turn_away(channel, error)
            return
        if self.failure is not None:
            self._turn_away(channel, self.failure)
        else:
            self._came(channel, local_rank, synced_in)

    def _came(self, channel: Channel, local_rank: int, synced_in: int) -> None:
        if self._open is None:
            self._waiting.append((channel, local_rank))
            self._on_change()
        else:
            self._welcome(channel, local_rank)

    def _check_hello(self, fields: dict[str, Any]) -> tuple[int, int]:
        """Its local rank, and the group that it has the state of."""
        local_rank, local_size = fields.get("local_rank"), fields.get("local_size")
        synced_in = fields.get("synced_in")
        if fields.get("version") != protocol.VERSION:
            raise ProtocolError("this rank's byteps_py and its communication service's are different versions")
        if local_size != self._local_size or not isinstance(local_rank, int) or not 0 <= local_rank < local_size:
            raise UsageError(
                f"a rank came as local rank {local_rank} of {local_size}, but its communication service was started "
                f"for {count_text(self._local_size, 'rank')}: BYTEPS_LOCAL_RANK, BYTEPS_LOCAL_SIZE must say the same "
                "to both"
            )
        if not isinstance(synced_in, int) or not 0 <= synced_in < _MOST_EPOCHS:
            raise ProtocolError(f"no group has the number {synced_in!r}")
        if self._is_taken(local_rank):
            raise UsageError(f"two processes of this machine both say that they are local rank {local_rank}")
        return local_rank, synced_in

    def _is_taken(self, local_rank: int) -> bool:
        taken = any(other == local_rank for _, other in self._waiting)
        return taken or bool(self._open and local_rank in self._open.executor.ranks)

    def _turn_away(self, channel: Channel, error: BytePSError) -> None:
        try:
            channel.send(protocol.pack(RankMessageKind.FATAL, error=type(error).__name__, message=str(error)))
        except PeerLostError:
            pass
        finally:
            channel.close()

    def _welcome(self, channel: Channel, local_rank: int) -> None:
        here = self._open
        if here is None:
            return
        arena = here.memory.arena_of(local_rank)
        try:
            rank = RankConnection(self._runtime, channel, local_rank, arena, here.released)
        except ProcessLookupError:
            channel.close()
            who = here.describe(local_rank, channel.peer_pid)
            self._on_death(f"{who} died: its process ended while the cluster came together")
            return
        here.executor.ranks[local_rank] = rank
        self.left.pop(local_rank, None)
        self.gone.pop(local_rank, None)
        if before := self._may_return.pop(local_rank, None):
            before.forget()
        self._loop.add_reader(rank.fd, functools.partial(self._read, rank))
        self._loop.add_reader(rank.pidfd, functools.partial(self._ended, rank))
        message = protocol.pack(
            RankMessageKind.WELCOME,
            rank=here.topology.first_rank + local_rank,
            size=here.topology.size,
            local_rank=local_rank,
            local_size=here.topology.local_size,
            is_continued=here.topology.is_continued,
            since_epoch=here.topology.group,
            machine_index=here.topology.machine_index,
            num_machines=here.topology.machines,
            is_homogeneous=here.topology.is_homogeneous,
        )
        self._guard(rank, functools.partial(rank.send, message))
        self._on_change()

    # ---- staying ---------------------------------------------------------------------------------------

    def _guard(self, rank: RankConnection, send: Callable[[], None]) -> None:
        try:
            send()
        except PeerLostError:
            self._ended(rank)

    def _read(self, rank: RankConnection) -> None:
        self._serve(rank)

    def _serve(self, rank: RankConnection) -> bool:
        """Take messages of a rank. True if it is still here and may have sent more."""
        here = self._open
        if here is None or here.executor.ranks.get(rank.local_rank) is not rank:
            return False
        try:
            for _ in range(_DRAIN):
                message = rank.receive()
                if message is None:
                    return False
                if message[0] == _READY:
                    here.executor.run(here.ready(message))
                    continue
                kind = protocol.kind_of(message)
                if kind is RankMessageKind.DECLARE:
                    here.executor.run(here.declare(rank, protocol.fields_of(message)))
                elif kind is RankMessageKind.LAYOUT:
                    here.lay_out(rank, protocol.fields_of(message))
                elif kind is RankMessageKind.STRIPS:
                    here.take_in_strips(rank, protocol.fields_of(message))
                elif kind is RankMessageKind.STACK:
                    continue  # its descriptor has been kept
                elif kind is RankMessageKind.BARRIER:
                    rank.barriers = rank.barriers_before + int(protocol.fields_of(message)["sequence"])
                    here.poll_barrier()
                elif kind is RankMessageKind.JOIN:
                    here.joining.join(rank)
                    here.poll_barrier()
                elif kind is RankMessageKind.MEET:
                    here.meet(rank, protocol.fields_of(message))
                elif kind is RankMessageKind.WAITS:
                    here.waits(rank, protocol.fields_of(message))
                elif kind is RankMessageKind.WAITED:
                    rank.direct_waits.pop(int(protocol.fields_of(message)["id"]), None)
                elif kind is RankMessageKind.PING:
                    rank.send(protocol.pack(RankMessageKind.PONG))
                elif kind is RankMessageKind.SETTLE:
                    rank.is_settling = True
                    self._on_change()
                elif kind is RankMessageKind.LEAVE:
                    self._leave(rank, here, protocol.fields_of(message))
                    return False
                elif kind is RankMessageKind.NOTE:
                    rank.note = text_of(protocol.fields_of(message)["text"])[:MAX_NOTE_CHARS]
                else:
                    raise ProtocolError(f"local rank {rank.local_rank} sent a {kind.name} message")
            return True
        except PeerLostError:
            self._died(rank)
        except (ProtocolError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._on_death(f"{here.describe(rank.local_rank, rank.pid)} broke the protocol: {error}")
        except OSError as error:
            self._on_death(f"{here.describe(rank.local_rank, rank.pid)} asked for what can't be had: {error}")
        return False

    def settled(self, local_rank: int) -> None:
        """Nobody needs this rank any more."""
        if self._open is not None and (rank := self._open.executor.ranks.get(local_rank)) is not None:
            rank.is_settling = False
            self._guard(rank, functools.partial(rank.send, protocol.pack(RankMessageKind.SETTLED)))

    def settle(self) -> list[int]:
        """Hear what the ranks have said so far. Returns the local ranks that are still here."""
        if self._open is None:
            return []
        for rank in list(self._open.executor.ranks.values()):
            while self._serve(rank):
                pass
        return sorted(self._open.executor.ranks)

    # ---- leaving ---------------------------------------------------------------------------------------

    def _ended(self, rank: RankConnection) -> None:
        """The rank's process, or its connection, is gone. What it said before, LEAVE above all, still counts."""
        while self._serve(rank):
            pass
        self._died(rank)

    def _died(self, rank: RankConnection) -> None:
        here = self._open
        if here is None or here.executor.ranks.get(rank.local_rank) is not rank:
            return
        self._remove(rank, here)
        rank.forget()
        self._on_death(f"{here.describe(rank.local_rank, rank.pid)} died: its process ended without shutdown()")

    def _leave(self, rank: RankConnection, here: Requests, fields: dict[str, Any]) -> None:
        if error := text_of(fields.get("error", "")):
            self._remove(rank, here)
            rank.forget()
            trace = text_of(fields.get("traceback", ""))[-MAX_NOTE_CHARS:]
            sentence = f"{here.describe(rank.local_rank, rank.pid)} was ended by an exception: {error}"
            self._on_death(f"{sentence}\n{trace}" if trace else sentence)
            return
        self._may_return[rank.local_rank] = rank
        self._loop.remove(rank.pidfd)
        self._loop.add_reader(rank.pidfd, functools.partial(self._is_gone, rank))
        self._remove(rank, here)

    def _is_gone(self, rank: RankConnection) -> None:
        del self._may_return[rank.local_rank]
        rank.forget()
        self.gone[rank.local_rank] = self._loop.time()
        self._on_change()

    def _remove(self, rank: RankConnection, here: Requests) -> None:
        del here.executor.ranks[rank.local_rank]
        self.left[rank.local_rank] = self._loop.time()
        rank.hang_up()
        here.forget(rank.local_rank)
        self._on_change()

    def close(self) -> None:
        self._loop.remove(self._listener.fileno())
        self._listener.close()
        for channel in [*self._strangers.values(), *(channel for channel, _ in self._waiting)]:
            self._loop.remove(channel.fileno())
            if self.failure is not None:
                self._turn_away(channel, self.failure)
            else:
                channel.close()
        for rank in self._may_return.values():
            rank.forget()
        if self._open:
            for rank in self._open.executor.ranks.values():
                rank.close()


def text_of(said: object) -> str:
    """In letters that can be passed on: the name of a file, in an error, may hold others."""
    return str(said).encode(errors="backslashreplace").decode()
