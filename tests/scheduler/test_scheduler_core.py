"""The scheduler's state machine, event by event, with a clock moved by hand: rendezvous, and broken protocol."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st
from support.scheduler_core import CPU, GPU, PARTITION, Cluster, ballot, declare, running, server, spec, worker

from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler import job as states
from byteps_py.scheduler.core import REGISTER_TIMEOUT_S, ConnectionOpened, Event, SchedulerCore
from byteps_py.scheduler.member_links.links import LinkEvent, MemberLinks
from byteps_py.scheduler.roster import ClusterConfig

# ---- rendezvous --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "addresses"),
    [
        (1, 0, []),
        (1, 1, ["tcp://cpu0:1"]),
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
    assert len(membership.servers) == (k if n == 1 else k + n if k < n else n)


def test_extra_cpu_machines_and_unneeded_gpu_servers_are_welcome_and_idle() -> None:
    cluster = Cluster(num_workers=2, num_servers=2)
    cluster.join(server(0, GPU, k=2))
    for register in (worker(0, k=2), worker(1, k=2), server(0, k=2), server(1, k=2)):
        cluster.join(register)
    assert [m.address for m in cluster.last(1).membership.servers] == ["tcp://cpu0:1", "tcp://cpu1:1"]
    cluster.drop(1)
    assert cluster.core.state == states.RUNNING


def test_a_cpu_machine_serves_jobs_of_any_size() -> None:
    cluster = Cluster()
    for register in (worker(0), worker(1), server(0, GPU), server(1, GPU), server(0, n=7, k=5)):
        cluster.join(register)
    assert "tcp://cpu0:1" in [m.address for m in cluster.last(1).membership.servers]


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
    (server(1, GPU, n=3), "ConfigurationError", "DMLC_NUM_WORKER is 3"),
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


def test_no_worker_joins_a_complete_cluster() -> None:
    cluster, _, _ = running()
    late = cluster.join(worker(0, k=0))
    assert "complete already" in cluster.last(late).refused.message


def test_a_connection_must_say_who_it_is_first_and_soon() -> None:
    cluster = Cluster()
    talker, mute = 1, 2
    cluster.told = {talker: [], mute: []}
    for connection in (talker, mute):
        cluster.core.handle(ConnectionOpened(connection), cluster.now)
    cluster.say(talker, heartbeat=pb.Heartbeat())
    cluster.tick(REGISTER_TIMEOUT_S)
    assert "first message must be Register, not heartbeat" in cluster.last(talker).refused.message
    assert "did not register" in cluster.last(mute).refused.message


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


def test_a_member_that_leaves_before_the_start_frees_its_place() -> None:
    cluster = Cluster(num_servers=0, start_timeout_s=20.0)
    first = cluster.join(worker(0, k=0))
    cluster.say(first, leave=pb.Leave(reason="changed its mind"))
    cluster.drop(first)
    assert "worker 0 (host gpu0, pid 100) registered and left: changed its mind" in cluster.core.reason
    assert cluster.tick(50.0) == []  # the deadline starts anew with the next registration
    for register in (worker(0, k=0), worker(1, k=0), server(0, GPU, k=0), server(1, GPU, k=0)):
        cluster.join(register)
    assert cluster.core.state == states.RUNNING


def test_a_member_that_dies_before_the_start_fails_the_job_at_once() -> None:
    cluster = Cluster()
    first, second = cluster.join(worker(0)), cluster.join(worker(1))
    cluster.drop(first)
    assert cluster.last(second).failure.message.startswith("lost worker 0 (host gpu0, pid 100): its connection ended")


# ---- broken protocol ---------------------------------------------------------------------------------------


BROKEN = [
    (declare(ballot([0])), "ranks 0-1 sent votes of rank 0"),
    (declare(ballot([0, 1, 1])), "sent votes of"),
    (declare(ballot([2, 3])), "sent votes of"),
    (declare(ballot([0, 1], generation=2)), "generation 2"),
    (declare(ballot([0, 1], generation=1), ballot([0, 1], generation=1)), "voted twice"),
    (declare(ballot([0, 1]), ballot([0, 1], generation=2)), "still undecided"),
    (declare(ballot([0, 1], spec(dtype=99))), "99 is not a valid DType"),
    (declare(ballot([0, 1], spec(op=99))), "99 is not a valid Op"),
    (declare(ballot([0, 1], spec((1 << 60, 1 << 60)))), "larger than any machine's memory"),
    (declare(ballot([0, 1], name="")), "name must have"),
    ({"register": worker(0, k=0)}, "must not send register"),
    ({}, "must not send an empty message"),
]


@pytest.mark.parametrize(("body", "text"), BROKEN, ids=[text for _, text in BROKEN])
def test_a_member_that_breaks_the_protocol_is_refused_and_the_job_fails(body: dict[str, object], text: str) -> None:
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


def test_a_server_does_not_speak_for_ranks_and_no_machine_arrives_twice() -> None:
    cluster, (a, _), _ = running()
    cluster.say(a, arrive=pb.Arrive(sequence=3))
    cluster.say(a, arrive=pb.Arrive(sequence=3))
    assert "barrier 3 after barrier 3" in cluster.last(a).refused.message
    cluster, _, (s, _) = running()
    cluster.say(s, **declare(ballot([])))
    assert "only a communication service" in cluster.last(s).refused.message


def test_every_event_and_every_message_has_a_handler() -> None:
    core, links = SchedulerCore(ClusterConfig(2)), MemberLinks(ClusterConfig(2))
    assert set(core._handlers) == set(get_args(Event))
    assert set(links._handlers) == set(get_args(LinkEvent))
    bodies = {field.name for field in pb.MemberMessage.DESCRIPTOR.oneofs_by_name["body"].fields}
    # An answer to what `bps dump` asks is no event of the job: see member_links/links.py.
    assert set(core._message_handlers) == bodies - {"register", "answer"}
