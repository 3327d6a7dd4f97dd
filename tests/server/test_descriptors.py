"""A server that has run out of descriptors: what it writes, and that it goes on when some are free again."""

import json
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, TextIO

import httpx2
import psutil
import pytest

LONG_S = 60.0
COMMAND = ("serve", "--port", "0", "--device", "cpu", "--threads", "1", "--log-format", "json")


@pytest.fixture
def server() -> Iterator["subprocess.Popen[str]"]:
    """A server in a process of its own, on any port, with its log as a pipe."""
    command = [sys.executable, "-m", "coldstream", *COMMAND]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


def lines_of(log: TextIO) -> Iterator[dict[str, Any]]:
    for line in log:
        if line.startswith("{"):  # and is no line about progress
            yield json.loads(line)


def test_rq09_without_descriptors_it_writes_a_line_a_second_and_goes_on_later(
    server: "subprocess.Popen[str]",
) -> None:
    assert server.stderr is not None
    lines = lines_of(server.stderr)
    url = next(line["url"] for line in lines if line["event"] == "ready")
    port = int(url.rsplit(":", 1)[1])
    assert httpx2.get(f"{url}/health").status_code == 200
    used = psutil.Process(server.pid).num_fds()
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 8, used + 8))
    began = time.monotonic()
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        full = [next(line for line in lines if "Too many open files" in line["message"]) for _ in range(3)]
        seconds = time.monotonic() - began
        while select.select([server.stderr], [], [], 0.0)[0]:
            full.append(next(lines))
    assert [line for line in full if "out of system resource" not in line["message"]] == []
    assert len(full) <= seconds + 2
    assert httpx2.get(f"{url}/health", timeout=LONG_S).status_code == 200
    answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=LONG_S)
    assert answer.status_code == 200
