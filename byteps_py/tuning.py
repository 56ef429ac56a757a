"""Sizes that follow the rate of the links: the largest partition, and the bytes a machine has in flight.

A partition should take a few milliseconds on the wire: shorter ones cost processor time for each message,
longer ones fill the pipeline (push, sum, answer) too slowly. What is in flight has to cover that pipeline, and no
more: the rest only waits in queues, ahead of more urgent tensors and of the acknowledgements of what comes the
other way. docs/performance.md has the measurements. Pure; any thread.
"""

from __future__ import annotations

#: What a link that only passes memory (loopback) counts as.
LOOPBACK_MBIT = 40_000.0

MAX_PARTITION_BYTES = 4 << 20  # larger messages are slower per byte in ZeroMQ
MIN_PARTITION_BYTES = 32 << 10

_PARTITION_S = 0.0033
_PARTITIONS_IN_FLIGHT = 16
_PARTITIONS_PER_SERVER = 2
#: What a machine with a fast link has in flight, unless told otherwise.
USUAL_CREDIT_BYTES = MAX_PARTITION_BYTES * _PARTITIONS_IN_FLIGHT


def partition_bytes(link_mbit: float) -> int:
    """The largest partition for links of this rate each way: a power of two.

    >>> [partition_bytes(rate) >> 10 for rate in (100, 400, 1000, 10_000, 100_000)]
    [32, 128, 256, 2048, 4096]
    """
    wire_bytes = int(link_mbit * 1e6 / 8 * _PARTITION_S)
    power = 1 << max(0, wire_bytes.bit_length() - 1)
    return min(max(power, MIN_PARTITION_BYTES), MAX_PARTITION_BYTES)


def credit_bytes(partition: int, servers: int) -> int:
    """How much a machine has in flight, for partitions of this size and so many servers."""
    return partition * max(_PARTITIONS_IN_FLIGHT, _PARTITIONS_PER_SERVER * servers)
