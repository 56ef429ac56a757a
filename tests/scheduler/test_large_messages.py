"""Large messages of the scheduler travel packed, and members see no difference."""

from __future__ import annotations

import hashlib
import zlib

import pytest
from support.scheduler_core import server, worker
from support.schedulers import Attend, Factory, as_worker, ballot

from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.member_links.links import MemberLinks, StreamMessage, StreamOpened
from byteps_py.scheduler.member_links.protocol import LEAST_BYTES, LargeMessages, unpack
from byteps_py.scheduler.roster import ClusterConfig

pytestmark = pytest.mark.usefixtures("grpc_library")


def table(members: int) -> pb.SchedulerMessage:
    workers = [pb.Member(member_id=i, host=f"gpu-{i}", address=f"tcp://10.0.0.{i}:1") for i in range(members)]
    return pb.SchedulerMessage(membership=pb.Membership(epoch=1, workers=workers))


def test_a_large_message_is_packed_once_and_comes_out_as_it_was() -> None:
    packer, message = LargeMessages(), table(2000)
    data = packer.pack(message)
    assert 0 < len(data) < message.ByteSize() / 4
    for _ in range(3):
        packer.pack(table(2))  # others go out meanwhile
    assert packer.pack(message) is data
    expected = pb.SchedulerMessage(number=7, received=3)
    expected.MergeFrom(message)
    assert unpack(pb.SchedulerMessage(number=7, received=3, packed=data)) == expected


def test_a_small_message_is_not() -> None:
    message = table(2)
    assert LargeMessages().pack(message) == b""
    assert unpack(message) is message


def test_old_messages_are_not_kept() -> None:
    packer = LargeMessages()
    for _ in range(100):
        packer.pack(table(2))
    assert len(packer._packed) < 10


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        zlib.compress(b"\xff" * 100),
        zlib.compress(table(500).SerializeToString())[:-20],
        zlib.compress(bytes(1 << 20)),
        zlib.compress(b""),
        zlib.compress(pb.SchedulerMessage(packed=zlib.compress(table(1).SerializeToString())).SerializeToString()),
    ],
    ids=["garbage", "no message", "cut off", "too much", "nothing", "packed twice"],
)
def test_what_no_scheduler_sends_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a packed message of the scheduler"):
        unpack(pb.SchedulerMessage(packed=data), most_bytes=1 << 19)


def test_all_members_get_the_same_bytes_also_one_that_comes_back() -> None:
    machines = 200
    links = MemberLinks(ClusterConfig(num_workers=machines, num_servers=machines, job="j"))
    members = [worker(i, 2, machines, machines, token=f"w{i}".encode()) for i in range(machines)]
    members += [server(i, n=machines, k=machines, token=f"s{i}".encode()) for i in range(machines)]
    sent = []
    for stream, register in enumerate(members):
        links.handle(StreamOpened(stream), 0.0)
        sent = links.handle(StreamMessage(stream, pb.MemberMessage(register=register)), 0.0)
    tables = [each for each in sent if each.packed]
    assert len(tables) == 2 * machines
    assert len({id(each.packed) for each in tables}) == 1
    assert all(each.stamped().ByteSize() < LEAST_BYTES for each in tables)
    links.handle(StreamOpened(9999), 1.0)
    again = links.handle(StreamMessage(9999, pb.MemberMessage(register=members[0])), 1.0)
    (table_again,) = [unpack(each.stamped()) for each in again if each.packed]
    assert table_again == unpack(tables[0].stamped())
    assert len(table_again.membership.workers) == machines


def test_verdicts_on_many_tensors_pass_real_connections(start: Factory, attend: Attend) -> None:
    settings = start(num_workers=1).wait_listening().settings
    member = attend(settings, as_worker(0))
    member.wait("membership")
    one = ballot(0).declare.ballots[0]
    names = [f"{hashlib.sha256(bytes([i])).hexdigest()}.{i}" for i in range(250)]
    ballots = [pb.Ballot(name=name, generation=1, votes=one.votes) for name in names]
    member.link.send(pb.MemberMessage(declare=pb.Declare(ballots=ballots)))
    verdicts = member.wait("verdicts")
    assert verdicts.ByteSize() > LEAST_BYTES
    assert [each.name for each in verdicts.verdicts.verdicts] == names
    member.leave()
