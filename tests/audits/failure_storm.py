"""A storm of requests whose clients leave at once, and how soon a server is as fast as before.

A few steady streams run from before the storm until after it. Their tokens are counted in windows of a
second. In the storm a new connection sends a request every few milliseconds, and is broken off within a
moment: before the server has read it, while it waits, or between two tokens.
"""

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from bench.serving.served import Served, engine_of, served, until_idle
from tests.audits.failure_answers import Fields

CONTEXT, PARALLEL, STEADY = 2048, 16, 4
WARM_S: Final = 3.0
MAX_STAY_S: Final = 0.25  # of a client in the storm
SHARE: Final = 0.95  # of the tokens before, that count as back
BACK_S: Final = 5
REQUEST_S: Final = 120.0
BODY: Final[Fields] = {"prompt": "import os", "max_tokens": 256, "ignore_eos": True, "temperature": 0}


@dataclass
class Steady:
    """Streams one after the other, until it is stopped."""

    http: httpx2.AsyncClient
    arrivals: list[float]  # of tokens, `time.monotonic()`
    faults: list[str]
    is_over: bool = False

    async def go_on(self) -> None:
        while not self.is_over:
            try:
                await self._stream()
            except httpx2.HTTPError as error:
                self.faults.append(f"a steady stream: {type(error).__name__}: {error}")

    async def _stream(self) -> None:
        last = ""
        async with self.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last = line
                if line.startswith('data: {"id"'):
                    self.arrivals.append(time.monotonic())
        if response.status_code != 200 or last != "data: [DONE]":
            self.faults.append(f"a steady stream: {response.status_code}, {last[:200]}")


class Storm:
    """Clients that leave."""

    def __init__(self, url: str, seed: int) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._chance = random.Random(seed)
        self.statuses: Counter[str] = Counter()  # of answers that had begun; "" of the others

    async def blow(self, rate: float, seconds: float) -> float:
        """Start `rate` requests a second, however long the others take; seconds until all have left."""
        start = time.monotonic()
        tasks = set()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            task = asyncio.create_task(self._begun_and_left())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return time.monotonic() - start

    async def _begun_and_left(self) -> None:
        body = json.dumps({**BODY, "stream": self._chance.random() < 0.5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stay_s = self._chance.uniform(0, MAX_STAY_S)
        reader, writer = await asyncio.open_connection(self._host, self._port)
        begun = b""
        with suppress(TimeoutError, ConnectionError):
            writer.write(head.encode() + body)
            async with asyncio.timeout(stay_s):
                while data := await reader.read(4096):
                    begun = begun or data
        writer.transport.abort()
        self.statuses[begun[9:12].decode()] += 1


def windows(arrivals: Sequence[float], start: float, seconds: int) -> list[int]:
    """How many arrivals are in each of `seconds` seconds from `start` on."""
    counts = Counter(int(at - start) for at in arrivals if at >= start)
    return [counts[second] for second in range(seconds)]


def recovery(before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """How the windows after a storm compare with those before it.

    `back_s` is the end of the first window with SHARE of the median before it, None if there is none; `after`
    the median of the windows behind the first BACK_S.
    """
    usual = statistics.median(before)
    back = (second + 1 for second, count in enumerate(after) if count >= SHARE * usual)
    later = statistics.median(after[BACK_S:])
    return {"before": usual, "after": later, "after_share": later / usual, "back_s": next(back, None)}


def missed(found: Mapping[str, Any]) -> list[str]:
    """What of a recovery took longer than asked."""
    late = found["back_s"] is None or found["back_s"] > BACK_S
    wrong = [f"back to {SHARE:.0%} of the tokens after {found['back_s']} s"] if late else []
    if found["after_share"] < SHARE:
        wrong.append(f"{found['after_share']:.1%} of the tokens after the storm")
    return wrong


def cpu_time(server: Served) -> float:
    """Seconds of processors that both processes of a server have taken."""
    times = [each.cpu_times() for each in (server.api, engine_of(server.api))]
    return float(sum(each.user + each.system for each in times))


async def weathered(server: Served, rate: float, seconds: float, calm_s: int, seed: int) -> dict[str, Any]:
    """The storm, with `calm_s` seconds, more than BACK_S, of steady streams before and after."""
    limits = httpx2.Limits(max_connections=STEADY + 1, max_keepalive_connections=STEADY + 1)
    storm = Storm(server.url, seed)
    async with httpx2.AsyncClient(base_url=server.url, timeout=REQUEST_S, limits=limits) as http:
        steady = Steady(http, [], [])
        streams = [asyncio.create_task(steady.go_on()) for _ in range(STEADY)]
        await http.get("/props")  # begins the process of the chat template, which stays
        await asyncio.sleep(WARM_S)
        descriptors = server.api.num_fds()
        begin, cpu = time.monotonic(), [cpu_time(server)]
        await asyncio.sleep(calm_s)
        cpu.append(cpu_time(server))
        counts = (await http.get("/props")).json()["statistics"]
        storm_begin = time.monotonic()
        took_s = await storm.blow(rate, seconds)
        end = time.monotonic()
        await asyncio.sleep(BACK_S)
        cpu.append(cpu_time(server))
        await asyncio.sleep(calm_s - BACK_S)
        cpu.append(cpu_time(server))
        more_descriptors = server.api.num_fds() - descriptors
        steady.is_over = True
        await asyncio.gather(*streams)
        left = await until_idle(http)
        after = (await http.get("/props")).json()["statistics"]
    before, later = windows(steady.arrivals, begin, calm_s), windows(steady.arrivals, end, calm_s)
    found = recovery(before, later)
    faults = steady.faults
    if left:
        faults.append(f"{left} answers never ended")
    if more_descriptors > 0:
        faults.append(f"{more_descriptors} descriptors more than before the storm")
    if refused := {status for status in storm.statuses if status not in ("", "200", "429")}:
        faults.append(f"answers with {refused}")
    begun = storm.statuses.total()
    return {
        "asked_rate": rate,
        "requests": begun,
        "seconds": took_s,
        "rate": begun / took_s,
        "statuses": {status or "none yet": count for status, count in sorted(storm.statuses.items())},
        "cancelled_in_engine": after["cancelled_requests"] - counts["cancelled_requests"],
        "steady_streams": STEADY,
        "tokens": {
            **found,
            "during": statistics.median(windows(steady.arrivals, storm_begin, int(took_s))),
        },
        # What other programs on the machine take shows less in seconds of processors than in seconds.
        "tokens_a_cpu_s": {
            "before": sum(before) / (cpu[1] - cpu[0]),
            "after": sum(later[BACK_S:]) / (cpu[3] - cpu[2]),
        },
        "windows_before": before,
        "windows_after": later,
        "faults": faults,
        "missed": missed(found),
    }


def storm(
    model: Path, folder: Path, *, rate: float, seconds: float, calm_s: int, threads: int, seed: int
) -> dict[str, Any]:
    """The whole of it, over a server of its own.

    `faults` are never right, `missed` is what took longer than asked.
    """
    options = ("--ctx-size", str(CONTEXT), "--threads", str(threads), "--parallel", str(PARALLEL))
    with served(model, folder / "storm.log", *options) as server:
        result = asyncio.run(weathered(server, rate, seconds, calm_s, seed))
    if server.exit_code != 0:
        result["faults"].append(f"the server left with {server.exit_code}")
    return result
