"""A running summation server, over real sockets and shared memory: right to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from support.data_plane import WAIT_S, Server, exact_sum, header_for, random_values
from support.summation import SETTINGS, assert_works

from byteps_py.errors import PeerLostError
from byteps_py.tensors import DType, Op
from byteps_py.wire.data_link import HEADER_BYTES, NO_RESULT, Header, Kind

BROADCAST = {"op": Op.BROADCAST}


pytestmark = pytest.mark.usefixtures("zeromq_collector")


@pytest.fixture(name="server")
def two_machines() -> Iterator[Server]:
    with Server(SETTINGS) as server:
        yield server


# ---- over the network --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType))
def test_sums_of_two_machines_are_exact(server: Server, dtype: DType) -> None:
    counts = [1, 5, 1000, 20_001, SETTINGS.partition_bytes // dtype.itemsize]
    machines = [server.machine(i) for i in range(2)]
    parts = [[random_values(dtype, count, seed=10 * i + m) for i, count in enumerate(counts)] for m in range(2)]
    for machine, mine in zip(machines, parts, strict=True):
        for index, part in enumerate(mine):
            machine.push(part.tobytes(), dtype=dtype, index=index)
    for machine in machines:
        results = {}
        for _ in counts:
            header, results[header.index] = machine.receive()  # bound from left to right
            assert (header.kind, header.sender) == (Kind.ANSWER, machine.index)
        for index, both in enumerate(zip(*parts, strict=True)):
            assert results[index] == exact_sum(dtype, list(both)).tobytes()


def test_the_order_of_addition_is_that_of_machines_not_of_arrival() -> None:
    with Server(SETTINGS, num_machines=3) as server:
        machines = [server.machine(i) for i in range(3)]
        parts = [random_values(DType.FLOAT32, 30_000, seed) for seed in range(3)]
        expected = exact_sum(DType.FLOAT32, parts).tobytes()
        assert expected != exact_sum(DType.FLOAT32, parts[::-1]).tobytes()
        for round_, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 2, 0)], start=1):
            for i in order:
                machines[i].push(parts[i].tobytes(), round=round_)
            assert [m.result() == expected for m in machines] == [True, True, True]


@pytest.mark.parametrize(("op", "expected"), [(Op.MIN, [-1.0, 2.0]), (Op.MAX, [3.0, 2.5]), (Op.PRODUCT, [-3.0, 5.0])])
def test_other_operations(server: Server, op: Op, expected: list[float]) -> None:
    for i, values in enumerate([[3.0, 2.0], [-1.0, 2.5]]):
        machine = server.machine(i)
        machine.push(np.array(values, np.float32).tobytes(), op=op)
    assert np.frombuffer(machine.result(), np.float32).tolist() == expected


@pytest.mark.parametrize("length", [8, 200 << 10])
def test_a_broadcast_reaches_all_but_its_root(server: Server, length: int) -> None:
    root, other = server.machine(1), server.machine(0)
    data = os.urandom(length)
    other.pull(length, root=1, dtype=DType.UINT8)
    root.push(data, root=1, dtype=DType.UINT8, **BROADCAST)
    assert (root.result(), other.result()) == (b"", data)


def test_contributions_that_arrive_before_the_membership_wait_for_it() -> None:
    with Server(SETTINGS, num_machines=0) as server:
        machine = server.machine(0)
        machine.push(b"\0\0\x80?")
        server.set_members(1)
        assert machine.result() == b"\0\0\x80?"


def test_disagreement_is_refused_to_both(server: Server) -> None:
    machines = [server.machine(i) for i in range(2)]
    machines[0].push(bytes(64))
    machines[1].push(bytes(64), dtype=DType.INT32)
    for machine in machines:
        kind, text = machine.refusal().split("\n")
        assert kind == "ProtocolError"
        assert text.startswith("partition 0 of tensor key 0x0000000000000007: machines disagree about dtype")


def test_statistics(server: Server) -> None:
    machines = [server.machine(i) for i in range(2)]
    for round_ in range(1, 4):
        for machine in machines:
            machine.push(bytes(100_000), round=round_)
        for machine in machines:
            machine.result()
    machines[0].push(bytes(400), round=4)
    machines[0].push(bytes(4), index=1)
    machines[0].push(bytes(4), index=1, round=2)  # an answer, so that all before it was received
    machines[0].refusal()
    found = server.link.statistics()
    assert (found.bytes_received, found.bytes_sent) == (600_000 + 400 + 4 + 4, 600_000)
    assert (found.rounds, found.bytes_summed, found.bytes_local) == (3, 300_000, 0)
    assert found.bytes_in_flight == 400
    assert found.cpu_s > 0
    assert found.resident_bytes > 1 << 20


# ---- inside the machine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 50_000])
@pytest.mark.parametrize("answer_offset", [0, 512 << 10])
def test_a_local_machine_and_a_remote_one(server: Server, count: int, answer_offset: int) -> None:
    local, remote = server.local_machine(0), server.machine(1)
    parts = [random_values(DType.FLOAT16, count, seed) for seed in range(2)]
    local.give_segment()
    local.write(0, parts[0].tobytes())
    local.send(parts[0].tobytes(), dtype=DType.FLOAT16, answer_offset=answer_offset)
    remote.push(parts[1].tobytes(), dtype=DType.FLOAT16)
    expected = exact_sum(DType.FLOAT16, parts).tobytes()
    assert remote.result() == expected
    header, text = local.receive()
    assert (header.kind, text) == (Kind.ANSWER, "")
    assert local.read(answer_offset, len(expected)) == expected
    found = server.link.statistics()
    assert (found.bytes_local, found.bytes_received, found.bytes_sent) == (2 * count, 2 * count, 2 * count)


@pytest.mark.parametrize("owner", ["local", "remote"])
def test_only_the_owner_of_a_sum_gets_it(server: Server, owner: str) -> None:
    """The other machine hears that its contribution is taken, and nothing is written for it."""
    one, two = b"\0\0\x80?", b"\0\0\0@"
    local, remote = server.local_machine(0), server.machine(1)
    local.give_segment()
    local.write(0, b"kept")
    local.write(4096, one)
    is_local = owner == "local"
    place = {"answer_offset": 8192} if is_local else {}
    local.send(one, segment_offset=4096, flags=0 if is_local else NO_RESULT, **place)
    remote.push(one, flags=NO_RESULT if is_local else 0)
    assert remote.result() == (b"" if is_local else two)
    header, text = local.receive()
    assert (header.kind, text) == (Kind.ANSWER, "")
    assert local.read(8192, 4) == (two if is_local else b"\0" * 4)
    assert local.read(0, 4) == b"kept"


@pytest.mark.parametrize("length", [100, 200 << 10])
def test_a_local_broadcast_both_ways(server: Server, length: int) -> None:
    local, remote = server.local_machine(0), server.machine(1)
    local.give_segment()
    down, up = os.urandom(length), os.urandom(length)
    local.write(4096, down)
    local.send(down, root=0, dtype=DType.UINT8, segment_offset=4096, **BROADCAST)
    remote.pull(length, root=0, dtype=DType.UINT8)
    assert remote.result() == down
    assert local.receive()[0].kind is Kind.ANSWER
    assert local.read(4096, length) == down
    where = {"kind": Kind.PULL, "root": 1, "length": length, "round": 2, "answer_offset": 512 << 10}
    local.send(b"", dtype=DType.UINT8, **where, **BROADCAST)
    remote.push(up, root=1, round=2, dtype=DType.UINT8, **BROADCAST)
    assert remote.result() == b""
    assert local.receive()[0].kind is Kind.ANSWER
    assert local.read(512 << 10, length) == up


def test_local_machines_only() -> None:
    with Server(SETTINGS) as server:
        machines = [server.local_machine(i) for i in range(2)]
        parts = [random_values(DType.INT16, 5000, seed) for seed in range(2)]
        for machine, part in zip(machines, parts, strict=True):
            machine.give_segment()
            machine.write(0, part.tobytes())
            machine.send(part.tobytes(), dtype=DType.INT16, answer_offset=64 << 10)
        for machine in machines:
            assert machine.receive()[0].kind is Kind.ANSWER
            assert machine.read(64 << 10, 10_000) == exact_sum(DType.INT16, parts).tobytes()
            assert machine.read(0, 10_000) == parts[machine.index].tobytes()


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"segment": 1}, "in segment 1, which was never sent"),
        ({"segment_offset": (1 << 20) - 32}, "in segment 0, which has 1048576 bytes"),
        ({"segment_offset": (1 << 64) - 32}, "in segment 0, which has 1048576 bytes"),
        ({"segment_offset": 2}, "64 bytes at offset 2 do not lie in segment 0"),
        ({"length": 1 << 63}, "in segment 0, which has 1048576 bytes"),
        ({"answer_segment": 9}, "in segment 9, which was never sent"),
        ({"answer_offset": 1 << 20}, "in segment 0, which has 1048576 bytes"),
        ({"answer_offset": 32}, "overlaps"),
    ],
)
def test_places_outside_of_shared_memory_are_refused(server: Server, where: dict[str, int], reason: str) -> None:
    local = server.local_machine(0)
    local.give_segment()
    local.send(bytes(64), **{"answer_offset": 4096, **where})
    header, text = local.receive()
    assert header.kind is Kind.REFUSED
    assert text.startswith("ProtocolError\n")
    assert reason in text
    assert_works(server, local)


@pytest.mark.parametrize(
    "offend",
    [
        lambda local: local.channel.send(b"no header at all"),
        lambda local: local.channel.send(bytes(HEADER_BYTES)),
        lambda local: local.channel.send(header_for(1, bytes(64)).pack()),
        lambda local: local.channel.send(header_for(0, bytes(64)).pack() + b"more"),
        lambda local: local.channel.send(Header(Kind.ANSWER, 0).pack()),
        lambda local: local.channel.send(Header(Kind.SEGMENT, 0, segment=1, length=4096).pack()),
        lambda local: local.give_segment(segment=0),  # a second time
        lambda local: local.give_segment(segment=1, length=1 << 40),  # more than there is
        lambda local: local.give_segment(segment=1, length=0),
    ],
)
def test_a_local_machine_that_breaks_the_protocol_is_cut_off_alone(server: Server, offend: object) -> None:
    local = server.local_machine(0)
    local.give_segment()
    offend(local)  # type: ignore[operator]
    with pytest.raises(PeerLostError):
        local.channel.receive(WAIT_S)
    again = server.local_machine(0)
    again.give_segment()
    assert_works(server, again)
