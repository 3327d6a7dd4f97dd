"""A GPU with less RAM than the file: text, speed and memory, each budget in a memory cgroup of its size.

    python -m bench.full_size_model full.gguf                                     20 GB
    python -m bench.engine.three_tiers full.gguf --vram 4G --ram 10G 14G 18G --out FILE

Each run is a process of its own: it opens the model, computes a prompt, and generates the most likely tokens
behind it. The text must be that of a run without a budget, in which the file is mapped; the peak of the
cgroup, of the process and of what it has locked must be within the budget. Where no cgroup may be made,
`--fill` takes all other memory of the machine first, so that the system has no room for more of the file's
pages, and `--no-cgroup` checks the process alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.disk_tier import forget_pages
from bench.memory_limit import filled_memory, memory_limit
from bench.peers.peer_tokens import random_tokens
from bench.results import add_result_options, write_result
from coldstream.engine import EngineConfig, open_model
from coldstream.engine.opened_model import OpenedModel
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import Hardware
from coldstream.planning.config import parse_size

CONTEXT = 4096
PARTS = 4  # of the generated tokens, timed apart
KILOBYTES = ("VmHWM", "VmLck", "VmPin")


def answered(opened: OpenedModel, prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Tokens after a prompt, the seconds of it and of each part of them, and what experts did."""
    runner, tokens, seconds = opened.runner, list[int](), list[float]()
    sequence = runner.new_sequence()
    started = time.perf_counter()
    token = int(np.array(runner.extend(sequence, prompt)).argmax())
    prompt_s = time.perf_counter() - started
    for _ in range(PARTS):
        started = time.perf_counter()
        for _ in range(count // PARTS):
            tokens.append(token)
            token = int(np.array(runner.extend(sequence, (token,))).argmax())
        seconds.append(time.perf_counter() - started)
    disk, on_gpu = runner.disk, runner.gpu_experts
    return {
        "tokens": tokens,
        "prompt_s": prompt_s,
        "seconds": seconds,
        "disk": asdict(disk) if disk else None,
        "hit_rate": on_gpu.hit_rate if on_gpu else 1.0,
    }


def memory_of_process() -> dict[str, int]:
    """Most bytes in memory so far, and those locked and pinned, as the system counts them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in KILOBYTES if name in lines}


def work(options: argparse.Namespace) -> None:
    """One run, in this process; prints its figures as a line of JSON."""
    config = EngineConfig(
        str(options.model), device="cuda", ctx_size=CONTEXT, vram=options.vram, ram=options.ram or "auto"
    )
    started = time.perf_counter()
    opened = open_model(config)
    try:
        load_s = time.perf_counter() - started
        plan = opened.plan
        expected = forecast(plan.placement, opened.planned.known, pool=plan.pool)
        figures = answered(opened, random_tokens(options.prompt, 1), options.tokens)
    finally:
        opened.close()
    pool = plan.pool
    print(
        json.dumps(
            {
                **figures,
                "load_s": load_s,
                "memory": memory_of_process(),
                "planned_bytes": pool.total_bytes if pool else None,
                "fixed": asdict(pool.fixed) if pool else None,
                "forecast": asdict(expected),
            }
        )
    )


def run(options: argparse.Namespace, ram: int | None) -> dict[str, Any]:
    """The figures of a run in a process of its own, in a cgroup of `ram` bytes."""
    forget_pages(options.model)
    command = (sys.executable, "-m", "bench.engine.three_tiers", str(options.model), "--worker")
    command += ("--vram", str(options.vram), "--prompt", str(options.prompt), "--tokens", str(options.tokens))
    if ram is None or options.no_cgroup:
        budget = () if ram is None else ("--ram", str(ram))
        found = _last_line((*command, *budget))
    elif options.fill:
        with filled_memory(ram):
            found = _last_line((*command, "--ram", str(ram)))
    else:
        with memory_limit(f"tiers-{ram}", ram) as limit:
            found = _last_line(limit.command(*command, "--ram", str(ram)))
            found |= {"cgroup_peak": limit.peak_bytes, "kills": limit.num_kills}
    print(f"--ram {ram or 'auto'}:", json.dumps(summary(found, options.tokens)), file=sys.stderr)
    return found


def _last_line(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """See the module docstring. AssertionError for another text, or memory beyond a budget."""
    mapped = run(options, None)
    assert mapped["disk"] is None, "without a budget the file is mapped: there is too little RAM to compare"
    runs = {str(ram): run(options, ram) for ram in options.budgets}
    for ram, found in runs.items():
        assert found["tokens"] == mapped["tokens"], f"the text depends on --ram {ram}"
        assert found.get("kills", 0) == 0, f"--ram {ram}: the system ended a process"
        peaks = {"cgroup": found.get("cgroup_peak", 0), **found["memory"]}
        assert max(peaks.values()) <= int(ram), f"--ram {ram}: {peaks}"
    return {
        "model": options.model.name,
        "file_bytes": options.model.stat().st_size,
        "vram_bytes": options.vram,
        "prompt": options.prompt,
        "machine": asdict(Hardware.measure()),
        "same_text": True,
        "limit": "process" if options.no_cgroup else "filled memory" if options.fill else "cgroup",
        "mapped": summary(mapped, options.tokens),
        "budgets": {ram: summary(found, options.tokens) for ram, found in runs.items()},
    }


def summary(found: dict[str, Any], count: int) -> dict[str, Any]:
    """The figures of a run without its text. Speed is without the first part, which fills memories."""
    rest = {key: value for key, value in found.items() if key not in ("tokens", "seconds")}
    return {**rest, "tok_s": count // PARTS / statistics.median(found["seconds"][1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--vram", type=parse_size, required=True)
    parser.add_argument("--ram", type=parse_size, nargs="*", default=[], help="budgets")
    parser.add_argument("--prompt", type=int, default=600, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="generated in each run")
    parser.add_argument("--no-cgroup", action="store_true", help="check the memory of the process alone")
    parser.add_argument("--fill", action="store_true", help="take all other memory, instead of a cgroup")
    parser.add_argument("--worker", action="store_true", help="one run, in this process")
    add_result_options(parser)
    options = parser.parse_args()
    options.budgets, options.ram = options.ram, (options.ram or [None])[0]
    options.model = options.model.resolve()
    if options.worker:
        work(options)
        return
    write_result(compare(options), options.out, options.commit)


if __name__ == "__main__":
    main()
