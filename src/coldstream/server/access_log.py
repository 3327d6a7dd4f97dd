"""AccessLog: one line a request, at its end."""

import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coldstream.server.log import Log

_QUIET_PATHS: Final = frozenset({"/health", "/live", "/metrics"})  # that machines ask every few seconds
_QUIET_STATUSES: Final = (200, 503)  # the log says once when the engine is lost
CLIENT_GONE: Final = 499  # as nginx calls a request whose client left before its answer began


class AccessLog:
    """Logs method, path, status and time of each request; nothing of its query, headers or body."""

    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status, is_whole = CLIENT_GONE, False

        async def watched(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if scope["path"] not in _QUIET_PATHS or status not in _QUIET_STATUSES:
                self._write(scope, status, is_whole, time.monotonic() - started)

    def _write(self, scope: Scope, status: int, is_whole: bool, duration_s: float) -> None:
        method, path = scope["method"], scope["path"]
        ending = "" if is_whole else " cut off"
        self._log.write(
            "info" if status < 500 else "error",
            "request",
            f"{method} {path} {status}{ending} {duration_s:.3f} s",
            method=method,
            path=path[:200],
            status=status,
            complete=is_whole,
            duration_s=round(duration_s, 6),
        )
