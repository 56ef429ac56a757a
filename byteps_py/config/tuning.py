"""Sizes that depend on the links' rates: the largest partition, and how many bytes a machine has in flight.

With n machines, a server's link receives n contributions to a partition of p bytes, one after the other, and sends n
answers. At B bytes per second that takes 2·n·p/B from the first byte pushed to the last one answered. To fill this
pipeline a machine needs at least 2·n·p bytes in flight. The pipeline also has to drain at the end. So more bytes in
flight are lost time there, and wait in queues ahead of more urgent tensors. Small partitions make the pipeline short,
but each message costs processor time.

Where GPU machines sum too, their links carry other machines' pushes beside their own, and each waits for the other.
There, smaller partitions and more bytes in flight are better. Two GPU machines gain no time from CPU machines, and lose
the time by which an answer follows its push: smaller partitions are better, and no more bytes in flight are needed.
benchmarks/results/tried.md has the measurements. Pure; any thread.
"""

from __future__ import annotations

#: The rate that is assumed for loopback, in Mbit/s.
LOOPBACK_MBIT = 40_000.0

#: With half of this, sums of 64 MB cost a tenth more processor time: each message finds cold caches. With twice as much
#: they cost hardly less, and twice as much is in flight.
MAX_PARTITION_BYTES = 8 << 20
MIN_PARTITION_BYTES = 64 << 10
#: All machines send their part of a partition to its server at about the same time, and more than the queue in front of
#: its link holds is lost: TCP then waits for a fifth of a second or longer. So with more than a few machines on slow
#: links, partitions are smaller: their bytes need this long at most.
_MOST_BURST_S, _FEW_MACHINES = 0.1, 4
#: On links of a few Mbit/s, messages are smaller than that: one takes this long on the wire at most, or is this small.
_MOST_MESSAGE_S, _LEAST_PARTITION_BYTES = 0.1, 4 << 10

_PIPELINE_S = 0.02  # the longest time of the pipeline
#: The shortest time of a message on the wire. The services at its ends need 0.2 ms of processor time each, and should
#: leave most of the processor to other work.
_MESSAGE_S, _SHARED_MESSAGE_S = 0.006, 0.003
_IN_FLIGHT_OVER_LEAST, _SHARED_IN_FLIGHT_OVER_LEAST = 1.5, 2.0
#: When an answer is due, relative to the least time. If this is too long, links stay idle when a machine's request is
#: late; if it is too short, bytes that are still on their way count as answered. Where GPU machines sum, links are
#: shared, and answers take longer.
_ANSWER_OVER_LEAST, _SHARED_ANSWER_OVER_LEAST = 1.5, 3.0
#: A link that carries less than this, in Mbit/s, is slow: signs of life on it are a part of what it carries.
SLOW_MBIT = 10.0
#: So many members speak to the scheduler as often as PS_HEARTBEAT_INTERVAL says. More do so less often: the scheduler
#: then gets as many messages a second of any larger job (docs/explanation/scale.md).
_MEMBERS_AT_FULL_RATE = 500
#: Freed memory, in bytes, that a process keeps for messages before it knows how much it will have in flight.
USUAL_CREDIT_BYTES = 64 << 20
#: The least time of a summation service's answer, in seconds: a busy machine's scheduling.
ANSWER_BASE_S = 0.005


def is_slow(link_mbit: float) -> bool:
    """True for a link of this rate in Mbit/s that is slow. 0: the rate is not known."""
    return 0 < link_mbit < SLOW_MBIT


def control_pace(num_workers: int, num_servers: int) -> float:
    """How many times less often members of a job of so many GPU and CPU machines speak to the scheduler.

    >>> control_pace(100, 100), control_pace(1000, 500), control_pace(10_000, 5000)
    (1.0, 5.0, 50.0)
    """
    return max(1.0, (2 * num_workers + num_servers) / _MEMBERS_AT_FULL_RATE)


def silence_s(interval_s: float, timeout_s: float, pace: float) -> float:
    """The silence that proves death where heartbeats come every ``interval_s`` times ``pace``. A busy machine delays a
    heartbeat for as long in a large job as in a small one, so the timeout grows only by the longer interval, and half
    as much again for a scheduler with very many members.

    >>> silence_s(0.2, 1.0, 1), round(silence_s(0.2, 1.0, 50), 1)
    (1.0, 15.7)
    """
    return timeout_s + 1.5 * (pace - 1) * interval_s


def report_pace(num_workers: int, num_servers: int) -> float:
    """The same of reports on links and ranks, which every other heartbeat has, and each one of a large job."""
    return max(1.0, control_pace(num_workers, num_servers) / 2)


def gpu_machines_sum(cpu_servers: int, gpu_servers: int) -> bool:
    """True if GPU machines sum for others in a job with these numbers of summation services on CPU and GPU machines."""
    return cpu_servers < gpu_servers


def needs_turns(machines: int) -> bool:
    """True if so many GPU machines would fill the queue in front of a link with what all of them send at once: each of
    them then begins with another one."""
    return machines > _FEW_MACHINES


def partition_bytes(link_mbit: float, machines: int, is_shared: bool) -> int:
    """The size in bytes of the largest partition, a power of two.

    Args:
        link_mbit: rate of the slowest link in each direction, Mbit/s.
        machines: number of GPU machines.
        is_shared: GPU machines sum too.

    >>> [partition_bytes(400, machines, is_shared=False) >> 10 for machines in (2, 3, 8)]
    [128, 256, 256]

    >>> [partition_bytes(rate, 4, is_shared=False) >> 10 for rate in (100, 400, 1000, 10_000, 1e308)]
    [64, 256, 512, 4096, 8192]
    >>> [partition_bytes(rate, 4, is_shared=True) >> 10 for rate in (100, 400, 1000, 10_000, 100_000)]
    [64, 128, 256, 2048, 8192]
    >>> [partition_bytes(rate, 4, is_shared=True) >> 10 for rate in (0.1, 1, 2, 5)]
    [4, 8, 16, 32]
    >>> [partition_bytes(30, machines, is_shared=True) >> 10 for machines in (4, 8, 16, 100)]
    [64, 32, 16, 8]
    >>> [partition_bytes(rate, 8, is_shared=True) >> 10 for rate in (15, 30, 100)]
    [16, 32, 64]
    """
    rate = link_mbit * 1e6 / 8
    least_s = _SHARED_MESSAGE_S if is_shared or machines == 2 else _MESSAGE_S
    message_s = max(_PIPELINE_S / (2 * machines), least_s)
    most_s = _MOST_MESSAGE_S if machines <= _FEW_MACHINES else _MOST_BURST_S / machines
    least = max(_LEAST_PARTITION_BYTES, min(MIN_PARTITION_BYTES, _power_of_two(rate * most_s)))
    return max(least, _power_of_two(min(rate * message_s, MAX_PARTITION_BYTES)))


def _power_of_two(nbytes: float) -> int:
    """The greatest one that is not above ``nbytes``."""
    return 1 << max(0, int(min(nbytes, MAX_PARTITION_BYTES)).bit_length() - 1)


def credit_bytes(partition: int, machines: int, is_shared: bool) -> int:
    """The bytes that a machine has in flight, for partitions of ``partition`` bytes.

    >>> [credit_bytes(128 << 10, machines, is_shared=True) >> 10 for machines in (2, 3, 4)]
    [768, 1536, 2048]
    """
    over_least = _SHARED_IN_FLIGHT_OVER_LEAST if is_shared and machines > 2 else _IN_FLIGHT_OVER_LEAST
    return round(over_least * 2 * machines * partition)


def on_their_way_bytes(link_mbit: float, round_trip_s: float) -> int:
    """The bytes that a machine has in flight beside its credit where its bytes and the answers are on their way for
    ``round_trip_s`` seconds together: what a link of this rate carries in twice that time, as answers also wait for
    other machines' bytes.

    >>> on_their_way_bytes(1000, 0.1) >> 20
    23
    """
    return round(2 * round_trip_s * link_mbit * 1e6 / 8)


def head_start_bytes(credit: int, cpu_servers: int, is_shared: bool) -> int:
    """The bytes that a machine with nothing in flight pushes to each CPU machine's server before other servers.

    ``credit`` is the machine's limit of bytes in flight. The placement loads all links equally, but TCP gives every
    flow of a GPU machine's link the same rate. So the flows to CPU machines get less than they need while GPU machines'
    sums are in flight beside them, and a full link can't catch up later. A head start that is too large leaves nothing
    for the other servers.

    >>> [head_start_bytes(2 << 20, k, is_shared=True) >> 10 for k in (1, 2, 3, 4)]
    [512, 512, 341, 256]
    """
    return credit // max(4, 2 * cpu_servers) if is_shared else 0


def answer_s(credit: int, link_mbit: float, is_shared: bool) -> float:
    """The time in seconds within which a request is answered unless a machine is late, with ``credit`` bytes in flight
    over links of this rate; 0 if the rate is unknown."""
    over_least = _SHARED_ANSWER_OVER_LEAST if is_shared else _ANSWER_OVER_LEAST
    return over_least * credit * 8 / (link_mbit * 1e6) if link_mbit else 0.0
