"""``python -m byteps_py.shadow``: reads states for a trainer, which talks with it over standard input and output.

The trainer unpickles the data, so it comes only from servers that have authenticated: in TLS, or, in a job without any
secret, by running as the same user on this machine. One thread. It ends when its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, CommunicationError, PeerLostError, RendezvousError, StallError
from byteps_py.proto import shadow_pb2, shadow_pb2_grpc
from byteps_py.scheduler import query, rpc
from byteps_py.security import auth
from byteps_py.shadow.frames import FrameKind, read_frame, write_frame
from byteps_py.system import jobs
from byteps_py.system.machine import belongs_to_this_user
from byteps_py.wire.data_link import ShadowDescription

#: A server that takes longer is described as silent.
_SERVER_S = 10.0
_RETRY_S = 0.2
_TRIES = 4


class StatesCaller:
    """Makes the calls. ``out``: descriptor of the pipe to the trainer."""

    def __init__(self, settings: Settings, out: int) -> None:
        self._settings = settings
        self._out = out
        self._metadata = rpc.metadata(settings)
        self._has_key = bool(auth.membership_key(settings))
        self._channels: dict[str, grpc.Channel] = {}

    def serve(self, kind: FrameKind, payload: bytes) -> None:
        """Answer one request."""
        try:
            said: dict[str, Any] = json.loads(payload)
            if kind is FrameKind.DESCRIBE:
                self._describe(said["hold_s"], said["timeout_s"])
            elif kind is FrameKind.READ_ATTACHED:
                wanted = shadow_pb2.AttachedRead(**said["request"])
                self._read(said["server"], lambda stub: stub.ReadAttached, wanted, said["timeout_s"])
            else:
                wanted_states = shadow_pb2.ShadowRead(**said["request"])
                self._read(said["server"], lambda stub: stub.Read, wanted_states, said["timeout_s"])
        except BytePSError as error:
            write_frame(self._out, FrameKind.ERROR, f"{type(error).__name__}\n{error}".encode())
        else:
            write_frame(self._out, FrameKind.END)

    def close(self) -> None:
        """End all connections."""
        for channel in self._channels.values():
            channel.close()

    def _check(self, server: str) -> None:
        """Raise RendezvousError if TLS does not prove the server and another user has its port. Call it also once an
        answer is there: the server may have ended, and its port may have been taken, just before the call."""
        if not self._has_key and not belongs_to_this_user(server):
            raise RendezvousError(
                f"what listens at {server} is not a server of this job: it does not run as this user. Set "
                "BYTEPS_SECRET, or start the job with bpslaunch -np, so that servers can prove who they are"
            )

    def _stub(self, server: str) -> shadow_pb2_grpc.ShadowStub:
        if server not in self._channels:
            self._channels[server] = rpc.open_channel(self._settings, server)
        return shadow_pb2_grpc.ShadowStub(self._channels[server])  # type: ignore[no-untyped-call]

    def _describe(self, hold_s: float, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        members = query.status(self._settings, timeout_s).members
        servers = sorted({each.member.shadow_address for each in members if each.alive and each.member.shadow_address})
        left_s = max(0.1, min(_SERVER_S, until_s - time.monotonic()))
        request = shadow_pb2.ShadowQuery(hold_s=hold_s)
        calls: dict[str, grpc.Future[shadow_pb2.ShadowChunk] | RendezvousError] = {}
        for server in servers:
            try:
                self._check(server)
                calls[server] = self._stub(server).Describe.future(request, timeout=left_s, metadata=self._metadata)
            except RendezvousError as error:
                calls[server] = error
        for server, call in calls.items():
            problem, description = "", ShadowDescription().pack()
            try:
                if isinstance(call, RendezvousError):
                    raise call
                try:
                    answer = call.result()
                except grpc.RpcError as error:
                    if not _may_come_back(error):
                        raise
                    time.sleep(_RETRY_S)
                    again_s = max(0.1, min(left_s, until_s - time.monotonic()))
                    answer = self._stub(server).Describe(request, timeout=again_s, metadata=self._metadata)
                self._check(server)
                description = answer.data
            except RendezvousError as error:
                problem = str(error)
            except grpc.RpcError as error:
                problem = str(_explained(server, error, left_s))
            write_frame(self._out, FrameKind.SERVER, json.dumps([server, problem]).encode())
            write_frame(self._out, FrameKind.DESCRIPTION, description)

    def _read(
        self, server: str, call_of: Callable[[shadow_pb2_grpc.ShadowStub], Any], request: Message, timeout_s: float
    ) -> None:
        """Pass the chunks on. ``call_of``: which call of a server brings them."""
        until_s = time.monotonic() + timeout_s
        has_come = False
        for tries_left in reversed(range(_TRIES)):
            left_s = max(0.1, until_s - time.monotonic())
            self._check(server)
            try:
                for chunk in call_of(self._stub(server))(request, timeout=left_s, metadata=self._metadata):
                    has_come = True
                    self._check(server)
                    write_frame(self._out, FrameKind.DATA, chunk.data)
                return
            except grpc.RpcError as error:
                if has_come or not tries_left or not _may_come_back(error):
                    raise _explained(server, error, timeout_s) from error
            time.sleep(_RETRY_S)


def _may_come_back(error: grpc.RpcError) -> bool:
    """The server may have ended an idle connection in this moment, or have more callers than it can serve."""
    return bool(error.code() is grpc.StatusCode.UNAVAILABLE)


def _explained(server: str, error: grpc.RpcError, waited_s: float) -> BytePSError:
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
        return CommunicationError(f"the server at {server}: {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return StallError(f"the server at {server} gave no answer within {waited_s:g} s")
    if code is grpc.StatusCode.UNAVAILABLE and rpc.is_of_another_cluster(error):
        return RendezvousError(f"what listens at {server} could not prove that it is a server of this job")
    if code is grpc.StatusCode.UNAVAILABLE:
        return PeerLostError(f"the server at {server} can't be reached: {rpc.reason(details)}")
    return CommunicationError(f"the server at {server} failed: {code.name}, {details}")


def main() -> int:
    """Answer requests until standard input ends. Exit status 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, whose end this process notices
    source, out = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of a library must not come between frames
    with contextlib.suppress(PeerLostError):
        _, payload = read_frame(source)
        caller = StatesCaller(jobs.with_local_secret(Settings(**json.loads(payload))), out)
        try:
            while True:
                caller.serve(*read_frame(source))
        finally:
            caller.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
