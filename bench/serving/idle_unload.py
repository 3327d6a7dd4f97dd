"""What a server has while its model is loaded and while it is unloaded, and how soon the next token comes.

    python -m bench.serving.idle_unload --out docs/results/idle_unload.json
    python -m bench.serving.idle_unload --device cuda --model MODEL.gguf

A server with `--idle-unload` is asked, left alone until it has unloaded its model, and asked again, several
times. Memory is that of all its processes: pages that are theirs in RAM, mapped files included.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import httpx2
import psutil

from bench.engine.at_rest import at_rest
from bench.results import write_result
from bench.serving.served import Served, engine_of, served
from coldstream.assets import demo_model_path
from coldstream.placement.hardware import Hardware

WINDOW_S: Final = 20.0
TIMES: Final = 5
IDLE_MINUTES: Final = 0.1
UNLOAD_S: Final = 120.0  # beyond the minutes, for a model to be unloaded
PROMPT: Final = "def read_lines(path):"
ASKED: Final = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "stream": True, "ignore_eos": True}


def ask(http: httpx2.Client) -> tuple[float, str]:
    """Seconds to the first text of an answer, and the whole answer."""
    began, first, pieces = time.perf_counter(), 0.0, []
    with http.stream("POST", "/v1/completions", json=ASKED) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            if pieces[-1] and not first:
                first = time.perf_counter() - began
    return first, "".join(pieces)


def until_sleeping(http: httpx2.Client) -> None:
    """RuntimeError if the model stays loaded."""
    deadline = time.monotonic() + 60 * IDLE_MINUTES + UNLOAD_S
    while not http.get("/v1/models").json()["data"][0]["meta"]["is_sleeping"]:
        if time.monotonic() > deadline:
            raise RuntimeError("the model was not unloaded")
        time.sleep(0.05)


def memory_of(api: psutil.Process, device: str) -> dict[str, int]:
    """Bytes of the server's processes in RAM, and used on the GPU by all programs."""
    children = api.children(recursive=True)
    found = {"api": api.memory_info().rss, "others": sum(each.memory_info().rss for each in children)}
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found["gpu"] = int(shown.splitlines()[0]) << 20
    return found


def measure(server: Served, device: str, seconds: float) -> dict[str, object]:
    """Memory, time at rest, and times to first tokens. RuntimeError if an answer is another one later."""
    with httpx2.Client(base_url=server.url, timeout=600) as http:
        _, answer = ask(http)
        loaded_s, woken_s = [], []
        for _ in range(TIMES):
            first, again = ask(http)
            loaded_s.append(first)
            if again != answer:
                raise RuntimeError("two answers to one question differ")
        loaded = memory_of(server.api, device)
        engine_of(server.api)  # it is there, or ValueError
        until_sleeping(http)
        unloaded, rest = memory_of(server.api, device), at_rest(server.api.pid, seconds)
        for _ in range(TIMES):
            first, again = ask(http)
            woken_s.append(first)
            if again != answer:
                raise RuntimeError("the answer behind a sleep is another one")
            until_sleeping(http)
    return {
        "first_token_s": {"loaded": loaded_s, "unloaded": woken_s},
        "median_first_token_s": {
            "loaded": statistics.median(loaded_s),
            "unloaded": statistics.median(woken_s),
        },
        "memory": {"loaded": loaded, "unloaded": unloaded},
        "rest": rest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=WINDOW_S, help="of the window at rest")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    idle = ("--idle-unload", str(IDLE_MINUTES))
    with (
        tempfile.TemporaryDirectory() as folder,
        served(options.model, Path(folder, "log"), *idle, device=options.device) as server,
    ):
        measured = measure(server, options.device, options.seconds)
    result = {
        "command": "python -m bench.serving.idle_unload",
        "model": options.model.name,
        "device": options.device,
        "load_average": os.getloadavg()[0],
        "cpu": Hardware.measure().cpu_name,
    }
    write_result(result | measured, options.out)


if __name__ == "__main__":
    main()
