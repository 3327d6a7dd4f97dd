"""One bad body after the other, and several at once: what they cost a server, and what others notice of it.

    python -m tests.audits.bad_bodies --out docs/results/bad_bodies.json

A server on the CPU with the bundled model answers a stream without end and a question for /health every few
milliseconds, from threads of this process. Meanwhile it is sent bodies of `bad_body_kinds.py`. Asked for: an
answer within a second, /health within 100 ms, and at most four times the body and 64 MiB more memory in both
of the server's processes. The longest gap of the stream is reported, and with nothing bad the same for
comparison. A kind that misses a time or a bound fails the run.
"""

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from bench.results import write_result
from bench.serving.served import Served, engine_of, served
from coldstream.assets import demo_model_path
from coldstream.placement.hardware import Hardware
from tests.audits.bad_body_kinds import AT_ONCE, KINDS, Kind

MIB: Final = 1 << 20
MOST_S, MOST_HEALTH_S = 1.0, 0.1
MORE_BYTES: Final = 64 * MIB
FACTOR: Final = 4
MAX_BODIES_BYTES: Final = 128 * MIB  # that a server holds at once
PAUSE_S: Final = 0.005
WATCH_S: Final = 0.02
CALM_S: Final = 2.0
STREAM: Final = {"prompt": "import os", "max_tokens": 2000, "ignore_eos": True, "stream": True}


class Repeated:
    """Does something again and again in a thread, and keeps what each time gave."""

    def __init__(self, do: Callable[[], float], pause_s: float) -> None:
        self._do, self._pause_s = do, pause_s
        self.values: list[float] = []
        self.faults: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> "Repeated":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._is_over.is_set():
            try:
                self.values.append(self._do())
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.faults.append(f"{type(error).__name__}: {error}")
            self._is_over.wait(self._pause_s)


class Client:
    """One connection to the server."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def health(self) -> float:
        """Seconds until it says that it is well. ValueError if it is not."""
        start = time.monotonic()
        self._connection.request("GET", "/health")
        response = self._connection.getresponse()
        response.read()
        if response.status != 200:
            raise ValueError(f"/health: {response.status}")
        return time.monotonic() - start

    def post(self, path: str, body: bytes) -> tuple[float, int, str]:
        """Seconds until all of the answer is there, its status, and the beginning of its message."""
        start = time.monotonic()
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        return time.monotonic() - start, response.status, answer.get("error", {}).get("message", "")[:120]


class Stream:
    """Streams one after the other; the longest gap between two parts of them since `begin`."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._last = time.monotonic()
        self._longest = 0.0
        self._response: http.client.HTTPResponse | None = None

    def close(self) -> None:
        """Leave the stream under way."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def begin(self) -> None:
        """What gaps there were does not count from now on."""
        self._last, self._longest = time.monotonic(), 0.0

    @property
    def longest_s(self) -> float:
        """The longest gap, the current one included."""
        return max(self._longest, time.monotonic() - self._last)

    def part(self) -> float:
        """Wait for the next part. ValueError if the stream is refused."""
        if self._response is None:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", "/v1/completions", json.dumps(STREAM), headers)
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                raise ValueError(f"a stream: {self._response.status}")
        if not self._response.readline():
            self._response = None
        now = time.monotonic()
        gap, self._last = now - self._last, now
        self._longest = max(self._longest, gap)
        return gap


class Memory:
    """The most memory of a server's processes together, over that of its beginning."""

    def __init__(self, server: Served) -> None:
        self._processes = [server.api, engine_of(server.api)]
        self.most = self.before = self.now()

    def now(self) -> float:
        """Bytes that are resident."""
        return float(sum(each.memory_info().rss for each in self._processes if each.is_running()))

    def look(self) -> float:
        """Notes what it is now."""
        self.most = max(self.most, now := self.now())
        return now


@contextmanager
def watched(server: Served, stream: Stream) -> Iterator[dict[str, Any]]:
    """Fills a dictionary with what others noticed during the block."""
    found: dict[str, Any] = {}
    memory = Memory(server)
    with (
        closing(Client(server.url)) as client,
        Repeated(client.health, PAUSE_S) as health,
        Repeated(memory.look, WATCH_S),
    ):
        stream.begin()
        yield found
    found["health_worst_s"] = max(health.values, default=float("inf"))
    found["health_asked"] = len(health.values)
    found["stream_gap_s"] = stream.longest_s
    found["memory_bytes"] = memory.most - memory.before
    found["faults"] = health.faults


def asked(server: Served, path: str, body: bytes) -> tuple[float, int, str]:
    """`Client.post` on a connection of its own."""
    with closing(Client(server.url)) as client:
        return client.post(path, body)


def one(server: Served, stream: Stream, kind: Kind) -> dict[str, Any]:
    """A single body of a kind."""
    body = kind.body()
    with watched(server, stream) as found:
        seconds, status, message = asked(server, kind.path, body)
    return {
        "bytes": len(body),
        "seconds": seconds,
        "status": status,
        "message": message,
        "limit_bytes": FACTOR * len(body) + MORE_BYTES,
        **found,
    }


def at_once(server: Served, stream: Stream, kind: Kind, count: int) -> dict[str, Any]:
    """Several of a kind, each on a connection of its own."""
    body = kind.body()
    answers: list[tuple[float, int, str]] = []

    def ask() -> None:
        answers.append(asked(server, kind.path, body))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    with watched(server, stream) as found:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    statuses = sorted(status for _, status, _ in answers)
    return {
        "count": count,
        "bytes": len(body),
        "seconds": max((seconds for seconds, _, _ in answers), default=float("inf")),
        "statuses": {str(each): statuses.count(each) for each in statuses},
        "limit_bytes": FACTOR * len(body) + MORE_BYTES + min(count * len(body), MAX_BODIES_BYTES),
        **found,
    }


def missed(name: str, found: Mapping[str, Any], statuses: set[int], most_s: float) -> list[str]:
    """What is not as it should be."""
    wrong = [f"{name}: {fault}" for fault in found["faults"]]
    given = {found["status"]} if "status" in found else set(map(int, found["statuses"]))
    if not given <= statuses:
        wrong.append(f"{name}: status {sorted(given)}")
    for what, value, limit in (
        ("seconds", found["seconds"], most_s),
        ("seconds of /health", found["health_worst_s"], MOST_HEALTH_S),
        ("bytes", found["memory_bytes"], found["limit_bytes"]),
    ):
        if value > limit:
            wrong.append(f"{name}: {value:.3f} {what}, more than {limit:g}")
    return wrong


def measured(folder: Path, threads: int) -> dict[str, Any]:
    """All kinds, over one server."""
    options = ("--threads", str(threads), "--ctx-size", "4096")
    with served(demo_model_path(), folder / "log", *options) as server:
        with closing(Stream(server.url)) as stream, Repeated(stream.part, 0.0) as streaming:
            with watched(server, stream) as calm:
                time.sleep(CALM_S)
            kinds, wrong = {}, []
            for name, kind in KINDS.items():
                kinds[name] = one(server, stream, kind)
                wrong += missed(name, kinds[name], {kind.status}, MOST_S)
                print(
                    name, {k: v for k, v in kinds[name].items() if k != "faults"}, file=sys.stderr, flush=True
                )
            together = at_once(server, stream, KINDS[AT_ONCE], 8)
            wrong += missed("8 at once", together, {KINDS[AT_ONCE].status, 429}, 8 * MOST_S)
        faults = [*streaming.faults, *calm.pop("faults")]
    return {"calm": calm, "kinds": kinds, "at_once": together, "faults": faults, "missed": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="of the engine, beside which others need some")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), options.threads)
    result = {
        "command": "python -m tests.audits.bad_bodies",
        "cpu": Hardware.measure().cpu_name,
        "cpus": psutil.cpu_count(),
        "threads": options.threads,
        **found,
    }
    write_result(result, options.out)
    wrong = [*found["faults"], *found["missed"]]
    print(*wrong or ["as it should be"], sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
