"""What ranks say to the communication service of their machine."""

from __future__ import annotations

import gc
import os
from typing import Any

from byteps_py import rank_protocol as protocol
from byteps_py.errors import ProtocolError
from byteps_py.rank_protocol import RankMessageKind
from byteps_py.tensors import DType, Layout, NonFinite, Op, TensorSpec, key_of

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
_GIVEN = (RankMessageKind.INTRODUCE, RankMessageKind.STACK)  # with descriptors
_VAST = TensorSpec("vast", DType.FLOAT32, (1 << 46,))  # more than can be mapped
_KNOCK = 2  # instead of a rank: a stranger
_HELLO = protocol.hello(0, RANKS, 42, 0)


def _declare(specs: tuple[TensorSpec, ...]) -> bytes:
    return protocol.pack(RankMessageKind.DECLARE, request=1, specs=[protocol.spec_to_json(spec) for spec in specs])


def _all_said() -> list[bytes]:
    """By either rank; the numbers of slots are those of Ranks._begin."""
    ready = [
        protocol.pack_record(RankMessageKind.READY, number, 1, spec.nbytes // (1 + cut))
        for number, spec in enumerate(_SLOTS, 1)
        for cut in (0, 0, 1)
    ]
    layouts = [protocol.layout_to_message(slot, layout) for slot in (5, 6, 12, 13) for layout in (_GATHER, _EXCHANGE)]
    return [
        *ready,
        *layouts,
        *[_declare((spec,)) for spec in (*_SPECS, _VAST)] * 2,
        protocol.pack_records(RankMessageKind.READY, [(1, 1, 48), (7, 1, 48)]),
        *[protocol.pack(RankMessageKind.CHUNKS, slot=slot) for slot in (2, 8)],
        *[protocol.pack(RankMessageKind.BARRIER, sequence=sequence) for sequence in (1, 2, 3)],
        *[protocol.pack(RankMessageKind.INTRODUCE, key=key_of("meeting"), members=[0, 1])] * 2,
        protocol.pack(RankMessageKind.WAITS, id=1, name="near", round=3, age_s=2.5, group=[0, 1]),
        protocol.pack(RankMessageKind.WAITS, id=2, name="near", round=3, age_s=2.5, group=[0, 1]),
        protocol.pack(RankMessageKind.WAITED, id=1),
        protocol.pack(RankMessageKind.STEPS, begun=[["gradients to combine", 7, 2]]),
        protocol.pack(RankMessageKind.NOTE, text="busy"),
        protocol.pack(RankMessageKind.JOIN),
        protocol.pack(RankMessageKind.PING),
        protocol.pack(RankMessageKind.STACK),
        protocol.pack(RankMessageKind.SETTLE),
        protocol.pack(RankMessageKind.LEAVE),
        protocol.pack(RankMessageKind.LEAVE, error="ValueError: no", traceback="line 1"),
        protocol.pack(RankMessageKind.LEAVE, again="HostsUpdatedInterrupt", planned=True),
    ]


#: Of any field: what JSON can say, and nobody means.
_WILD = (
    None, True, -1, 0, 1, 1 << 31, 1 << 32, 1 << 47, 1 << 63, 1 << 64, 1 << 80, 0.5, float("inf"), float("-inf"),
    float("nan"), 1e300, "", "name", "\ud800", "\0", "n" * 5000, [], [0], [1], [0, 1], [1, 0], [-1], [5], [0] * 3,
    [[0, 8]], [[0, -8], [0, 8]], [1 << 62, 9], [1 << 34], [1 << 46], [[]], {}, {"0": 1},
)  # fmt: skip


def _twisted(said: bytes, number: int) -> bytes:
    """The same with something else in one field; of a declaration in one field of its first spec."""
    try:
        kind, fields = protocol.kind_of(said), protocol.fields_of(said)
        inside: Any = fields["specs"][0] if kind is RankMessageKind.DECLARE and number % 4 else fields
        keys = sorted(fields) if inside is fields else range(len(inside))
        at = keys[number % len(keys)]
        inside[at] = _WILD[number // len(keys) % len(_WILD)]
        return protocol.pack(kind, **fields)
    except (ProtocolError, ValueError, TypeError, LookupError, ZeroDivisionError):  # it has none
        return said


def _is_malformed(said: bytes) -> bool:
    try:
        kind = protocol.kind_of(said)
        if kind is RankMessageKind.RECORD:
            return not protocol.record_part_of(said)
        return not (
            protocol.records_of(said) if kind is RankMessageKind.READY else protocol.fields_of(said) is not None
        )
    except ProtocolError:
        return True


class Ranks(Target):
    """A rank that breaks the protocol ends the job by a sentence, and nothing else does; what is computed and copied
    lies in the memory of the two; what they say can be told to the scheduler; descriptors are closed."""

    cost = 10
    seeds = (
        *[bytes((rank, 0)) + said for rank in range(RANKS) for said in _all_said()],
        *[bytes((rank, 1)) + said for rank in range(RANKS) for said in _all_said() if said[0] in _GIVEN],
        *[bytes((_KNOCK, gift)) + _HELLO for gift in range(2)],
    )  # fmt: skip

    def __init__(self) -> None:
        self._turn = self._twists = self._groups = self._deaths = self._computed = 0
        self._gift = os.memfd_create("gift")
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._machine = Machine(is_elastic=False)
        self._declare()

    def _declare(self) -> None:
        for rank in range(RANKS):
            self._machine.say(rank, _declare(tuple(spec for spec in _SPECS if rank in spec.members(RANKS))))
        self._machine.go_on()
        self._since = self._turn
        assert not self._machine.deaths, self._machine.deaths

    def feed(self, data: bytes) -> None:
        self._turn += 1
        if len(data) < 3:
            return
        who, said = data[0] % 3, data[2:]
        if said[0] not in (RankMessageKind.READY, RankMessageKind.DONE) and self._turn % 2:
            self._twists += 1
            said = _twisted(said, self._twists)
        if self._turn % 8 and _is_malformed(said):  # every group would end by it; see LocalProtocol
            return
        fds = (self._gift,) * (data[1] % 3)
        machine = self._machine
        if who == _KNOCK:
            stranger = machine.knock(said, fds)
            if machine.group.executor.ranks.keys() == {0, 1} and not machine.deaths:
                answers = machine.heard(stranger)
                assert [answer[:1] for answer in answers] == [bytes((RankMessageKind.FATAL,)), b""]
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
        if said[0] != RankMessageKind.READY or len(said) != 17:
            return said
        ((number, round_, nbytes),) = protocol.records_of(said)
        slot = self._machine.group.requests.memory.slots.get(number)
        if slot is None or round_ >= 16 or self._turn % 8 == 0:
            return said
        if slot.ready_bytes >= slot.spec.nbytes:  # it has been given, and others have not
            return protocol.pack(RankMessageKind.PING)
        if slot.spec.op.is_direct:
            layout = _GATHER if slot.spec.op is Op.GATHER else _EXCHANGE
            self._machine.say(slot.local_rank, protocol.layout_to_message(number, layout))
        if nbytes != slot.spec.nbytes // 2:
            nbytes = slot.spec.nbytes
        return protocol.pack_record(RankMessageKind.READY, number, slot.round + (slot.ready_bytes < 0), nbytes)

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
