"""A server of this package in a process of its own, for measurements from outside: its start, log and end."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import httpx2
import psutil

from bench.results import ROOT
from coldstream.assets import demo_model_path

TEMPLATE: Final = ROOT / "tests" / "gguf" / "chatml.jinja"
SERVE: Final = ("-m", "coldstream", "serve", "--port", "0", "--log-format", "json")
START_S: Final = 120.0
END_S: Final = 60.0  # for a server that is asked to stop: answers under way have half of it
_EVENT: Final = re.compile(r'"time": ?"([^"]+)".*"event": ?"(\w+)"')


@dataclass
class Served:
    """A running server."""

    url: str
    api: psutil.Process
    load_s: float  # from its start of the engine process until that was ready
    exit_code: int | None = None  # once it has ended


@contextmanager
def served(
    model: Path, log: Path, *options: str, device: str = "cpu", python: str = sys.executable
) -> Iterator[Served]:
    """A server on a device with `options`, ready, which is asked to stop at the end of the block.

    python: the interpreter, whose environment says which package is served. Raises RuntimeError if the server
    is not ready within START_S seconds, and subprocess.TimeoutExpired, with the server killed, if it does not
    stop within END_S.
    """
    command = [python, *SERVE, str(model), "--device", device, *options]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    server: Served | None = None
    try:
        url = wait_for_url(process, log)
        server = Served(url, psutil.Process(process.pid), load_time(log.read_text()))
        yield server
    finally:
        process.terminate()
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        if server is not None:
            server.exit_code = code


def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """What a server's log says once it is ready.

    RuntimeError with the end of the log if the process ends before, or takes longer than START_S seconds.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r'"url": ?"([^"]+)"', log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not become ready: {log.read_text()[-500:]}")


def load_time(log: str) -> float:
    """Seconds from the first line of a log, when loading begins, to the one that says that all is ready."""
    times = {event: datetime.fromisoformat(at) for at, event in reversed(_EVENT.findall(log))}
    return (times["ready"] - times["loading"]).total_seconds()


def engine_of(api: psutil.Process) -> psutil.Process:
    """The engine process of a server. ValueError if there is none, as between two of them."""
    (engine,) = [each for each in api.children() if "coldstream.server.engine_process" in each.cmdline()]
    return engine


def model_with_tools(folder: Path) -> Path:
    """The bundled model with a chat template that has tools and thoughts."""
    path = folder / "demo-with-tools.gguf"
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template-file", str(TEMPLATE)]
    subprocess.run([*command, str(demo_model_path()), str(path)], check=True, capture_output=True)
    return path


async def until_idle(http: httpx2.AsyncClient) -> int:
    """Answers that still run or wait after a minute."""
    deadline = time.monotonic() + 60
    while True:
        counts = (await http.get("/props")).json()["statistics"]
        left = int(counts["running"] + counts["waiting"])
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)
