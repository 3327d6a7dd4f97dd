"""Keeps the process that runs a chat template: starts it when needed, watches it, replaces it when it dies.

Unit of work: one rendering, a JSON line to the process and one back. Knows neither messages nor tokens.
`template_worker.py` restricts what the process may do; this module sets the limits and the errors at each.
"""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from coldstream.errors import InvalidRequestError, TemplateError, TemplateLimitError
from coldstream.forks import OwnProcess

MAX_SOURCE_CHARS = 1 << 20
MAX_REQUEST_CHARS = 8 << 20
# A rendering may be four times as long as its input, plus this length for the template's own text.
OUTPUT_PER_INPUT = 4
EXTRA_OUTPUT_CHARS = 1 << 16
# The longest escape, a surrogate pair, and the shortest run: one digit, comma and blank.
JSON_CHARS_PER_CHAR = 12 + 3


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering, or of the compilation before the first. wall_s: allows for a busy machine."""

    cpu_s: float = 2.0
    wall_s: float = 30.0
    memory_bytes: int = 256 << 20


@dataclass(frozen=True)
class Rendering:
    """A template's output, and the ranges `[start, end)` of it that the template itself wrote, in order."""

    text: str
    written: tuple[tuple[int, int], ...]


class TemplateProcess:
    """Renders one template in a process of its own. Calls from several threads are serialised.

    In a forked child, `start` and `render` raise GenerationFault and `close` does nothing.
    """

    def __init__(self, source: str, limits: TemplateLimits | None = None) -> None:
        self._source = source
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._owner = OwnProcess()
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: weakref.finalize[..., TemplateProcess] | None = None
        self._compile_error: str | None = None
        if len(source) > MAX_SOURCE_CHARS:
            self._compile_error = f"chat template: {len(source)} characters, allowed are {MAX_SOURCE_CHARS}"

    def start(self) -> None:
        """Compile the template now, not at the first rendering. Raises `TemplateError` if it fails."""
        self._owner.check()
        with self._lock:
            self._running()

    def render(
        self, variables: Mapping[str, Any], own: Mapping[str, Any] | None = None, roles: Sequence[str] = ()
    ) -> Rendering:
        """The template's output for `variables` and `own`, which must be JSON values.

        What of `own` stands in the output counts as written by the template, and so do the roles of
        `variables["messages"]` that are among `roles`; all else in `variables` is the caller's. Raises
        `InvalidRequestError` for values that aren't JSON or are too large, `TemplateError` when the template
        fails, refuses or reaches a limit.
        """
        self._owner.check()
        given = {"variables": variables, "own": own or {}, "roles": roles, "now": datetime.now().isoformat()}
        try:
            request = json.dumps(given)
        except RecursionError:
            raise InvalidRequestError("messages: nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"messages: not plain JSON values: {error}") from None
        if len(request) > MAX_REQUEST_CHARS:
            raise InvalidRequestError(f"messages: {len(request)} bytes, allowed are {MAX_REQUEST_CHARS}")
        max_chars = OUTPUT_PER_INPUT * len(request) + EXTRA_OUTPUT_CHARS
        with self._lock:
            line = f'{request[:-1]}, "max_chars": {max_chars}}}'
            answer = self._exchange(self._running(), line, JSON_CHARS_PER_CHAR * max_chars)
        if "error" in answer:
            raise TemplateError(f"chat template: {answer['error']}")
        ends = (0, *accumulate(answer["runs"]))
        return Rendering(answer["text"], tuple(zip(ends[1::2], ends[2::2], strict=False)))

    def close(self) -> None:
        """End the process. A later rendering would start a new one."""
        if not self._owner.is_here():
            return
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process with the template compiled in it. One that failed to compile is not tried again."""
        if self._compile_error is not None:
            raise TemplateError(self._compile_error)
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _spawn()
            self._reaper = weakref.finalize(self, _kill, self._process)
            try:
                self._compile(self._process)
            except TemplateError as error:
                self._compile_error = str(error)
                self._end()
                raise
        return self._process

    def _compile(self, process: subprocess.Popen[bytes]) -> None:
        settings = {
            "paths": [*_import_paths("jinja2", "markupsafe"), str(Path(__file__).parent)],
            "memory_bytes": self._limits.memory_bytes,
            "cpu_s": self._limits.cpu_s,
        }
        lines = f"{json.dumps(settings)}\n{json.dumps({'source': self._source})}"
        answer = self._exchange(process, lines, EXTRA_OUTPUT_CHARS)
        if "error" in answer:
            raise TemplateError(f"chat template: not compiled: {answer['error']}")

    def _exchange(self, process: subprocess.Popen[bytes], line: str, max_bytes: int) -> dict[str, Any]:
        """One request, one answer. Without a whole answer the process is ended: its next would be stale."""
        whole = False
        try:
            assert process.stdin is not None
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._read_line(process, max_bytes))
            whole = "fatal" not in answer
            return answer
        except (OSError, ValueError):  # it died while being written to, or wrote what is no answer
            raise TemplateLimitError(f"chat template: {self._cause_of_death(process)}") from None
        finally:
            if not whole:
                self._end()

    def _read_line(self, process: subprocess.Popen[bytes], max_bytes: int) -> bytes:
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        deadline = time.monotonic() + self._limits.wall_s
        data = bytearray()
        while not data.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TemplateLimitError(f"chat template: no answer in {self._limits.wall_s:g} s, stopped")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise TemplateLimitError(f"chat template: {self._cause_of_death(process)}")
            data += part
            if len(data) > max_bytes:
                raise TemplateLimitError(f"chat template: an answer of more than {max_bytes} bytes")
        return bytes(data)

    def _cause_of_death(self, process: subprocess.Popen[bytes]) -> str:
        self._end()
        if process.returncode == -signal.SIGPROF:
            return f"took more than {self._limits.cpu_s:g} s of processor time and was stopped"
        return f"its process ended with status {process.returncode}"

    def _end(self) -> None:
        if self._reaper is not None:
            self._reaper()
        self._process = self._reaper = None


def _spawn() -> subprocess.Popen[bytes]:
    """Start the worker with no environment and no path but the standard library's, out of reach of Ctrl-C."""
    worker = Path(__file__).with_name("template_worker.py")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            process_group=0,
        )
    except OSError as error:
        raise TemplateLimitError(f"chat template: no process to run it in: {error}") from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End `process` and collect its status. Also called when its owner is collected, and at exit.

    In a forked child it closes the pipes alone, since Popen ends no process of another parent.
    """
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # the rest of a request that it will never read
            if pipe is not None:
                pipe.close()


def _import_paths(*modules: str) -> list[str]:
    """The folders of these packages: all that the worker can import besides the standard library."""
    specs = [importlib.util.find_spec(module) for module in modules]
    return sorted({str(Path(spec.origin).parent.parent) for spec in specs if spec and spec.origin})
