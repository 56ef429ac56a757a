"""What a communication service makes of what no correct scheduler says of a group, and of tensors that are not here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.errors import ProtocolError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.wire.chunks import CHUNK_BYTES
from byteps_py.worker.core.placement_view import MAX_PARTITIONS, PlacementView
from byteps_py.worker.core.topology import Topology


def membership() -> pb.Membership:
    workers = [pb.Member(machine_index=i, local_size=2, first_rank=2 * i, link_mbit=100.0) for i in range(2)]
    servers = [pb.Member(member_id=9 + i, weight=1) for i in range(2)]
    return pb.Membership(epoch=1, workers=workers, servers=servers, partition_bytes=4096)


@pytest.mark.parametrize(
    ("where", "field", "value", "why"),
    [
        ("workers", "machine_index", 0, "worker 1 is machine 0"),
        ("workers", "first_rank", 3, "its ranks begin at 3"),
        ("workers", "local_size", 0, "has 0 ranks"),
        ("workers", "local_size", 1 << 31, "has 2147483648 ranks"),
        ("workers", "link_mbit", math.nan, "has nan Mbit/s"),
        ("servers", "link_mbit", -1.0, "has -1.0 Mbit/s"),
        ("servers", "weight", 0, "server 10 is to hold nothing"),
    ],
)
def test_a_membership_that_can_not_be(where: str, field: str, value: Any, why: str) -> None:
    said = membership()
    Topology.of(said, 0).check()
    setattr(getattr(said, where)[1], field, value)
    with pytest.raises(ProtocolError, match=why):
        Topology.of(said, 0).check()


def test_ranks_are_not_as_many_as_a_message_can_say() -> None:
    workers = [pb.Member(machine_index=i, local_size=1024, first_rank=1024 * i) for i in range(1025)]
    with pytest.raises(ProtocolError, match="more than 1048576 ranks"):
        Topology.of(pb.Membership(workers=workers, partition_bytes=4096), 0).check()


def test_tensors_of_others_take_no_more_room_than_there_is() -> None:
    placing = PlacementView(Topology.of(membership(), 0), 1 << 20, CHUNK_BYTES)
    placing.add([TensorSpec("some", DType.UINT8, (8192,))])
    placing.add([TensorSpec("some", DType.UINT8, (8192,))])
    for name, count in (("vast", MAX_PARTITIONS + 1), ("some", MAX_PARTITIONS - 1)):  # a new one, and one anew
        with pytest.raises(ProtocolError, match=r"cut into \d+ partitions of 4096 bytes"):
            placing.add([TensorSpec(name, DType.UINT8, (4096 * count,)), TensorSpec("more", DType.UINT8, (8192,))])


@pytest.mark.parametrize("how", [{"group": (0,)}, {"scatters": True}, {"op": Op.BROADCAST, "root": 0}], ids=str)
def test_nor_does_one_tensor_that_is_in_no_table(how: dict[str, Any]) -> None:
    placing = PlacementView(Topology.of(membership(), 0), 4096, CHUNK_BYTES)
    with pytest.raises(ProtocolError, match=r"'vast': .* would be cut into pieces of 4096 bytes"):
        placing.pieces(TensorSpec("vast", DType.UINT8, (1 << 40,), **how))


def test_what_is_no_address_is_an_error_of_ours() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    loop = EventLoop()
    for address in ("", "nowhere", "tcp://host", "tcp://host:port"):
        with pytest.raises(ProtocolError, match="can't be reached at"):
            Dialer(context, loop, DialTarget(address, "the service"), 0, Settings(), Owner())
    context.term()
    loop.close()
