"""CPU time of programs that hold an open model while nobody asks it anything, and what wakes meanwhile.

    python -m bench.engine.at_rest --out docs/results/at_rest.json

The bundled model on the CPU: served, in a chat on a terminal, and in a program that uses the library. Each
has answered once. A thread that waits costs nothing; one that looks for something costs time of a core.
"""

import argparse
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2
import psutil

from bench.results import write_result
from bench.serving.served import served
from coldstream.assets import demo_model_path
from coldstream.placement.hardware import Hardware

WINDOW_S: Final = 20.0
SETTLE_S: Final = 3.0  # from an answer's end until the window begins
PROMPT: Final = "def read_lines(path):"
TOKENS: Final = 32
SHOWN: Final = 4  # threads that woke most often
KEYS: Final = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}  # this terminal tells no positions
LIBRARY: Final = f"""
import sys
from coldstream.engine import LLM, SamplingParams
with LLM({str(demo_model_path())!r}, device="cpu") as llm:
    llm.generate({PROMPT!r}, SamplingParams(temperature=0.0, max_tokens={TOKENS}))
    print("answered", flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Times:
    """Of a thread, since it began. wakes: how often it has waited and gone on."""

    name: str
    cpu_s: float
    wakes: int


@dataclass(frozen=True)
class Thread:
    process: int
    number: int


def times_of(process: int) -> dict[Thread, Times]:
    """All threads of a process and of those that it began. One that ends meanwhile is left out."""
    found = {}
    for each in (psutil.Process(process), *psutil.Process(process).children(recursive=True)):
        for task in Path(f"/proc/{each.pid}/task").iterdir():
            try:
                found[Thread(each.pid, int(task.name))] = _times(task)
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _times(task: Path) -> Times:
    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    ran_ns, *_ = (task / "schedstat").read_text().split()
    return Times(status["Name"].strip(), int(ran_ns) / 1e9, int(status["voluntary_ctxt_switches"]))


def spent(before: Mapping[Thread, Times], after: Mapping[Thread, Times]) -> dict[Thread, Times]:
    """What each thread of `after` took since; new ones began with nothing."""
    return {
        thread: Times(
            now.name,
            now.cpu_s - (before[thread].cpu_s if thread in before else 0.0),
            now.wakes - (before[thread].wakes if thread in before else 0),
        )
        for thread, now in after.items()
    }


def at_rest(process: int, seconds: float) -> dict[str, object]:
    """CPU time of a process and its children over so many seconds, by that of a core, and what woke."""
    before, start = times_of(process), time.perf_counter()
    time.sleep(seconds)
    after, took = times_of(process), time.perf_counter() - start
    each = sorted(spent(before, after).values(), key=lambda times: -times.wakes)
    return {
        "window_s": took,
        "threads": len(each),
        "share_of_core": sum(times.cpu_s for times in each) / took,
        "wakes_per_s": sum(times.wakes for times in each) / took,
        "woken": {
            f"{number} {times.name}": times.wakes for number, times in enumerate(each[:SHOWN]) if times.wakes
        },
    }


@contextmanager
def serving() -> Iterator[int]:
    """A server's process, after an answer."""
    with tempfile.TemporaryDirectory() as folder, served(demo_model_path(), Path(folder, "log")) as server:
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        httpx2.post(f"{server.url}/v1/completions", json=asked, timeout=60).raise_for_status()
        yield server.api.pid


@contextmanager
def chatting() -> Iterator[int]:
    """A chat's process, after an answer, on a terminal where nobody types."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "coldstream", "run", "--device", "cpu", "-n", str(TOKENS)]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, **KEYS, "XDG_CONFIG_HOME": home}
        process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
        )
        os.close(terminal)
        try:
            read_until_quiet(controller)
            os.write(controller, f"{PROMPT}\r".encode())
            shown = read_until_quiet(controller)
            if process.poll() is not None or b"generated" not in shown:
                raise RuntimeError(f"the chat did not answer: {shown[-500:]!r}")
            yield process.pid
        finally:
            process.kill()
            process.wait()
            os.close(controller)


def read_until_quiet(controller: int) -> bytes:
    """What a program writes to a terminal until it has written something and then nothing for SETTLE_S."""
    shown = os.read(controller, 65536)
    while select.select([controller], [], [], SETTLE_S)[0]:
        shown += os.read(controller, 65536)
    return shown


@contextmanager
def library() -> Iterator[int]:
    """A program's process that has used `LLM` once and keeps it."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LIBRARY], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"answered\n":
            raise RuntimeError("the program with the library did not answer")
        yield process.pid


PROGRAMS: Final[Mapping[str, Callable[[], "contextmanager[int]"]]] = {
    "serve": serving,
    "chat": chatting,
    "library": library,
}


def measure(seconds: float) -> dict[str, object]:
    """Each program's `at_rest`."""
    programs = {}
    for name, opened in PROGRAMS.items():
        with opened() as process:
            time.sleep(SETTLE_S)
            programs[name] = at_rest(process, seconds)
    return {
        "command": "python -m bench.engine.at_rest",
        "programs": programs,
        "load_average": os.getloadavg()[0],
        "cpu": Hardware.measure().cpu_name,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=WINDOW_S, help="of each program's window")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    write_result(measure(options.seconds), options.out)


if __name__ == "__main__":
    main()
