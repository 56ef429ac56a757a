"""A running summation server, over real sockets and shared memory: right to the bit, and not to be stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import zmq
from support.data_plane import WAIT_S, HandLink, LocalMachine, Machine, Server, exact_sum, header_for, random_values
from zmq.utils import garbage

from byteps_py.errors import ConfigurationError, PeerLostError, ProtocolError, RendezvousError
from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.client import connect
from byteps_py.server.service import Service
from byteps_py.settings import Settings
from byteps_py.tensors import DType, Op
from byteps_py.wire import HEADER_BYTES, Header, Kind

SETTINGS = Settings(
    scheduler_host="127.0.0.1",
    scheduler_port=9999,  # nobody is there: the tests' links have no other end
    node_host="127.0.0.1",
    job_id="test",
    secret="known to members",
    num_workers=3,
    partition_bytes=256 << 10,
    server_threads=2,
)
BROADCAST = {"op": Op.BROADCAST}


@pytest.fixture(scope="module", autouse=True)
def zeromq_collector() -> Iterator[None]:
    """pyzmq's thread that frees memory sent without copying: one per process, started at the first use."""
    zmq.Frame(bytearray(1 << 20))
    yield
    garbage.gc.stop()


@pytest.fixture(name="server")
def two_machines() -> Iterator[Server]:
    with Server(SETTINGS) as server:
        yield server


# ---- over the network ------------------------------------------------------------------------------------


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


def test_contributions_that_come_before_the_membership_wait_for_it() -> None:
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


# ---- inside the machine ----------------------------------------------------------------------------------


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
        ({"segment": 1}, "of segment 1, which was never sent"),
        ({"segment_offset": (1 << 20) - 32}, "of segment 0, which has 1048576 bytes"),
        ({"segment_offset": (1 << 64) - 32}, "of segment 0, which has 1048576 bytes"),
        ({"segment_offset": 2}, "64 bytes at 2 of segment 0"),
        ({"length": 1 << 63}, "of segment 0, which has 1048576 bytes"),
        ({"answer_segment": 9}, "of segment 9, which was never sent"),
        ({"answer_offset": 1 << 20}, "of segment 0, which has 1048576 bytes"),
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


# ---- what must not stop it -------------------------------------------------------------------------------


def assert_works(server: Server, zero: Machine | LocalMachine) -> None:
    """A round of machine 0, as given, and a fresh machine 1."""
    one = server.machine(1)
    if isinstance(zero, LocalMachine):
        zero.write(0, b"\0\0\x80?")
        zero.send(b"\0\0\x80?", key=1234, answer_offset=4096)
    else:
        zero.push(b"\0\0\x80?", key=1234)
    one.push(b"\0\0\0@", key=1234)
    assert one.result() == b"\0\0@@"
    assert zero.receive()[0].kind is Kind.ANSWER


MALFORMED = [
    [b""],
    [b"", b""],
    [b"no header", b"payload"],
    [b"\xff" * HEADER_BYTES, b"payload"],
    [bytes(HEADER_BYTES), bytes(100)],
    [b"XPS1" + header_for(0, b"").pack()[4:], b"wrong magic"],
    [header_for(0, b"").pack()[:4] + b"\x09" + header_for(0, b"").pack()[5:], b"another version"],
    [header_for(0, bytes(4)).pack()],
    [header_for(0, bytes(4)).pack(), bytes(4), bytes(4)],
    [header_for(0, bytes(4)).pack(), *[b"part"] * 50],
]
REFUSED = [
    (header_for(0, b"", length=1 << 40), bytes(4), "a partition has 1 to"),
    (header_for(0, b"", length=8), bytes(4), "its header promises 8 bytes of payload, 4 came"),
    (header_for(0, b"", length=4), bytes(8), "its header promises 4 bytes of payload, 8 came"),
    (header_for(1, bytes(4)), bytes(4), "PUSH in the name of machine 1 is not for machine 0 to send"),
    (Header(Kind.SEGMENT, 0, length=4), bytes(4), "SEGMENT in the name of machine 0 is not for"),
    (Header(Kind.ANSWER, 0, length=4), bytes(4), "ANSWER in the name of machine 0 is not for"),
    (header_for(0, bytes(4), epoch=0), bytes(4), "stale epoch"),
]


def test_malformed_messages_are_dropped_and_nothing_else_happens(server: Server) -> None:
    machine = server.machine(0)
    for frames in MALFORMED:
        machine.socket.send_multipart(frames)
    assert_works(server, machine)


@pytest.mark.parametrize(("header", "payload", "reason"), REFUSED)
def test_wrong_headers_are_refused(server: Server, header: Header, payload: bytes, reason: str) -> None:
    machine = server.machine(0)
    machine.socket.send_multipart([header.pack(), payload])
    assert reason in machine.refusal()
    assert_works(server, machine)


def test_a_machine_number_that_does_not_exist_is_refused(server: Server) -> None:
    machine = server.machine(65_000)
    machine.push(bytes(4))
    assert "there are 2 machines, from 0" in machine.refusal()


def test_strangers_are_refused(server: Server) -> None:
    stranger = server.machine(0, shown="guessed")
    assert "its proof of membership is wrong" in stranger.refusal()
    stranger.push(bytes(4))
    assert "no HELLO was accepted" in stranger.refusal()
    assert_works(server, server.machine(0))


def test_local_strangers_are_refused(server: Server) -> None:
    stranger = server.local_machine(0, shown="guessed")
    assert "its proof of membership is wrong" in stranger.receive()[1]
    with pytest.raises(PeerLostError):
        stranger.channel.receive(WAIT_S)


def test_bytes_that_are_no_zeromq_and_messages_beyond_all_bounds(server: Server) -> None:
    machine = server.machine(0)
    host, port = server.service.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(os.urandom(4096))
    giant = server.machine(1)
    giant.push(bytes(SETTINGS.partition_bytes + 8192))  # libzmq ends the connection before it allocates
    assert_works(server, machine)


def test_a_local_machine_that_goes_takes_its_contribution_along(server: Server) -> None:
    local = server.local_machine(0)
    local.give_segment()
    local.send(bytes(64), answer_offset=4096)
    local.send(bytes(64), answer_offset=0, segment=5)  # refused: what was sent before it has arrived
    local.receive()
    assert server.link.statistics().bytes_in_flight == 64
    server.disconnect()
    again = server.local_machine(0)
    again.give_segment()
    assert_works(server, again)
    assert server.link.statistics().bytes_in_flight == 0


# ---- its life --------------------------------------------------------------------------------------------


def test_it_ends_with_the_job(server: Server) -> None:
    server.link.say(stop=pb.Stop(reason="all workers have left"))
    assert (server.join(), server.link.closed_because) == (0, "the job is over")


def test_it_ends_with_a_failure_of_the_job(server: Server) -> None:
    server.link.say(failure=pb.Failure(error="PeerLostError", message="rank 3 is gone"))
    assert server.join() == 1


def test_it_says_why_it_was_not_let_in() -> None:
    with Server(SETTINGS, num_machines=0) as server:
        server.link.say(refused=pb.Refused(error="RendezvousError", message="the job is full"))
        server.join()
    assert isinstance(server.error, RendezvousError)


def test_partitions_larger_than_it_was_told_end_it() -> None:
    with Server(SETTINGS, num_machines=0) as server:
        server.link.say(membership=pb.Membership(epoch=1, workers=[pb.Member()], partition_bytes=8 << 20))
        server.join()
    assert isinstance(server.error, ProtocolError)


def test_a_scheduler_lost_early_ends_it() -> None:
    with Server(SETTINGS, num_machines=0) as server:
        server.link.lose(PeerLostError("the scheduler is gone"))
        server.join()
    assert isinstance(server.error, PeerLostError)


def test_a_scheduler_lost_late_stops_no_reduction_and_the_last_worker_ends_it() -> None:
    with Server(replace(SETTINGS, heartbeat_timeout_s=1.0)) as server:
        machine = server.machine(0)
        assert_works(server, machine)
        server.link.lose(PeerLostError("the scheduler is gone"))
        machine.push(bytes(4), key=99)
        server.machine(1).push(bytes(4), key=99)
        assert machine.result() == bytes(4)
        server.disconnect()
        assert server.join() == 0


def test_it_leaves_when_told(server: Server) -> None:
    server.service.stop("SIGTERM")
    assert (server.join(), server.link.closed_because) == (0, "SIGTERM")


def test_it_needs_a_scheduler() -> None:
    with pytest.raises(ConfigurationError, match="DMLC_PS_ROOT_URI"):
        Service(Settings(), pb.MACHINE_KIND_CPU, HandLink().connect)


def run_program(module: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, env={"PATH": os.environ["PATH"], **environment}, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("environment", "status", "line"),
    [
        ({}, 2, "byteps_py server: ConfigurationError: a summation server finds its workers through the scheduler"),
        ({"DMLC_NUM_WORKER": "many"}, 2, "byteps_py server: ConfigurationError: DMLC_NUM_WORKER='many'"),
        (
            {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9", "BYTEPS_START_TIMEOUT_S": "0.3"},
            1,
            "byteps_py server: RendezvousError: ",
        ),
    ],
)
def test_the_program_says_in_one_line_why_it_can_not_start(environment: dict[str, str], status: int, line: str) -> None:
    with run_program("byteps_py.server", environment) as process:
        _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == status
    assert said.startswith(line)
    assert len(said.splitlines()) == 1


def test_the_program_leaves_on_sigterm_and_never_imports_torch() -> None:
    environment = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9", "BYTEPS_LOG_LEVEL": "DEBUG"}
    with run_program("byteps_py.server", environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "summation server at tcp://" in line:
                break
        with open(f"/proc/{process.pid}/maps") as maps:
            assert "/torch/" not in maps.read()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 0


@pytest.fixture(name="control")
def event_loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def test_a_whole_job_through_the_scheduler(control: EventLoop) -> None:
    """Scheduler and servers as programs. The workers' links and connections are real, their ranks are not:
    machine 0 is on the first server's machine, machine 1 reaches it over the network."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_WORKER": "2"}
    environment |= {"BYTEPS_SECRET": "known to members", "BYTEPS_JOB_ID": f"test-{port}"}
    on_machine = [{**environment, "DMLC_WORKER_ID": str(i)} for i in range(2)]
    settings = [Settings.from_env(variables) for variables in on_machine]
    epoch = pb.Membership()

    def on_message(message: pb.SchedulerMessage) -> None:
        if message.HasField("membership"):
            epoch.CopyFrom(message.membership)
            control.stop()

    with contextlib.ExitStack() as ending:
        programs = [ending.enter_context(run_program("byteps_py.scheduler", environment))]
        programs += [ending.enter_context(run_program("byteps_py.server", v, "--gpu-machine")) for v in on_machine]
        for program in programs:
            ending.callback(program.kill)  # matters only if the test fails: in the end they have ended
        links = []
        control.call_later(WAIT_S, control.stop)
        for i in range(2):
            member = pb.Register(
                role=pb.ROLE_COMMUNICATION, kind=pb.MACHINE_KIND_GPU, machine_index=i, local_size=1
            )  # fmt: skip
            links.append(connect(settings[i], member, control, on_message, lambda _: control.stop(), pb.Heartbeat))
            ending.callback(links[i].close)
        control.run()
        assert [m.machine_index for m in epoch.servers] == [0, 1]
        first, second = epoch.servers
        assert first.local_address != second.local_address  # though both run on this host
        context = ending.enter_context(zmq.Context())
        local = ending.enter_context(contextlib.closing(LocalMachine(first.local_address, 0, settings[0])))
        remote = ending.enter_context(contextlib.closing(Machine(context, first.address, 1, settings[1])))
        parts = [random_values(DType.BFLOAT16, 100_000, seed) for seed in range(2)]
        local.give_segment()
        local.write(0, parts[0].tobytes())
        local.send(parts[0].tobytes(), dtype=DType.BFLOAT16, answer_offset=512 << 10)
        remote.push(parts[1].tobytes(), dtype=DType.BFLOAT16)
        expected = exact_sum(DType.BFLOAT16, parts).tobytes()
        assert remote.result() == expected
        assert local.receive()[0].kind is Kind.ANSWER
        assert local.read(512 << 10, len(expected)) == expected
        assert [program.poll() for program in programs] == [None] * 3
        for link in links:
            link.close("the test is over")
        said = [program.communicate(timeout=WAIT_S)[1] for program in programs]
    assert [program.returncode for program in programs] == [0, 0, 0], said
