"""The samples of a page, from what services and ranks have counted already: heartbeats, progress, the job's status.

Nothing is counted here. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from byteps_py.prometheus.metrics import BY_NAME, PREFIX, RANK, SCHEDULER, SERVER, WORKER
from byteps_py.proto import control_pb2 as pb

MOST_AWAITED = 16
#: Lost members have a line for so long, and only the latest of them.
LOST_S = 3600.0
MOST_LOST = 32
_STATES = {1: "forming", 2: "running", 3: "failed", 4: "ended"}
_BYTES_PER_MBIT = 125_000


class Place(NamedTuple):
    """The labels of a process. ``machine``: gpu-0, … for GPU machines, gpu-outside-HOST-PID for those that wait for an
    elastic job's next group, and cpu-HOST:PORT with the address of a CPU machine's server, as `bps scale --remove`
    takes it."""

    job: str
    role: str
    machine: str = ""
    rank: str = ""


class MetricSample(NamedTuple):
    """One line of a page. ``extra``: the values of the metric's own labels."""

    name: str
    place: Place
    value: float
    extra: tuple[str, ...] = ()


def server_machine(is_gpu_machine: bool, index: int, address: str) -> str:
    """The machine of a summation service."""
    return gpu_machine(index) if is_gpu_machine else f"cpu-{address.removeprefix('tcp://')}"


def gpu_machine(index: int) -> str:
    """A machine that runs ranks."""
    return f"gpu-{index}"


def of_progress(place: Place, progress: pb.RankProgress) -> Iterator[MetricSample]:
    """A rank's own figures."""
    yield from _of(place, {
        "steps_total": progress.steps,
        "step_seconds": progress.step_s,
        "last_step_timestamp_seconds": progress.last_step_at_s,
        "tokens_total": progress.tokens,
        "samples_total": progress.samples,
        "tokens_per_second": progress.tokens_per_s,
        "exposed_communication_seconds_total": progress.exposed_s,
        "exposed_communication_ratio": progress.exposed_share,
        "result_bytes_total": progress.result_bytes,
        "recoveries_total": progress.recoveries,
    })  # fmt: skip


def of_service(place: Place, counted: pb.Statistics) -> Iterator[MetricSample]:
    """The counters of a service."""
    yield from _of(place, {
        "sent_bytes_total": counted.bytes_sent,
        "received_bytes_total": counted.bytes_received,
        "local_bytes_total": counted.bytes_local,
        "rounds_total": counted.rounds,
        "in_flight_bytes": counted.bytes_in_flight,
        "credit_bytes": counted.credit_bytes,
        "queued_partitions": counted.queued,
        "summed_bytes_total": counted.bytes_summed,
        "repetitions_total": counted.repetitions,
        "relayed_bytes_total": counted.bytes_relayed,
        "shadow_steps_total": counted.shadow_steps,
        "shadow_waiting_bytes": counted.shadow_waiting_bytes,
        "cpu_seconds_total": counted.cpu_s,
        "resident_memory_bytes": counted.resident_bytes,
    })  # fmt: skip


def of_member(place: Place, counted: pb.Statistics, progress: Iterable[pb.RankProgress]) -> Iterator[MetricSample]:
    """A service and, if it is a communication service, its ranks."""
    yield from of_service(place, counted)
    for each in progress:
        yield from of_progress(place._replace(role=RANK, rank=str(each.rank)), each)


def of_status(job: str, status: pb.StatusReply) -> Iterator[MetricSample]:
    """The job, and all of its members that are there, or were lost."""
    place = Place(job, SCHEDULER)
    for number, name in _STATES.items():
        yield MetricSample(f"{PREFIX}job_state", place, float(status.state == number), (name,))
    lost = [member for member in status.members if not member.alive and not member.left]
    yield from _of(place, {
        "epoch": status.epoch,
        "members_lost_total": len(lost),
        "machines_awaited": len(status.missing_workers),
        "scheduler_restarts_total": status.restarts,
        "tensors": status.tensors,
        "tensor_bytes": status.tensor_bytes,
        "stalls": len(status.stalled),
        "slow_members": len(status.slow),
    })  # fmt: skip
    for awaited in sorted(status.awaited, key=lambda each: -each.age_s)[:MOST_AWAITED]:
        yield MetricSample(f"{PREFIX}awaited_seconds", place, awaited.age_s, (str(awaited.rank),))
    if status.shadow.survives:
        yield from _of(place, {
            "shadow_step": status.shadow.step,
            "shadow_survives_loss": float(status.shadow.step > 0 and status.shadow.survives != "nothing"),
        })  # fmt: skip
    lately = [member for member in lost if member.heartbeat_age_s < LOST_S]
    there = {_place(job, member.member): member for member in lately[-MOST_LOST:]}
    there |= {
        _place(job, member.member): member for member in status.members if member.alive
    }  # also in a lost one's place
    for where, member in there.items():
        yield MetricSample(f"{PREFIX}member_up", where, float(member.alive))
        if member.alive:
            yield from _of(where, {
                "member_heartbeat_age_seconds": member.heartbeat_age_s,
                "link_bytes_per_second": member.member.link_mbit * _BYTES_PER_MBIT,
            })  # fmt: skip
            yield from of_member(where, member.statistics, member.progress)


def _place(job: str, member: pb.Member) -> Place:
    if member.kind == 1 and member.machine_index < 0:  # of a machine that waits for an elastic job's next group
        return Place(job, WORKER if member.role == 1 else SERVER, f"gpu-outside-{member.host}-{member.pid}")
    if member.role == 1:
        return Place(job, WORKER, gpu_machine(member.machine_index))
    return Place(job, SERVER, server_machine(member.kind == 1, member.machine_index, member.address))


def _of(place: Place, values: Mapping[str, float]) -> Iterator[MetricSample]:
    for name, value in values.items():
        if place.role in BY_NAME[PREFIX + name].of:
            yield MetricSample(PREFIX + name, place, value)
