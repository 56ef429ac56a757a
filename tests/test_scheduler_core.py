"""The scheduler's state machine, event by event, with a clock moved by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import core as states
from byteps_py.scheduler.cluster import PROTOCOL_VERSION, ClusterConfig
from byteps_py.scheduler.core import SchedulerCore
from byteps_py.scheduler.ending import END_LINGER_S, FAILED_LINGER_S
from byteps_py.scheduler.outgoing import Outgoing
from byteps_py.tensors import DType, Op

GPU, CPU = pb.MACHINE_KIND_GPU, pb.MACHINE_KIND_CPU
PARTITION = 4 << 20


def worker(index: int, local_size: int = 2, n: int = 2, k: int = 1, **changes: object) -> pb.Register:
    facts: dict[str, object] = {
        "protocol": PROTOCOL_VERSION,
        "job": "j",
        "role": pb.ROLE_COMMUNICATION,
        "kind": GPU,
        "machine_id": f"m{index}",
        "machine_index": index,
        "local_size": local_size,
        "num_workers": n,
        "num_servers": k,
        "partition_bytes": PARTITION,
        "link_mbit": 1000.0,
        "host": f"gpu{index}",
        "pid": 100 + index,
    }
    return pb.Register(**{**facts, **changes})


def server(index: int, kind: pb.MachineKind = CPU, n: int = 2, k: int = 1, **changes: object) -> pb.Register:
    place = {"machine_index": -1 if kind == CPU else index, "machine_id": f"{'c' if kind == CPU else 'm'}{index}"}
    address = f"tcp://{'cpu' if kind == CPU else 'gpu'}{index}:1"
    role = {"role": pb.ROLE_SUMMATION, "kind": kind, "local_size": 0, "address": address, "host": f"h{index}"}
    return worker(0, n=n, k=k, **{**role, **place, "pid": 200 + index, **changes})


class Cluster:
    """A core and its connections; keeps what each connection was told. Connections are numbered as they come."""

    def __init__(self, **config: object) -> None:
        self.core = SchedulerCore(ClusterConfig(**{"num_workers": 2, "num_servers": 1, "job": "j", **config}))
        self.now = 0.0
        self.told: dict[int, list[pb.SchedulerMessage]] = {}

    def take(self, outgoing: Outgoing) -> Outgoing:
        for connection, message in outgoing:
            self.told[connection].append(message)
        return outgoing

    def join(self, register: pb.Register) -> int:
        connection = len(self.told) + 1
        self.told[connection] = []
        self.take(self.core.on_connected(connection, self.now))
        self.say(connection, register=register)
        return connection

    def say(self, connection: int, **body: object) -> Outgoing:
        return self.take(self.core.handle(connection, pb.MemberMessage(**body), self.now))

    def drop(self, connection: int) -> Outgoing:
        return self.take(self.core.on_disconnected(connection, self.now))

    def tick(self, by_s: float, beating: tuple[int, ...] = ()) -> Outgoing:
        """Move the clock in steps, as a timer would, the members ``beating`` sending heartbeats."""
        out: Outgoing = []
        for _ in range(max(1, round(by_s / 0.5))):
            self.now += min(by_s, 0.5)
            for connection in beating:
                self.say(connection, heartbeat=pb.Heartbeat())
            out += self.take(self.core.on_tick(self.now))
        return out

    def last(self, connection: int) -> pb.SchedulerMessage:
        return self.told[connection][-1]

    def bodies(self, connection: int) -> list[str]:
        return [m.WhichOneof("body") for m in self.told[connection]]


def running(n: int = 2, k: int = 0, local_size: int = 2, **config: object) -> tuple[Cluster, list[int], list[int]]:
    """A complete cluster, with its workers' and its servers' connections."""
    cluster = Cluster(num_workers=n, num_servers=k, **config)
    workers = [cluster.join(worker(i, local_size, n, k)) for i in range(n)]
    servers = [cluster.join(server(i, CPU, n, k)) for i in range(k)]
    if n > 1 and k < n:
        servers += [cluster.join(server(i, GPU, n, k)) for i in range(n)]
    assert cluster.core.state == states.RUNNING
    return cluster, workers, servers


def spec(shape: tuple[int, ...] = (3,), dtype: DType = DType.FLOAT32, op: Op = Op.SUM, **changes: object) -> pb.Spec:
    return pb.Spec(**{"dtype": int(dtype), "shape": shape, "op": int(op), "root": -1, **changes})


def ballot(ranks: list[int], what: pb.Spec | None = None, name: str = "w", generation: int = 1) -> pb.Ballot:
    return pb.Ballot(name=name, generation=generation, votes=[pb.Vote(ranks=ranks, spec=what or spec())])


def declare(*ballots: pb.Ballot) -> dict[str, pb.Declare]:
    return {"declare": pb.Declare(ballots=ballots)}


# ---- rendezvous ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "addresses"),
    [
        (1, 0, []),
        (1, 1, []),
        (2, 0, ["tcp://gpu0:1", "tcp://gpu1:1"]),
        (2, 1, ["tcp://cpu0:1", "tcp://gpu0:1", "tcp://gpu1:1"]),
        (2, 2, ["tcp://cpu0:1", "tcp://cpu1:1"]),
        (2, 3, ["tcp://cpu0:1", "tcp://cpu1:1"]),
    ],
)
def test_every_order_of_arrival_gives_the_same_membership(n: int, k: int, addresses: list[str]) -> None:
    members = [worker(i, i + 1, n, k) for i in range(n)] + [server(i, CPU, n, k) for i in range(k)]
    if n > 1 and k < n:
        members += [server(i, GPU, n, k) for i in range(n)]
    for order in itertools.permutations(members):
        cluster = Cluster(num_workers=n, num_servers=k)
        for i, register in enumerate(order):
            assert cluster.core.state == states.FORMING, i
            cluster.join(register)
        assert cluster.core.state == states.RUNNING
        for told in cluster.told.values():
            assert [m.WhichOneof("body") for m in told] == ["welcome", "membership"]
            membership = told[1].membership
            assert membership.epoch == 1
            assert membership.partition_bytes == PARTITION
            assert [(m.machine_index, m.first_rank) for m in membership.workers] == [(0, 0), (1, 1)][:n]
            assert [m.address for m in membership.servers] == addresses


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_cluster_forms_with_any_order_and_any_machine_sizes(data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 7))
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=n, max_size=n))
    members = [worker(i, sizes[i], n, k) for i in range(n)] + [server(i, CPU, n, k) for i in range(k)]
    members += [server(i, GPU, n, k) for i in range(n)] if n > 1 and k < n else []
    cluster = Cluster(num_workers=n, num_servers=k)
    for register in data.draw(st.permutations(members)):
        cluster.join(register)
    membership = cluster.last(1).membership
    assert [m.first_rank for m in membership.workers] == [sum(sizes[:i]) for i in range(n)]
    assert len(membership.servers) == (0 if n == 1 else k + n if k < n else n)


def test_extra_cpu_machines_and_unneeded_gpu_servers_are_welcome_and_idle() -> None:
    cluster = Cluster(num_workers=2, num_servers=2)
    cluster.join(server(0, GPU, k=2))
    for register in (worker(0, k=2), worker(1, k=2), server(0, k=2), server(1, k=2)):
        cluster.join(register)
    assert [m.address for m in cluster.last(1).membership.servers] == ["tcp://cpu0:1", "tcp://cpu1:1"]
    cluster.drop(1)
    assert cluster.core.state == states.RUNNING


REFUSED = [
    (worker(0, protocol=99), "ConfigurationError", "version 99"),
    (worker(0, job="other"), "ConfigurationError", "'other'"),
    (worker(0, n=3), "ConfigurationError", "DMLC_NUM_WORKER is 3 in this process and 2 in the scheduler"),
    (worker(0, k=2), "ConfigurationError", "DMLC_NUM_SERVER is 2 in this process and 1 in the scheduler"),
    (worker(0, partition_bytes=4096), "ConfigurationError", "BYTEPS_PARTITION_BYTES is 4096"),
    (worker(0, partition_bytes=0), "ConfigurationError", "BYTEPS_PARTITION_BYTES"),
    (worker(0, role=0), "ConfigurationError", "unknown role"),
    (worker(0, kind=0), "ConfigurationError", "unknown kind"),
    (worker(0, kind=CPU), "ConfigurationError", "GPU machine only"),
    (worker(0, local_size=0), "ConfigurationError", "BYTEPS_LOCAL_SIZE=0"),
    (worker(2), "ConfigurationError", "DMLC_WORKER_ID=2 is not in 0..1"),
    (worker(-1), "ConfigurationError", "DMLC_WORKER_ID=-1"),
    (server(5, GPU), "ConfigurationError", "DMLC_WORKER_ID=5"),
    (server(7, address=""), "ConfigurationError", "gave none"),
    (worker(1), "RendezvousError", "DMLC_WORKER_ID=1 is taken by worker 1 (host gpu1, pid 101)"),
    (server(1, GPU, address="tcp://x:1"), "RendezvousError", "DMLC_WORKER_ID=1 is taken by the summation"),
    (server(0), "RendezvousError", "tcp://cpu0:1 is taken"),
    (server(9), "RendezvousError", "DMLC_NUM_SERVER=1"),
]


@pytest.mark.parametrize(("register", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_a_process_that_does_not_fit_is_refused_and_the_others_go_on(
    register: pb.Register, error: str, text: str
) -> None:
    cluster = Cluster()
    for present in (worker(1), server(0), server(1, GPU)):
        cluster.join(present)
    stranger = cluster.join(register)
    refused = cluster.last(stranger).refused
    assert refused.error == error
    assert text in refused.message
    cluster.say(stranger, heartbeat=pb.Heartbeat())
    cluster.drop(stranger)
    assert cluster.core.state == states.FORMING
    cluster.join(worker(0))
    cluster.join(server(0, GPU))
    assert cluster.core.state == states.RUNNING


def test_nobody_joins_a_complete_cluster() -> None:
    cluster, _, _ = running()
    late = cluster.join(worker(0, k=0))
    assert "complete already" in cluster.last(late).refused.message


def test_a_connection_must_say_who_it_is_first_and_soon() -> None:
    cluster = Cluster()
    talker, mute = 1, 2
    cluster.told = {talker: [], mute: []}
    for connection in (talker, mute):
        cluster.core.on_connected(connection, cluster.now)
    cluster.say(talker, heartbeat=pb.Heartbeat())
    cluster.tick(states.REGISTER_TIMEOUT_S)
    assert "first message must be register, not heartbeat" in cluster.last(talker).refused.message
    assert "not registered" in cluster.last(mute).refused.message


MISSING = [
    ([worker(0), worker(1), server(0, GPU), server(1, GPU)], "2 of 2 workers, 0 of 1 server: waiting for 1 server ("),
    ([worker(0), server(0), server(0, GPU), server(1, GPU)], "for 1 worker (DMLC_ROLE=worker, DMLC_WORKER_ID=1"),
    ([worker(0), worker(1), server(0), server(0, GPU)], "waiting for 1 summation service (of GPU machine 1;"),
    ([server(0)], "waiting for 2 workers (DMLC_ROLE=worker, DMLC_WORKER_ID=0, 1) and 2 summation services"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "text"), MISSING, ids=[text for _, text in MISSING])
def test_the_rendezvous_deadline_names_exactly_who_is_missing(members: list[pb.Register], text: str) -> None:
    cluster = Cluster(start_timeout_s=20.0)
    cluster.tick(100.0)  # nobody is there: nothing to be late for
    there = tuple(cluster.join(register) for register in members)
    assert text in cluster.core.status(cluster.now).reason
    assert cluster.tick(19.5, there) == []
    cluster.tick(0.5, there)
    for connection in there:
        failure = next(m.failure for m in cluster.told[connection] if m.HasField("failure"))
        assert failure.error == "RendezvousError"
        assert text in failure.message
        assert "after 20 s" in failure.message
    assert cluster.core.state == states.FAILED
    late = cluster.join(worker(0))
    assert "this job is over" in cluster.last(late).refused.message


def test_who_leaves_before_the_start_frees_the_place() -> None:
    cluster = Cluster(num_servers=0, start_timeout_s=20.0)
    first = cluster.join(worker(0, k=0))
    cluster.say(first, leave=pb.Leave(reason="changed its mind"))
    cluster.drop(first)
    assert "worker 0 (host gpu0, pid 100) came and left: changed its mind" in cluster.core.reason
    assert cluster.tick(50.0) == []  # the deadline starts anew with the next registration
    for register in (worker(0, k=0), worker(1, k=0), server(0, GPU, k=0), server(1, GPU, k=0)):
        cluster.join(register)
    assert cluster.core.state == states.RUNNING


def test_who_dies_before_the_start_fails_the_job_at_once() -> None:
    cluster = Cluster()
    first, second = cluster.join(worker(0)), cluster.join(worker(1))
    cluster.drop(first)
    assert cluster.last(second).failure.message.startswith("lost worker 0 (host gpu0, pid 100): its connection ended")


# ---- declarations --------------------------------------------------------------------------------------------


def test_agreement_is_told_to_all_workers_and_to_no_server() -> None:
    cluster, (a, b), servers = running()
    assert cluster.say(a, **declare(ballot([0, 1], spec(priority=7)))) == []
    cluster.say(b, **declare(ballot([2, 3], spec(priority=1))))
    for connection in (a, b):
        (verdict,) = cluster.last(connection).verdicts.verdicts
        assert (verdict.name, verdict.generation, verdict.error) == ("w", 1, "")
        assert verdict.spec == spec(priority=7)
    assert all(cluster.bodies(s) == ["welcome", "membership"] for s in servers)
    status = cluster.core.status(cluster.now)
    assert (status.tensors, status.tensor_bytes) == (1, 12)


DISAGREEMENTS = [
    (spec((3,)), spec((4,)), "ranks 0-1 gave sum of float32[3], ranks 2-3 gave sum of float32[4]"),
    (spec(), spec(dtype=DType.FLOAT16), "ranks 2-3 gave sum of float16[3]"),
    (spec(), spec(op=Op.MAX), "ranks 2-3 gave max of float32[3]"),
    (spec(), spec(average=True), "ranks 2-3 gave average of float32[3]"),
    (spec(op=Op.BROADCAST, root=0), spec(op=Op.BROADCAST, root=1), "broadcast of float32[3] from rank 1"),
    (spec(op=Op.BROADCAST, root=9), spec(op=Op.BROADCAST, root=9), "rank 9 was to broadcast it, but ranks end at 3"),
]


@pytest.mark.parametrize(("one", "other", "text"), DISAGREEMENTS, ids=[text for _, _, text in DISAGREEMENTS])
def test_disagreement_names_tensor_ranks_and_difference(one: pb.Spec, other: pb.Spec, text: str) -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1], one)))
    cluster.say(b, **declare(ballot([2, 3], other)))
    for connection in (a, b):
        (verdict,) = cluster.last(connection).verdicts.verdicts
        assert verdict.error.startswith("tensor 'w': ")
        assert text in verdict.error
        assert not verdict.HasField("spec")
    assert cluster.core.state == states.RUNNING
    assert cluster.core.status(cluster.now).tensors == 0


def test_ranks_of_one_machine_may_disagree_too() -> None:
    cluster, (a,), _ = running(n=1, local_size=3)
    votes = [pb.Vote(ranks=[0, 2], spec=spec((2,))), pb.Vote(ranks=[1], spec=spec((2, 1)))]
    cluster.say(a, declare=pb.Declare(ballots=[pb.Ballot(name="w", generation=1, votes=votes)]))
    error = cluster.last(a).verdicts.verdicts[0].error
    assert "ranks 0, 2 gave sum of float32[2], rank 1 gave sum of float32[2, 1]" in error


def test_after_a_mismatch_the_next_generation_needs_no_reopening() -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **declare(ballot([0, 1], spec((3,)))))
    cluster.say(b, **declare(ballot([2, 3], spec((4,)))))
    assert cluster.say(b, **declare(ballot([2, 3], generation=2))) == []
    cluster.say(a, **declare(ballot([0, 1], generation=2)))
    (verdict,) = cluster.last(b).verdicts.verdicts
    assert (verdict.generation, verdict.error) == (2, "")


def test_a_new_generation_of_an_accepted_name_is_told_to_the_others() -> None:
    cluster, (a, b, c), _ = running(n=3, local_size=1)
    for rank, connection in enumerate((a, b, c)):
        cluster.say(connection, **declare(ballot([rank])))
    before = cluster.bodies(b)
    out = cluster.say(b, **declare(ballot([1], spec((5,)), generation=2)))
    assert [(connection, m.reopen) for connection, m in out] == [
        (a, pb.Reopen(name="w", generation=2)),
        (c, pb.Reopen(name="w", generation=2)),
    ]
    assert cluster.bodies(b) == before
    # c declares the same on its own; its ballot crosses the Reopen and must not open a third vote
    assert cluster.say(c, **declare(ballot([2], spec((5,)), generation=2))) == []
    assert cluster.say(c, **declare(ballot([2], generation=1))) == []  # of the old generation: ignored
    cluster.say(a, **declare(ballot([0], spec((5,)), generation=2)))
    (verdict,) = cluster.last(c).verdicts.verdicts
    assert (verdict.generation, list(verdict.spec.shape)) == (2, [5])
    assert cluster.core.status(cluster.now).tensor_bytes == 20


def test_what_one_message_completes_goes_out_as_one_batch_in_one_order() -> None:
    cluster, (a, b), _ = running()
    names = ["z", "a", "m"]
    cluster.say(a, **declare(*(ballot([0, 1], name=name) for name in ["a", "m", "z", "later"])))
    cluster.say(b, **declare(*(ballot([2, 3], name=name) for name in names)))
    cluster.say(b, **declare(ballot([2, 3], name="later")))
    for connection in (a, b):
        batches = [[v.name for v in m.verdicts.verdicts] for m in cluster.told[connection] if m.HasField("verdicts")]
        assert batches == [names, ["later"]]


# ---- barrier -------------------------------------------------------------------------------------------------


def test_a_barrier_opens_when_all_machines_are_there() -> None:
    cluster, (a, b), servers = running()
    for sequence in (0, 1):
        assert cluster.say(b, arrive=pb.Arrive(sequence=sequence)) == []
        out = cluster.say(a, arrive=pb.Arrive(sequence=sequence))
        assert [(connection, m.release.sequence) for connection, m in out] == [(a, sequence), (b, sequence)]
    assert all("release" not in cluster.bodies(s) for s in servers)


# ---- broken protocol -----------------------------------------------------------------------------------------

BROKEN = [
    (declare(ballot([0])), "ranks 0-1 sent votes of rank 0"),
    (declare(ballot([0, 1, 1])), "sent votes of"),
    (declare(ballot([2, 3])), "sent votes of"),
    (declare(ballot([0, 1], generation=2)), "generation 2"),
    (declare(ballot([0, 1], generation=1), ballot([0, 1], generation=1)), "voted twice"),
    (declare(ballot([0, 1]), ballot([0, 1], generation=2)), "still undecided"),
    (declare(ballot([0, 1], pb.Spec(dtype=99, op=1, root=-1))), "99 is not a valid DType"),
    (declare(ballot([0, 1], pb.Spec(dtype=1, op=99, root=-1))), "99 is not a valid Op"),
    (declare(ballot([0, 1], spec((1 << 60, 1 << 60)))), "larger than any machine's memory"),
    (declare(ballot([0, 1], name="")), "name must have"),
    ({"register": worker(0, k=0)}, "register makes no sense"),
    ({}, "None makes no sense"),
]


@pytest.mark.parametrize(("body", "text"), BROKEN, ids=[text for _, text in BROKEN])
def test_who_breaks_the_protocol_is_refused_and_the_job_fails_for_all(body: dict[str, object], text: str) -> None:
    cluster, (a, b), _ = running()
    cluster.say(a, **body)
    assert cluster.last(a).refused.error == "ProtocolError"
    assert text in cluster.last(a).refused.message
    assert cluster.last(b).failure.error == "ProtocolError"
    assert "worker 0 (ranks 0-1, host gpu0, pid 100) broke the protocol" in cluster.last(b).failure.message
    assert cluster.core.state == states.FAILED


@pytest.mark.parametrize("body", [declare(ballot([0, 1])), {"arrive": pb.Arrive(sequence=0)}])
def test_ranks_have_no_say_before_the_cluster_is_complete(body: dict[str, object]) -> None:
    cluster = Cluster()
    early = cluster.join(worker(0))
    cluster.say(early, **body)
    assert "before the cluster was complete" in cluster.last(early).refused.message


def test_a_server_does_not_speak_for_ranks_and_nobody_arrives_twice() -> None:
    cluster, (a, _), _ = running()
    cluster.say(a, arrive=pb.Arrive(sequence=3))
    cluster.say(a, arrive=pb.Arrive(sequence=3))
    assert "barrier 3 after barrier 3" in cluster.last(a).refused.message
    cluster, _, (s, _) = running()
    cluster.say(s, **declare(ballot([])))
    assert "only communication services" in cluster.last(s).refused.message


# ---- leaving and dying ---------------------------------------------------------------------------------------


def test_a_job_ends_when_its_workers_leave_one_after_another() -> None:
    cluster, (a, b), servers = running(k=1)
    out = cluster.say(a, leave=pb.Leave(reason=""))
    assert [(connection, m.failure.error, m.failure.orderly) for connection, m in out] == [(b, "PeerLostError", True)]
    assert out[0][1].failure.message == "worker 0 (ranks 0-1, host gpu0, pid 100) has shut down"
    assert cluster.core.state == states.RUNNING
    cluster.drop(a)
    out = cluster.say(b, leave=pb.Leave(reason=""))
    assert [(connection, m.WhichOneof("body")) for connection, m in out] == [(s, "stop") for s in servers]
    assert cluster.core.state == states.ENDED
    cluster.drop(b)
    assert cluster.core.finished(cluster.now) is None
    for s in servers:
        assert cluster.say(s, leave=pb.Leave(reason="told so")) == []
        assert cluster.drop(s) == []
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert (finish.exit_status, finish.reason) == (0, "all workers have left")


def test_ranks_that_have_ended_while_their_service_stays_are_told_of_like_a_worker_that_left() -> None:
    cluster, (a, b), (s, _) = running()
    out = cluster.say(a, gone=pb.Gone())
    assert [(connection, m.failure.orderly) for connection, m in out] == [(b, True)]
    text = "worker 0 (ranks 0-1, host gpu0, pid 100) has shut down: its ranks have ended"
    assert cluster.last(b).failure.message == text
    assert cluster.core.state == states.RUNNING
    cluster.say(s, gone=pb.Gone())
    assert "only communication services" in cluster.last(s).refused.message


def test_who_comes_back_before_the_others_have_left_is_to_try_again() -> None:
    cluster, (a, b), servers = running()
    cluster.say(a, leave=pb.Leave())
    early = cluster.join(worker(0, k=0))
    assert cluster.last(early).refused.later
    stranger = cluster.join(worker(1, k=0))  # the first worker 1 is still here
    assert not cluster.last(stranger).refused.later
    cluster.say(b, leave=pb.Leave())
    assert cluster.last(cluster.join(worker(1, k=0))).refused.later
    for connection in (a, b, early, stranger, *servers):
        cluster.drop(connection)


def test_who_comes_to_a_job_that_was_stopped_or_has_failed_need_not_try_again() -> None:
    stopped, _, _ = running()
    stopped.take(stopped.core.stop("enough", stopped.now))
    failed, (a, _), _ = running()
    failed.drop(a)
    for cluster in (stopped, failed):
        refused = cluster.last(cluster.join(worker(0, k=0))).refused
        assert "this job is over" in refused.message
        assert not refused.later


def test_a_frozen_member_holds_up_nobodys_end() -> None:
    cluster, (_, b), servers = running(heartbeat_timeout_s=5.0)
    cluster.tick(5.5, (b, *servers))  # nothing was heard of a, whose connection stands
    assert cluster.core.state == states.FAILED
    for connection in (b, *servers):
        cluster.say(connection, leave=pb.Leave())
        assert cluster.core.finished(cluster.now) is None
        cluster.drop(connection)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert finish.exit_status == 1


def test_a_server_that_ignores_the_end_is_not_waited_for_forever() -> None:
    cluster, (a,), (s,) = running(n=1, k=1)
    cluster.say(a, leave=pb.Leave())
    cluster.drop(a)
    cluster.tick(END_LINGER_S - 0.5, (s,))
    assert cluster.core.finished(cluster.now) is None
    cluster.tick(0.5, (s,))
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert finish.exit_status == 0
    assert "still there: server tcp://cpu0:1 (host h0, pid 200)" in finish.reason


def test_a_dead_worker_fails_the_job_for_everyone_else_once() -> None:
    cluster, (a, b), servers = running(k=1)
    out = cluster.drop(b)
    assert sorted(connection for connection, _ in out) == sorted([a, *servers])
    for _, message in out:
        assert (message.failure.error, message.failure.orderly) == ("PeerLostError", False)
        assert message.failure.message.startswith("lost worker 1 (ranks 2-3, host gpu1, pid 101): its connection ended")
    status = cluster.core.status(cluster.now)
    assert status.state == states.FAILED
    assert status.reason == out[0][1].failure.message
    assert [m.alive for m in status.members] == [True, False, *(True for _ in servers)]
    # the last worker to go takes the servers with it, and the first failure stays the reason
    out = cluster.drop(a)
    assert [(connection, m.WhichOneof("body")) for connection, m in out] == [(s, "stop") for s in servers]
    for s in servers:
        cluster.drop(s)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert (finish.exit_status, finish.reason) == (1, status.reason)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_server_with_keys_is_missed_and_an_idle_one_is_not(in_order: bool) -> None:
    cluster, (a, _, _), servers = running(n=3, k=4)
    for s, is_idle in [(servers[3], True), (servers[1], False)]:
        if in_order:
            cluster.say(s, leave=pb.Leave(reason="SIGTERM"))
        cluster.drop(s)
        assert cluster.core.state == (states.RUNNING if is_idle else states.FAILED)
    text = cluster.last(a).failure.message
    assert "server tcp://cpu1:1 (host h1, pid 201)" in text
    assert ("has shut down: SIGTERM" if in_order else "its connection ended") in text


def test_silence_is_death_and_a_late_scheduler_proves_nothing() -> None:
    cluster, (a, b), servers = running(heartbeat_timeout_s=10.0)
    assert cluster.tick(9.5, (a, *servers)) == []
    cluster.now += 60.0  # the scheduler itself was suspended
    assert cluster.take(cluster.core.on_tick(cluster.now)) == []
    assert cluster.tick(9.5, (a, *servers)) == []
    cluster.tick(0.5, (a, *servers))
    assert "lost worker 1 (ranks 2-3, host gpu1, pid 101): nothing was heard of it for 10.0 s" in (
        cluster.last(a).failure.message
    )
    assert cluster.last(b).failure == cluster.last(a).failure  # should it wake up, it knows


def test_a_report_fails_the_others_with_its_own_type() -> None:
    cluster, (a, b), servers = running()
    out = cluster.say(a, report=pb.Report(error="StallError", message="rank 1 gave up"))
    assert sorted(connection for connection, _ in out) == sorted([b, *servers])
    assert cluster.last(b).failure.error == "StallError"
    assert cluster.last(b).failure.message.startswith("rank 1 gave up (reported by worker 0")
    assert cluster.say(b, report=pb.Report(error="SystemExit", message="and I")) == []
    assert cluster.core.reason.startswith("rank 1 gave up")


def test_a_failed_job_lets_go_after_a_while() -> None:
    cluster, (a, _), _ = running()
    cluster.drop(a)
    cluster.tick(FAILED_LINGER_S - 0.5)
    assert cluster.core.finished(cluster.now) is None
    cluster.tick(0.5)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert finish.exit_status == 1


def test_stop_tells_everyone_to_leave_and_is_no_failure() -> None:
    cluster, workers, servers = running()
    cluster.take(cluster.core.stop("enough", cluster.now))
    for connection in (*workers, *servers):
        assert cluster.last(connection).stop.reason == "stopped: enough"
        cluster.drop(connection)
    finish = cluster.core.finished(cluster.now)
    assert finish is not None
    assert (finish.exit_status, finish.reason) == (0, "stopped: enough")


# ---- stalls --------------------------------------------------------------------------------------------------


def wait_for(name: str, ready: list[int], age_s: float, round_: int = 0) -> dict[str, pb.Heartbeat]:
    return {"heartbeat": pb.Heartbeat(waiting=[pb.Waiting(name=name, round=round_, ready_ranks=ready, age_s=age_s)])}


def test_a_stall_names_the_missing_ranks_and_is_repeated_only_after_a_while() -> None:
    cluster, (a, b, c), _ = running(n=3, stall_warn_s=5.0)
    for first, connection in ((0, a), (2, b), (4, c)):
        cluster.say(connection, **declare(ballot([first, first + 1])))
    assert cluster.say(a, **wait_for("w", [0, 1], 1.0)) == []  # not long enough
    assert cluster.say(b, **wait_for("w", [3], 0.5)) == []
    out = cluster.say(a, **wait_for("w", [0, 1], 5.0))
    assert {m.stalled.message for _, m in out} == {
        "tensor 'w' has waited 5 s for ranks 2, 4-5, which have not handed it over "
        "(worker 1 (ranks 2-3, host gpu1, pid 101); worker 2 (ranks 4-5, host gpu2, pid 102)): "
        "slow, stuck, or on another path of the program"
    }
    assert len(out) == len(cluster.told)
    assert list(cluster.core.status(cluster.now).stalled) == [out[0][1].stalled.message]
    cluster.now += 4.5
    assert cluster.say(a, **wait_for("w", [0, 1], 9.5)) == []
    cluster.now += 0.5
    assert cluster.say(a, **wait_for("w", [0, 1], 10.0)) != []
    cluster.say(a, heartbeat=pb.Heartbeat())
    cluster.say(b, heartbeat=pb.Heartbeat())
    assert list(cluster.core.status(cluster.now).stalled) == []


def test_tensors_that_wait_for_the_same_ranks_share_a_sentence() -> None:
    cluster, (a, _), _ = running(stall_warn_s=5.0)
    cluster.say(a, **declare(*(ballot([0, 1], name=f"t{i}") for i in range(6))))
    waiting = [pb.Waiting(name=f"t{i}", ready_ranks=[0, 1], age_s=5 + i) for i in range(6)]
    out = cluster.say(a, heartbeat=pb.Heartbeat(waiting=waiting))
    (text,) = {m.stalled.message for _, m in out}
    assert text.startswith("tensors 't0', 't1', 't2', 't3' and 2 more have waited 10 s for ranks 2-3, which have not ")
    assert "not declared them" in text


def test_a_barrier_that_waits_is_told_of_apart_from_tensors() -> None:
    cluster, (a, _), _ = running(stall_warn_s=5.0)
    waiting = [pb.Waiting(name="w", ready_ranks=[0, 1], age_s=6), pb.Waiting(ready_ranks=[0, 1], age_s=6.25)]
    out = cluster.say(a, heartbeat=pb.Heartbeat(waiting=waiting))
    texts = {m.stalled.message for _, m in out}
    why = "(worker 1 (ranks 2-3, host gpu1, pid 101)): slow, stuck, or on another path of the program"
    assert texts == {
        f"tensor 'w' has waited 6 s for ranks 2-3, which have not handed it over {why}",
        f"a barrier has waited 6.2 s for ranks 2-3, which have not come to it {why}",
    }


def test_when_all_ranks_have_given_nobody_is_accused() -> None:
    cluster, (a, b), _ = running(stall_warn_s=5.0)
    cluster.say(a, **wait_for("w", [0, 1], 4.0, round_=8))
    out = cluster.say(b, **wait_for("w", [2, 3], 5.0, round_=7))
    assert "although all ranks have given their part" in out[0][1].stalled.message


def test_status_carries_the_counters() -> None:
    cluster, (a, *_), (s, *_) = running()
    counters = pb.Statistics(bytes_received=1, bytes_sent=2, bytes_summed=3, cpu_s=0.5, resident_bytes=4)
    cluster.say(s, heartbeat=pb.Heartbeat(statistics=counters))
    cluster.now += 2.0
    members = {m.member.member_id: m for m in cluster.core.status(cluster.now).members}
    assert members[s].statistics == counters
    assert (members[a].heartbeat_age_s, members[a].member.host, members[a].alive) == (2.0, "gpu0", True)
