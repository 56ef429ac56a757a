"""States that outlive their job: a real scheduler, a server process, and a reader as a trainer uses it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

import grpc
import numpy as np
import pytest
import zmq
from support import warm
from support.data_plane import Machine, random_values
from support.schedulers import CHILD, TIMEOUT_S, Member, Scheduler, as_worker, environment
from support.shadow import RUN, ShadowedStates, held

from byteps_py.config.settings import Settings
from byteps_py.errors import CommunicationError, PeerLostError, RendezvousError, UsageError
from byteps_py.kernels.update_rules import Decay, Method, StepKind, UpdateRule
from byteps_py.scheduler import query
from byteps_py.shadow import NotRestorable, Restorable, ShadowReader, latest_step
from byteps_py.tensors import DType
from byteps_py.wire.data_link import MAX_READ_BYTES, READER, Header, Kind, ShadowDescription, StatesQuery

ADAMW = StepKind(UpdateRule(Method.ADAM, Decay.DECOUPLED), DType.BFLOAT16, DType.BFLOAT16)
SECRET = "known to members of this job"

pytestmark = pytest.mark.usefixtures("zeromq_collector")


@pytest.fixture(autouse=True, scope="module")
def _grpc_library() -> Iterator[None]:
    """gRPC's own descriptors live as long as any channel does: keep one, so that no test seems to leak them."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/warm/up")
        with contextlib.suppress(grpc.RpcError):
            call(b"", timeout=0.05)
        yield


class Log:
    """What a process writes to a pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self.text = ""

    def wait_for(self, words: str) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while words not in self.text:
            assert select.select([self._pipe], [], [], until_s - time.monotonic())[0], self.text
            more = self._pipe.read1(1 << 16)  # type: ignore[attr-defined]
            assert more, f"it ended: {self.text}"
            self.text += more.decode()


class ShadowedJob:
    """A scheduler, and a CPU machine's server; workers come and go. Of two, the first one's rank owns all states."""

    def __init__(self, **changes: object) -> None:
        self.scheduler = Scheduler(
            num_workers=2,
            num_servers=1,
            placement="servers-only",
            journal_dir="none",
            secret=SECRET,
            heartbeat_timeout_s=2.0,
            **changes,
        ).wait_listening()
        self.settings = self.scheduler.settings
        variables = {**environment(self.settings), "DMLC_NODE_HOST": "127.0.0.1", "BYTEPS_SHADOW_KEEP_S": "60"}
        variables |= {name: str(text) for name, text in changes.pop("variables", {}).items()}  # type: ignore[attr-defined]
        self.process = warm.Popen([sys.executable, "-m", "byteps_py.server"], env=variables, stderr=-1)
        assert self.process.stderr is not None
        self.log = Log(self.process.stderr)  # type: ignore[arg-type]
        self._context = zmq.Context()
        self.child: subprocess.Popen[bytes] | None = None
        self.members: list[Member] = []
        self.machines: list[Machine] = []

    def join(self) -> Machine:
        """Workers register; once the cluster is complete, the first one connects to the server."""
        self.child = warm.Popen([sys.executable, "-c", CHILD], env=environment(self.settings), stdout=-1)
        self.members.append(Member(self.settings, as_worker(0)))
        membership = self.members[0].wait("membership").membership
        [server] = membership.servers
        machine = Machine(self._context, server.address, 0, self.settings)
        self.machines.append(machine)
        return machine

    def vanish(self) -> None:
        """A worker is killed; the other one hears of it, if there is a scheduler, and ends."""
        self._kill_child()
        if self.scheduler.process.poll() is None:
            self.members[0].wait("failure")
        self._disconnect()

    def _kill_child(self) -> None:
        if self.child is not None:
            self.child.kill()
            with self.child:
                pass
            self.child = None

    def _disconnect(self) -> None:
        for machine in self.machines:
            machine.close()
        self.machines.clear()
        for member in self.members:
            member.link.away_close_s = 0.0  # type: ignore[attr-defined]
            member.close()
        self.members.clear()

    def restart(self) -> None:
        """Another scheduler at the same address."""
        self.scheduler.restart()
        self.scheduler.wait_listening()

    def close(self) -> None:
        self._kill_child()
        self._disconnect()
        if self.process.poll() is None:
            self.process.kill()
        with self.process:
            pass
        self._context.term()
        self.scheduler.close()


@pytest.fixture(name="job")
def _job() -> Iterator[ShadowedJob]:
    job = ShadowedJob()
    yield job
    job.close()


def train(machine: Machine, steps: int, run: int = RUN, count: int = 400_000) -> list[ShadowedStates]:
    """Two partitions of 'gradients 7', of which each makes some steps. The last but one is durable."""
    parts = [ShadowedStates(ADAMW, count, index=index) for index in range(2)]
    for part in parts:
        part.begin(machine, run)
    assert [held(machine) for _ in parts] == [0, 0]
    for step in range(1, steps + 1):
        for part in parts:
            total = random_values(ADAMW.gradient, count, seed=step).tobytes()
            part.give_sum(machine, step, total)
            part.make_step(machine, step, total, durable=step - 1, run=run)
            assert held(machine) == step
        said = {"parts": [["gradients 7", 2 * count, step]], "params": {}, "kinds": {}, "steps": {}}
        common = json.dumps(said).encode()
        parts[0].record(machine, durable=step - 1, run=run, common=common)
        assert held(machine) == step
    return parts


@pytest.mark.slow
def test_more_is_attached_than_one_answer_brings(job: ShadowedJob) -> None:
    """Of two steps, in pieces; the description of what is held does not grow with it."""
    machine = job.join()
    parts = train(machine, 1, count=400)
    attached = random_values(DType.FLOAT32, 8 * MAX_READ_BYTES + 5, seed=1).tobytes()
    for step in (2, 3):
        total = random_values(ADAMW.gradient, 400, seed=step).tobytes()
        for part in parts:
            part.give_sum(machine, step, total)
            part.make_step(machine, step, total, durable=1)
            assert held(machine) == step
        common = json.dumps({"parts": [["gradients 7", 800, step]], "params": {}, "kinds": {}, "steps": {}}).encode()
        parts[0].record(machine, durable=1, common=common, attached_bytes=len(attached))
        with ShadowReader(job.settings) as reader:
            found = latest_step(reader.describe())
            assert isinstance(found, Restorable)
            assert found.step == step - 1, "what is attached has not come"
        parts[0].attach(machine, attached[step:] + attached[:step], 4 << 20)
        assert held(machine) == step
    with ShadowReader(job.settings) as reader:
        found = latest_step(reader.describe())
        assert isinstance(found, Restorable)
        [record] = found.records.values()
        assert (record.step, record.attached_bytes) == (3, len(attached))
        assert reader.read_attached(record) == attached[3:] + attached[:3]
        gone = dataclasses.replace(record, step=9)
        with pytest.raises(CommunicationError, match="the record of rank 0 of step 9 is not kept here any more"):
            reader.read_attached(gone)
        more = dataclasses.replace(record, attached_bytes=len(attached) + 1)
        with pytest.raises(CommunicationError, match=r"gave \d+ bytes of \d+"):
            reader.read_attached(more)


def read_all(reader: ShadowReader, found: Restorable) -> list[bytes]:
    """Of each state all elements, in three reads a partition."""
    parts = found.tensors["gradients 7"]
    whole = parts[-1].elements.stop
    states = [np.zeros(whole, np.float32) for _ in range(parts[0].kind.states)]
    for part in parts:
        cuts = [part.elements.start, part.elements.start + 1, part.elements.stop - 7, part.elements.stop]
        for number, state in enumerate(states):
            for start, stop in itertools.pairwise(cuts):
                reader.read_into(part, number, range(start, stop), memoryview(state)[start:stop])  # type: ignore[arg-type]
    return [state.tobytes() for state in states]


def assert_restored(settings: Settings, parts: list[ShadowedStates], run: int = RUN) -> None:
    with ShadowReader(settings) as reader:
        found = latest_step(reader.describe(hold_s=20.0))
        assert isinstance(found, Restorable), found
        assert (found.run, found.step) == (run, parts[0].step)
        wanted = [b"".join(part.states[i].tobytes() for part in parts) for i in range(ADAMW.states)]
        assert read_all(reader, found) == wanted


def test_a_trainer_reads_what_a_running_server_keeps(job: ShadowedJob) -> None:
    parts = train(job.join(), 3)
    assert_restored(job.settings, parts)
    with ShadowReader(job.settings) as reader:
        [server] = reader.describe()
        found = latest_step([server])
        assert isinstance(found, Restorable)
        part = found.tensors["gradients 7"][0]
        with pytest.raises(UsageError, match="are not among"):
            reader.read_into(part, 3, range(1), memoryview(bytearray(4)))
        with pytest.raises(UsageError, match="take 4 writable bytes"):
            reader.read_into(part, 0, range(1), memoryview(bytearray(5)))
        gone = type(part)(part.server, part.run, part.key, part.index, part.kind, part.elements, part.first, step=1)
        with pytest.raises(CommunicationError, match="can't be read as of step 1: it is at step 3"):
            reader.read_into(gone, 0, range(1), memoryview(bytearray(4)))
        unknown = type(part)(part.server, 1, part.key, part.index, part.kind, part.elements, part.first, step=1)
        with pytest.raises(CommunicationError, match="of run 0x1 is not kept here"):
            reader.read_into(unknown, 0, range(1), memoryview(bytearray(4)))
        job.process.send_signal(signal.SIGKILL)
        job.process.wait(TIMEOUT_S)
        with pytest.raises(PeerLostError, match="can't be reached"):
            reader.read_into(part, 0, range(1), memoryview(bytearray(4)))
        assert latest_step(reader.describe()) is None or isinstance(latest_step(reader.describe()), NotRestorable)


def test_only_members_may_read(job: ShadowedJob) -> None:
    job.join()
    [address] = [each.member.address for each in query.status(job.settings).members if each.member.address]
    for changes in ({"secret": "guessed by a process of another"}, {"secret": ""}, {"job_id": "another"}):
        stranger = dataclasses.replace(job.settings, **changes)
        with ShadowReader(stranger, TIMEOUT_S, servers=lambda: [address]) as reader:
            [described] = reader.describe()
            assert not described.description.runs
            assert "turned this process away" in described.error or "not a server of this job" in described.error


def test_a_reader_does_only_that(job: ShadowedJob) -> None:
    """It is no machine: several read at the same time, and none of them contributes."""
    machine = job.join()
    parts = train(machine, 2, count=400)
    [address] = [each.member.address for each in query.status(job.settings).members if each.member.address]
    with zmq.Context() as context:
        readers = [Machine(context, address, READER, job.settings) for _ in range(2)]
        for reader in readers:
            reader.push(bytes(4))
            assert f"machine {READER} must not send PUSH" in reader.refusal()
        for reader in readers:
            reader.send(Header(Kind.DESCRIBE_STATES, READER, round=5), StatesQuery(0.0).pack())
            assert len(ShadowDescription.unpack(reader.result()).runs) == 1
            reader.close()
    machine.send(Header(Kind.DESCRIBE_STATES, machine.index), StatesQuery(0.0).pack())
    assert "machine 0 must not send DESCRIBE_STATES" in machine.refusal()
    assert_restored(job.settings, parts)


@pytest.mark.slow
def test_a_reader_asks_again_when_its_connection_breaks(job: ShadowedJob) -> None:
    """Servers hold what is described meanwhile, so the answer is the same."""
    parts = train(job.join(), 2, count=400)
    with ShadowReader(job.settings) as reader:
        found = latest_step(reader.describe(hold_s=20.0))
        assert isinstance(found, Restorable)
        [connection] = reader._connections.values()
        connection._dialer.reconnect()
        assert read_all(reader, found) == [
            b"".join(part.states[i].tobytes() for part in parts) for i in range(ADAMW.states)
        ]


@pytest.mark.slow
def test_states_outlive_a_job_whose_worker_died(job: ShadowedJob) -> None:
    parts = train(job.join(), 3)
    job.vanish()
    job.log.wait_for(
        "the job has failed; the states of 2 partitions as of step 2 are kept for 60 s for a restarted job"
    )
    job.scheduler.ended()
    job.restart()
    machine = job.join()
    assert_restored(job.settings, parts)
    again = train(machine, 2, run=2)
    assert_restored(job.settings, again, run=2)
    query.stop(job.settings, "the test is over")
    assert job.process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_states_outlive_the_death_of_all(job: ShadowedJob) -> None:
    parts = train(job.join(), 3)
    job.scheduler.kill()
    job.vanish()
    job.restart()
    job.log.wait_for("the states of 2 partitions as of step 2 are kept for 60 s")
    job.join()
    assert_restored(job.settings, parts)


@pytest.mark.slow
def test_a_server_that_waits_for_a_job_ends_at_once_when_it_is_told_to(job: ShadowedJob) -> None:
    train(job.join(), 2)
    job.vanish()
    job.log.wait_for("are kept for 60 s")
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(TIMEOUT_S) == 1, "the status that it would have had"


@pytest.mark.slow
def test_without_anything_durable_a_server_ends_with_its_job(job: ShadowedJob) -> None:
    machine = job.join()
    train(machine, 1)
    job.vanish()
    assert job.process.wait(TIMEOUT_S) == 1


def test_a_reader_without_a_job() -> None:
    with ShadowReader(Settings()) as reader:
        assert reader.describe() == []
    nobody = Settings(scheduler_host="127.0.0.1", scheduler_port=9, heartbeat_timeout_s=1.0)
    with ShadowReader(nobody, timeout_s=2.0) as reader, pytest.raises(RendezvousError, match="no scheduler answers"):
        reader.describe()
