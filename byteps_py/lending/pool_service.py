"""The pool's process, and requests to it: gRPC with the certificates and tokens that are derived from the cluster
secret, as on the control plane. Requests and answers are JSON. One asyncio thread; ``ask`` is for any thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from byteps_py.config.addresses import joined, place_given
from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, ConfigurationError, RendezvousError, StallError, UsageError
from byteps_py.lending.pool import JobRequest, LendingOffer, LendingPool
from byteps_py.scheduler import rpc
from byteps_py.scheduler.call_authenticator import CallAuthenticator
from byteps_py.scheduler.service import listening_address
from byteps_py.system.log import logger

_SERVICE = "byteps.Pool"
_JOB_ID = "byteps pool"  # a pool is authenticated as a job of this name would be
_STOP_GRACE_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
Values = Mapping[str, Any]


def pool_settings(address: str) -> Settings:
    """The settings for the pool at ``address``, HOST:PORT. Raises ConfigurationError, also without a cluster secret."""
    host, port = place_given("--pool", address)
    settings = Settings.from_env()
    if not settings.secret:
        raise ConfigurationError(
            "a pool, its lenders and its jobs prove by the cluster secret that they belong together: set BYTEPS_SECRET "
            "or BYTEPS_SECRET_FILE to the same value for all of them"
        )
    return dataclasses.replace(settings, scheduler_host=host, scheduler_port=port, job_id=_JOB_ID)


def ask(settings: Settings, method: str, values: Values, timeout_s: float = 5.0) -> Any:
    """One request. ``settings``: of ``pool_settings``.

    Raises RendezvousError (no pool there, or another secret), StallError (no answer in time), UsageError (the pool
    refuses).
    """
    where = settings.scheduler_address
    with rpc.open_channel(settings) as channel:
        call = channel.unary_unary(f"/{_SERVICE}/{method}", _as_json, json.loads)
        try:
            answer = call(values, timeout=timeout_s, metadata=rpc.metadata(settings))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise StallError(f"the pool at {where} gave no answer within {timeout_s:g} s: is it frozen?") from error
            raise RendezvousError(
                f"no pool answers at {where}: start it (bps pool --listen {where}), and check that BYTEPS_SECRET is "
                f"the same here and there, and that no firewall is in between ({rpc.reason(error.details() or '')})"
            ) from error
    if isinstance(answer, dict) and "error" in answer:
        raise UsageError(answer["error"])
    return answer


def _as_json(values: object) -> bytes:
    return json.dumps(values).encode()


class PoolService:
    """Serves one pool at the address of ``settings``. ``run`` may be called once."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._pool = LendingPool()
        self._authenticator = CallAuthenticator(settings)
        self._said: dict[str, object] = {}

    async def run(self) -> None:
        """Listen until SIGTERM or SIGINT. Raises ConfigurationError if the address can't be used."""
        host, port = listening_address(self._settings)
        try:
            server, _ = self._authenticator.new_server(joined(host, port))
        except RuntimeError as error:
            raise ConfigurationError(f"the pool can't listen on {joined(host, port)}: {error}") from error
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(answer))
            for name, answer in (
                ("Lend", self._lend), ("Leave", self._leave), ("Borrow", self._borrow), ("Scale", self._scale),
                ("End", self._end), ("Status", self._status),
            )
        }  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        await server.start()
        self._authenticator.watch()
        logger.warning("a pool at %s", joined(host, port))
        try:
            await over.wait()
        finally:
            self._authenticator.unwatch()
            await server.stop(_STOP_GRACE_S)

    def _handler(self, answer: Callable[[Values], Any]) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handle(request: bytes, context: Context) -> bytes:
            await self._authenticator.authenticate(context)
            try:
                found = answer(json.loads(request))
            except (BytePSError, TypeError, KeyError, ValueError) as error:
                found = {"error": str(error)}
            self._log_changes()
            return _as_json(found)

        return handle

    def _lend(self, values: Values) -> list[dict[str, Any]]:
        return [dataclasses.asdict(job) for job in self._pool.lend(LendingOffer(**values), self._clock())]

    def _leave(self, values: Values) -> dict[str, Any]:
        self._pool.leave(values["name"], self._clock())
        return {}

    def _borrow(self, values: Values) -> dict[str, Any]:
        return dataclasses.asdict(self._pool.borrow(JobRequest(**values), self._clock()))

    def _scale(self, values: Values) -> dict[str, Any]:
        return dataclasses.asdict(self._pool.scale(values["scheduler"], int(values["servers"]), self._clock()))

    def _end(self, values: Values) -> dict[str, Any]:
        self._pool.end(values["scheduler"], self._clock())
        return {}

    def _status(self, values: Values) -> dict[str, Any]:
        return dict(self._pool.status(self._clock()))

    def _log_changes(self) -> None:
        """Log which lender serves which job, if that has changed."""
        now = {each["name"]: each["serves"] for each in self._pool.status(self._clock())["lenders"]}  # type: ignore[attr-defined]
        for name in sorted(now.keys() | self._said.keys()):
            if now.get(name) != self._said.get(name):
                what = f"serves {', '.join(now[name]) or 'nobody'}" if name in now else "has gone"
                logger.warning("lender %s %s", name, what)
        self._said = now
