"""The table of metrics: names, kinds, meanings, and on whose pages they are; docs/reference/metrics.md is made from it.
And the samples of a page, from what services and ranks have counted already: heartbeats, progress, the job's status.

Every sample of a page has the labels job, role, machine and rank; what does not apply is empty. So the same figure has
the same name and labels on every page that it is on. No label takes its values from tensors: however many there are, a
page has some lines per process. Nothing is counted here. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from byteps_py.proto import control_pb2 as pb

#: In this order on every sample.
LABELS = ("job", "role", "machine", "rank")
PREFIX = "byteps_"

RANK, WORKER, SERVER, SCHEDULER = "rank", "worker", "server", "scheduler"
_SERVICES = (WORKER, SERVER)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: in full; a counter's ends with _total.
        kind: gauge or counter.
        meaning: what it says, in a few words, with its unit.
        of: the roles of processes that it is about.
        extra: labels beside LABELS.
        detail: sentences that do not fit in the table.
    """

    name: str
    kind: str
    meaning: str
    of: tuple[str, ...]
    extra: tuple[str, ...] = ()
    detail: str = ""


def _gauge(name: str, of: tuple[str, ...], meaning: str, detail: str = "", extra: tuple[str, ...] = ()) -> Metric:
    return Metric(PREFIX + name, "gauge", meaning, of, extra, detail)


def _counter(name: str, of: tuple[str, ...], meaning: str, detail: str = "") -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", meaning, of, (), detail)


METRICS: tuple[Metric, ...] = (
    _counter("steps", (RANK,), "optimizer steps that the rank has made"),
    _gauge("step_seconds", (RANK,), "time from the step before the latest to the latest one"),
    _gauge("last_step_timestamp_seconds", (RANK,), "when the latest step was made, in seconds since 1970, by the rank's clock"),
    _counter("tokens", (RANK,), "tokens that the rank has trained on, as bps.count_batch() was told"),
    _counter("samples", (RANK,), "samples that the rank has trained on, as bps.count_batch() was told"),
    _gauge("tokens_per_second", (RANK,), "tokens per second, of the last ten seconds"),
    _counter("exposed_communication_seconds", (RANK,), "time that the training has waited for communication"),
    _gauge("exposed_communication_ratio", (RANK,), "share of the last ten seconds that the training has waited for communication, from 0 to 1"),
    _counter("result_bytes", (RANK,), "bytes of results that the communication service has delivered to the rank: its goodput is their rate", "Sums of one machine's ranks in shared memory, and transfers from rank to rank, are not counted."),
    _counter("recoveries", (RANK,), "how often the rank has gone on in another group of ranks, after a loss or as members came and went"),
    _counter("sent_bytes", _SERVICES, "payload bytes that the service has sent to other machines"),
    _counter("received_bytes", _SERVICES, "payload bytes that the service has received from other machines"),
    _counter("local_bytes", _SERVICES, "payload bytes that have gone through shared memory instead"),
    _counter("rounds", _SERVICES, "partitions delivered to ranks (worker), or summed (server)"),
    _gauge("in_flight_bytes", _SERVICES, "bytes pushed and not answered, which take credit (worker), or contributions that are held (server)"),
    _gauge("credit_bytes", (WORKER,), "limit of the bytes in flight; 0: none"),
    _gauge("queued_partitions", (WORKER,), "partitions that wait for credit, or for their turn"),
    _counter("summed_bytes", (SERVER,), "bytes of results, each counted once"),
    _counter("repetitions", (SERVER,), "contributions that came twice, or had to be asked for again: messages get lost"),
    _counter("relayed_bytes", (SERVER,), "bytes that the server has passed on between ranks of two other machines, whose direct way is slow"),
    _counter("shadow_steps", (SERVER,), "steps that the server has made with copies of optimizers' states, each partition counted"),
    _gauge("shadow_waiting_bytes", (SERVER,), "sums that wait for such steps"),
    _counter("cpu_seconds", _SERVICES, "processor time of the service, all threads"),
    _gauge("resident_memory_bytes", _SERVICES, "resident memory of the service"),
    _gauge("link_bytes_per_second", _SERVICES, "rate of the machine's network link in each direction, as configured or measured", "Only on the scheduler's page."),
    _gauge("member_up", _SERVICES, "1: the member is there; 0: it is lost", "Only on the scheduler's page. A member that has left in order has no line, nor has one whose place another has taken. A lost one has a line for an hour, and only the latest 32 do."),
    _gauge("member_heartbeat_age_seconds", _SERVICES, "time since the scheduler has heard from the member", "Only on the scheduler's page."),
    _gauge("job_state", (SCHEDULER,), "1 for the state in which the job is, 0 for the others", extra=("state",)),
    _gauge("epoch", (SCHEDULER,), "number of the present membership: it grows when members, or their shares, change"),
    _counter("members_lost", (SCHEDULER,), "members that were lost, and did not leave in order, since the job began"),
    _gauge("machines_awaited", (SCHEDULER,), "GPU machines that are lost and awaited (BYTEPS_MAX_RESTARTS)"),
    _counter("scheduler_restarts", (SCHEDULER,), "how often a restarted scheduler has resumed the job"),
    _gauge("tensors", (SCHEDULER,), "tensors on which ranks have agreed"),
    _gauge("tensor_bytes", (SCHEDULER,), "their bytes"),
    _gauge("stalls", (SCHEDULER,), "groups of tensors and barriers that have waited longer than BYTEPS_STALL_WARN_S"),
    _gauge("slow_members", (SCHEDULER,), "ranks and servers that keep others waiting (BYTEPS_STRAGGLER)"),
    _gauge("awaited_seconds", (SCHEDULER,), "how long others have waited for this rank", "For waits of a second or longer, and at most for 16 ranks, those that are awaited longest.", extra=("awaited_rank",)),
    _gauge("shadow_step", (SCHEDULER,), "the step from which a restarted job could go on; 0: some states are yet to be copied", "Only with shadow=True."),
    _gauge("shadow_survives_loss", (SCHEDULER,), "1: the copies of optimizers' states are complete and on other machines; 0: they are not", "Only with shadow=True."),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}


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
