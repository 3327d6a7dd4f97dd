"""The program `llama-server` of llama.cpp's tests: translates its flags, and forwards its port to
`coldstream serve`.

    llama_server_stand_in.py STATE --port 8080 --ctx-size 512 --parallel 2 …

A server takes seconds to start, so one that runs with the same flags is used again, unless STATE/fresh
exists. At most KEPT of them run; whoever made the folder STATE ends them (`end_servers`). Flags that
`coldstream serve` has no counterpart for are written to STATE/dropped, a line for each start.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KEPT: Final = 2
TRAINED_CTX: Final = 4096  # of the bundled model, and no server goes beyond
# The template in place of a large model's, by a part of its name: of llama.cpp's tree, and of this one.
TOOL_TEMPLATES: Final = {"Coder": "Qwen3-Coder", "Qwen": "Qwen3.5-4B"}
OWN_TEMPLATE: Final = Path(__file__).parents[2] / "tests" / "gguf" / "chatml.jinja"
START_S: Final = 120.0
SWITCHES: Final = frozenset(
    {
        *("--jinja", "--no-jinja", "--metrics", "--slots", "--no-slots", "--offline", "--verbose", "--no-ui"),
        *("--cont-batching", "--embedding", "--reranking", "--kv-unified", "--swa-full", "--context-shift"),
        *("--no-models-autoload", "--no-mmproj", "--no-cache-idle-slots", "--ui-mcp-proxy"),
        "--backend_sampling",
    }
)
WITHOUT_EFFECT: Final = frozenset(  # what `coldstream serve` always does, or what its model decides
    {
        *("--jinja", "--metrics", "--cont-batching", "--offline", "--kv-unified", "--no-slots", "--hf-repo"),
        *(
            "--hf-file",
            "--batch-size",
            "--ubatch-size",
            "-fa",
            "--port",
            "--host",
            "--parallel",
            "--ctx-size",
        ),
        *("--verbose", "--temp", "--seed", "--n-predict"),  # the last three are given with each request
    }
)


@dataclass(frozen=True)
class Translation:
    """What a command line of `llama-server` means here."""

    host: str
    port: int
    options: tuple[str, ...]  # of `coldstream serve`
    dropped: tuple[str, ...]  # flags without a counterpart


def translate(arguments: list[str], folder: Path) -> Translation:
    """The options for a command line. Templates that it holds are written to `folder`."""
    flags: dict[str, str] = {}
    rest = iter(arguments)
    for flag in rest:
        flags[flag] = "" if flag in SWITCHES else next(rest)
    parallel = int(flags.get("--parallel", "1"))
    options = ["--parallel", str(parallel)]
    if context := int(flags.get("--ctx-size", "0")):
        of_each = context if "--kv-unified" in flags else context // parallel
        options += ["--ctx-size", str(min(of_each, TRAINED_CTX))]
    if "--jinja" in flags and "--chat-template-file" not in flags:
        options += _template_of(flags.get("--hf-repo", ""))
    dropped = []
    for flag, value in flags.items():
        if flag in ("--alias", "--api-key", "--threads"):
            options += [flag, value]
        elif flag == "--chat-template-file":
            options += ["--chat-template", str(Path(value).resolve())]
        elif flag == "--chat-template" and not re.fullmatch(r"[\w.-]+", value):  # otherwise a built-in's name
            path = folder / f"{hashlib.sha256(value.encode()).hexdigest()[:16]}.jinja"
            path.write_text(value)
            options += ["--chat-template", str(path)]
        elif flag == "--reasoning":  # auto: as the template has it
            given = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}.get(value, {})
            options += ["--chat-template-kwargs", json.dumps(given)] if given else []
        elif flag == "--spec-type":
            options += ["--spec-type", "mtp"]  # the bundled model has a drafter of its own
        elif flag not in WITHOUT_EFFECT:
            dropped.append(flag)
    host = flags.get("--host", "127.0.0.1").split(",")[0]
    return Translation(host, int(flags["--port"]), tuple(options), tuple(dropped))


def _template_of(repository: str) -> list[str]:
    """Options for a large model's own template: one that knows tools, without thoughts, which the bundled
    model would not end. None for tiny models.
    """
    if not repository or repository.startswith("ggml-org/"):
        return []
    names = [name for part, name in TOOL_TEMPLATES.items() if part in repository]
    path = Path("../../../models/templates", f"{names[0]}.jinja").resolve() if names else OWN_TEMPLATE
    return ["--chat-template", str(path), "--chat-template-kwargs", '{"enable_thinking": false}']


def server_for(options: tuple[str, ...], state: Path) -> int:
    """The port of a ready server with `options`, of those that run or a new one.

    RuntimeError with the end of its log if it ends before it is ready or takes longer than START_S.
    """
    servers = state / "servers"
    servers.mkdir(exist_ok=True)
    record = servers / f"{hashlib.sha256(repr(options).encode()).hexdigest()[:16]}.json"
    if record.exists():
        found = json.loads(record.read_text())
        if not (state / "fresh").exists() and _answers(found["port"]):
            record.touch()
            return int(found["port"])
        end_server(record)
    running = sorted(servers.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for oldest in running[: len(running) - KEPT + 1]:
        end_server(oldest)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = record.with_suffix(".log")
    command = [sys.executable, "-m", "coldstream", "serve", "--device", "cpu", "--port", str(port), *options]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    record.write_text(json.dumps({"pid": process.pid, "port": port}))
    deadline = time.monotonic() + START_S
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            end_server(record)
            raise RuntimeError(f"`{' '.join(command)}` did not become ready: {log.read_text()[-500:]}")
        time.sleep(0.1)
    return port


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def end_server(record: Path) -> None:
    """Ends the server of a record, and removes that."""
    pid = json.loads(record.read_text())["pid"]
    record.unlink()
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end_servers(state: Path) -> None:
    """Ends all servers that were started with this folder."""
    for record in (state / "servers").glob("*.json"):
        end_server(record)


def forward(listener: socket.socket, port: int) -> None:
    """Gives each connection of `listener` to a server of this machine, until the parent process has ended."""
    parent = os.getppid()
    listener.settimeout(1)
    while os.getppid() == parent:
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        client.settimeout(None)
        try:
            server = socket.create_connection(("127.0.0.1", port))
        except OSError:
            client.close()
            continue
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    # A client that leaves must look the same to the server: both directions end with either.
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def main() -> None:
    state = Path(sys.argv[1])
    translation = translate(sys.argv[2:], state)
    with (state / "dropped").open("a") as out:
        out.write(f"{' '.join(translation.dropped)}\n")
    port = server_for(translation.options, state)
    forward(socket.create_server((translation.host, translation.port)), port)


if __name__ == "__main__":
    main()
