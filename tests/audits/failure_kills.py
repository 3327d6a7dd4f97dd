"""The engine process killed again and again under load, with prefixes kept in files.

Clients ask questions whose answers are known (`failure_answers.py`), in bursts: in the quiet moments between
them prefixes are written. SIGKILL comes at random moments of the engine's life, and every tenth time as soon
as the next engine loads. Then /health is asked until it says that the engine is gone, and that it is back.
"""

import asyncio
import json
import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil

from bench.serving.served import Served, engine_of, served, until_idle
from coldstream.engine.cache_tiers import cache_identity
from coldstream.engine.opened_model import open_model
from coldstream.kvcache.prefix.file import LOCK, TEMPORARY, DamagedFileError, opened, parse
from coldstream.kvcache.prefix.pages import sha256
from coldstream.planning.config import EngineConfig
from tests.audits.failure_answers import KINDS, Fields, Kind, Outcome, judged, judged_stream, questions

CONTEXT, PARALLEL = 2048, 4
MAX_MOMENT_S: Final = 4.0  # of an engine's life before it is killed
MAX_QUIET_S, MAX_WAIT_S = 0.8, 0.3  # after a burst that was answered, and one that was not
EARLY_EACH: Final = 10  # of so many kills one strikes an engine that loads
CLOSING_S: Final = 1.0  # for the server to close its ends of connections that have ended
BEYOND_LOAD_S: Final = 2.0  # an engine may take so much longer to come back than to load at first
REQUEST_S, BACK_S = 120.0, 120.0
POLL_S: Final = 0.02
NEW_SHARE: Final = 0.25  # of the questions


@dataclass(frozen=True)
class Kill:
    """One kill, and what was seen of it."""

    at_s: float  # since the first request
    while_loading: bool
    in_flight: int  # requests
    answered_s: float | None  # until the last of those had its answer or error; None without any
    noticed_s: float  # until /health said so
    back_s: float | None  # until /health said that the engine is ready; None if it was killed before that
    half_written: int  # files of the cache that it left
    restored: int  # prefixes that this engine had read from files
    api_descriptors: int
    api_rss: int  # bytes


@dataclass(frozen=True)
class _Before:
    """What an engine had done by its last moment."""

    restored: int = 0
    damaged: int = 0
    problem: str = ""


class Traffic:
    """Bursts of questions at random, with quiet moments between them, and what comes of each."""

    def __init__(self, http: httpx2.AsyncClient, bodies: Sequence[Fields], answers: Sequence[Fields]) -> None:
        self._http = http
        self._pairs = list(zip(bodies, answers, strict=True))
        self.in_flight: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self.is_over = False

    async def go_on(self, clients: int, seed: int) -> None:
        """Bursts of a question from each client, until `is_over`."""
        chance = random.Random(seed)
        while not self.is_over:
            burst = [self._chosen(chance) for _ in range(clients)]
            found = await asyncio.gather(*(self._ask(*pair) for pair in burst))
            is_well = all(outcome.kind == "answered" for outcome in found)
            await asyncio.sleep(chance.uniform(0.05, MAX_QUIET_S if is_well else MAX_WAIT_S))

    def _chosen(self, chance: random.Random) -> tuple[Fields, Fields]:
        """A question and its answer, sometimes one that finds nothing kept, and whose prefix is written."""
        body, expected = chance.choice(self._pairs)
        body = {**body, "stream": chance.random() < 0.5}
        if chance.random() < NEW_SHARE:
            body["cache_salt"] = str(chance.getrandbits(64))
        return body, expected

    async def _ask(self, body: Fields, expected: Fields) -> Outcome:
        number, sent_s = len(self.in_flight) + len(self.outcomes), time.monotonic()
        self.in_flight.add(number)
        reused = 0
        try:
            kind, detail, reused = await (self._stream if body["stream"] else self._whole)(body, expected)
        except (httpx2.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
            kind, detail = "lost", f"{type(error).__name__}: {error}"
        outcome = Outcome(kind, sent_s, time.monotonic(), detail[:500], reused)
        self.in_flight.remove(number)
        self.outcomes[number] = outcome
        return outcome

    async def _whole(self, body: Fields, expected: Fields) -> tuple[Kind, str, int]:
        response = await self._http.post("/v1/completions", json=body)
        found = response.json()
        usage = found.get("usage", {"prompt_tokens_details": {"cached_tokens": 0}})
        kind, detail = judged(response.status_code, response.headers, found, expected)
        return kind, detail, int(usage["prompt_tokens_details"]["cached_tokens"])

    async def _stream(self, body: Fields, expected: Fields) -> tuple[Kind, str, int]:
        events: list[Any] = []
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                found = json.loads(await response.aread())
                return *judged(response.status_code, response.headers, found, expected), 0
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append(data if data == "[DONE]" else json.loads(data))
        cached = [event["timings"]["cache_n"] for event in events if "timings" in event]
        return *judged_stream(events, expected), sum(cached)


class Killer:
    """Kills one server's engines, and looks at the server around each kill."""

    def __init__(
        self, server: Served, http: httpx2.AsyncClient, traffic: Traffic, folder: Path, seed: int
    ) -> None:
        self._server, self._http, self._traffic, self._folder = server, http, traffic, folder
        self._chance = random.Random(seed)
        self._start = time.monotonic()
        self._watched: list[tuple[float, frozenset[int]]] = []
        self._kills: list[Kill] = []
        self.faults: list[str] = []

    async def kill(self, *, is_early: bool, next_is_early: bool) -> None:
        """Kill the engine at a random moment of its life, or of the time that loading takes.

        next_is_early: the next kill strikes while the next engine loads, which is not waited for then.
        """
        before = _Before()
        if is_early:
            await asyncio.sleep(self._chance.uniform(0, self._server.load_s))
        else:
            await asyncio.sleep(self._chance.uniform(0, MAX_MOMENT_S))
            before = await self._before()
            # The engine answers between two steps, and shall be killed anywhere.
            await asyncio.sleep(self._chance.uniform(0, 0.1))
        is_loading = (await self._http.get("/health")).status_code != 200
        engine = engine_of(self._server.api)
        killed_s, in_flight = time.monotonic(), frozenset(self._traffic.in_flight)
        os.kill(engine.pid, signal.SIGKILL)
        half_written = sum(bool(TEMPORARY.fullmatch(each.name)) for each in self._folder.rglob(".*"))
        noticed_s = await self._until_noticed(killed_s)
        next_engine = await self._next_engine()
        back_s = None if next_is_early else await self._until_ready(killed_s)
        number = len(self._kills) + 1
        if psutil.pid_exists(engine.pid):
            self.faults.append(f"kill {number}: the process is still there")
        if engine_of(self._server.api).pid != next_engine.pid:
            self.faults.append(f"kill {number}: the engine was started twice")
        if before.damaged or before.problem:
            self.faults.append(f"kill {number}: {before}")
        self._watched.append((killed_s, in_flight))
        at_s = killed_s - self._start
        held = self._server.api.num_fds(), self._server.api.memory_info().rss
        counted = (noticed_s, back_s, half_written, before.restored)
        self._kills.append(Kill(at_s, is_loading, len(in_flight), None, *counted, *held))

    def kills(self) -> list[Kill]:
        """All of them; once the traffic has ended."""
        outcomes = self._traffic.outcomes
        reported = [
            max((outcomes[number].ended_s - killed_s for number in in_flight), default=None)
            for killed_s, in_flight in self._watched
        ]
        return [
            Kill(**{**asdict(kill), "answered_s": s}) for kill, s in zip(self._kills, reported, strict=True)
        ]

    async def _before(self) -> _Before:
        prefixes = (await self._http.get("/props")).json()["cache"]["prefixes"]
        disk = prefixes["tiers"][-1]
        return _Before(prefixes["restored"], disk["damaged"], disk["problem"])

    async def _until_noticed(self, since_s: float) -> float:
        """Seconds since a moment until /health counts one more restart. RuntimeError after BACK_S."""
        number = len(self._kills) + 1
        while (now := time.monotonic()) - since_s < BACK_S:
            response = await self._http.get("/health")
            if response.status_code == 503 and (restarts := response.json()["restarts"]) >= number:
                if restarts > number:
                    self.faults.append(f"kill {number}: the engine was started {restarts} times")
                return now - since_s
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"nobody noticed for {BACK_S:.0f} s that the engine is gone")

    async def _until_ready(self, since_s: float) -> float:
        """Seconds since a moment until /health says that all is well. RuntimeError after BACK_S."""
        while (now := time.monotonic()) - since_s < BACK_S:
            if (await self._http.get("/health")).status_code == 200:
                return now - since_s
            await asyncio.sleep(POLL_S)
        raise RuntimeError(f"the engine was not back after {BACK_S:.0f} s")

    async def _next_engine(self) -> psutil.Process:
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            with suppress(ValueError, psutil.NoSuchProcess):
                return engine_of(self._server.api)
            await asyncio.sleep(POLL_S)
        raise RuntimeError("no engine process was started")


async def undisturbed(url: str, bodies: Sequence[Fields]) -> list[Fields]:
    """The choices that answer `bodies`, one after the other, none of which finds anything of another."""
    async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_S) as http:
        found = []
        for number, body in enumerate(bodies):
            response = await http.post("/v1/completions", json={**body, "cache_salt": str(number)})
            found.append(response.raise_for_status().json()["choices"][0])
    return found


async def killed(
    server: Served,
    folder: Path,
    count: int,
    clients: int,
    bodies: Sequence[Fields],
    answers: Sequence[Fields],
    seed: int,
) -> dict[str, Any]:
    """`count` kills under the load of questions `bodies`, and what was seen of them."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=REQUEST_S) as http:
        await http.get("/props")  # begins the process of the chat template, which stays
    await asyncio.sleep(CLOSING_S)
    idle_descriptors = server.api.num_fds()
    limits = httpx2.Limits(max_connections=clients + 1, max_keepalive_connections=clients + 1)
    async with httpx2.AsyncClient(base_url=server.url, timeout=REQUEST_S, limits=limits) as http:
        traffic = Traffic(http, bodies, answers)
        killer = Killer(server, http, traffic, folder, seed)
        asking = asyncio.create_task(traffic.go_on(clients, seed))
        try:
            for number in range(count):
                is_early, next_is_early = (
                    each % EARLY_EACH == EARLY_EACH - 1 for each in (number, number + 1)
                )
                next_is_early &= number + 1 < count
                await killer.kill(is_early=is_early, next_is_early=next_is_early)
            await asyncio.sleep(MAX_MOMENT_S)  # for answers of the last engine
        finally:
            traffic.is_over = True
            await asking
        left = await until_idle(http)
    await asyncio.sleep(CLOSING_S)
    faults = [
        *killer.faults,
        *(f"{each.kind}: {each.detail}" for each in traffic.outcomes.values() if each.detail),
    ]
    if left:
        faults.append(f"{left} answers never ended")
    if (more := server.api.num_fds() - idle_descriptors) > 0:
        faults.append(f"{more} descriptors more than before the first kill")
    return {
        "load_s": server.load_s,
        "limit_s": server.load_s + BEYOND_LOAD_S,
        "clients": clients,
        "questions": len(bodies),
        "descriptors": {"before": idle_descriptors, "after": server.api.num_fds()},
        **figures(killer.kills(), list(traffic.outcomes.values()), server.load_s + BEYOND_LOAD_S),
        "faults": faults,
        "each": [asdict(kill) for kill in killer.kills()],
    }


def figures(kills: Sequence[Kill], outcomes: Sequence[Outcome], limit_s: float) -> dict[str, Any]:
    """The counts and times of all kills and requests."""
    counts = Counter(outcome.kind for outcome in outcomes)
    back = [kill.back_s for kill in kills if kill.back_s is not None]
    reported = [kill.answered_s for kill in kills if kill.answered_s is not None]
    return {
        "kills": len(kills),
        "kills_while_loading": sum(kill.while_loading for kill in kills),
        "kills_that_left_half_a_file": sum(kill.half_written > 0 for kill in kills),
        "kills_with_requests": len(reported),
        "in_flight": sum(kill.in_flight for kill in kills),
        "requests": {kind: counts[kind] for kind in KINDS},
        "answers_with_kept_prefixes": sum(
            outcome.kind == "answered" and outcome.reused > 0 for outcome in outcomes
        ),
        "prefixes_from_files": sum(kill.restored for kill in kills),
        "back_s": quantiles(back),
        "answered_s": quantiles(reported),
        "missed": [f"back only after {each:.1f} s" for each in back if each > limit_s],
    }


def quantiles(times: Sequence[float]) -> dict[str, float] | None:
    """Median, 95th percentile (the least time that 95 % don't exceed) and worst; None without any."""
    if not times:
        return None
    ordered = sorted(times)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return {"median": statistics.median(ordered), "p95": p95, "worst": ordered[-1]}


def check_folder(folder: Path, model: Path) -> tuple[int, list[str]]:
    """How many files are in the folder of a cache beside its lock, and what is wrong with which of them.

    Every byte is compared with what was written. The model tells whose files they must be; no server may use
    the folder.
    """
    with closing(open_model(EngineConfig(str(model), device="cpu", ctx_size=CONTEXT))) as known:
        identity = sha256(cache_identity(known))
    paths = sorted(each for each in folder.rglob("*") if each.is_file() and each.name != LOCK)
    faults = []
    for path in paths:
        try:
            with opened(path) as (read_at, status):
                for place in parse(read_at, status.st_size, identity).places:
                    place.read(read_at)
        except (DamagedFileError, OSError) as error:
            faults.append(f"{path.name}: {error}")
    return len(paths), faults


def kills(
    model: Path, folder: Path, *, count: int, clients: int, num_questions: int, threads: int, seed: int
) -> dict[str, Any]:
    """The whole of it, with `cache` in `folder` for the server's files.

    `faults` are never right, `missed` is what took longer than asked.
    """
    bodies = questions(num_questions, seed)
    common = ("--ctx-size", str(CONTEXT), "--threads", str(threads), "--parallel", str(PARALLEL))
    with served(model, folder / "undisturbed.log", *common) as server:
        answers = asyncio.run(undisturbed(server.url, bodies))
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    with served(model, folder / "kills.log", *common, "--prompt-cache", str(cache)) as server:
        result = asyncio.run(killed(server, cache, count, clients, bodies, answers, seed))
        processes = server.api.children(recursive=True)
    _, alive = psutil.wait_procs(processes, timeout=5)
    if server.exit_code != 0:
        result["faults"].append(f"the server left with {server.exit_code}")
    if alive:
        result["faults"].append(f"{len(alive)} processes are left")
    files, broken = check_folder(cache, model)
    result["faults"] += broken
    return {**result, "files_left": files, "files_left_broken": len(broken)}
