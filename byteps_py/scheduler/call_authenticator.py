"""Who may call a gRPC server of this package: processes that know the cluster secret. Others cost little.

A server's asyncio thread calls these methods, but for ``handshake_begins``. The limits are in connection_limits.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from byteps_py import auth
from byteps_py.refusal_log import RefusalLog
from byteps_py.scheduler import connection_limits, rpc
from byteps_py.scheduler.connection_limits import GrpcConnections, address_of
from byteps_py.settings import Settings

_OF_THIS_CLUSTER = "knows the cluster secret (BYTEPS_SECRET or BYTEPS_SECRET_FILE, the same everywhere)"

Context = grpc.aio.ServicerContext[Any, Any]


class CallAuthenticator:
    """The callers of one server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._refusals = RefusalLog()
        self._connections = GrpcConnections(0)
        self._watching: asyncio.Task[None] | None = None

    def new_server(self, address: str) -> tuple[grpc.aio.Server, int]:
        """A server that will listen on ``address``, ``host:port``, and its port. Raises RuntimeError if it can't."""
        server = grpc.aio.server(interceptors=[connection_limits.RequestTimeout()], options=rpc.server_options())
        port = rpc.add_port(server, address, self._settings, self._connections.handshake_begins)
        self._connections.listens_at(port)
        return server, port

    def watch(self) -> None:
        """Begin to cut off connections that are not authenticated in time, in the running asyncio loop."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._connections.look())

    def unwatch(self) -> None:
        """End what ``watch`` began."""
        if self._watching is not None:
            self._watching.cancel()

    def note_refused(self) -> None:
        """Log the connections that have ended without a valid token."""
        for address in self._connections.take_refused():
            self._note(address, f"it has not proven that it {_OF_THIS_CLUSTER}")
        self._refusals.tick()

    def _note(self, address: str, why: str) -> None:
        self._refusals.note(address, address.rpartition(":")[0], why)

    async def authenticate(self, context: Context) -> None:
        """End a call that shows no valid token."""
        shown = dict(context.invocation_metadata() or ()).get(rpc.TOKEN_KEY, "")
        if not auth.is_valid(str(shown), self._settings, "control"):
            why = "the cluster secrets or the jobs differ" if shown else "it shows no cluster secret"
            self._connections.explained(context.peer())
            self._note(address_of(context.peer()), why)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{why}: set the same BYTEPS_SECRET or BYTEPS_SECRET_FILE, and the same BYTEPS_JOB_ID or scheduler "
                "address, everywhere",
            )
        self._connections.admit(context.peer())
