"""The API process's end of an engine process."""

import asyncio
import os
import socket
from typing import Any

import pytest

from coldstream.errors import GenerationFault
from coldstream.server import engine_child
from coldstream.server.engine_child import EngineChild
from coldstream.server.messages import FromEngine, Loading, framed


async def test_a_command_that_cannot_be_started_is_an_error_and_leaves_nothing_open() -> None:
    errors = []  # one that is kept holds the frames that it went through
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(GenerationFault, match=r"no process to compute in: .*No such file") as caught:
            await EngineChild.start(("/no/such/command",))
        errors.append(caught)
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_a_start_that_is_given_up_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that only the collector of cycles would close, which the product stops while it starts."""
    made = list[socket.socket]()

    def make_pair() -> tuple[socket.socket, socket.socket]:
        made.extend(make())
        return made[0], made[1]

    async def start_nothing(*command: str, **options: object) -> None:
        started.set()
        await asyncio.Event().wait()

    make, started = socket.socketpair, asyncio.Event()
    monkeypatch.setattr(socket, "socketpair", make_pair)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_nothing)
    starting = asyncio.create_task(EngineChild.start(("engine",)))
    await started.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [each.fileno() for each in made] == [-1, -1]


async def test_a_burst_of_messages_lets_other_tasks_have_their_turn() -> None:
    """They are all there, so that no read of them waits."""
    frame = framed(Loading("x" * 4000, 1, 2), FromEngine)
    count = 10 * engine_child._BURST_BYTES // len(frame)
    reader = asyncio.StreamReader()
    reader.feed_data(frame * count)
    reader.feed_eof()
    nothing: Any = None
    child = EngineChild(nothing, reader, nothing)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    messages = [message async for message in child.messages()]
    other.cancel()
    assert len(messages) == count
    assert 5 <= turns <= 20
