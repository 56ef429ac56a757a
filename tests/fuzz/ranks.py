"""What ranks say to the communication service of their machine."""

from __future__ import annotations

import dataclasses
import gc
import os
from typing import Any

from byteps_py.errors import ProtocolError, UsageError
from byteps_py.tensors import DType, Layout, NonFinite, Op, TensorSpec, key_of
from byteps_py.wire import rank_link as protocol
from byteps_py.wire.data_link import SegmentNumbers

from .base import Target
from .machine import RANKS, Machine

_SPECS = (
    TensorSpec("sum", DType.FLOAT32, (3, 4)),
    TensorSpec("average", DType.BFLOAT16, (5000,), average=True, nonfinite=NonFinite.RAISE),
    TensorSpec("broadcast", DType.INT64, (7,), Op.BROADCAST, root=1),
    TensorSpec("scattered", DType.FLOAT32, (5, 3), scatters=True),
    TensorSpec("gather", DType.UINT8, (64, 128), Op.GATHER),
    TensorSpec("exchange", DType.UINT8, (128, 128), Op.EXCHANGE),
    TensorSpec("alone", DType.FLOAT32, (6,), group=(1,)),
)
_SLOTS = [spec for rank in range(RANKS) for spec in _SPECS if rank in spec.members(RANKS)]  # from number 1
_GATHER = Layout(((0, 64),), ((0, 64), (64, 64)))
_EXCHANGE = Layout(((0, 8), (8, 8)), ((0, 8), (16, 8)))
_GIVEN = (protocol.AskIntroduction, protocol.GiveStackFile, protocol.GiveFlightRecorder)  # with descriptors
_VAST = TensorSpec("vast", DType.FLOAT32, (1 << 46,))  # more than can be mapped
_KNOCK = 2  # instead of a rank: a stranger
_ROUNDS = {protocol.encode(message(()))[0] for message in (protocol.Ready, protocol.RoundsDone)}
_FATAL = protocol.encode(protocol.Fatal("", ""))[:1]
_HELLO = protocol.Hello.of(0, RANKS, 42, 0)


def _all_said() -> list[object]:
    """By either rank; the numbers of slots are those of Ranks._begin."""
    ready = [
        protocol.Ready(((number, 1, spec.nbytes // (1 + cut)),))
        for number, spec in enumerate(_SLOTS, 1)
        for cut in (0, 0, 1)
    ]
    layouts = [protocol.SetLayout.of(slot, layout) for slot in (5, 6, 12, 13) for layout in (_GATHER, _EXCHANGE)]
    return [
        *ready,
        *layouts,
        *[protocol.Declare.of(1, (spec,)) for spec in (*_SPECS, _VAST)] * 2,
        protocol.Ready(((1, 1, 48), (7, 1, 48))),
        *[protocol.WantChunks(slot) for slot in (2, 8)],
        *[protocol.EnterBarrier(sequence) for sequence in (1, 2, 3)],
        *[protocol.AskIntroduction(key_of("meeting"), (0, 1))] * 2,
        protocol.WaitBegun(1, 3, 2.5, "near", (0, 1)),
        protocol.WaitBegun(2, 3, 2.5, "near", (0, 1)),
        protocol.WaitEnded(1),
        protocol.StepsBegun((protocol.StepCount(7, 2, "gradients to combine"),)),
        protocol.ProgressMade(7, 0.25, 1.7e9, 4096, 2, 0.5, 48, 1, 8192.0, 0.25),
        protocol.Note("busy"),
        protocol.Join(),
        protocol.Ping(),
        protocol.GiveStackFile(),
        protocol.GiveFlightRecorder(),
        protocol.Drain(),
        protocol.Leave(),
        protocol.Leave(error="ValueError: no", traceback="line 1"),
        protocol.Leave(return_reason="HostsUpdatedInterrupt", planned=True),
        protocol.KeepStates(1, 1, 1, 2, 0, 7),
        protocol.BeginStep(1, 1, True, 1, 0, False, (SegmentNumbers(0, 3, (0.5, 0.25)),)),
        protocol.SkipStep(1, 1),
        protocol.MeasureNorm(1, 1, ((0, 3),)),
        protocol.DropStates(1),
        protocol.BeginRecord(7, 1, 0, False, 4, 4),
        protocol.RecordData(b"1234"),
        protocol.Pong(),
    ]


#: Of any field: what its type allows, and nobody means.
_WILD = (
    False, True, -1, 0, 1, 1 << 31, (1 << 32) - 1, 1 << 47, 1 << 63, (1 << 64) - 1, 0.5, float("inf"), float("-inf"),
    float("nan"), 1e300, "", "name", "\0", "n" * 5000, b"", b"0" * 9, (), (0,), (1,), (0, 1), (1, 0), (5,), (0,) * 3,
    ((0, 8),), ((0, 1 << 63), (0, 8)), ((1 << 62, 9),), (1 << 20,), (1 << 46,), (1 << 62, 9),
)  # fmt: skip


def twisted(said: bytes, number: int, wild: tuple[Any, ...]) -> bytes:
    """The same with one of ``wild`` in one field, or in one of its first record; unchanged if that is no message."""
    try:
        message = protocol.decode(said)
        fields = dataclasses.fields(message)
        if not fields:
            return said
        name = fields[number % len(fields)].name
        inside = getattr(message, name)
        value = _any_like(inside, number // len(fields), wild)
        if isinstance(inside, tuple) and inside and dataclasses.is_dataclass(inside[0]) and number % 4:
            others = dataclasses.fields(inside[0])
            other = others[number // 4 % len(others)].name
            changed = {other: _any_like(getattr(inside[0], other), number // len(fields), wild)}
            value = (dataclasses.replace(inside[0], **changed), *inside[1:])
        return protocol.encode(dataclasses.replace(message, **{name: value}))
    except (ProtocolError, UsageError, TypeError, ValueError, AttributeError, LookupError):  # of another type
        return said


def _any_like(value: Any, number: int, wild: tuple[Any, ...]) -> Any:
    kinds = (int, float) if isinstance(value, int | float) else type(value)
    of_kind = [each for each in wild if isinstance(each, kinds)]
    return of_kind[number % len(of_kind)] if of_kind else value


def _is_slow(said: bytes) -> bool:
    """A declaration of more than is quickly cut into partitions, and of less than is refused."""
    try:
        message = protocol.decode(said)
        specs = [fields.spec() for fields in message.specs] if isinstance(message, protocol.Declare) else []
    except ProtocolError:
        return False
    return any(1 << 26 < max(spec.nbytes, *spec.shape, 0) < 1 << 46 for spec in specs)


def _is_malformed(said: bytes) -> bool:
    try:
        protocol.decode(said)
    except ProtocolError:
        return True
    return False


class Ranks(Target):
    """A rank that breaks the protocol ends the job by a sentence, and nothing else does; what is computed and copied
    lies in the memory of the two; what they say can be told to the scheduler; descriptors are closed."""

    cost = 10
    seeds = (
        *[bytes((rank, 0)) + protocol.encode(said) for rank in range(RANKS) for said in _all_said()],
        *[
            bytes((rank, 1)) + protocol.encode(said)
            for rank in range(RANKS)
            for said in _all_said()
            if isinstance(said, _GIVEN)
        ],
        *[bytes((_KNOCK, gift)) + protocol.encode(_HELLO) for gift in range(2)],
    )  # fmt: skip

    def __init__(self) -> None:
        self._turn = self._twists = self._groups = self._deaths = self._computed = 0
        self._gift = os.memfd_create("gift")
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._machine = Machine(is_elastic=False)
        self._declare()

    def _declare(self) -> None:
        for rank in range(RANKS):
            self._machine.say(rank, protocol.Declare.of(1, [spec for spec in _SPECS if rank in spec.members(RANKS)]))
        self._machine.go_on()
        self._since = self._turn
        assert not self._machine.deaths, self._machine.deaths

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if len(data) < 3:
            return
        who, said = data[0] % 3, data[2:]
        if said[0] not in _ROUNDS and self._turn % 2:
            self._twists += 1
            said = twisted(said, self._twists, _WILD)
        if self._turn % 8 and _is_malformed(said):  # every group would end by it; see LocalProtocol
            return
        if _is_slow(said):
            return
        fds = (self._gift,) * (data[1] % 3)
        machine = self._machine
        if who == _KNOCK:
            stranger = machine.knock(said, fds)
            if machine.group.executor.ranks.keys() == {0, 1} and not machine.deaths:
                answers = machine.heard(stranger)
                assert [answer[:1] for answer in answers] == [_FATAL, b""]
            stranger.close()
        else:
            machine.say(who, self._in_time(said), fds)
        machine.go_on()
        for channel in machine.ranks:
            machine.heard(channel)
        if machine.deaths or machine.group.executor.ranks.keys() != {0, 1} or self._turn - self._since > 150:
            self._again()

    def _in_time(self, said: bytes) -> bytes:
        """What is about right is, mostly, what is due, so that rounds come to their ends."""
        if said[0] not in _ROUNDS or _is_malformed(said):
            return said
        message = protocol.decode(said)
        if not isinstance(message, protocol.Ready) or len(message.rounds) != 1:
            return said
        ((number, round_, nbytes),) = message.rounds
        slot = self._machine.group.requests.memory.slots.get(number)
        if slot is None or round_ >= 16 or self._turn % 8 == 0:
            return said
        if slot.ready_bytes >= slot.spec.nbytes:  # it has been given, and others have not
            return protocol.encode(protocol.Ping())
        if slot.spec.op.bypasses_servers:
            layout = _GATHER if slot.spec.op is Op.GATHER else _EXCHANGE
            self._machine.say(slot.local_rank, protocol.SetLayout.of(number, layout))
        if nbytes != slot.spec.nbytes // 2:
            nbytes = slot.spec.nbytes
        return protocol.encode(protocol.Ready(((number, slot.round + (slot.ready_bytes < 0), nbytes),)))

    def _again(self) -> None:
        machine = self._machine
        self._groups += 1
        self._deaths += bool(machine.deaths)
        self._computed += machine.computed
        if self._groups % 3 == 1 or machine.deaths or not machine.is_elastic:
            machine.close()
            self._machine = Machine(is_elastic=self._groups % 2 == 0)
        else:
            machine.begin_anew()
        self._declare()

    def end(self) -> None:
        assert self._deaths
        assert self._computed
        self._machine.close()
        self._machine = Machine(is_elastic=False)
        self._machine.close()  # with nothing that has been asked for
        gc.collect()  # memory has descriptors until it is forgotten
        assert len(os.listdir("/proc/self/fd")) <= self._descriptors + 2 * RANKS
        self._machine = Machine(is_elastic=False)

    def close(self) -> None:
        self._machine.close()
        os.close(self._gift)
