"""What a communication service says about the copies of its ranks' optimizer states."""

from __future__ import annotations

from typing import Any, cast

import pytest
from support.worker_core import slot, tensor

from byteps_py.kernels.update_rules import Decay, Method, StepKind, UpdateRule
from byteps_py.proto import control_pb2 as pb
from byteps_py.tensors import DType, TensorSpec
from byteps_py.wire.data_link import Header, Kind, ShadowRecord
from byteps_py.worker.core.hosted_steps import OwnedPart
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.ranks.shadows import Shadows

KIND = StepKind(UpdateRule(Method.SGD, Decay.NONE), DType.FLOAT32, DType.FLOAT32)


def topology(machines: int, cpu_machines: int, epoch: int = 1) -> Topology:
    workers = [
        pb.Member(machine_index=i, machine_id=f"m{i}", first_rank=i, local_size=1, host="h") for i in range(machines)
    ]
    gpu = [
        pb.Member(member_id=i, kind=pb.MACHINE_KIND_GPU, weight=1, machine_id=f"m{i}", machine_index=i)
        for i in range(machines if machines > 1 else 0)
    ]
    cpu = [
        pb.Member(member_id=10 + i, kind=pb.MACHINE_KIND_CPU, weight=1, machine_id=f"c{i}", machine_index=-1)
        for i in range(cpu_machines)
    ]
    return Topology(epoch, 0, tuple(workers), (*gpu, *cpu), 4096, 1)


def watching(place: Topology) -> Shadows:
    """Of a rank that owns one partition. Nothing is sent: no step is made."""
    shadows = Shadows(place, cast(Any, None), cast(Any, None))
    gradients = tensor([slot(0, TensorSpec("g", DType.FLOAT32, (8,), ownership="g"))], contributions=True)
    shadows.watch(0, 5, KIND, [OwnedPart(gradients, 0, 0, 32, -1, owner=0, is_own=True)])
    return shadows


@pytest.mark.parametrize(
    ("machines", "cpu_machines", "warns"), [(1, 1, False), (2, 0, True), (2, 1, False), (3, 0, False)]
)
def test_copies_that_are_of_no_use_are_warned_of(
    caplog: pytest.LogCaptureFixture, machines: int, cpu_machines: int, warns: bool
) -> None:
    watching(topology(machines, cpu_machines))
    assert ("need a CPU machine, or three GPU machines" in caplog.text) == warns


def test_it_is_said_once_that_the_last_server_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    shadows = watching(topology(1, 2))
    shadows.change(topology(1, 1, epoch=2))
    assert not caplog.text
    for epoch in (3, 4):
        shadows.change(topology(1, 0, epoch))
    assert caplog.text.count("no server of another machine is left") == 1
    shadows.change(topology(1, 1, epoch=5))
    shadows.change(topology(1, 0, epoch=6))
    assert caplog.text.count("no server of another machine is left") == 2


class SentMessages:
    """Stands for the network, and the executor that has it."""

    def __init__(self) -> None:
        self.network, self.ranks = self, dict[int, object]()
        self.sent: list[tuple[int, Header, bytes]] = []

    def tell(self, server: int, header: Header, payload: bytes, offset: int) -> None:
        self.sent.append((server, header, bytes(payload)))


def test_what_is_attached_is_sent_in_pieces_and_once_more_on_a_new_connection() -> None:
    sent = SentMessages()
    shadows = Shadows(topology(1, 1), cast(Any, None), cast(Any, sent))
    attached = bytearray(range(256)) * 40
    record = ShadowRecord(run=5, step=2, rank=0, size=1, attached_bytes=len(attached))
    shadows.record(0, record, attached)
    first, sent.sent = sent.sent, []
    assert [header.kind for _, header, _ in first] == [Kind.SHADOW_RECORD, *[Kind.SHADOW_ATTACHED] * 3]
    assert ShadowRecord.unpack(first[0][2]) == record
    for (server, header, data), start in zip(first[1:], (0, 4096, 8192), strict=True):
        assert (server, header.key, header.index, header.round) == (10, 5, 0, 2)
        assert (header.offset, header.length, header.segment_offset) == (start, len(data), len(attached))
        assert data == attached[start : start + 4096]
    shadows.on_reconnected(10)
    assert sent.sent == first


def test_a_record_that_no_server_takes_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    shadows = Shadows(topology(1, 1), cast(Any, None), cast(Any, SentMessages()))
    for step in (2, 3):
        shadows.record(0, ShadowRecord(run=5, step=step, rank=0, size=1, attached_bytes=9), bytearray(9))
        shadows.answered(Header(Kind.SHADOW_LACKS, 0, key=5, index=0, round=step), "9 bytes wait here", 10)
    text = (
        "server 10 does not take a rank's record of step 2, so this step can't be restored: 9 bytes wait here. Attach"
    )
    assert text in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("before", "after", "survives", "survived"),
    [
        ((2, 1), (2, 0), "nothing", "the loss of all GPU machines"),
        ((3, 1), (3, 0), "the loss of one GPU machine of an elastic job", "the loss of all GPU machines"),
        ((3, 0), (2, 0), "nothing", "the loss of one GPU machine of an elastic job"),
        ((2, 0), (2, 1), "the loss of all GPU machines", "nothing"),
    ],
)
def test_protection_that_changes_is_said_both_ways(
    caplog: pytest.LogCaptureFixture, before: tuple[int, int], after: tuple[int, int], survives: str, survived: str
) -> None:
    shadows = watching(topology(*before))
    caplog.clear()
    shadows.change(topology(*before, epoch=2))
    assert not caplog.text
    shadows.change(topology(*after, epoch=3))
    assert f"survive {survives} (they survived {survived})" in caplog.text
    assert shadows.protection == pb.ShadowProtection(step=0, survives=survives)
