"""EngineChild: one engine process from its start to its end, seen from the event loop of the API process."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Final, Self

from coldstream import __version__
from coldstream.errors import ColdstreamError, GenerationFault
from coldstream.server.codec import decode
from coldstream.server.messages import FromEngine, ToEngine, framed, payload_length

ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "coldstream.server.engine_process")
END_S: Final = 2.0  # for leaving after the socket is closed
_BURST_BYTES: Final = 1 << 16  # bytes that are read before other tasks run


class EngineChild:
    """A running process and its socket. For one event loop, in the thread that started it: the kernel ends
    the process with that thread.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str] = ENGINE_COMMAND) -> Self:
        """Start `command` with the numbers of its socket and of this process, and the package's version.

        Raises GenerationFault.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(*command, str(theirs.fileno()), str(os.getpid()), __version__),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    process_group=0,  # out of reach of a terminal's Ctrl-C
                )
            reader, writer = await asyncio.open_connection(sock=ours, limit=_BURST_BYTES)
        except BaseException as error:
            ours.close()  # a process that is there already leaves
            if isinstance(error, OSError):
                raise GenerationFault(f"no process to compute in: {error}") from error
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send a message, or keep it until the socket takes it. A dead process loses it.

        Raises ProtocolError if it is too large or no data; nothing was sent then.
        """
        frame = framed(message, ToEngine)
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def messages(self) -> AsyncIterator[FromEngine]:
        """Each message, until the process closes the socket.

        Raises ProtocolError for what is no message.
        """
        burst = 0
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = payload_length(await self._reader.readexactly(4))
                message: FromEngine = decode(await self._reader.readexactly(length), FromEngine)
                burst += length
                if burst >= _BURST_BYTES:
                    burst = 0
                    await asyncio.sleep(0)
                yield message

    def leave(self) -> None:
        """Let the process leave by itself, with nothing more to do; `messages` ends then."""
        self._writer.close()

    def kill(self) -> None:
        """End the process, whatever it does; `messages` ends then."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, grace_s: float = END_S) -> int:
        """Close the socket, wait up to `grace_s` for the process to leave, and end it if it does not.

        Returns its exit code, negative for a signal.
        """
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        if grace_s > 0:
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        return await self._process.wait()


def cause_of_death(code: int, last: ColdstreamError | None) -> ColdstreamError:
    """Why a process ended, by the error that it sent last or its exit code."""
    if last is not None:
        return last
    how = f"signal {-code}" if code < 0 else f"status {code}"
    return GenerationFault(f"the engine process ended with {how}")
