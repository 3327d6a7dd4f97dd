"""PatientProtocol: uvicorn's HTTP/1.1, for clients that take a bounded time for the headers of a request.

Without a bound, connections that send a byte now and then take descriptors for as long as they like.
"""

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Of what has come that are read before others have their turn: chunks of one byte take 15 us each.
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
