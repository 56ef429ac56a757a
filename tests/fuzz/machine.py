"""A communication service's machine for the fuzzer: its desk, a group of two ranks, and a scheduler that agrees.

All classes are the product's, but for the loop, which is asked to go on, and the thread pool: a kernel is looked at and
not run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, PeerLostError, ProtocolError
from byteps_py.kernels.readiness import Pair
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime, Thresholds
from byteps_py.scheduler.rank_group import Decided, Declarations
from byteps_py.system.channel import Channel
from byteps_py.tensors import DType
from byteps_py.wire import rank_link as protocol
from byteps_py.worker.core.local_ranks import IN_GROUP, RankState
from byteps_py.worker.core.tensor import Compute
from byteps_py.worker.group import Group, GroupServices
from byteps_py.worker.ranks.rank_server import RankServer

RANKS = 2
_SETTINGS = Settings(job_id="fuzz")


class Loop:
    """Nothing comes by itself: ``readers`` are called, and ``posted``, by whoever holds it."""

    lateness_s = 0.0

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.posted: list[Callable[[], None]] = []
        self.is_stopped = False

    def add_reader(self, source: int, callback: Callable[[], None]) -> None:
        assert source >= 0
        self.readers[source] = callback

    change_reader = add_reader

    def remove(self, source: int) -> None:
        self.readers.pop(source, None)

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None: ...
    def add_writer(self, fd: int, callback: Callable[[], None]) -> None: ...
    def remove_writer(self, fd: int) -> None: ...
    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None: ...

    def time(self) -> float:
        return time.monotonic()

    def post(self, callback: Callable[[], None]) -> None:
        self.posted.append(callback)

    def run_posted(self) -> None:
        posted, self.posted = self.posted, []
        for callback in posted:
            callback()


class Kernels:
    """None is loaded: what is to be done is checked for where it reads and writes, and said to be done."""

    def __init__(self) -> None:
        self.group: Group
        self.checked = 0

    def __contains__(self, pair: Pair) -> bool:
        return False

    def expect(self, pairs: Iterable[Pair]) -> None:
        list(pairs)

    def when_done(self, callback: Callable[[], None]) -> None:
        callback()

    def submit(self, pair: Pair, priority: int, work: Any, done: Callable[[None], None]) -> None:
        compute = next((each for each in work.args if isinstance(each, Compute)), None)
        if compute is not None:
            dtype, inputs, outputs = compute.part.tensor.spec.dtype, compute.inputs, compute.outputs
            count = compute.part.count
        else:
            _, dtype, inputs, outputs, count = work.args[:5]
        self.checked += 1
        for address in (*inputs, *outputs):
            self.check(address, count * cast(DType, dtype).itemsize)
        done(None)

    def check(self, address: int, nbytes: int) -> None:
        memory = self.group.requests.memory
        segments = [segment for arena in (*memory._ranks, memory.machine) for segment in arena.segments]
        assert any(s.address <= address <= address + nbytes <= s.address + s.nbytes for s in segments)


class Door:
    """What ranks knock at: it has no name, and so costs nothing."""

    def __init__(self) -> None:
        self.coming: list[Channel] = []

    def fileno(self) -> int:
        return 1 << 20

    def accept(self) -> Channel:
        return self.coming.pop(0)

    def close(self) -> None: ...


class Machine:
    """Two ranks have come, which are all of the job. ``deaths``: why it can't go on."""

    def __init__(self, is_elastic: bool) -> None:
        self.loop, self._door, self._kernels = Loop(), Door(), Kernels()
        self.is_elastic = is_elastic
        self.deaths: list[str] = []
        self.returns = 0
        self.sent: list[pb.MemberMessage] = []
        self.ranks: list[Channel] = []  # their ends
        self._epoch = 0
        self.runtime = Runtime(loop=cast(Any, self.loop), thresholds=Thresholds(inline_copy=-1))
        door: Any = self._door
        returned = self._returned if is_elastic else None
        self.rank_server = RankServer(self.runtime, door, RANKS, self._died, lambda: None, returned, 1.0)
        self.begin()

    def begin(self) -> None:
        """A group of ranks that have just come."""
        self._epoch += 1
        self.ranks = [self.knock(protocol.Hello.of(rank, RANKS, 1, self._epoch - 1)) for rank in range(RANKS)]
        worker = pb.Member(member_id=1, local_size=RANKS, host="node", link_mbit=1000.0)
        server = pb.Member(member_id=2, kind=pb.MACHINE_KIND_GPU, host="node", link_mbit=1000.0, weight=1)
        membership = pb.Membership(
            epoch=self._epoch, workers=[worker], servers=[server], partition_bytes=4096, workers_since=self._epoch
        )
        services = GroupServices(
            self.runtime, _SETTINGS, False, cast(Any, self._kernels), self.rank_server, None, self._send, self._failed,
            lambda work: None, self._lost, self._lost,
        )  # fmt: skip
        self.group = self._kernels.group = Group(services, membership, 0)
        self._declarations = Declarations(1, RANKS)
        self.group.open()
        assert not self.deaths, self.deaths

    def begin_anew(self) -> None:
        """Of an elastic job: all go back, and come again."""
        self.rank_server.dissolve(PeerLostError("again"))
        self.group.end()
        self.read()
        for channel in self.ranks:
            channel.close()
        self.begin()

    @property
    def computed(self) -> int:
        """Kernels so far."""
        return self._kernels.checked

    # ---- ranks -----------------------------------------------------------------------------------------

    def knock(self, hello: object, fds: tuple[int, ...] = ()) -> Channel:
        """Somebody connects, and says this: a message, or any bytes."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, accepted = Channel(mine), Channel(theirs)
        self._door.coming.append(accepted)
        self.loop.readers[self._door.fileno()]()
        if hello:
            channel.send(_encoded(hello), fds)
        self.loop.readers[accepted.fileno()]()
        return channel

    def say(self, rank: int, message: object, fds: tuple[int, ...] = ()) -> None:
        """A rank says this: a message, or any bytes."""
        try:
            self.ranks[rank].send(_encoded(message), fds)
        except PeerLostError:  # it is here no more
            return
        self.read()

    def read(self) -> None:
        """All that ranks have said."""
        states = (*IN_GROUP, RankState.RETURNING, RankState.LEFT)
        pidfds = {connection.pidfd for connection in self.rank_server.ranks.connections(*states)}
        for fd in [fd for fd in self.loop.readers if fd != self._door.fileno() and fd not in pidfds]:
            if reader := self.loop.readers.get(fd):
                reader()

    @staticmethod
    def heard(channel: Channel) -> list[bytes]:
        """What has been said to a rank."""
        messages: list[bytes] = []
        try:
            while (message := channel.receive(0)) is not None:
                for fd in message[1]:
                    os.close(fd)
                messages.append(message[0])
        except PeerLostError:
            messages.append(b"")
        return messages

    # ---- the scheduler ---------------------------------------------------------------------------------

    def go_on(self) -> None:
        """The scheduler answers, kernels end."""
        sent, self.sent = self.sent, []
        for message in sent:
            message.SerializeToString()
            for answer in self._answers(message):
                self.group.on_message(answer)
        self.loop.run_posted()
        # Who gave a way to show its stack would get a signal.
        ranks = self.group.executor.ranks.values()
        self.group.sample_stacks([rank.local_rank for rank in ranks if rank.stack_fd < 0])
        pb.Heartbeat(waiting=self.group.waits.longer_than(0.0, time.monotonic())).SerializeToString()

    def _answers(self, message: pb.MemberMessage) -> Iterable[pb.SchedulerMessage]:
        body = message.WhichOneof("body")
        if body == "declare":
            try:
                outcomes = [self._declarations.cast(0, range(RANKS), ballot) for ballot in message.declare.ballots]
            except ProtocolError as error:  # ranks name others that there are not
                self._failed(error)
                return
            verdicts = [outcome.verdict for outcome in outcomes if isinstance(outcome, Decided)]
            yield pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=verdicts))
        elif body == "arrive":
            yield pb.SchedulerMessage(release=pb.Release(sequence=message.arrive.sequence))
        elif body == "join":
            yield pb.SchedulerMessage(joined=message.join)
            yield pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=self._declarations.join(message.join.rank)))
        elif body == "idle":
            self._declarations.void_all()
            yield pb.SchedulerMessage(all_joined=pb.AllJoined(last=0, direct_round=message.idle.direct_round))

    def _send(self, message: pb.MemberMessage) -> None:
        self.sent.append(message)

    def _failed(self, error: BytePSError) -> None:
        self._died(str(error))

    def _died(self, sentence: str) -> None:
        pb.Report(error="PeerLostError", message=sentence).SerializeToString()
        self.deaths.append(sentence)

    def _returned(self, reason: str, planned: bool) -> None:
        self._send(pb.MemberMessage(reform=pb.Reform(reason=reason, planned=planned)))
        self.returns += 1

    def _lost(self, sentence: str, whom: int) -> None:
        raise AssertionError(sentence)

    def close(self) -> None:
        for channel in self.ranks:
            channel.close()
        self.read()
        self.rank_server.close()
        self.group.requests.close()
        for arena in (*self.group.requests.memory._ranks, self.group.requests.memory.machine):
            arena.close_descriptors()


def _encoded(message: object) -> bytes:
    return message if isinstance(message, bytes) else protocol.encode(message)
