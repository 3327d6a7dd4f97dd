"""WebServer: uvicorn around an application, with a socket that is bound before anything is loaded.

`PatientProtocol` is uvicorn's HTTP/1.1 for clients that take a bounded time for the headers of a request.
Without a bound, connections that send a byte now and then take descriptors for as long as they like.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from coldstream.errors import ConfigError

# Bytes that are read before other connections are served: chunks of one byte take 15 us each.
MAX_READ_BYTES: Final = 1 << 14


class PatientProtocol(H11Protocol):
    """Answers 408 and closes if headers are not whole `slow_headers_s` after the connection or, on one that
    was used before, after their first byte.
    """

    def __init__(self, *arguments: Any, slow_headers_s: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._slow_headers_s = slow_headers_s
        self._headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        setattr(transport, "max_size", MAX_READ_BYTES)  # noqa: B010  asyncio's transports of sockets have it
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def _wait_for_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(self._slow_headers_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _give_up(self) -> None:
        self._headers_due = None
        if self.conn.their_state is not h11.IDLE or self.conn.our_state is not h11.IDLE:
            return
        headers = [(b"connection", b"close"), (b"content-length", b"0")]
        for event in (h11.Response(status_code=408, headers=headers), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


_BACKLOG: Final = 2048
# Connections that asyncio accepts at a time. Without descriptors it writes a line for each of them.
_ACCEPTED: Final = 1
_MAX_UNREAD_HEADERS: Final = 64 << 10  # bytes of a request before its headers are whole
_CLOSE_S: Final = 2  # for connections whose answers are whole, or ended early


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the caller's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, with the backlog that the sockets were given: asyncio sets it to `_ACCEPTED`."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)


class WebServer:
    """Serves `app` on a listening socket. For one event loop."""

    def __init__(self, app: ASGIApp, listener: socket.socket, slow_headers_s: float = 10.0) -> None:
        """slow_headers_s: that a client may take for the headers of a request."""
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=cast(Any, partial(PatientProtocol, slow_headers_s=slow_headers_s)),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=_MAX_UNREAD_HEADERS,
            backlog=_ACCEPTED,
        )
        self._listener = listener
        self._server = _Uvicorn(config)

    async def run(self) -> None:
        """Serve until `stop`, and until the answers under way are sent."""
        await self._server.serve([self._listener])

    def stop(self) -> None:
        """Listen no more, and leave `run` when the answers under way are sent."""
        self._server.should_exit = True

    async def force(self) -> None:
        """Leave `run` soon, whether or not answers are sent."""
        self._server.should_exit = True
        await asyncio.sleep(_CLOSE_S)
        self._server.force_exit = True
        for task in list(self._server.server_state.tasks):
            task.cancel()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any that is free. Raises ConfigError for what cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port} on {host} is in use: stop what uses it, or give another"
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"--port {port} is not for this user: give one from 1024 on") from error
        raise ConfigError(f"--host {host} cannot be listened on: {error.strerror}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client reaches a listening socket: of all addresses, the loopback one."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://{f'[{address}]' if address.version == 6 else address}:{port}"
