"""Where the time of a decode step on the GPU goes: by kind of kernel, and between kernels.

    python -m bench.engine.gpu_profile full.gguf [--rows N]

A profiler (CUPTI, through PyTorch) records every kernel of some steps after a prompt; its overhead is why
the speed is measured without it (gpu.py). A kernel's kind is its name without template arguments. A gap is
the time from the end of a kernel to the start of the next in the same step, below 0 where they overlap; the
gap between two steps, in which the logits travel to the host, is counted apart.

Launches of a kind with the same grid are a shape. A launch begins before the one before it ends, so that its
duration says little. What it adds to the step is the time from the end of all launches before to its own.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.device import describe, measure_bandwidth
from bench.engine.gpu import FIRST_ID
from bench.results import ROOT, add_result_options, write_result
from coldstream.engine import LLM
from coldstream.models.footprint import bytes_per_token
from coldstream.models.runner import ModelRunner

NUM_STEPS = 20
NUM_GAPS = 3
OTHER_EVENTS = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or fill on the device; times in microseconds."""

    name: str
    start: float
    duration: float
    grid: tuple[int, ...] = ()  # of a kernel

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def kind(self) -> str:
        """The name without return type, namespaces, template arguments and parameters."""
        name = re.split(r"[<(]", self.name.replace("(anonymous namespace)::", ""))[0].strip()
        return name if name.startswith("Mem") else name.removeprefix("void ").split("::")[-1]


def read_trace(path: Path) -> list[Launch]:
    """The device's work in order of start, from a trace that PyTorch's profiler exported."""
    events = json.loads(path.read_text())["traceEvents"]
    launches = [
        Launch(event["name"], event["ts"], event["dur"], tuple(event.get("args", {}).get("grid", ())))
        for event in events
        if event.get("cat") in ("kernel", *OTHER_EVENTS)
    ]
    return sorted(launches, key=lambda launch: launch.start)


def split_steps(launches: Sequence[Launch], num_steps: int) -> list[list[Launch]]:
    """The launches of each step. Raises RuntimeError if steps don't all launch the same kernels."""
    length, rest = divmod(len(launches), num_steps)
    steps = [list(launches[i * length : (i + 1) * length]) for i in range(num_steps)]
    kinds = [Counter(launch.kind for launch in step) for step in steps]
    if rest or not length or any(counts != kinds[0] for counts in kinds):
        raise RuntimeError(f"{len(launches)} launches in {num_steps} steps: the steps are not alike")
    return steps


def shapes_of(steps: Sequence[Sequence[Launch]]) -> list[dict[str, Any]]:
    """Launches by kind and grid, those first that add most to a step; times are medians of a launch."""
    durations: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    added: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for step in steps:
        end = step[0].start
        for launch in step:
            key = launch.kind, launch.grid
            durations[key].append(launch.duration)
            added[key].append(max(0.0, launch.end - end))
            end = max(end, launch.end)
    shapes = [
        {
            "kind": kind,
            "grid": list(grid),
            "launches": len(values) // len(steps),
            "us": statistics.median(durations[kind, grid]),
            "adds_us": statistics.median(values),
            "step_us": sum(values) / len(steps),
        }
        for (kind, grid), values in added.items()
    ]
    return sorted(shapes, key=lambda shape: -float(shape["step_us"]))


def summarise(steps: Sequence[Sequence[Launch]], num_layers: int) -> dict[str, Any]:
    """Medians over the steps of what a step spends on what."""
    times: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        totals: dict[str, float] = defaultdict(float)
        for launch in step:
            totals[launch.kind] += launch.duration
        for kind, total in totals.items():
            times[kind].append(total)
    counts = Counter(launch.kind for launch in steps[0])
    kinds = [
        {"kind": kind, "launches": counts[kind], "us": statistics.median(values)}
        for kind, values in times.items()
    ]
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        for before, after in pairwise(step):
            gaps[before.kind, after.kind].append(after.start - before.end)
    per_pair = [
        {
            "after": before,
            "before": after,
            "count": len(values) // len(steps),
            "median_us": statistics.median(values),
            "us": sum(values) / len(steps),
        }
        for (before, after), values in gaps.items()
    ]
    return {
        "launches_per_step": len(steps[0]),
        "launches_per_layer": len(steps[0]) / num_layers,
        "step_us": statistics.median(step[-1].end - step[0].start for step in steps),
        "busy_us": statistics.median(sum(x.duration for x in step) for step in steps),
        "between_steps_us": statistics.median(
            after[0].start - before[-1].end for before, after in pairwise(steps)
        ),
        "kinds": sorted(kinds, key=lambda kind: -float(str(kind["us"]))),
        "shapes": shapes_of(steps),
        "largest_gaps": sorted(per_pair, key=lambda gap: -float(str(gap["us"])))[:NUM_GAPS],
    }


def trace_steps(runner: ModelRunner, depth: int, num_steps: int, rows: int) -> list[Launch]:
    """The launches of steps of `rows` rows, after a prompt of `depth` tokens and two steps to warm up."""
    sequence = runner.new_sequence()
    runner.extend(sequence, range(FIRST_ID, FIRST_ID + depth))
    first = FIRST_ID + depth
    starts = [first + step * rows for step in range(num_steps + 2)]
    for start in starts[:2]:
        np.asarray(runner.extend(sequence, range(start, start + rows)))
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for start in starts[2:]:
            np.asarray(runner.extend(sequence, range(start, start + rows)))
        torch.cuda.synchronize()
    runner.release(sequence)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """All figures; see the module docstring."""
    bandwidth = measure_bandwidth("cuda", 0)
    ctx_size = options.depth + (NUM_STEPS + 2) * options.rows
    with LLM(options.model, device="cuda", ctx_size=ctx_size) as llm:
        runner = llm.opened.runner
        weight_bytes = bytes_per_token(runner.spec, runner.file.tensors)
        launches = trace_steps(runner, options.depth, NUM_STEPS, options.rows)
        summary = summarise(split_steps(launches, NUM_STEPS), runner.spec.num_layers)
        return {
            "command": f"python -m bench.engine.gpu_profile {options.model.name} --rows {options.rows}",
            "machine": describe("cuda"),
            "depth": options.depth,
            "rows": options.rows,
            "steps": NUM_STEPS,
            "weight_bytes_per_token": weight_bytes,
            "bandwidth_bytes_s": bandwidth,
            "share_of_bandwidth": weight_bytes / (summary["step_us"] * 1e-6) / bandwidth,
            **summary,
        }


def table(result: dict[str, Any]) -> str:
    """The profile for people."""
    lines = [f"{'kind':40} {'launches':>8} {'µs':>8} {'share':>6}"]
    for kind in result["kinds"]:
        share = kind["us"] / result["step_us"]
        lines.append(f"{kind['kind']:40} {kind['launches']:8} {kind['us']:8.1f} {share:6.1%}")
    lines.append(f"{'shape':40} {'launches':>8} {'µs':>8} {'adds':>6} {'a step':>8}")
    for shape in result["shapes"]:
        name = f"{shape['kind']} {'×'.join(map(str, shape['grid']))}"
        times = f"{shape['us']:8.1f} {shape['adds_us']:6.1f} {shape['step_us']:8.1f}"
        lines.append(f"{name:40} {shape['launches']:8} {times}")
    lines.append(
        f"{result['launches_per_step']} launches, {result['launches_per_layer']:.1f} a layer; step "
        f"{result['step_us']:.0f} µs, kernels {result['busy_us']:.0f} µs, then "
        f"{result['between_steps_us']:.0f} µs to the next; {result['share_of_bandwidth']:.0%} of bandwidth"
    )
    lines += [
        f"gap after {gap['after']}, before {gap['before']}: {gap['count']} of {gap['median_us']:.1f} µs, "
        f"{gap['us']:.0f} µs a step"
        for gap in result["largest_gaps"]
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--depth", type=int, default=512, help="tokens before the steps")
    parser.add_argument("--rows", type=int, default=1, help="of a step; bytes are counted for one")
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "profile.json")
    options = parser.parse_args()
    result = profile(options)
    write_result(result, options.out, options.commit)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
