"""The two simulations of `bps simulate`: what a job of so many machines costs the scheduler, and its goodput.

``ControlPlane`` has the scheduler's state machines: the scheduler's own code (``MemberLinks`` with its core) takes the
messages that members send, built and parsed as on the wire, and its answers are serialized as for the wire. Members
only answer what the scheduler waits for. The figures leave out the time that gRPC itself takes for each message.

The goodput of a job over weeks in which machines are lost and links and processors slow down, beside one that goes back
to its last checkpoint (``month_goodput``):

    losses of machines, slow links, slow processors ─► what each of them stops, repeats and slows down ─► goodput

This is an event model: the times of events are drawn, and what each costs was measured (benchmarks/results: recovery,
goodput, heal) or follows from the scheduler's own constants for a job of this size. It doesn't drive the state
machines: a month of 10,000 machines has too many messages. One thread.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from byteps_py.config.tuning import control_pace, report_pace, silence_s
from byteps_py.errors import UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.core import ClockTicked
from byteps_py.scheduler.job import RUNNING
from byteps_py.scheduler.member_links.links import MemberLinks, Sent, StreamClosed, StreamMessage, StreamOpened
from byteps_py.scheduler.roster import PROTOCOL_VERSION, ClusterConfig
from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.wire.rank_link import pack_spec

#: Members of a small job say that they are alive, and services report what they have sent, so often.
BEAT_S, REPORT_S = 0.2, 0.4
#: A report tells of so many peers at most (dataplane/link_usage.py).
_MOST_PEERS = 32
#: A late rank keeps others waiting for a few tensors at a time.
_MOST_WAITS = 8
_JOB = "simulated"
_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """``machines``: GPU machines, each with ``ranks_per_machine`` ranks. ``tensors``: gradients of a model.

    Raises UsageError for numbers below 1 (CPU machines: below 0), and for a job of one machine, which has no network.
    """

    machines: int
    cpu_machines: int = 0
    ranks_per_machine: int = 8
    tensors: int = 500

    def __post_init__(self) -> None:
        least = {"machines": 2, "cpu_machines": 0, "ranks_per_machine": 1, "tensors": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise UsageError(f"{name.replace('_', ' ')}: {getattr(self, name)}, but at least {value} are needed")


@dataclass(slots=True)
class PhaseCost:
    """The scheduler's costs of one phase: processor seconds, and messages and bytes to and from it."""

    name: str
    cpu_s: float = 0.0
    received: int = 0
    received_bytes: int = 0
    sent: int = 0
    sent_bytes: int = 0

    def divided(self, by: float) -> PhaseCost:
        """The same of a phase that is shorter by this factor."""
        counts = (int(count / by) for count in (self.received, self.received_bytes, self.sent, self.sent_bytes))
        return PhaseCost(self.name, self.cpu_s / by, *counts)


@dataclass(slots=True)
class SimulationReport:
    """``costs``: of the phases in order. ``beats``, ``reports`` and ``waits`` are for one second of training, the
    others for all members together, once."""

    job: SimulatedJob
    members: int
    costs: list[PhaseCost] = field(default_factory=list)

    def cost(self, name: str) -> PhaseCost:
        """The phase of this name."""
        return next(each for each in self.costs if each.name == name)


class ControlPlane:
    """A scheduler and the members of ``job``, in simulated time.

    >>> report = ControlPlane(SimulatedJob(machines=3, cpu_machines=1, tensors=2)).run()
    >>> report.members, report.cost("register").received
    (7, 7)
    """

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._progress: Callable[[str], None] = lambda phase: None
        config = ClusterConfig(num_workers=job.machines, num_servers=job.cpu_machines, job=_JOB)
        self.links = MemberLinks(config)
        self._now_s = 0.0
        self._registers = [*self._workers(), *self._servers(config)]
        self._numbers = [0] * (len(self._registers) + 1)  # by stream: of the last message that it sent
        self._received = [0] * (len(self._registers) + 1)  # and that it got
        self._report = SimulationReport(job, len(self._registers))
        self._cost = PhaseCost("")

    def run(self, progress: Callable[[str], None] | None = None) -> SimulationReport:
        """All phases. ``progress``: called with the name of each before it. Raises RuntimeError if the job does not
        start, which would be a fault of the scheduler."""
        self._progress = progress or self._progress
        streams = range(1, len(self._registers) + 1)
        with self._phase("register"):
            for stream, register in zip(streams, self._registers, strict=True):
                self.links.handle(StreamOpened(stream), self._now_s)
                self._say(stream, pb.MemberMessage(register=register))
        with self._phase("start"):
            for stream in streams:
                self._say(stream, pb.MemberMessage(ready=pb.Ready()), is_numbered=True)
        if self.links.core.state != RUNNING:
            raise RuntimeError(f"the simulated job has not started: {self.links.core.reason}")
        with self._phase("declare"):
            for index in range(self._job.machines):
                self._say(index + 1, pb.MemberMessage(declare=self._declaration(index)), is_numbered=True)
        numbers = self._job.machines, self._job.cpu_machines
        beat_s, report_s = BEAT_S * control_pace(*numbers), REPORT_S * report_pace(*numbers)
        with self._phase("beats", per_s=beat_s):
            for stream in streams:
                self._say(stream, pb.MemberMessage(heartbeat=pb.Heartbeat(bare=True)))
            self._tick(beat_s)
        with self._phase("reports", per_s=report_s):
            for stream in streams:
                self._say(stream, pb.MemberMessage(heartbeat=self._usage(stream)))
            self._tick(report_s)
        with self._phase("waits", per_s=beat_s):
            for stream in range(2, self._job.machines + 1):
                self._say(stream, pb.MemberMessage(heartbeat=self._waits(stream)))
            self._tick(beat_s)
        with self._phase("epoch"):
            self._lose(self._job.machines + 1, streams)
        return self._report

    # ---- phases ---------------------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str, per_s: float = 1.0) -> Iterator[None]:
        """``per_s``: the simulated time that the phase takes, of those whose costs are for one second."""
        self._progress(name)
        self._cost = PhaseCost(name)
        yield
        self._report.costs.append(self._cost.divided(per_s))

    def _lose(self, stream: int, streams: Sequence[int]) -> None:
        """The connection of a summation service ends. Once it is lost, all members learn of the new shares."""
        epoch = self.links.core.job.roster.epoch
        self._timed(lambda: self.links.handle(StreamClosed(stream), self._now_s))
        while self.links.core.job.roster.epoch == epoch:
            self._tick(BEAT_S)
            for each in streams:
                if each != stream:
                    self.links.handle(
                        StreamMessage(each, pb.MemberMessage(heartbeat=pb.Heartbeat(bare=True))), self._now_s
                    )

    # ---- messages -------------------------------------------------------------------------------------------

    def _say(self, stream: int, message: pb.MemberMessage, is_numbered: bool = False) -> None:
        if is_numbered:
            self._numbers[stream] += 1
            message.number = self._numbers[stream]
        message.received = self._received[stream]
        data = message.SerializeToString()
        self._cost.received += 1
        self._cost.received_bytes += len(data)
        self._timed(lambda: self.links.handle(StreamMessage(stream, pb.MemberMessage.FromString(data)), self._now_s))

    def _tick(self, by_s: float) -> None:
        self._now_s += by_s
        self._timed(lambda: self.links.handle(ClockTicked(), self._now_s))

    def _timed(self, call: Callable[[], Sequence[Sent]]) -> None:
        began_s = time.thread_time()
        sent = call()
        for each in sent:
            if each.message is not None:
                self._cost.sent += 1
                self._cost.sent_bytes += len(each.stamped().SerializeToString())
                self._received[each.stream] = each.number or self._received[each.stream]
        self._cost.cpu_s += time.thread_time() - began_s

    # ---- what members say -----------------------------------------------------------------------------------

    def _facts(self, index: int, kind: pb.MachineKind, **more: object) -> pb.Register:
        host = f"{'cpu' if kind == pb.MACHINE_KIND_CPU else 'gpu'}-{index:05d}.example.com"
        common: dict[str, object] = {
            "protocol": PROTOCOL_VERSION, "job": _JOB, "kind": kind, "machine_id": host, "host": host,
            "pid": 1000 + index, "machine_index": index, "num_workers": self._job.machines,
            "num_servers": self._job.cpu_machines, "link_mbit": 100_000.0, "memory_bytes": 1 << 38,
        }  # fmt: skip
        return pb.Register(**{**common, **more})  # type: ignore[arg-type]

    def _workers(self) -> Iterator[pb.Register]:
        for index in range(self._job.machines):
            token = f"worker {index}".encode()
            yield self._facts(
                index,
                pb.MACHINE_KIND_GPU,
                role=pb.ROLE_COMMUNICATION,
                local_size=self._job.ranks_per_machine,
                token=token,
            )

    def _servers(self, config: ClusterConfig) -> Iterator[pb.Register]:
        places = [(pb.MACHINE_KIND_CPU, index) for index in range(self._job.cpu_machines)]
        if config.needs_gpu_machine_servers:
            places += [(pb.MACHINE_KIND_GPU, index) for index in range(self._job.machines)]
        for kind, index in places:
            is_cpu = kind == pb.MACHINE_KIND_CPU
            address = f"tcp://10.{int(is_cpu)}.{index >> 8}.{index & 255}:40000"
            place = -1 if is_cpu else index
            token = f"server {kind} {index}".encode()
            facts = self._facts(index, kind, role=pb.ROLE_SUMMATION, address=address, token=token)
            facts.machine_index = place
            yield facts

    def _declaration(self, machine: int) -> pb.Declare:
        first, count = machine * self._job.ranks_per_machine, self._job.ranks_per_machine
        ballots = []
        for number in range(self._job.tensors):
            name = _name(number)
            spec = TensorSpec(name, DType.FLOAT32, (_ELEMENTS,), Op.SUM, average=True)
            votes = [pb.Vote(ranks=range(first, first + count), spec=pack_spec(spec))]
            ballots.append(pb.Ballot(name=name, generation=1, votes=votes))
        return pb.Declare(ballots=ballots)

    def _usage(self, stream: int) -> pb.Heartbeat:
        """A worker tells of the services, a service of the workers."""
        job, members = self._job, len(self._registers)
        is_worker = stream <= job.machines
        first, count = (job.machines + 1, members - job.machines) if is_worker else (1, job.machines)
        peers = [first + (stream + turn) % count for turn in range(min(_MOST_PEERS, count))]
        links = [pb.LinkUsage(peer=peer, bytes=1 << 20, busy_s=0.01) for peer in peers]
        ranks = range((stream - 1) * job.ranks_per_machine, stream * job.ranks_per_machine) if is_worker else ()
        paces = [pb.RankPace(rank=rank, step_s=0.1, pid=rank) for rank in ranks]
        return pb.Heartbeat(links=links, ranks=paces)

    def _waits(self, stream: int) -> pb.Heartbeat:
        """The ranks of the first machine are late, all others wait for them."""
        ranks = range((stream - 1) * self._job.ranks_per_machine, stream * self._job.ranks_per_machine)
        names = [_name(number) for number in range(min(_MOST_WAITS, self._job.tensors))]
        return pb.Heartbeat(waiting=[pb.Waiting(name=name, round=1, ready_ranks=ranks, age_s=2.0) for name in names])


def _name(tensor: int) -> str:
    return f"Gradient.transformer.layers.{tensor}.weight"


DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class MonthOptions:
    """A job and its troubles. Raises UsageError for a value that is not above 0, or a share of more than 1."""

    machines: int
    cpu_machines: int = 0
    days: float = 30.0
    seed: int = 0
    step_s: float = 10.0
    #: The share of a step in which nothing but the network works.
    exposed: float = 0.2
    #: Days in which one machine is lost once: Llama 3 (Grattafiori et al., 2024, 3.3.4), 419 unexpected interruptions
    #: of 2,048 machines in 54 days.
    lost_days: float = 264.0
    #: Greyhound (Wu et al., 2025): 40 % of jobs on four machines had a slow link, for 24 minutes; 2 % of those on one
    #: had a slow processor, for 10. That these jobs ran for a day is our assumption.
    slow_link_days: float = 7.8
    slow_link_s: float = 1440.0
    slow_processor_days: float = 50.0
    slow_processor_s: float = 600.0
    #: The time with a slow link or processor, in units of the usual one.
    slower: float = 2.0
    #: From the moment in which a loss is known until the next step (benchmarks/results/goodput.md).
    recover_s: float = 7.0
    #: The same of a job that starts again as a whole, and what it stops for each checkpoint.
    restart_s: float = 600.0
    checkpoint_s: float = 10.0

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name not in ("cpu_machines", "seed") and not 0 < getattr(self, one.name) < math.inf:
                raise UsageError(f"{one.name.replace('_', ' ')}: {getattr(self, one.name)}: a number above 0 is needed")
        if self.exposed > 1 or self.slower < 1:
            raise UsageError(f"exposed={self.exposed:g} is a share of a step, slower={self.slower:g} at least 1")


@dataclass(slots=True)
class Goodput:
    """``lost``: shares of the time, by what took them; with ``share`` they add up to 1."""

    share: float = 0.0
    losses: int = 0
    lost: dict[str, float] = field(default_factory=dict)


#: After its shares have followed, a sum over one link at half of its rate takes so much longer, and they follow so many
#: seconds after it became slow (benchmarks/results/heal.md: eight machines, of which one is slow).
_HEALED, _HEALED_AFTER_S = 1.15, 4.0


def month_goodput(options: MonthOptions) -> tuple[Goodput, Goodput]:
    """Of this package, whose spare machines take the place of lost ones, and of a job that goes back to checkpoints.

    >>> ours, other = month_goodput(MonthOptions(1000))
    >>> ours.losses == other.losses, ours.share > other.share
    (True, True)
    """
    numbers = options.machines, options.cpu_machines
    noticed_s = silence_s(0.2, 1.0, control_pace(*numbers))
    stops = _drawn(options, "losses", options.lost_days)
    slow = [*_slow(options, "link", options.slow_link_days, options.slow_link_s)]
    slow += _slow(options, "processor", options.slow_processor_days, options.slow_processor_s)
    heals_s = _HEALED_AFTER_S * report_pace(*numbers)
    healed = [part for each in slow for part in _with_healing(each, heals_s, options.slower)]
    ours = _walk(options, stops, healed, noticed_s + options.recover_s, options.step_s)
    # Young's interval between checkpoints; a machine's loss ends the job at once.
    every_s = math.sqrt(2 * options.checkpoint_s * options.lost_days * DAY_S / options.machines)
    other = _walk(options, stops, slow, noticed_s + options.restart_s, every_s, options.checkpoint_s)
    return ours, other


@dataclass(frozen=True, slots=True)
class _Slow:
    """From ``begin_s`` to ``end_s``, links or processors take ``times`` as long."""

    kind: str
    begin_s: float
    end_s: float
    times: float


def _drawn(options: MonthOptions, name: str, days: float) -> list[float]:
    """When the events of all machines come."""
    chance, found, at_s = random.Random(f"{options.seed} {name}"), [], 0.0
    while (at_s := at_s + chance.expovariate(options.machines / (days * DAY_S))) < options.days * DAY_S:
        found.append(at_s)
    return found


def _slow(options: MonthOptions, kind: str, days: float, mean_s: float) -> Iterator[_Slow]:
    lasts = random.Random(f"{options.seed} {kind} lasts")
    for at_s in _drawn(options, kind, days):
        yield _Slow(kind, at_s, at_s + lasts.expovariate(1 / mean_s), options.slower)


def _with_healing(slow: _Slow, after_s: float, slower: float) -> Iterator[_Slow]:
    """Shares follow a slow link; a slow processor is named, and stays."""
    if slow.kind != "link" or slow.end_s - slow.begin_s <= after_s:
        yield slow
        return
    yield _Slow(slow.kind, slow.begin_s, slow.begin_s + after_s, slower)
    yield _Slow(slow.kind, slow.begin_s + after_s, slow.end_s, min(slower, _HEALED))


def _walk(
    options: MonthOptions, stops: list[float], slow: list[_Slow], pause_s: float, kept_s: float, saving_s: float = 0.0
) -> Goodput:
    """``pause_s``: after each loss; ``kept_s``: of computing, after which nothing is lost any more; ``saving_s``: what
    that takes each time."""
    marks: list[tuple[float, int, _Slow | None]] = [(at_s, 0, None) for at_s in stops]
    for each in slow:
        marks += [(each.begin_s, 1, each), (each.end_s, -1, each)]
    marks.sort(key=lambda mark: mark[0])
    end_s, now_s, paused_until_s = options.days * DAY_S, 0.0, 0.0
    under_way: dict[str, dict[float, int]] = {"link": {}, "processor": {}}
    done_s = since_s = 0.0  # useful seconds, and those of them that would be lost now
    stopped_s = repeated_s = slow_s = saved_s = 0.0
    rate = kept_s / (kept_s + saving_s)
    for at_s, number, change in [*marks, (end_s, 0, None)]:
        at_s = min(at_s, end_s)
        began_s = min(max(now_s, paused_until_s), at_s)
        stopped_s += began_s - now_s
        worked_s = at_s - began_s
        times = {kind: max(which, default=1.0) for kind, which in under_way.items()}
        took = options.exposed * times["link"] + (1 - options.exposed) * times["processor"]
        useful_s = worked_s / took * rate
        saved_s += worked_s * (1 - rate)
        slow_s += worked_s * rate * (1 - 1 / took)
        done_s += useful_s
        since_s = (since_s + useful_s) % kept_s
        now_s = at_s
        if change is not None:
            counts = under_way[change.kind]
            counts[change.times] = counts.get(change.times, 0) + number
            if not counts[change.times]:
                del counts[change.times]
        elif at_s < end_s:
            repeated_s, done_s, since_s = repeated_s + since_s, done_s - since_s, 0.0
            paused_until_s = at_s + pause_s
    parts = {"stopped": stopped_s, "repeated": repeated_s, "slowed down": slow_s, "checkpoints": saved_s}
    return Goodput(done_s / end_s, len(stops), {name: part / end_s for name, part in parts.items()})
