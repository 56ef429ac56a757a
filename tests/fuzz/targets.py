"""What is fuzzed: every parser, and the state machines behind them."""

from __future__ import annotations

import contextlib
import itertools
import os

import zmq

from byteps_py.config import launchers
from byteps_py.config.settings import Settings
from byteps_py.config.variables import VARIABLES
from byteps_py.dataplane.handshake import CallerHandshake, ListenerHandshake
from byteps_py.dataplane.listener import DataListener, Peer
from byteps_py.dataplane.seal import DamagedError, Protection, new_seal
from byteps_py.dataplane.traffic import Limiter, Traffic
from byteps_py.errors import ConfigurationError, ProtocolError
from byteps_py.server.round_state import Answer, Contribution, Reduce, Round
from byteps_py.server.rounds import HELD_BYTES, Rounds
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import (
    Fetch,
    Header,
    HeldPartition,
    HeldRun,
    Kind,
    SegmentNumbers,
    ShadowDescription,
    ShadowPartition,
    ShadowRecord,
    ShadowStep,
)

from .base import Target

PARTITION_BYTES = 4096
MACHINES = 3
_SECRET = Settings(secret="known to members", job_id="fuzz")

HEADERS = [
    Header(kind, sender, 1, dtype, op, 0xFFFF, 7 + index, 1, index, round_, 0, 64, machines=machines).pack()
    for kind, dtype, op in (
        (Kind.PUSH, DType.FLOAT32, Op.SUM),
        (Kind.PASS, DType.FLOAT32, Op.SUM),
        (Kind.PUSH, DType.BFLOAT16, Op.MAX),
    )
    for sender, index, round_, machines in itertools.product(range(MACHINES), (0, 1), (1, 2), (0, 2))
] + [
    Header(kind, sender, 1, DType.UINT8, Op.BROADCAST, 0, 9, 1, 0, 1, 0, 64).pack()
    for kind, sender in ((Kind.PUSH, 0), (Kind.PULL, 1), (Kind.PULL, 2))
] + [Header(kind, 0, 1, length=64).pack() for kind in Kind]  # fmt: skip


class WireHeader(Target):
    seeds = (
        *HEADERS,
        Fetch(0, 1, 9).pack(),
    )

    def feed(self, data: bytes) -> None:
        for kind in (Header, Fetch):
            try:
                read = kind.unpack(data)
            except ProtocolError:
                continue
            assert kind.unpack(read.pack()) == read


class Seals(Target):
    """What was changed is never opened."""

    seeds = tuple(
        new_seal(protection, bytes(16), bytes(16)).seal(HEADERS[0], b"payload" * 9)[0] for protection in Protection
    )

    def __init__(self) -> None:
        self._seals = [new_seal(protection, bytes(16), bytes(16)) for protection in Protection]

    def feed(self, data: bytes) -> None:
        for seal in self._seals:
            seal.number = 0
            try:
                seal.open(data, zmq.Frame(b"payload of another"))
            except DamagedError:
                continue
            raise AssertionError("it was opened")


class Handshake(Target):
    """Whoever does not know the secret is not accepted, whatever it says."""

    seeds = (
        CallerHandshake(_SECRET, 0, "tcp://a:1").hello,
        bytes(128),
        bytes(32),
    )

    def __init__(self) -> None:
        self._keeper = ListenerHandshake(_SECRET)
        self._caller = CallerHandshake(_SECRET, 0, "tcp://a:1")

    def feed(self, data: bytes) -> None:
        try:
            self._caller.answer(data)
        except ProtocolError:
            pass
        else:
            raise AssertionError("a listener was believed")
        try:
            challenge = self._keeper.challenge(data, 0, "tcp://a:1")[1]
        except ProtocolError:
            return
        try:
            challenge.accept(data[:32])
        except ProtocolError:
            return
        raise AssertionError("a caller was believed")


class Listener(Target):
    """A real listener, to which connections say what they like before they are known. Nobody becomes known."""

    seeds = (
        *HEADERS,
        *[Header(Kind.HELLO, 0).pack() + CallerHandshake(_SECRET, 0, "tcp://a:1").hello],
        b"\0" * 110,
    )

    def __init__(self) -> None:
        settings = Settings(secret="known to members", job_id="fuzz", num_workers=MACHINES)
        self._traffic = Traffic(_log_limiter=Limiter(0))
        self._listener = DataListener("127.0.0.1", settings, self._traffic, frozenset(Kind), self._came, self._gone)
        self._identities = itertools.cycle([b"\0%04d" % number for number in range(1000)] + [b"chosen", b""])

    def _came(self, header: Header, peer: Peer, frame: zmq.Frame) -> None:
        raise AssertionError("a stranger was heard")

    def _gone(self, peer: Peer) -> None:
        raise AssertionError("a stranger was known")

    def feed(self, data: bytes) -> None:
        cut = len(HEADERS[0])
        frames = [zmq.Frame(data[:cut]), zmq.Frame(data[cut:]), zmq.Frame(data)][: 1 + len(data) % 3]
        self._listener._receive(next(self._identities), frames)

    def end(self) -> None:
        assert not self._listener._peers
        assert len(self._listener._challenges) <= 256

    def close(self) -> None:
        self._listener.close()


class ServerRounds(Target):
    """Members that say what they like. What is reduced is what the rules allow; memory and counters stay bounded."""

    seeds = tuple(HEADERS)

    def __init__(self) -> None:
        self._rounds: Rounds[Contribution]
        self._reducing: list[Round[Contribution]] = []
        self._origins = [object() for _ in range(2)]
        self._now = 0.0
        self._begin()

    def _begin(self) -> None:
        self._rounds = Rounds(PARTITION_BYTES)
        self._rounds.membership(1, MACHINES, self._now, 1)

    def feed(self, data: bytes) -> None:
        try:
            header = Header.unpack(data)
        except ProtocolError:
            return
        self._now += 0.01
        rounds = self._rounds
        if header.kind is Kind.WITHDRAW:
            rounds.withdraw(header)
        elif header.kind is Kind.HELLO:
            rounds.on_origin_lost(self._origins[header.sender % 2])
        elif header.kind is Kind.PROBE:
            self._end_reductions()
        elif header.kind in (Kind.PUSH, Kind.PULL, Kind.PASS):
            header.index %= 4  # some meet
            partition = rounds._generations.get(header.key, {}).get(header.index)
            if partition is not None and header.round < 16:  # and some come at the right time
                header.round += max(partition.last_round, partition.broken_round, 0) - header.round // 4
            nbytes = header.length % (2 * PARTITION_BYTES) if header.kind is Kind.PUSH else 0
            new = Contribution(header, self._origins[header.round % 2], nbytes)
            for action in (*rounds.contribution(new, self._now), *rounds.tick(self._now)):
                if isinstance(action, Reduce):
                    self._check(action.round)
                    self._reducing.append(action.round)
        if len(self._reducing) > 3:
            self._end_reductions()
        assert 0 <= rounds.counters.bytes_in_flight <= HELD_BYTES + 501 * 8 * MACHINES * PARTITION_BYTES
        if len(rounds._generations) > 500:
            rounds.membership(rounds.epoch + 1, MACHINES - 1, self._now, rounds.epoch + 1)
            self._end_reductions()
            self._begin()

    def _end_reductions(self) -> None:
        for round_ in self._reducing:
            for action in self._rounds.reduced(round_, None):
                assert isinstance(action, Answer)
        self._reducing.clear()

    def _check(self, round_: Round[Contribution]) -> None:
        given = round_.in_order()
        headers = [contribution.header for contribution in given]
        assert [header.sender for header in headers] == sorted({header.sender for header in headers})
        assert all(header.sender < MACHINES for header in headers)
        assert len(given) == (headers[0].machines or MACHINES)
        assert any(header.kind is Kind.PUSH for header in headers)
        first = headers[0]
        for contribution, header in zip(given, headers, strict=True):
            assert (header.length, header.op, header.dtype) == (first.length, first.op, first.dtype)
            assert contribution.nbytes in (0, header.length)
            assert 0 < header.length <= PARTITION_BYTES


class LocalProtocol(Target):
    """What a rank says to its communication service, and back."""

    _spec = TensorSpec("layer.weight", DType.FLOAT32, (3, 4), Op.SUM, average=True, group=(0, 1))
    seeds = tuple(
        map(
            protocol.encode,
            (
                protocol.Hello.of(local_rank=0, local_size=2, pid=42, synced_in=7),
                protocol.Declare.of(1, [_spec, _spec]),
                protocol.Ready(((1, 2, 3), (4, 5, 6))),
                protocol.SetLayout.of(3, Layout(((0, 8),), ((0, 8), (8, 8)))),
                protocol.WantChunks(3),
                protocol.EnterBarrier(3),
                protocol.StepsBegun((protocol.StepCount(7, 2, "all"),)),
                protocol.ProgressMade(7, 0.25, 1.7e9, 4096, 2, 0.5, 48, 1, 8192.0, 0.25),
                protocol.BeginStep(1, 2, True, 3, 2, False, (SegmentNumbers(0, 8, (0.5, 0.25)),)),
                protocol.RecordData(b"what a rank knows"),
                protocol.Leave(error="ValueError: no", traceback="line 1"),
                protocol.Declared(1, (protocol.SlotFields(1, 48, 2, 0, 128, ((0, 0), (0, 4096))),)),
                protocol.StatesKept(1, 2, 3, ((0, 0),), ((0, 3, 1),)),
            ),
        )
    )

    def feed(self, data: bytes) -> None:
        try:
            message = protocol.decode(data)
            protocol.decode_hello(data)
        except ProtocolError:
            return
        assert protocol.decode(protocol.encode(message)) == message or "nan" in repr(message)
        with contextlib.suppress(ProtocolError):
            if isinstance(message, protocol.SetLayout):
                message.layout()
            elif isinstance(message, protocol.Declare):
                for fields in message.specs:
                    fields.spec()


class ShadowPayloads(Target):
    """What owners of states say to servers, and what servers say that they keep."""

    _part = ShadowPartition(7, 0, 12, 1, 3, "layer.weight")
    _record = ShadowRecord(7, 3, 1, 2, 2, False, 5, b"{}")
    seeds = (
        _part.pack(),
        _record.pack(),
        ShadowStep(7, 4, 3, 2, 3, True, (SegmentNumbers(0, 12, (0.5, 0.25)),)).pack(),
        ShadowDescription((HeldRun(7, 3, 1.5, (HeldPartition(1, 0, _part, (4, 5)),), (_record,)),)).pack(),
        Fetch(1, 2, 64, True, 3).pack(),
    )

    def feed(self, data: bytes) -> None:
        for kind in (ShadowPartition, ShadowStep, ShadowRecord, ShadowDescription, Fetch):
            with contextlib.suppress(ProtocolError):
                found = kind.unpack(data)  # type: ignore[attr-defined]
                assert kind.unpack(found.pack()) == found or "nan" in repr(found)  # type: ignore[attr-defined]


class Environment(Target):
    """Every variable with garbage, and combinations. Launchers' variables, too."""

    _names = [name for variable in VARIABLES for name in variable.names if variable.field != "secret_file"] + [
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
        "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES",
        "SLURM_STEP_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "TORCHELASTIC_RUN_ID",
    ]  # fmt: skip
    seeds = (
        b"1",
        b"0",
        b"4096",
        b"0.5",
        b"true",
        b"worker",
        b"127.0.0.1",
        b"2(x3),1",
        b"nan",
        b"-1",
        b"1e400",
        b"SUM",
    )

    def __init__(self) -> None:
        self._environ: dict[str, str] = {}
        self._turn = 0

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if self._turn % 5 == 0:
            self._environ.clear()
        name = self._names[(self._turn * 7919 + len(data)) % len(self._names)]
        self._environ[name] = os.fsdecode(data.replace(b"\0", b"")) + (
            "of nothing else" if name == "BYTEPS_SECRET" else ""
        )
        try:
            settings = Settings.from_env(self._environ)
        except ConfigurationError as error:
            if "of nothing else" in str(error):
                raise AssertionError("the secret is shown") from None
            return
        settings.describe().encode()
        launchers.scheduler(self._environ)
        launchers.job(self._environ)
