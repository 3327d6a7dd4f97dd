"""A server under mixed traffic for a while: whether every answer is as it should be, and nothing grows.

    python -m tests.audits.soak --minutes 30 --out docs/results/soak.json

Clients send what people and agents send, each kind at random: chats, streams, streams that are given up,
calls of tools, answers of a JSON schema, prompts with a long beginning in common, Anthropic's messages,
requests that must be refused, and a golden one whose answer must never change. Memory, descriptors and
threads of both processes are noted meanwhile. A result with `faults`, or with growth beyond its limit, fails.

The model is the bundled one with a chat template that has tools. Memory is compared between the second and
the last quarter of the time, by medians: the first quarter fills caches.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil

from bench.results import write_result
from bench.serving.served import Served, engine_of, model_with_tools, served, until_idle
from coldstream.placement.hardware import Hardware

CONTEXT, PARALLEL = 2048, 4
MAX_GROWTH_BYTES: Final = 16 << 20  # of each process, between the quarters that are compared
MAX_GROWTH_COUNT: Final = 4  # of descriptors and of threads: connections come and go
REQUEST_S: Final = 300.0
SHARED: Final = "import os\nimport sys\n\n\ndef read_lines(path):\n    with open(path) as file:\n" * 12
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 8}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
# Each must be refused with this status.
BAD: Final[Sequence[tuple[str, bytes, int]]] = (
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -2}', 400),
    ("/v1/completions", json.dumps({"prompt": "a " * 9000}).encode(), 400),
    ("/v1/completions", b'{"prompt": "a", "model": "../other"}', 404),
    ("/v1/embeddings", b'{"input": "a"}', 404),
)


@dataclass(frozen=True)
class Sample:
    """What both processes hold at a moment."""

    at_s: float  # since the traffic began
    requests: int  # that have ended
    api_rss: int  # bytes
    api_descriptors: int
    api_threads: int
    engine_rss: int
    engine_descriptors: int
    engine_threads: int


class Fault(Exception):
    """An answer that is not as it should be."""


class Traffic:
    """Requests of all kinds to one server."""

    def __init__(self, http: httpx2.AsyncClient, seed: int) -> None:
        self._http = http
        self._random = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.faults: list[str] = []
        self._golden: str | None = None
        self._kinds: Mapping[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "chat": (4, self.chat),
            "stream": (4, self.stream),
            "given up": (2, self.give_up),
            "tool": (2, self.tool),
            "schema": (2, self.schema),
            "shared prefix": (4, self.shared_prefix),
            "messages": (2, self.messages),
            "bad": (2, self.bad),
            "golden": (1, self.golden),
        }

    async def go_on(self, until: float) -> None:
        """One client: the next request when the last has ended, until `time.monotonic()` says `until`."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while time.monotonic() < until:
            (name,) = self._random.choices(names, weights)
            try:
                await self._kinds[name][1]()
            except (Fault, httpx2.HTTPError, KeyError, IndexError, ValueError) as error:
                self.faults.append(f"{name}: {type(error).__name__}: {error}"[:300])
            self.ended[name] += 1

    async def chat(self) -> None:
        answer = await self._post("/v1/chat/completions", self._chat())
        if answer["choices"][0]["finish_reason"] not in ("stop", "length"):
            raise Fault(str(answer["choices"][0]))

    async def stream(self) -> None:
        """A whole stream: as many pieces as it says, and its end."""
        body = {"prompt": self._text(), "max_tokens": self._random.randint(1, 64), "ignore_eos": True}
        lines = await self._lines("/v1/completions", {**body, "stream": True}, None)
        *pieces, last = lines
        # The text of a piece may be the word "error", so that its line has it in quotes.
        errors = [piece for piece in pieces if "error" in json.loads(piece)]
        if errors or last != "[DONE]":
            raise Fault(f"a stream with {(errors or lines)[-1]}")

    async def give_up(self) -> None:
        """A stream whose reader leaves after some pieces."""
        body = {"prompt": self._text(), "max_tokens": 1500, "ignore_eos": True, "stream": True}
        await self._lines("/v1/completions", body, self._random.randint(0, 20))

    async def tool(self) -> None:
        more = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
        answer = await self._post("/v1/chat/completions", self._chat(**more))
        choice = answer["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["path"]
        elif choice["finish_reason"] != "length":
            raise Fault(str(choice))

    async def schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
        more = {"response_format": form, "max_tokens": 120, "enable_thinking": False}
        answer = await self._post("/v1/chat/completions", self._chat(**more))
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"])["size"] not in (
            1,
            2,
            3,
        ):
            raise Fault(str(choice))

    async def shared_prefix(self) -> None:
        body = {"prompt": SHARED + self._text(), "max_tokens": 8}
        usage = (await self._post("/v1/completions", body))["usage"]
        if usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"]:
            raise Fault(str(usage))

    async def messages(self) -> None:
        body = {"messages": [{"role": "user", "content": self._text()}], "max_tokens": 16}
        answer = await self._post("/v1/messages", body)
        if answer["type"] != "message":
            raise Fault(str(answer))

    async def bad(self) -> None:
        path, body, status = self._random.choice(BAD)
        response = await self._http.post(path, content=body, headers={"Content-Type": "application/json"})
        if response.status_code != status or "error" not in response.json():
            raise Fault(f"{response.status_code} for {body[:60]!r}")

    async def golden(self) -> None:
        """A fixed prompt and seed, whose text is the same beside whatever else."""
        body = {"prompt": "class Point:\n", "max_tokens": 24, "temperature": 0.8, "seed": 7}
        text = (await self._post("/v1/completions", body))["choices"][0]["text"]
        if self._golden is None:
            self._golden = text
        if text != self._golden:
            raise Fault(f"{text!r} instead of {self._golden!r}")

    def _text(self) -> str:
        words = ["def", "class", "import", "return", "self", "path", "for", "in", "os", "x", "=", "("]
        return " ".join(self._random.choices(words, k=self._random.randint(3, 150))) + "\n"

    def _chat(self, **more: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": self._text()}], "temperature": 0.8, "max_tokens": 32}
        return {**body, "seed": self._random.randrange(1000), **more}

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        response = await self._http.post(path, json=body)
        if response.status_code != 200:
            raise Fault(f"{response.status_code}: {response.text[:200]}")
        return response.json()

    async def _lines(self, path: str, body: Mapping[str, Any], most: int | None) -> list[str]:
        """The data of a stream's events, up to `most`."""
        found: list[str] = []
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise Fault(f"{response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    found.append(line.removeprefix("data: "))
                if most is not None and len(found) >= most:
                    break
        return found


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """By name of a figure, how much its median rose from the second to the last quarter of the samples."""
    quarter = len(samples) // 4
    before, after = samples[quarter : 2 * quarter], samples[-quarter:]
    names = [field.name for field in fields(Sample) if "_" in field.name and field.name != "at_s"]
    return {
        name: statistics.median(getattr(each, name) for each in after)
        - statistics.median(getattr(each, name) for each in before)
        for name in names
    }


def complaints(grown: Mapping[str, float]) -> list[str]:
    """What grew more than its limit."""
    return [
        f"{name} grew by {value:.0f}"
        for name, value in grown.items()
        if value > (MAX_GROWTH_BYTES if name.endswith("_rss") else MAX_GROWTH_COUNT)
    ]


def sample(api: psutil.Process, engine: psutil.Process, at_s: float, requests: int) -> Sample:
    held = [(each.memory_info().rss, each.num_fds(), each.num_threads()) for each in (api, engine)]
    return Sample(at_s, requests, *held[0], *held[1])


async def drive(server: Served, seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """The traffic, and what was seen meanwhile and after it."""
    api = server.api
    engine = engine_of(api)
    samples: list[Sample] = []
    limits = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx2.AsyncClient(base_url=server.url, timeout=REQUEST_S, limits=limits) as http:
        traffic = Traffic(http, seed)
        start = time.monotonic()

        async def look() -> None:
            while True:
                samples.append(sample(api, engine, time.monotonic() - start, traffic.ended.total()))
                await asyncio.sleep(seconds / 120)

        looking = asyncio.create_task(look())
        await asyncio.gather(*(traffic.go_on(start + seconds) for _ in range(clients)))
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        left = await until_idle(http)
        props = (await http.get("/props")).json()
    faults = list(traffic.faults)
    if left:
        faults.append(f"{left} answers never ended")
    if engine_of(api).pid != engine.pid or props["restarts"]:
        faults.append("the engine was started again")
    grown = growth(samples)
    return {
        "seconds": seconds,
        "clients": clients,
        "requests": dict(sorted(traffic.ended.items())),
        "faults": faults,
        "growth": grown,
        "grown_too_much": complaints(grown),
        "statistics": {
            name: props["statistics"][name] for name in ("generated_tokens", "cancelled_requests")
        },
        "samples": [asdict(each) for each in samples],
    }


def soak(seconds: float, clients: int, threads: int, seed: int) -> dict[str, Any]:
    """A server from its start to its end, with its exit code among the faults if it is not 0."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--ctx-size", str(CONTEXT), "--threads", str(threads)]
        options += ["--parallel", str(PARALLEL), "--prompt-cache", "16M"]
        with served(model_with_tools(folder), folder / "log", *options) as server:
            result = asyncio.run(drive(server, seconds, clients, seed))
        if server.exit_code != 0:
            result["faults"].append(f"the server left with {server.exit_code}")
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = soak(60 * options.minutes, options.clients, options.threads, options.seed)
    command = f"python -m tests.audits.soak --minutes {options.minutes:g}"
    write_result({"command": command, "cpu": Hardware.measure().cpu_name, **result}, options.out)
    bad = [*result["faults"], *result["grown_too_much"]]
    print("\n".join(bad) or "as it should be", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
