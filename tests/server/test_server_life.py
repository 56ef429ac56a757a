"""A running summation server: what ends it, and its program."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest
import zmq
from support.data_plane import WAIT_S, HandLink, LocalMachine, Machine, Server, exact_sum, random_values
from support.summation import SETTINGS, assert_works

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, PeerLostError, ProtocolError, RendezvousError, StallError
from byteps_py.launch.process_plan import free_port
from byteps_py.proto import control_pb2 as pb
from byteps_py.runtime import Runtime
from byteps_py.scheduler.client import connect
from byteps_py.server.service import SummationService, orphan_patience_s
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import DType
from byteps_py.wire.control_link import ControlEvents
from byteps_py.wire.data_link import Kind
from byteps_py.wire.launch_protocol import GIVEN_UP_STATUS

pytestmark = pytest.mark.usefixtures("zeromq_collector")


@pytest.fixture(name="server")
def two_machines() -> Iterator[Server]:
    with Server(SETTINGS) as server:
        yield server


def test_it_ends_with_the_job(server: Server) -> None:
    server.link.say(stop=pb.Stop(reason="all workers have left"))
    assert (server.join(), server.link.closed_because) == (0, "the job is over")


@pytest.mark.parametrize("keep_states", [False, True])
def test_states_are_kept_if_the_scheduler_says_so(server: Server, keep_states: bool) -> None:
    server.link.say(stop=pb.Stop(reason="all workers have left", keep_states=keep_states))
    assert server.join() == 0
    assert server.service.is_abandoned is keep_states


def test_it_ends_with_a_failure_of_the_job(server: Server) -> None:
    server.link.say(failure=pb.Failure(error="PeerLostError", message="rank 3 is gone"))
    assert server.join() == 1


def test_a_job_that_has_failed_and_says_stop_at_once_has_failed(server: Server) -> None:
    """Both are there before the loop looks whether it is to end, if the last worker is quick."""
    on_message = server.service._on_message

    def both() -> None:
        on_message(pb.SchedulerMessage(failure=pb.Failure(error="PeerLostError", message="rank 3 is gone")))
        on_message(pb.SchedulerMessage(stop=pb.Stop(reason="rank 3 is gone")))

    server.service._loop.post(both)
    assert (server.join(), server.link.closed_because) == (1, "the job has failed")


def test_it_says_why_it_was_not_let_in() -> None:
    with Server(SETTINGS, num_machines=0) as server:
        server.link.say(refused=pb.Refused(error="RendezvousError", message="the job is full"))
        server.join()
    assert isinstance(server.error, RendezvousError)


@pytest.mark.parametrize(("error", "is_member"), [("PeerLostError", True), ("RendezvousError", False)])
def test_threads_that_are_still_busy_do_not_hide_why_it_ends(
    error: str, is_member: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it was taken for dead because loading its kernels takes long. Given up, it may be started again."""
    with Server(SETTINGS, num_machines=2 * is_member) as server:
        reducer = server.service._reducer
        close = reducer.close

        def stall() -> None:
            raise StallError("thread pool 'sum': sum-0 still busy 10 s after close()")

        monkeypatch.setattr(reducer, "close", stall)
        server.link.say(refused=pb.Refused(error=error, message="no place for it"))
        status = server.join()
        assert not server.service.has_closed
        monkeypatch.setattr(reducer, "close", close)  # what stalled goes on
    assert status == (GIVEN_UP_STATUS if is_member else None)
    assert type(server.error).__name__ == ("NoneType" if is_member else error)


def test_partitions_above_its_limit_end_the_server() -> None:
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
    settings = dataclasses.replace(SETTINGS, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.1)
    with Server(settings) as server:
        machine = server.machine(0)
        assert_works(server, machine)
        server.link.go_away(PeerLostError("the scheduler is gone"))
        server.link.come_back()
        server.link.go_away(PeerLostError("the scheduler is gone again"))
        machine.push(bytes(4), key=99)
        server.machine(1).push(bytes(4), key=99)
        assert machine.result() == bytes(4)
        server.disconnect()
        assert server.join() == 0


def test_it_leaves_at_stop(server: Server) -> None:
    """Once its keys have moved."""
    server.service.stop("SIGTERM")
    assert server.join() == 0
    assert [message.drain.reason for message in server.link.sent if message.HasField("drain")] == ["SIGTERM"]


def test_it_leaves_when_the_scheduler_is_back_to_move_its_keys(server: Server) -> None:
    """If it left before, all machines would lose it, and no scheduler would say which server has its keys."""
    machine = server.machine(0)
    assert_works(server, machine)
    server.link.go_away(PeerLostError("the scheduler is gone"))
    server.service.stop("SIGTERM")
    assert server.link.has_sent.wait(WAIT_S)
    machine.push(bytes(4), key=99)
    server.machine(1).push(bytes(4), key=99)
    assert machine.result() == bytes(4)
    server.link.come_back()
    assert server.join() == 0


def test_it_leaves_when_neither_a_scheduler_nor_a_worker_is_there(server: Server) -> None:
    server.link.go_away(PeerLostError("the scheduler is gone"))
    server.service.stop("SIGTERM")
    assert server.join() == 0


def test_it_needs_a_scheduler() -> None:
    with pytest.raises(ConfigurationError, match="DMLC_PS_ROOT_URI"):
        SummationService(Settings(), pb.MACHINE_KIND_CPU, HandLink().connect, Runtime(loop=cast(EventLoop, None)))


def run_program(module: str, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, env={"PATH": os.environ["PATH"], **environment}, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("environment", "status", "line"),
    [
        ({}, 2, "byteps_py server: ConfigurationError: a summation server needs the scheduler's address"),
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
    port = free_port()
    environment = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_WORKER": "2"}
    environment |= {"BYTEPS_SECRET": "known to members", "BYTEPS_JOB_ID": f"test-{port}"}
    environment |= {"PS_HEARTBEAT_TIMEOUT": "30"}  # slow is not dead
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
            events = ControlEvents(on_message, lambda _: control.stop(), pb.Heartbeat)
            links.append(connect(settings[i], member, control, events))
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


def test_a_server_waits_longer_where_ranks_are_started_again() -> None:
    """A rank and the scheduler are lost at the same time: no worker is connected, and there is no scheduler."""
    usual, restarted = Settings(), Settings(max_restarts=3, elastic=True, elastic_timeout_s=50.0)
    assert orphan_patience_s(usual, is_unknown=False) <= 10.0
    assert orphan_patience_s(restarted, is_unknown=False) == 50.0
    assert orphan_patience_s(restarted, is_unknown=True) == orphan_patience_s(usual, is_unknown=True) < 10.0
