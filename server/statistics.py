"""What a summation server's heartbeat tells the scheduler."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from byteps_py.dataplane.traffic import Traffic
from byteps_py.proto import control_pb2 as pb
from byteps_py.server.actions import Counters


def statistics(traffic: Traffic, counters: Counters) -> pb.Statistics:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pb.Statistics(
        bytes_received=traffic.bytes_received,
        bytes_sent=traffic.bytes_sent,
        bytes_local=traffic.bytes_local,
        rounds=counters.rounds,
        bytes_summed=counters.bytes_summed,
        cpu_s=time.process_time(),
        resident_bytes=resident_pages * resource.getpagesize(),
        bytes_in_flight=counters.bytes_in_flight,
    )
