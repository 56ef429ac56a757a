"""Calls whose request does not come: they end soon, and with them the connection of who has nothing else to say.

gRPC waits for a request as long as its connection lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

#: Together with the time that an idle connection has (rpc.py), less than the 5 s that strangers have.
PATIENCE_S = 2.0


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """For a server's calls with a single request and a single answer."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)  # a grpc.RpcMethodHandler, or None for what is unknown
        if handler is None or handler.unary_unary is None:
            return handler

        async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    request = await anext(aiter(requests))
            except (TimeoutError, StopAsyncIteration):
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the call came without its request")
            return await handler.unary_unary(request, context)

        # On the wire they are alike. But a stream's handler runs before there is a request.
        return grpc.stream_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)
