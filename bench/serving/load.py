"""A server under load on the CPU, beside llama.cpp's server with as many slots, interleaved.

    python -m bench.serving.load --out docs/results/serving.json

Clients ask for completions of source code over HTTP. *Closed loop*: each of N clients sends its next request
when the last one is answered; all N are interleaved, as a machine is not equally fast at all times. *Open
loop*: requests arrive at random times, half as many again as the server
answers in the closed loop; each is answered or refused (429). *First token*: short streams, alone and beside
a long prompt. The clients run on the same cores: what these spend on them is distinguished.
"""

import argparse
import asyncio
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx2
import psutil

from bench.results import write_result
from coldstream.assets import demo_model_path
from coldstream.placement.hardware import Hardware
from tools.train_demo.data import load_corpus

NEW_TOKENS = 64
PROMPT_CHARS, LONG_CHARS = 400, 9000
START_S = 60
# What the peer runs: its server listens on a port of its own choice, which it prints.
PEER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_ctx = int(sys.argv[4])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.cont_batching = params.cache_prompt = params.kv_unified = True
params.port = int(sys.argv[5])
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Load:
    """What came of some seconds of requests."""

    seconds: float
    answered: int
    refused: int
    lost: int  # neither answered nor refused
    tok_s: float
    p50_s: float
    p95_s: float
    server_cores: float  # that all processes of the server kept busy
    client_cores: float  # that this benchmark did beside them


class Texts:
    """Prompts that do not repeat, so that none of them is found in a cache."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._files = [file.text for file in load_corpus().held_out if len(file.text) > 2 * LONG_CHARS]

    def some(self, num_chars: int) -> str:
        text = self._random.choice(self._files)
        start = self._random.randrange(len(text) - num_chars)
        return text[start : start + num_chars]


class Client:
    """Requests to one server."""

    def __init__(self, url: str, texts: Texts, pid: int) -> None:
        """pid: of the server's first process, on this machine."""
        self._process = psutil.Process(pid)
        limits = httpx2.Limits(max_connections=512, max_keepalive_connections=512)
        self.http = httpx2.AsyncClient(base_url=url, timeout=600, limits=limits)
        self.texts = texts

    def body(self, num_chars: int, **more: Any) -> dict[str, Any]:
        return {
            "prompt": self.texts.some(num_chars),
            "max_tokens": NEW_TOKENS,
            "temperature": 0.8,
            "ignore_eos": True,
            **more,
        }

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds so far of the server's processes and of this one."""
        processes = [self._process, *self._process.children(recursive=True)]
        times = [process.cpu_times() for process in processes]
        return sum(each.user + each.system for each in times), time.process_time()

    async def complete(self) -> tuple[int, float, int]:
        """Status, seconds and generated tokens of a completion; status 0 if the connection failed."""
        start = time.perf_counter()
        try:
            answer = await self.http.post("/v1/completions", json=self.body(PROMPT_CHARS))
        except httpx2.HTTPError:
            return 0, time.perf_counter() - start, 0
        tokens = answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else 0
        return answer.status_code, time.perf_counter() - start, tokens

    async def first_token(self, num_chars: int) -> float:
        """Seconds to the first piece of a stream."""
        start = time.perf_counter()
        body = self.body(num_chars, stream=True, max_tokens=8)
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            first = 0.0
            async for line in answer.aiter_lines():
                if line.startswith("data:") and not first:
                    first = time.perf_counter() - start
        return first


class Meter:
    """Requests to one server and what came of them, while it runs: in `with` blocks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._results: list[tuple[int, float, int]] = []
        self._seconds, self._cpu_s = 0.0, (0.0, 0.0)
        self.start, self._before_s = 0.0, (0.0, 0.0)  # of the last block

    def __enter__(self) -> Self:
        self._before_s = self._client.cpu_s()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """All requests of the block have ended."""
        self._seconds += time.perf_counter() - self.start
        all_s = zip(self._cpu_s, self._client.cpu_s(), self._before_s, strict=True)
        server_s, client_s = (so_far + now - before for so_far, now, before in all_s)
        self._cpu_s = server_s, client_s

    async def complete(self) -> None:
        self._results.append(await self._client.complete())

    def load(self) -> Load:
        """What came of the requests of all blocks."""
        results, seconds = self._results, self._seconds
        server_s, client_s = self._cpu_s
        times = sorted(taken for status, taken, _ in results if status == 200) or [0.0]
        return Load(
            seconds=seconds,
            answered=sum(status == 200 for status, _, _ in results),
            refused=sum(status == 429 for status, _, _ in results),
            lost=sum(status not in (200, 429) for status, _, _ in results),
            tok_s=sum(tokens for _, _, tokens in results) / seconds,
            p50_s=statistics.median(times),
            p95_s=times[int(0.95 * (len(times) - 1))],
            server_cores=server_s / seconds,
            client_cores=client_s / seconds,
        )


async def closed_loop(meter: Meter, num_clients: int, seconds: float) -> None:
    """Adds so many seconds of requests."""

    async def one() -> None:
        while time.perf_counter() < meter.start + seconds:
            await meter.complete()

    with meter:
        await asyncio.gather(*(one() for _ in range(num_clients)))


async def closed_loops(client: Client, counts: Sequence[int], seconds: float, turns: int) -> dict[str, Any]:
    """What came of so many clients, by number, in so many turns that begin at another number each."""
    meters = {count: Meter(client) for count in counts}
    for turn in range(turns):
        first = turn % len(counts)
        for count in (*counts[first:], *counts[:first]):
            await closed_loop(meters[count], count, seconds / turns)
    return {str(count): asdict(meter.load()) for count, meter in meters.items()}


async def open_loop(client: Client, rate: float, seconds: float) -> Load:
    """Requests at `rate` a second, however many are unanswered."""
    arrivals, tasks = random.Random(5), []
    with Meter(client) as meter:
        at = meter.start
        while at < meter.start + seconds:
            at += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(meter.complete()))
        await asyncio.gather(*tasks)
    return meter.load()


async def first_tokens(client: Client, count: int) -> dict[str, float]:
    """95th percentiles of the time to the first token of short streams, alone and beside a long prompt."""
    alone = sorted([await client.first_token(PROMPT_CHARS) for _ in range(count)])
    beside = []
    for _ in range(count):
        long = asyncio.create_task(client.first_token(LONG_CHARS))
        await asyncio.sleep(0.05)
        beside.append(await client.first_token(PROMPT_CHARS))
        await long
    last = int(0.95 * (count - 1))
    return {"alone_p95_s": alone[last], "beside_long_p95_s": sorted(beside)[last]}


@asynccontextmanager
async def server(command: Sequence[str], url: str) -> AsyncIterator[int]:
    """The process of a server that a command starts. RuntimeError if it is not up in START_S seconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=5) as http:
            for _ in range(10 * START_S):
                await asyncio.sleep(0.1)
                try:
                    if (await http.get("/health")).status_code == 200:
                        break
                except httpx2.HTTPError:
                    continue
            else:
                raise RuntimeError(f"{command[0]} did not come up at {url}")
        yield process.pid
    finally:
        process.terminate()
        process.wait()


async def measure(command: Sequence[str], port: int, options: argparse.Namespace) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    async with server(command, url) as pid:
        client = Client(url, Texts(seed=1), pid)
        await closed_loop(Meter(client), 2, 1)
        closed = await closed_loops(client, options.clients, options.seconds, options.turns)
        print(command[0], command[1], closed, flush=True)
        most = max(closed.values(), key=lambda load: float(load["tok_s"]))
        rate = 1.5 * most["tok_s"] / NEW_TOKENS
        opened = asdict(await open_loop(client, rate, options.seconds))
        print("open loop", rate, opened, flush=True)
        try:
            first: dict[str, float] | None = await first_tokens(client, options.first_tokens)
        except httpx2.HTTPError as error:
            print(f"no first tokens: {error}", flush=True)
            first = None
        print(first, flush=True)
        await client.http.aclose()
        return {"closed_loop": closed, "open_loop": {"requests_s": rate, **opened}, "first_token": first}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("model", type=Path, nargs="?", default=demo_model_path())
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    found.add_argument("--seconds", type=float, default=20, help="of each number of clients, in all turns")
    found.add_argument("--turns", type=int, default=4)
    found.add_argument("--first-tokens", type=int, default=20)
    found.add_argument("--port", type=int, default=18100)
    found.add_argument("--out", type=Path)
    return found


def command(options: argparse.Namespace) -> str:
    """What measures this again."""
    words = ["python", "-m", "bench.serving.load"]
    words += [options.model.name] if options.model != demo_model_path() else []
    for name, value in vars(options).items():
        if name not in ("model", "port", "out") and value != parser().get_default(name):
            values = value if isinstance(value, list) else [value]
            words += ["--" + name.replace("_", "-"), *(f"{each:g}" for each in values)]
    return shlex.join(words)


def main() -> int:
    options = parser().parse_args()
    slots, threads, port = str(max(options.clients)), str(options.threads), options.port
    ours = [sys.executable, "-m", "coldstream", "serve", str(options.model), "--port", str(port)]
    ours += ["--threads", threads, "--parallel", slots]
    context = str(max(options.clients) * 4096)
    peer = [sys.executable, "-c", PEER, str(options.model), slots, threads, context, str(port + 1)]
    run: Callable[[Coroutine[Any, Any, dict[str, Any]]], dict[str, Any]] = asyncio.run
    result = {
        "command": command(options),
        "cpu": Hardware.measure().cpu_name,
        "threads": options.threads,
        "slots": int(slots),
        "new_tokens": NEW_TOKENS,
        "coldstream": run(measure(ours, port, options)),
        "llama_cpp": run(measure(peer, port + 1, options)),
    }
    write_result(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
