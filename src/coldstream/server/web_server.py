"""WebServer: uvicorn around an application, with a socket that is bound before anything is loaded."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp

from coldstream.errors import ConfigError
from coldstream.server.patient_protocol import PatientProtocol

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
