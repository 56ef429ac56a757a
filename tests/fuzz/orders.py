"""What the scheduler says to a communication service that has a group of ranks."""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.wire import rank_link as protocol

from .base import Target
from .machine import RANKS, Machine

_SPECS = (
    TensorSpec("sum", DType.FLOAT32, (3, 4)),
    TensorSpec("average", DType.BFLOAT16, (5000,), average=True),
    TensorSpec("broadcast", DType.INT64, (7,), Op.BROADCAST, root=1),
    TensorSpec("scattered", DType.FLOAT32, (5, 3), scatters=True),
)
_OTHERS = (
    TensorSpec("sum", DType.FLOAT32, (3, 4), group=(0,)),
    TensorSpec("broadcast", DType.INT64, (7,), Op.BROADCAST, root=7),
    TensorSpec("unknown", DType.FLOAT64, (9,), scatters=True, group=(5, 6)),
    TensorSpec("gather", DType.UINT8, (9, 9), Op.GATHER),
)


def _verdicts() -> list[pb.Verdict]:
    return [
        pb.Verdict(name=spec.name, generation=generation, spec=protocol.pack_spec(spec), rounds=rounds, **error)
        for spec in (*_SPECS, *_SPECS, *_OTHERS)
        for generation in (1, 2)
        for rounds, error in ((0, {}), (2, {"error": "they differ", "late": [0, 1]}))
    ]


_SAID = (
    *[pb.SchedulerMessage(verdicts=pb.Verdicts(verdicts=[verdict])) for verdict in _verdicts()],
    *[pb.SchedulerMessage(reopen=pb.Reopen(name=spec.name, generation=2, rounds=1)) for spec in _SPECS],
    *[pb.SchedulerMessage(release=pb.Release(sequence=sequence)) for sequence in (0, 1, 2)],
    *[
        pb.SchedulerMessage(joined=pb.Join(rank=rank, last=[pb.LastRound(name=name, generation=1, round=round_)]))
        for rank in (0, 1, 5)
        for name, round_ in (("broadcast", 0), ("scattered", 1))
    ],
    pb.SchedulerMessage(all_joined=pb.AllJoined(last=1, direct_round=3)),
    pb.SchedulerMessage(
        membership=pb.Membership(epoch=2, servers=[pb.Member(member_id=3, weight=1)], partition_bytes=4096)
    ),
)


class Orders(Target):
    """Only ProtocolError, which ends the job, may come of it. What ranks do afterwards is served, or ends it too."""

    cost = 10
    seeds = tuple(message.SerializeToString() for message in _SAID)

    def __init__(self) -> None:
        self._turn = self._computed = 0
        self._begin()

    def _begin(self) -> None:
        self._begun = self._turn
        self._machine = Machine(is_elastic=False)
        for rank in range(RANKS):
            self._machine.say(rank, protocol.Declare.of(1, _SPECS))
        if self._turn % 2:
            self._machine.go_on()  # else the ballots are answered by what comes

    def feed(self, data: bytes) -> None:
        self._turn += 1
        machine = self._machine
        is_over = self._turn - self._begun > 40
        try:
            message = pb.SchedulerMessage.FromString(data)
        except DecodeError:
            return
        try:
            if message.HasField("membership"):
                machine.group.change(message.membership)
            else:
                machine.group.on_message(message)
        except ProtocolError as error:
            str(error).encode()
            is_over = True
        for slot in list(machine.group.requests.memory.slots.values()):
            if slot.ready_bytes < 0 and (slot.id + self._turn) % 3 == 0:
                machine.say(slot.local_rank, protocol.Ready(((slot.id, slot.round + 1, slot.spec.nbytes),)))
        with contextlib.suppress(ProtocolError):
            machine.go_on()
        for channel in machine.ranks:
            for heard in machine.heard(channel):
                self._check(heard)
        if is_over or machine.deaths:
            self._computed += machine.computed
            machine.close()
            self._begin()

    def _check(self, heard: bytes) -> None:
        if heard:
            message = protocol.decode(heard)
            if isinstance(message, protocol.RoundsDone):
                assert all(round_ > 0 for _, round_, _ in message.rounds)

    def end(self) -> None:
        assert self._computed

    def close(self) -> None:
        self._machine.close()
