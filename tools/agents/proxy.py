"""A recording proxy between a coding agent and `coldstream serve`.

Every request goes to the server as the agent wrote it, and its status is recorded. If it is refused, the
agent gets the refusal. If it is served, the agent gets the server's answer to another, small request
(`steps.py`), because the bundled model would never call a tool that makes sense, nor end a text soon.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tools.agents.steps import Say, Step, demanded

ANSWERING: Final = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
PASSED_ON: Final = ("accept", "authorization", "content-type", "x-api-key")  # of a request's headers
BEGUN: Final = 3  # events of a stream, pings apart: then the model has begun to answer
START_S: Final = 30.0
OTHERWISE: Final = Say("All is said.")  # where no step is due, as for titles and summaries


@dataclass(frozen=True)
class Exchange:
    """One request of an agent and how the server answered it."""

    method: str
    path: str
    body: Any  # the JSON value; None without one
    status: int
    error: str  # what the server said of a refused request, or in the middle of a stream
    seconds: float
    step: Step | None  # that the answer takes; None for a refused request and for one that asks for no answer


class Proxy:
    """The proxy, which listens on a free port of 127.0.0.1 while its block lasts."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._exchanges: list[Exchange] = []
        self._steps: deque[Step] = deque()
        routes = [Route("/{path:path}", self._answer, methods=["GET", "HEAD", "POST"])]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", lifespan="off")
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._uvicorn.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the proxy does not listen")
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._uvicorn.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def expect(self, steps: Iterable[Step]) -> None:
        """Answer the next requests of the conversation with `steps`, and drop what is left of others."""
        self._steps = deque(steps)

    def taken(self) -> tuple[list[Exchange], list[Step]]:
        """The exchanges since the last call, and the steps that no request has asked for."""
        exchanges, self._exchanges = self._exchanges, []
        return exchanges, list(self._steps)

    async def _answer(self, request: Request) -> Response:
        content, start = await request.body(), time.monotonic()
        body: Any = json.loads(content) if content else None
        async with httpx2.AsyncClient(timeout=None, trust_env=False) as client:
            response = await self._sent(client, request, content)
            is_answer = request.url.path in ANSWERING and response.status_code == 200
            error = await (_failure(response) if is_answer else _refusal(response))
            step = self._due(body) if is_answer else None
            path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            took = time.monotonic() - start
            self._exchanges.append(
                Exchange(request.method, path, body, response.status_code, error, took, step)
            )
            if step is not None:
                response = await self._sent(
                    client, request, json.dumps(demanded(request.url.path, body, step)).encode()
                )
            found = await response.aread()
        return Response(found, response.status_code, media_type=response.headers.get("content-type"))

    def _due(self, body: dict[str, Any]) -> Step:
        """The next step for a request of the conversation, which is one with tools."""
        return self._steps.popleft() if body.get("tools") and self._steps else OTHERWISE

    async def _sent(self, client: httpx2.AsyncClient, request: Request, content: bytes) -> httpx2.Response:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers |= {name: value for name, value in request.headers.items() if name.startswith("anthropic-")}
        path = httpx2.URL(self._server_url).join(request.url.path).copy_with(query=request.url.query.encode())
        sent = client.build_request(request.method, path, headers=headers, content=content)
        return await client.send(sent, stream=True)


async def _refusal(response: httpx2.Response) -> str:
    """What the server says of a request that it does not serve. Reads all of it."""
    text = (await response.aread()).decode(errors="replace")
    return text if response.status_code >= 400 else ""


async def _failure(response: httpx2.Response) -> str:
    """An error in an answer, of a stream up to the model's first words, as nobody needs the rest."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        await response.aread()
        return ""
    num_events = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            return line
        num_events += event.get("type") != "ping"
        if num_events == BEGUN:
            break
    await response.aclose()
    return ""
