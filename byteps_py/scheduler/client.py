"""Connects a member to the scheduler: over gRPC, or to a core in its own process where a machine is alone.

Trainers must not import this module: gRPC does not survive a fork.

A link outlives its connections. When one breaks, the link tries to connect again at once and goes on where the
connection broke off (member_links/protocol.py). Messages that are sent meanwhile wait.
"""

from __future__ import annotations

import os
import socket
import time

from byteps_py.config.settings import Settings
from byteps_py.errors import ConfigurationError, from_name
from byteps_py.proto import control_pb2 as pb
from byteps_py.scheduler.core import ConnectionOpened, MessageReceived, SchedulerCore
from byteps_py.scheduler.job import Outgoing
from byteps_py.scheduler.roster import PROTOCOL_VERSION, ClusterConfig
from byteps_py.system import machine
from byteps_py.system.loop import EventLoop
from byteps_py.wire.control_link import ControlEvents, ControlLink
from byteps_py.wording import count_text

_ONLY_CONNECTION = 1


def connect(settings: Settings, register: pb.Register, loop: EventLoop, events: ControlEvents) -> ControlLink:
    """Register with the scheduler and keep the connection. Returns at once; messages arrive through ``events``.

    Empty fields of ``register`` that follow from ``settings`` are filled in. Raises ConfigurationError if the cluster
    has more machines than this one and the scheduler's address is not set.
    """
    register = complete(register, settings)
    if not settings.scheduler_address:
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


class InProcessControlLink:
    """A ControlLink on a single machine without a scheduler: the scheduler's core in the member's own process.

    The loop's thread owns the core. Any thread may call ``send`` and ``close``. Raises ConfigurationError if the
    cluster has other machines.
    """

    def __init__(
        self,
        settings: Settings,
        register: pb.Register,
        loop: EventLoop,
        events: ControlEvents,
    ) -> None:
        if settings.num_workers > 1 or settings.num_servers > 0:
            raise ConfigurationError(
                f"a cluster of {count_text(settings.num_workers, 'GPU machine')} and "
                f"{count_text(settings.num_servers, 'server')} needs a scheduler: set DMLC_PS_ROOT_URI and "
                "DMLC_PS_ROOT_PORT to its address"
            )
        self._interval_s = settings.heartbeat_interval_s
        self._core = SchedulerCore(ClusterConfig.from_settings(settings))
        self._loop = loop
        self._events = events
        self._is_closed = False
        loop.post(lambda: self._start(register))

    def send(self, message: pb.MemberMessage) -> None:
        self._loop.post(lambda: self._handle(message))

    def close(self, reason: str = "") -> None:
        self._is_closed = True

    def _start(self, register: pb.Register) -> None:
        self._deliver(self._core.handle(ConnectionOpened(_ONLY_CONNECTION), time.monotonic()))
        self._handle(pb.MemberMessage(register=register))
        self._beat()

    def _beat(self) -> None:
        if self._is_closed:
            return
        self._handle(pb.MemberMessage(heartbeat=self._events.heartbeat()))
        self._deliver(self._core.tick(time.monotonic()))
        self._loop.call_later(self._interval_s, self._beat)

    def _handle(self, message: pb.MemberMessage) -> None:
        if not self._is_closed:
            self._deliver(self._core.handle(MessageReceived(_ONLY_CONNECTION, message), time.monotonic()))

    def _deliver(self, outgoing: Outgoing) -> None:
        for _, message in outgoing:
            if self._is_closed:
                return
            self._events.on_message(message)
            if message.HasField("refused"):
                self._is_closed = True
                self._events.on_lost(from_name(message.refused.error, message.refused.message))
