"""Takes in the local ranks of this machine: their connections and messages, how they leave and how they end.

Each rank has its state in one object (core/local_ranks.py). This module carries out what follows from a transition. In
an elastic job, which is one with ``on_return``, one group of ranks follows another; any other job has one group.

Owned by the loop's thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from byteps_py.errors import BytePSError, DismissedError, PeerLostError, ProtocolError, UsageError
from byteps_py.runtime import Runtime
from byteps_py.security.unauthenticated_connections import LocalStrangers, RefusalLog
from byteps_py.system.channel import Channel, Listener
from byteps_py.wire import rank_link as protocol
from byteps_py.wording import count_text, ranks_text
from byteps_py.worker.core.local_ranks import IN_GROUP, LocalRank, LocalRanks, RankEvent, RankState
from byteps_py.worker.core.placement_view import replicated_gain
from byteps_py.worker.io.rank_connection import RankConnection
from byteps_py.worker.ranks.request_handler import RequestHandler

MAX_TRACEBACK_CHARS = 9000
_DRAIN = 256  # messages taken from a rank before others get their turn

Rank = LocalRank[RankConnection]
#: What a rank in the group may send, but for Leave, and what is done.
_Handler = Callable[[RequestHandler, RankConnection, Any], None]
_HANDLERS: dict[type, _Handler] = {
    protocol.Ready: lambda here, connection, message: here.ready(message),
    protocol.Declare: lambda here, connection, message: here.declare(connection, message),
    protocol.SetLayout: lambda here, connection, message: here.lay_out(message),
    protocol.WantChunks: lambda here, connection, message: here.take_in_chunks(connection, message),
    protocol.BeginStep: lambda here, connection, message: here.hosting.step(connection, message),
    protocol.SkipStep: lambda here, connection, message: here.hosting.skip(connection, message),
    protocol.BeginRecord: lambda here, connection, message: here.hosting.begin_record(connection, message),
    protocol.RecordData: lambda here, connection, message: here.hosting.add_to_record(connection, message),
    protocol.MeasureNorm: lambda here, connection, message: here.hosting.norm(connection, message),
    protocol.KeepStates: lambda here, connection, message: here.hosting.host(connection, message),
    protocol.DropStates: lambda here, connection, message: here.hosting.release(connection, message),
    protocol.AskServers: lambda here, connection, message: here.hosting.shadows.tell_servers(connection, message),
    protocol.GiveStackFile: lambda here, connection, message: None,  # the connection has its descriptor
    protocol.GiveFlightRecorder: lambda here, connection, message: here.keep_flight_recorder(connection),
    protocol.EnterBarrier: lambda here, connection, message: here.enter_barrier(connection, message),
    protocol.Join: lambda here, connection, message: here.join(connection),
    protocol.AskIntroduction: lambda here, connection, message: here.introduce(connection, message),
    protocol.WaitBegun: lambda here, connection, message: here.wait_begun(connection, message),
    protocol.WaitEnded: lambda here, connection, message: connection.end_wait(message),
    protocol.StepsBegun: lambda here, connection, message: connection.tell_steps(message),
    protocol.ProgressMade: lambda here, connection, message: connection.take_progress(message),
    protocol.LinksUsed: lambda here, connection, message: connection.tell_links(message),
    protocol.Ping: lambda here, connection, message: connection.send(protocol.Pong()),
    protocol.Note: lambda here, connection, message: connection.take_note(message),
}


class RankServer:
    """``on_death(sentence)``: a rank ended without leaving. ``on_change()``: a rank came, wants to leave, or left, or
    has left and its process has ended by now. ``on_return(reason, planned)``: ranks of an elastic job's group want to
    be a group anew. ``patience_s``: after an elastic job's first group has begun, this long it waits for all of its
    ranks."""

    ranks_class: type[LocalRanks[RankConnection]] = LocalRanks

    def __init__(
        self,
        runtime: Runtime,
        listener: Listener,
        local_size: int,
        on_death: Callable[[str], None],
        on_change: Callable[[], None],
        on_return: Callable[[str, bool], None] | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._runtime = runtime
        self._loop = runtime.loop
        self._listener = listener
        self._local_size = local_size
        self._on_death = on_death
        self._on_change = on_change
        self._on_return = on_return
        self._patience_s = patience_s
        self._refusals = RefusalLog()
        self._strangers = LocalStrangers(runtime.loop.call_later, self._cut_off)  # channels without a Hello
        self.ranks = self.ranks_class(local_size, on_return is not None)
        self._open: RequestHandler | None = None  # of the present group
        self._relays: protocol.RelaysChanged | None = None  # its ranks know
        self.failure: BytePSError | None = None
        self.is_dismissed = False  # this machine's ranks are to leave the elastic job
        #: A rank of the latest group has ended without saying that training is done.
        self.has_unfinished = False
        self._loop.add_reader(listener.fileno(), self._accept)

    @property
    def _is_elastic(self) -> bool:
        return self._on_return is not None

    @property
    def ranks_here(self) -> int:
        """Ranks that wait, take part in the group, or are expected to come again."""
        return len(self.ranks.in_state(RankState.WAITING, *IN_GROUP, RankState.RETURNING))

    # ---- groups ----------------------------------------------------------------------------------------

    def open(self, requests: RequestHandler) -> None:
        """The group is complete: take in those of its ranks that wait."""
        self._open, self._relays = requests, None
        self.has_unfinished = False
        topology = requests.topology
        for connection in self.ranks.connections(RankState.LEFT):
            connection.forget()
        members = self.ranks.begins(topology.local_size)
        if self._is_elastic and self.ranks.in_state(RankState.LATE):
            self._loop.call_later(self._patience_s, functools.partial(self._give_up, requests))
        for rank in members:
            self._welcome(rank)
        missing = topology.local_size - len(members) - len(self.ranks.in_state(RankState.LATE))
        if missing or (topology.is_continued and not all(rank.is_back for rank in members)):
            self._on_death(f"{missing or 'some'} ranks of {topology.me.host} ended as a group was formed")
        self._on_change()

    def _give_up(self, requests: RequestHandler) -> None:
        """Its other ranks have begun, and some have yet to come: they may have died before they sent a Hello."""
        late = self.ranks.forget_late() if self._open is requests else ()
        if late:
            who = ranks_text(requests.topology.first_rank + rank.local_rank for rank in late)
            host, variable = requests.topology.me.host, "BYTEPS_START_TIMEOUT_S"
            self._on_death(f"{who} of {host} did not come within {self._patience_s:g} s ({variable})")
            self._on_change()

    def dissolve(self, error: BytePSError) -> None:
        """The group can't go on: its ranks are told, and expected to come again."""
        here, self._open = self._open, None
        if here is None:
            return
        self.ranks.forget_late()
        message = protocol.Fatal.of(error)
        for connection in here.executor.ranks.values():
            self._expect_again(self.ranks.group[connection.local_rank], connection)
            with contextlib.suppress(PeerLostError):  # what it said last is still to be read
                connection.send(message)

    def tell_hosts(self, added: bool, removed: bool) -> None:
        """Ranks wait to join, or are about to leave."""
        self._tell_group(protocol.HostsChanged(added, removed))

    def set_relays(self, relays: tuple[protocol.RelayedRank, ...]) -> None:
        """The group's ranks, also those that come later, reach these ranks through a third machine as well."""
        self._relays = protocol.RelaysChanged(relays)
        self._tell_group(self._relays)

    def dismiss(self) -> None:
        """Turn away the ranks that wait, and all that come from now on."""
        self.is_dismissed = True
        if self.ranks.forget_late() and self._on_return is not None:  # the others of the group would wait for them
            self._on_return("a machine was told to leave before all of its ranks had come", False)
        self._turn_away_waiting(_dismissed())
        self._on_change()

    def fail(self, error: BytePSError) -> None:
        """Nothing works any more: tell every rank, also those that come later."""
        self.failure = error
        self._tell_group(protocol.Fatal.of(error))
        self._turn_away_waiting(error)

    def _tell_group(self, message: object) -> None:
        for connection in list(self._open.executor.ranks.values()) if self._open else ():
            rank = self.ranks.group[connection.local_rank]
            self._guard(rank, connection, functools.partial(connection.send, message))

    def _turn_away_waiting(self, error: BytePSError) -> None:
        for rank in self.ranks.waiting:
            connection = rank.connection
            rank.happens(RankEvent.IS_TURNED_AWAY)
            if connection is not None:
                connection.turn_away(error)

    # ---- coming ----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            channel = self._listener.accept()
        except (BytePSError, OSError) as error:
            self._refusals.note("a local process", "local processes", str(error))
            return
        self._strangers.add(channel)
        self._loop.add_reader(channel.fileno(), functools.partial(self._greet, channel))

    def _cut_off(self, channel: Channel) -> None:
        self._loop.remove(channel.fileno())
        channel.close()

    def _greet(self, channel: Channel) -> None:
        """The first message of a connection must be a Hello."""
        self._loop.remove(channel.fileno())
        self._strangers.discard(channel)
        connection = RankConnection(self._runtime, channel)
        try:
            received = channel.receive(0)
            for descriptor in received[1] if received is not None else ():
                self._runtime.close_fd(descriptor)
            hello = protocol.decode_hello(received[0]) if received is not None else None
            if hello is None:
                raise ProtocolError(f"process {channel.peer_pid} did not send a Hello first")
            self._check_hello(hello)
        except BytePSError as error:
            self._refusals.note(f"process {channel.peer_pid}", "processes", str(error))
            connection.turn_away(error)
            return
        if self.failure is not None:
            connection.turn_away(self.failure)
        else:
            self._came(self.ranks[hello.local_rank], connection, hello.synced_in)

    def _check_hello(self, hello: protocol.Hello) -> None:
        """Raises UsageError."""
        if hello.local_size != self._local_size or not 0 <= hello.local_rank < hello.local_size:
            raise UsageError(
                f"a rank came as local rank {hello.local_rank} of {hello.local_size}, but its communication service "
                f"was started for {count_text(self._local_size, 'rank')}: BYTEPS_LOCAL_RANK, BYTEPS_LOCAL_SIZE must "
                "say the same to both"
            )
        if self._is_taken(self.ranks[hello.local_rank]):
            raise UsageError(f"two processes of this machine both say that they are local rank {hello.local_rank}")

    def _is_taken(self, rank: Rank) -> bool:
        """A process has this seat, and has not said that it goes. It may have said so on its connection by now."""
        if rank.is_in_group and (connection := rank.connection) is not None:
            while self._serve(rank, connection):
                pass
            if rank.is_in_group and self._runtime.has_ended(connection.pidfd):
                self._died(rank, connection)
        return rank.is_in_group or rank.state is RankState.WAITING

    def _came(self, rank: Rank, connection: RankConnection, synced_in: int) -> None:
        before, former = rank.state, rank.connection
        if former is not None:
            former.close()
        is_back = before is RankState.RETURNING and former is not None and former.pid == connection.pid
        self.ranks.comes(rank, connection, is_back, synced_in)
        if self.is_dismissed:
            rank.happens(RankEvent.IS_TURNED_AWAY)
            connection.turn_away(_dismissed())
        elif before is RankState.LATE or (not self._is_elastic and rank in self.ranks.group):
            self.ranks.is_welcomed(rank)
            self._welcome(rank)
            return
        elif self._on_return is not None:
            self._watch_waiting(rank, connection)
            if before is RankState.LEFT and self._open is not None:
                self._on_return("ranks have shut down, and come back", True)
        self._on_change()

    def _watch_waiting(self, rank: Rank, connection: RankConnection) -> None:
        """A rank that waits for an elastic job's next group may end meanwhile, and the group begins without it."""
        try:
            connection.watch_process()
        except ProcessLookupError:
            rank.happens(RankEvent.ENDS)
            connection.close()
            return
        self._loop.add_reader(connection.fd, functools.partial(self._waiting_ended, rank, connection))
        self._loop.add_reader(connection.pidfd, functools.partial(self._waiting_ended, rank, connection))

    def _waiting_ended(self, rank: Rank, connection: RankConnection) -> None:
        """Its process has ended, or waits no longer: a rank says nothing else before it is welcome."""
        rank.happens(RankEvent.ENDS)
        connection.close()
        self._on_change()

    def _welcome(self, rank: Rank) -> None:
        """Tell a rank that the group has taken it in."""
        here, connection = self._open, rank.connection
        if here is None or connection is None:
            return
        if self.failure is not None:  # the end of another one has failed the job meanwhile
            rank.happens(RankEvent.IS_TURNED_AWAY)
            connection.turn_away(self.failure)
            return
        self._loop.remove(connection.fd)
        try:
            connection.enter(rank.local_rank, here.memory.arena_of(rank.local_rank), here.released)
        except ProcessLookupError:
            rank.happens(RankEvent.ENDS)
            connection.close()
            who = here.describe(rank.local_rank, connection.pid)
            self._on_death(f"{who} died: its process ended while the cluster came together")
            return
        here.executor.ranks[rank.local_rank] = connection
        self._loop.add_reader(connection.fd, functools.partial(self._read, rank, connection))
        self._loop.add_reader(connection.pidfd, functools.partial(self._ended, rank, connection))
        message = protocol.Welcome(
            rank=here.topology.first_rank + rank.local_rank,
            size=here.topology.size,
            local_rank=rank.local_rank,
            local_size=here.topology.local_size,
            is_continued=here.topology.is_continued,
            is_under_way=here.topology.is_under_way,
            since_epoch=here.topology.group,
            machine_index=here.topology.machine_index,
            num_machines=here.topology.machines,
            is_homogeneous=here.topology.is_homogeneous,
            has_shadow_servers=here.topology.has_shadow_servers,
            slowest_mbit=here.topology.slowest_mbit,
            replicated_gain=replicated_gain(here.topology),
            shadowed_gain=replicated_gain(here.topology, is_shadowed=True),
            memory_bytes=min(worker.memory_bytes for worker in here.topology.workers),
        )
        self._guard(rank, connection, functools.partial(connection.send, message))
        if self._relays is not None:
            self._guard(rank, connection, functools.partial(connection.send, self._relays))
        self._on_change()

    # ---- in the group ----------------------------------------------------------------------------------

    def _guard(self, rank: Rank, connection: RankConnection, send: Callable[[], None]) -> None:
        try:
            send()
        except PeerLostError:
            self._ended(rank, connection)

    def _read(self, rank: Rank, connection: RankConnection) -> None:
        self._serve(rank, connection)

    def _serve(self, rank: Rank, connection: RankConnection) -> bool:
        """Take messages of a rank. True if it is still here and may have sent more."""
        here = self._open
        if here is None or here.executor.ranks.get(connection.local_rank) is not connection:
            return False
        try:
            for _ in range(_DRAIN):
                message = connection.receive()
                if message is None:
                    return False
                handle = _HANDLERS.get(type(message))
                if handle is not None:
                    handle(here, connection, message)
                elif isinstance(message, protocol.Leave):
                    self._leave(rank, connection, here, message)
                    return False
                elif isinstance(message, protocol.Drain):
                    rank.happens(RankEvent.DRAINS)
                    self._on_change()
                else:
                    kind = type(message).__name__
                    raise ProtocolError(f"local rank {rank.local_rank} sent a {kind} message, which only services send")
            return True
        except PeerLostError:
            self._died(rank, connection)
        except (ProtocolError, ValueError) as error:
            self._on_death(f"{here.describe(rank.local_rank, connection.pid)} broke the protocol: {error}")
        except OSError as error:
            self._on_death(f"{here.describe(rank.local_rank, connection.pid)} asked for what can't be had: {error}")
        return False

    def draining(self) -> list[int]:
        """Local ranks that are about to leave, once others have taken what these gave them."""
        return [rank.local_rank for rank in self.ranks.in_state(RankState.DRAINING)]

    def drained(self, local_rank: int) -> None:
        """No other rank needs this one any more."""
        rank = self.ranks.group[local_rank]
        if rank.state is RankState.DRAINING and (connection := rank.connection) is not None:
            rank.happens(RankEvent.IS_DRAINED)
            self._guard(rank, connection, functools.partial(connection.send, protocol.Drained()))

    def receive_all(self) -> list[int]:
        """Take all that the ranks have said so far. Returns the local ranks that are still here."""
        if self._open is None:
            return []
        for connection in list(self._open.executor.ranks.values()):
            while self._serve(self.ranks.group[connection.local_rank], connection):
                pass
        return sorted(self._open.executor.ranks)

    # ---- leaving ---------------------------------------------------------------------------------------

    def _ended(self, rank: Rank, connection: RankConnection) -> None:
        """The rank's process, or its connection, is gone. What it said before, Leave above all, still counts."""
        while self._serve(rank, connection):
            pass
        self._died(rank, connection)

    def _died(self, rank: Rank, connection: RankConnection) -> None:
        here = self._open
        if here is None or here.executor.ranks.get(connection.local_rank) is not connection:
            return
        self._is_unfinished()
        self._remove(rank, connection, here, RankEvent.ENDS)
        connection.forget()
        self._on_death(f"{here.describe(rank.local_rank, connection.pid)} died: its process ended without shutdown()")

    def _leave(self, rank: Rank, connection: RankConnection, here: RequestHandler, message: protocol.Leave) -> None:
        if self._on_return is not None and message.return_reason:
            del here.executor.ranks[rank.local_rank]
            here.forget(rank.local_rank)
            self._expect_again(rank, connection)
            connection.hang_up()
            who = here.describe(rank.local_rank, connection.pid)
            self._on_return(f"{who} goes back to its last commit after {message.return_reason}", message.planned)
            self._on_change()
        elif message.error:
            self._is_unfinished()
            self._remove(rank, connection, here, RankEvent.ENDS)
            connection.forget()
            trace = message.traceback[-MAX_TRACEBACK_CHARS:]
            sentence = f"{here.describe(rank.local_rank, connection.pid)} was ended by an exception: {message.error}"
            self._on_death(f"{sentence}\n{trace}" if trace else sentence)
        else:
            self.has_unfinished |= message.unfinished
            self._loop.change_reader(connection.pidfd, functools.partial(self._is_gone, rank, connection))
            self._remove(rank, connection, here, RankEvent.SHUTS_DOWN)

    def _is_unfinished(self) -> None:
        """A rank ends without leaving in order. Where that does not fail the job, others may do the rest."""
        self.has_unfinished |= self._is_elastic

    def _remove(self, rank: Rank, connection: RankConnection, here: RequestHandler, event: RankEvent) -> None:
        """The rank leaves the group, and is not expected to come again."""
        rank.happens(event)
        rank.left_s = self._loop.time()
        del here.executor.ranks[rank.local_rank]
        connection.hang_up()
        here.forget(rank.local_rank)
        self._on_change()

    def _is_gone(self, rank: Rank, connection: RankConnection) -> None:
        """The process of a rank that has shut down has ended."""
        rank.happens(RankEvent.ENDS)
        rank.gone_s = self._loop.time()
        connection.forget()
        self._on_change()

    def _expect_again(self, rank: Rank, connection: RankConnection) -> None:
        rank.happens(RankEvent.GOES_BACK)
        self._loop.change_reader(connection.fd, functools.partial(self._hear_returning, rank, connection))
        self._loop.change_reader(connection.pidfd, functools.partial(self._returning_ended, rank, connection))

    def _hear_returning(self, rank: Rank, connection: RankConnection) -> None:
        """Of all that a rank may still say which is out of the group, only that it leaves matters."""
        try:
            while rank.connection is connection and (message := connection.receive()) is not None:
                if isinstance(message, protocol.Ping):
                    connection.send(protocol.Pong())
                elif isinstance(message, protocol.Leave):
                    if message.return_reason:
                        connection.hang_up()  # it comes again, on another connection
                    elif message.error:
                        self._returning_ended(rank, connection)
                    else:
                        self.has_unfinished |= message.unfinished
                        self._returning_shut_down(rank, connection)
                    return
        except PeerLostError:
            connection.hang_up()
        except ProtocolError:
            self._returning_ended(rank, connection)

    def _returning_shut_down(self, rank: Rank, connection: RankConnection) -> None:
        """As others may have done before they heard that the group can't go on. It may initialize again."""
        rank.happens(RankEvent.SHUTS_DOWN)
        connection.hang_up()
        self._loop.change_reader(connection.pidfd, functools.partial(self._is_gone, rank, connection))
        self._on_change()

    def _returning_ended(self, rank: Rank, connection: RankConnection) -> None:
        self._is_unfinished()
        rank.happens(RankEvent.ENDS)
        connection.close()
        self._on_change()

    def close(self) -> None:
        self._loop.remove(self._listener.fileno())
        self._listener.close()
        for channel in self._strangers:
            self._strangers.discard(channel)
            self._loop.remove(channel.fileno())
            if self.failure is not None:
                RankConnection(self._runtime, channel).turn_away(self.failure)
            else:
                channel.close()
        for connection in self.ranks.connections(*RankState):
            connection.close()


def _dismissed() -> DismissedError:
    return DismissedError("this machine was told to leave the job, which goes on without it")
