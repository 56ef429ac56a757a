"""How a member connects to the scheduler: over gRPC, or to a core in its own process where a machine is alone.

Trainers must not import this module: gRPC does not survive a fork.

A link outlives its connections. When one breaks, the link tries to connect again at once and goes on where the
connection broke off (member_links/protocol.py). Messages that are sent meanwhile wait.
"""

from __future__ import annotations

import os
import socket

from byteps_py import machine
from byteps_py.control_link import ControlEvents, ControlLink
from byteps_py.loop import EventLoop
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.cluster_config import PROTOCOL_VERSION
from byteps_py.settings import Settings


def connect(settings: Settings, register: pb.Register, loop: EventLoop, events: ControlEvents) -> ControlLink:
    """Register with the scheduler and keep the connection. Returns at once; messages arrive through ``events``.

    Empty fields of ``register`` that follow from ``settings`` are filled in. Raises ConfigurationError if the cluster
    has more machines than this one and the scheduler's address is not set.
    """
    register = complete(register, settings)
    if not settings.scheduler_address:
        from byteps_py.scheduler.in_process_link import InProcessControlLink

        return InProcessControlLink(settings, register, loop, events)
    from byteps_py.scheduler.grpc_link import GrpcControlLink

    return GrpcControlLink(settings, register, loop, events)


def complete(register: pb.Register, settings: Settings) -> pb.Register:
    """A copy in which the empty fields that are the same for all members are filled in."""
    filled = pb.Register()
    filled.CopyFrom(register)
    filled.protocol = filled.protocol or PROTOCOL_VERSION
    filled.job = filled.job or settings.job
    filled.machine_id = filled.machine_id or machine.machine_id(settings)
    filled.num_workers = filled.num_workers or settings.num_workers
    filled.num_servers = filled.num_servers or settings.num_servers
    filled.partition_bytes = filled.partition_bytes or settings.partition_bytes or 0
    filled.link_mbit = filled.link_mbit or machine.link_mbit(settings)
    filled.host = filled.host or socket.gethostname()
    filled.elastic = filled.elastic or settings.elastic
    filled.pid = filled.pid or os.getpid()
    return filled
