"""A member's link to the scheduler, over gRPC or, on a single machine without one, to a core in-process.

Callbacks run in the event loop's thread, and never after ``close``. Trainers must not import this module.

A link outlives its connections: when one breaks, the next is tried for at once, and again and again, and goes on where
it broke off (resuming.py). What is sent meanwhile waits.
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
    """Register with the scheduler and stay in touch. Returns at once; what comes arrives through the ``events``.

    Fields of ``register`` that are left empty and that ``settings`` know are filled in.
    Raises ConfigurationError if the cluster is larger than this machine and there is no scheduler's address.
    """
    register = complete(register, settings)
    if not settings.scheduler_address:
        from byteps_py.scheduler.in_process_link import InProcessControlLink

        return InProcessControlLink(settings, register, loop, events)
    from byteps_py.scheduler.grpc_link import GrpcControlLink

    return GrpcControlLink(settings, register, loop, events)


def complete(register: pb.Register, settings: Settings) -> pb.Register:
    """A copy with the empty fields filled that every member fills alike."""
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
