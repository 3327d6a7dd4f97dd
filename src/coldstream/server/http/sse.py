"""Responses that end with their connection. The framing of server-sent events is FastAPI's."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

import anyio
from fastapi.sse import EventSourceResponse, format_sse_event
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE: Final = format_sse_event(comment="keep-alive")
DONE: Final = format_sse_event(data_str="[DONE]")
CLIENT_CLOSED_REQUEST: Final = 499

T = TypeVar("T")


def json_bytes(value: Any) -> bytes:
    """A value as JSON. Numbers that JSON has not, such as those of an echoed schema, are null."""
    return to_json(value, inf_nan_mode="null")


def sse(value: Any, event: str | None = None) -> bytes:
    """One event with a JSON value."""
    return format_sse_event(data_str=json_bytes(value).decode(), event=event)


class StreamedAnswer(EventSourceResponse):
    """Sends `events`, and calls `close` however that ends. It ends by itself, by a client that goes away, or
    by one that leaves data unread for `slow_reader_s`.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        slow_reader_s: float,
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._close = close
        self._slow_reader_s = slow_reader_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(self._send_all(send), receive)
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            async for chunk in self._events:
                with anyio.move_on_after(self._slow_reader_s) as patience:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if patience.cancelled_caught:
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond_unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes. It is cancelled when the client goes away before.

    It is all that a route does: what nobody waits for any more is neither read nor given to the engine.
    """
    response = await _unless_gone(work, request.receive)
    return response or Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`; None once the client has gone, `work` being cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
