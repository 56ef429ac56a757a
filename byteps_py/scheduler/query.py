"""Requests to a running scheduler from outside its job: `bps status`, `stop` and `scale`, health checks. Any thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import grpc

from byteps_py import jobs
from byteps_py.errors import UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.proto import control_pb2_grpc
from byteps_py.scheduler import rpc
from byteps_py.settings import Settings
from byteps_py.wording import sendable

_RETRY_S = 0.1
_MOST_RETRIES_S = 4.0  # a scheduler that has a secret hangs up on a process without one, again and again


def status(settings: Settings, timeout_s: float = 5.0) -> pb.StatusReply:
    """The job's members, their traffic and what they wait for, as the scheduler of ``settings`` knows it.

    Raises RendezvousError (no scheduler there, or another secret), StallError (no answer in ``timeout_s``),
    ConfigurationError (no address).
    """
    reply: pb.StatusReply = _ask(settings, "Status", pb.StatusRequest(), timeout_s)
    return reply


def stop(settings: Settings, reason: str, timeout_s: float = 5.0) -> None:
    """Let the scheduler end its job in order; returns when it has told its members. Raises like ``status``."""
    _ask(settings, "Stop", pb.StopRequest(reason=sendable(reason)), timeout_s)


def scale(settings: Settings, servers: int, addresses: Sequence[str], timeout_s: float = 5.0) -> int:
    """Drain the servers at these addresses, and then CPU machines until ``servers`` are left (-1: any number). Returns
    how many stay, as soon as keys begin to move. Raises like ``status``, and UsageError if the job can't do it."""
    request = pb.ScaleRequest(servers=servers, addresses=addresses)
    reply: pb.ScaleReply = _ask(settings, "Scale", request, timeout_s)
    if reply.error:
        raise UsageError(reply.error)
    return reply.servers


def _ask(settings: Settings, method: str, request: object, timeout_s: float):  # type: ignore[no-untyped-def]
    settings = jobs.with_local_secret(settings)
    with rpc.open_channel(settings) as channel:
        stub = control_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        began_s = time.monotonic()
        until_s = began_s + min(timeout_s, _MOST_RETRIES_S)
        while True:
            left_s = max(0.01, began_s + timeout_s - time.monotonic())
            try:
                return getattr(stub, method)(request, timeout=left_s, metadata=rpc.metadata(settings))
            except grpc.RpcError as error:
                if not rpc.is_dropped(error) or time.monotonic() + _RETRY_S >= until_s:
                    raise rpc.explain(settings.scheduler_address, error, timeout_s) from error
            time.sleep(_RETRY_S)
