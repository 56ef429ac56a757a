"""Schedulers and members of real processes and threads, for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import grpc
import pytest
from support.schedulers import Factory, Member, Scheduler

from byteps_py.config.settings import Settings
from byteps_py.proto import control_pb2 as pb


@pytest.fixture(scope="module")
def grpc_library() -> Iterator[None]:
    """gRPC's own descriptors live as long as any channel does: keep one, so that no test seems to leak them."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call = channel.unary_unary("/warm/up")
        with contextlib.suppress(grpc.RpcError):
            call(b"", timeout=0.05)
        yield


@pytest.fixture
def start() -> Iterator[Factory]:
    with contextlib.ExitStack() as stack:

        def factory(**changes: object) -> Scheduler:
            scheduler = Scheduler(**changes)
            stack.callback(scheduler.close)
            return scheduler

        yield factory


@pytest.fixture
def attend() -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def factory(settings: Settings, register: pb.Register) -> Member:
        members.append(Member(settings, register))
        return members[-1]

    yield factory
    for member in members:
        member.close()
