"""Sizes that follow the rate of the links: the largest partition, and the bytes a machine has in flight.

With n machines a server's link brings in n contributions to a partition of p bytes, one after the other, and takes
out n answers: 2·n·p/B from the first byte pushed to the last one answered. That pipeline has to be filled, so 2·n·p
bytes in flight is the least; and it has to run empty at the end, so all that is more is lost there, and waits in
queues ahead of more urgent tensors. Small partitions make it short, but cost processor time for every message.
Where GPU machines sum, too, their links carry what others push beside what is their own, and both wait for each other:
smaller partitions and more in flight are better there. Two GPU machines gain no time by CPU machines, and lose the
time by which an answer follows its push: smaller partitions are better, and no more in flight is needed in any case.
docs/tried.md has the measurements. Pure; any thread.
"""

from __future__ import annotations

#: What a link that only passes memory (loopback) counts as.
LOOPBACK_MBIT = 40_000.0

MAX_PARTITION_BYTES = 4 << 20  # larger messages are slower per byte in ZeroMQ
MIN_PARTITION_BYTES = 64 << 10

_PIPELINE_S = 0.02  # what the pipeline may take
#: What a message takes on the wire at least: the services need 0.2 ms of processor time for it at either end, and what
#: else there is to do, beside them, should have most of it.
_MESSAGE_S, _SHARED_MESSAGE_S = 0.006, 0.003
_IN_FLIGHT_OVER_LEAST, _SHARED_IN_FLIGHT_OVER_LEAST = 1.5, 2.0
#: Longer, and what machines ask each other for keeps the links idle if it is late; shorter, and what is on its way
#: counts as answered. Where GPU machines sum, their links are shared, and answers take longer.
_ANSWER_OVER_LEAST, _SHARED_ANSWER_OVER_LEAST = 1.5, 3.0
#: Freed memory that a process keeps for messages, before it knows what it will have in flight.
USUAL_CREDIT_BYTES = 64 << 20


def gpu_machines_sum(cpu_servers: int, gpu_servers: int) -> bool:
    """True if GPU machines sum for others in a job with so many summation services of either kind."""
    return cpu_servers < gpu_servers


def partition_bytes(link_mbit: float, machines: int, is_shared: bool) -> int:
    """The largest partition for links of this rate each way between so many GPU machines: a power of two.
    ``is_shared``: these machines sum, too.

    >>> [partition_bytes(400, machines, is_shared=False) >> 10 for machines in (2, 3, 8)]
    [128, 256, 256]

    >>> [partition_bytes(rate, 4, is_shared=False) >> 10 for rate in (100, 400, 1000, 10_000, 1e308)]
    [64, 256, 512, 4096, 4096]
    >>> [partition_bytes(rate, 4, is_shared=True) >> 10 for rate in (100, 400, 1000, 10_000, 100_000)]
    [64, 128, 256, 2048, 4096]
    """
    rate = link_mbit * 1e6 / 8
    least_s = _SHARED_MESSAGE_S if is_shared or machines == 2 else _MESSAGE_S
    message_s = max(_PIPELINE_S / (2 * machines), least_s)
    wire_bytes = int(min(rate * message_s, MAX_PARTITION_BYTES))
    power = 1 << max(0, wire_bytes.bit_length() - 1)
    return max(power, MIN_PARTITION_BYTES)


def credit_bytes(partition: int, machines: int, is_shared: bool) -> int:
    """How much a machine has in flight, for partitions of this size.

    >>> [credit_bytes(128 << 10, machines, is_shared=True) >> 10 for machines in (2, 3, 4)]
    [768, 1536, 2048]
    """
    over_least = _SHARED_IN_FLIGHT_OVER_LEAST if is_shared and machines > 2 else _IN_FLIGHT_OVER_LEAST
    return round(over_least * 2 * machines * partition)


def head_start_bytes(credit: int, cpu_servers: int, is_shared: bool) -> int:
    """By how much a machine that begins lets each CPU machine's server go first, with so many bytes in flight.

    The placement fills all links alike, but TCP gives each flow the same part of a GPU machine's: those to CPU machines
    get less than they need beside those of what GPU machines sum, until these have nothing more in flight. What a full
    link is behind by then it can't catch up on. Too much, and nothing is left for the others.

    >>> [head_start_bytes(2 << 20, k, is_shared=True) >> 10 for k in (1, 2, 3, 4)]
    [512, 512, 341, 256]
    """
    return credit // max(4, 2 * cpu_servers) if is_shared else 0


def answer_s(credit: int, link_mbit: float, is_shared: bool) -> float:
    """By when what was pushed, or asked for, has its answer, with so many bytes in flight over links of this rate,
    unless a machine is late."""
    over_least = _SHARED_ANSWER_OVER_LEAST if is_shared else _ANSWER_OVER_LEAST
    return over_least * credit * 8 / (link_mbit * 1e6) if link_mbit else 0.0
