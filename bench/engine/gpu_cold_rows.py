"""Steps of 1 to 64 rows on a GPU that holds few of the experts, beside the time of the bytes that they lack.

    python -m bench.engine.gpu_cold_rows full.gguf     writes the file first if it isn't there (21 GB)
    python -m bench.engine.gpu_cold_rows full.gguf --old DIR --old-commit COMMIT

For each budget of experts, texts continue a prompt in steps of so many rows: first those in which the working
set comes in, then those that are timed, with their logits on the host. Beside each stands the floor: the
experts that the step's rows want and no slot has, each once, over what RAM and bus read together. The logits
behind the same tokens must be the same whatever the rows of a step. With --old the sources in that folder,
with their extension built, are measured after these. With --cpu-times experts are shared out as if the
CPU took so many times as long for one as the plan says: whether the plan's rates share them well. With
--prefetch guessed experts come ahead, up to that many of a layer, or as the plan says.
"""

import argparse
import hashlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.device import describe
from bench.engine.gpu import FIRST_ID, numbers, write_model
from bench.engine.gpu_hybrid import GIB, Machine, plan_with
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, add_result_options, write_result
from coldstream import kvcache
from coldstream.engine import LLM, EngineConfig
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.models.read_spec import read_spec
from coldstream.placement.controls import Controls
from coldstream.placement.plan_file import save_plan
from coldstream.placement.rates import Rates
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.machine import measured_hardware

DEPTH, WARM_STEPS, TIMED_STEPS = 512, 24, 8
COMPARED = 64  # tokens behind the prompt, after which logits are compared


def warm_steps(rows: int) -> int:
    """Steps of so many rows that come before the timed ones, which reach the token of the comparison."""
    return max(WARM_STEPS, -(-COMPARED // rows) - TIMED_STEPS)


def num_tokens(rows: int) -> int:
    """Tokens behind the prompt of all steps of so many rows."""
    return rows * (warm_steps(rows) + TIMED_STEPS)


class Steps:
    """Steps of one runner behind a prompt that it has computed."""

    def __init__(self, runner: Any, sizes: Sequence[int], both_bytes_per_s: float) -> None:
        self._runner, self._sizes, self._both = runner, np.array(sizes), both_bytes_per_s

    def of(self, rows: int) -> dict[str, Any]:
        """Figures of steps of so many rows, behind a prompt of their own."""
        runner = self._runner
        sequence: kvcache.Sequence = runner.new_sequence()
        runner.extend(sequence, [FIRST_ID + i for i in range(DEPTH)])
        seconds, floors, wanted, digest = [], [], [], ""
        num_warm = warm_steps(rows)
        for number in range(num_warm + TIMED_STEPS):
            if number == num_warm:
                before = runner.gpu_experts
            first = DEPTH + number * rows
            resident = runner._partial._residency.resident.copy()
            start = time.perf_counter()
            logits = np.asarray(runner.extend(sequence, [FIRST_ID + first + i for i in range(rows)]))
            taken = time.perf_counter() - start
            if first + rows == DEPTH + COMPARED:
                digest = hashlib.sha256(np.ascontiguousarray(logits)).hexdigest()[:16]
            if number >= num_warm:
                seconds.append(taken)
                union, missing = self._wanted(rows, resident)
                floors.append(missing / self._both)
                wanted.append(union)
        after = runner.gpu_experts
        runner.release(sequence)
        per_step = 1e3 / TIMED_STEPS
        return {
            "rows": rows,
            "ms": 1e3 * statistics.median(seconds),
            "floor_ms": 1e3 * statistics.mean(floors),
            "experts_of_a_layer": statistics.mean(wanted),
            "cpu_ms": per_step * (sum(after.cpu_s) - sum(before.cpu_s)),
            "cpu_pairs": (sum(after.cpu_pairs) - sum(before.cpu_pairs)) / TIMED_STEPS,
            "logits": digest,
        }

    def _wanted(self, rows: int, resident: Any) -> tuple[float, float]:
        """Experts of a layer that the last step chose, on average, and the bytes of those without a slot."""
        used = np.asarray(self._runner._partial._executor.decode.chosen.used)[:, :rows]
        chosen = np.zeros_like(resident)
        for layer, ids in enumerate(used[: len(chosen)]):
            chosen[layer, ids.reshape(-1)] = True
        missing = (chosen & ~resident).sum(axis=1)
        return float(chosen.sum(axis=1).mean()), float((missing * self._sizes[: len(missing)]).sum())


def share_by(runner: Any, times: Any, scale: float) -> None:
    """Has experts shared out as if the CPU took `scale` times as long as the plan's `times` say."""
    cpu = tuple(max(1, round(scale * time)) for time in times.cpu)
    runner.control(Controls())
    runner._partial.set_times(replace(times, cpu=cpu))


def measure(
    path: Path,
    budgets: Sequence[float],
    rows: Sequence[int],
    scales: Sequence[float],
    prefetch: int | Literal["auto"] = 0,
) -> list[dict[str, Any]]:
    """A row for each budget, in GiB, scale of the CPU's times (none: as planned) and number of rows."""
    hardware, ctx_size = measured_hardware(find_gpu()), DEPTH + max(map(num_tokens, rows))
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        config = EngineConfig(str(path), device="cuda", vram=100 * GIB, ctx_size=ctx_size)
        sizes = plan_model(config, Sources(file, spec, hardware)).known.model
    rates, found = Rates.of(hardware), []
    both = max(rates.read_bytes_per_s, rates.read_beside_link + rates.link_beside_read)
    for gib in budgets:
        run = plan_with(Machine(path, ctx_size, spec.vocab_size, hardware, sizes), int(gib * GIB))
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder, "plan.json")
            save_plan(run, kept)
            with LLM(path, device="cuda", plan=str(kept), prefetch=prefetch) as llm:
                steps = Steps(llm.opened.runner, run.placement.expert_bytes, both)
                for scale, count in itertools.product(scales or [None], rows):
                    if scale is not None:
                        share_by(llm.opened.runner, run.miss_times, scale)
                    given = {
                        "gib": gib,
                        "resident_bytes": run.placement.resident_bytes,
                        "expert_bytes": sizes.all_expert_bytes,
                        "cpu_times": scale,
                        "prefetch": llm.opened.config.prefetch,
                    }
                    found.append(given | steps.of(count))
                    print(found[-1], file=sys.stderr, flush=True)
    return found


def measured_in(root: Path, options: argparse.Namespace, scales: Sequence[float]) -> list[dict[str, Any]]:
    """`measure` in a process over the sources below `root`."""
    # -P: not the folder of this file, whose benchmarks are those of these sources.
    paths = [str(root / "src"), str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "rows.json")
        command = [
            sys.executable,
            "-P",
            __file__,
            str(options.model),
            *words(options, scales),
            "--kept",
            str(kept),
        ]
        subprocess.run(command, env=environment, check=True)
        found: list[dict[str, Any]] = json.loads(kept.read_text())
    return found


def words(options: argparse.Namespace, scales: Sequence[float]) -> list[str]:
    asked = ["--experts", *map(str, options.experts), "--rows", ",".join(map(str, options.rows))]
    if options.prefetch:
        asked += ["--prefetch", str(options.prefetch)]
    return [*asked, "--cpu-times", *map(str, scales)] if scales else asked


def prefetch_of(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def check_logits(rows: Sequence[dict[str, Any]]) -> None:
    """RuntimeError unless the same tokens led to the same logits in all steps that end behind them."""
    if len({row["logits"] for row in rows if row["logits"]}) > 1:
        raise RuntimeError(
            f"logits depend on rows or budget: {[(row['rows'], row['logits']) for row in rows]}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--experts", type=float, nargs="*", default=[0.25, 3.0], help="GiB")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 24, 32, 64])
    parser.add_argument("--cpu-times", type=float, nargs="*", default=[], help="as many times the plan's")
    parser.add_argument("--prefetch", type=prefetch_of, default=0, help="experts of a layer, or auto")
    parser.add_argument("--old", type=Path, help="the older sources, with their extension built")
    parser.add_argument("--old-commit")
    add_result_options(parser)
    parser.add_argument("--kept", type=Path, help=argparse.SUPPRESS)  # of one side, in its own process
    options = parser.parse_args()
    if options.kept is not None:
        rows = measure(options.model, options.experts, options.rows, options.cpu_times, options.prefetch)
        options.kept.write_text(json.dumps(rows))
        return 0
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    asked = words(options, options.cpu_times)
    result = {
        "command": shlex.join(["python", "-m", "bench.engine.gpu_cold_rows", options.model.name, *asked]),
        "machine": describe("cuda"),
        "rows": measured_in(ROOT, options, options.cpu_times),
    }
    if options.old is not None:
        result |= {"old_commit": options.old_commit, "old_rows": measured_in(options.old, options, [])}
    for name in ("rows", "old_rows"):
        check_logits(result.get(name, []))
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
