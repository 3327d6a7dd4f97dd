"""Serving over HTTP with an engine that follows a script: how it stops, whatever it is doing."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scripted_engine import FLOOD, WAIT

from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig
from coldstream.engine.limits import EngineLimits
from coldstream.server.http import ServerSettings
from coldstream.server.http.volatile_lines import DROPPED
from coldstream.server.log import Log
from coldstream.server.serving import Service, serve
from coldstream.server.web_server import bind, url_of

SCRIPT = Path(__file__).with_name("scripted_engine.py")


@dataclass
class Served:
    """A service under way in this process."""

    task: "asyncio.Task[int | None]"
    client: httpx2.AsyncClient
    log: int  # descriptor

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in os.pread(self.log, 1 << 20, 0).splitlines()]

    async def until(self, event: str) -> None:
        while event not in self.events():
            await asyncio.sleep(0)
            await asyncio.to_thread(os.sched_yield)


Begin = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    @asynccontextmanager
    async def begun(
        word: str, *, drop_volatile: bool = False, model: Path | None = None, **settings: Any
    ) -> AsyncIterator[Served]:
        script = tmp_path / "script"
        script.write_text(word)
        service = Service(
            name="demo",
            config=EngineConfig(str(model or demo_model_path())),
            limits=EngineLimits(),
            settings=ServerSettings(drop_volatile=drop_volatile),
            command=(sys.executable, str(SCRIPT), str(script)),
            **settings,
        )
        descriptor = os.memfd_create("log")
        listener = bind("127.0.0.1", 0)
        url = url_of(listener)
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
                with Log(descriptor, "json") as log:
                    task = asyncio.create_task(serve(service, listener, log, lambda *progress: None))
                    served = Served(task, client, descriptor)
                    yield served
                    await served.task
        finally:
            listener.close()
            os.close(descriptor)

    return begun


def prompt(first: int, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": [first, 5], "max_tokens": 3000, "stream": True, **more}


async def test_pr01_sigterm_while_loading_ends_at_once_and_leaves_nothing(begin: Begin) -> None:
    async with begin("hang") as served:
        while (answer := await served.client.get("/health")).status_code != 503:
            continue
        assert int(answer.headers["retry-after"]) >= 1
        signal.raise_signal(signal.SIGTERM)
        assert await served.task is None
        assert "ready" not in served.events()


@pytest.mark.sharded(of="processes")
async def test_pr01_what_is_not_finished_in_time_ends_with_an_error_in_its_stream(begin: Begin) -> None:
    async with begin("serve", drain_s=0.0) as served:
        await served.until("ready")
        async with served.client.stream("POST", "/v1/completions", json=prompt(WAIT)) as stream:
            signal.raise_signal(signal.SIGTERM)
            rest = (await stream.aread()).decode()
        assert "server stops" in rest
        assert rest.count('"error"') == 1
        assert await served.task is None


@pytest.mark.sharded(of="processes")
async def test_pr01_readers_that_have_stopped_do_not_hold_up_the_end(begin: Begin) -> None:
    async with begin("serve", drain_s=0.0, close_s=0.0) as served:
        await served.until("ready")
        body = json.dumps(prompt(FLOOD)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", served.client.base_url.port or 0)) as stopped:
            stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stopped.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            loop = asyncio.get_running_loop()
            stopped.setblocking(False)
            assert (await loop.sock_recv(stopped, 12)).endswith(b"200")
            signal.raise_signal(signal.SIGTERM)
            assert await served.task is None


async def test_the_second_signal_is_reported_to_the_caller(begin: Begin) -> None:
    async with begin("serve") as served:
        await served.until("ready")
        async with served.client.stream("POST", "/v1/completions", json=prompt(WAIT)) as stream:
            signal.raise_signal(signal.SIGINT)
            await served.until("stopping")
            signal.raise_signal(signal.SIGTERM)
            assert "server stops" in (await stream.aread()).decode()
        assert await served.task == signal.SIGTERM


@pytest.mark.sharded(of="processes")
async def test_a_server_that_drops_lines_says_which_at_its_start(begin: Begin) -> None:
    async with begin("serve", drop_volatile=True) as served:
        await served.until("drops")
        line = os.pread(served.log, 1 << 20, 0).decode()
        assert all(each.what in line.replace("\\", "") for each in DROPPED)
        signal.raise_signal(signal.SIGTERM)
        assert await served.task is None
    async with begin("serve") as served:
        await served.until("ready")
        signal.raise_signal(signal.SIGTERM)
        assert await served.task is None
        assert "drops" not in served.events()


@pytest.mark.sharded(of="processes")
async def test_a_model_that_sleeps_has_a_line_for_each_change_and_a_failure_is_an_answer(
    begin: Begin,
) -> None:
    async with begin("serve\nfail\nserve", idle_unload_s=1e-3) as served:
        await served.until("unloaded")
        short = {"model": "demo", "prompt": [5, 6], "max_tokens": 3}
        while (refused := await served.client.post("/v1/completions", json=short)).status_code == 200:
            continue  # it came before the model was unloaded
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory")
        assert "retry-after" in refused.headers
        assert (await served.client.get("/health")).json()["status"] == "ok"
        assert (await served.client.get("/v1/models")).status_code == 200
        answered = await served.client.post("/v1/completions", json=short)
        assert answered.json()["choices"][0]["text"] == "5 6 5 "
        await served.until("loaded_again")
        signal.raise_signal(signal.SIGTERM)
        assert await served.task is None
        said = [event for event in served.events() if event in ("unloaded", "not_loaded", "loaded_again")]
        assert said[:3] == ["unloaded", "not_loaded", "loaded_again"]
        lines = os.pread(served.log, 1 << 20, 0).decode()
        assert "could not be loaded again: needs 9 GiB" in lines
        assert "engine_lost" not in served.events()


@pytest.mark.sharded(of="processes")
async def test_a_server_whose_model_has_changed_calls_itself_unhealthy_and_says_why(
    begin: Begin, tmp_path: Path
) -> None:
    model = Path(shutil.copy(demo_model_path(), tmp_path / "model.gguf"))
    async with begin("serve", model=model) as served:
        await served.until("ready")
        assert (await served.client.get("/health")).status_code == 200
        os.utime(model, ns=(0, 0))
        model.write_bytes(model.read_bytes())
        while (health := await served.client.get("/health")).status_code == 200:
            continue
        found = health.json()
        assert (found["status"], found["restarts"]) == ("failed", 1)
        assert "model.gguf was written to while in use" in found["error"]["message"]
        assert str(tmp_path) not in health.text
        refused = await served.client.post("/v1/completions", json=prompt(5))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        await served.until("engine_lost")
        line = os.pread(served.log, 1 << 20, 0).decode()
        assert f"the engine is lost: {model} was written to while in use" in line
        assert "back in about" not in line
        signal.raise_signal(signal.SIGTERM)
        assert await served.task is None


@pytest.mark.sharded(of="processes")
async def test_a_model_that_does_not_open_is_raised_and_nothing_listens(begin: Begin) -> None:
    async with begin("fail") as served:
        with pytest.raises(Exception, match="needs 9 GiB"):
            await served.task
        with pytest.raises(httpx2.ConnectError):
            await served.client.get("/health")
        served.task = asyncio.create_task(asyncio.sleep(0, None))
