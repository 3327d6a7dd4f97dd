"""Decode speed of the full-size model with memory for a part of its experts, beside the floor.

    python -m bench.engine.gpu_hybrid full.gguf          writes the model file first if it isn't there (21 GB)

For each budget of experts and depth of context, texts that are new to the cache: a prompt, tokens that are
not timed while the working set comes in, then those that are. Greedy text has to walk through the vocabulary,
as these files make it do, so that every token is checked. The report adds the forecast of `coldstream plan`.
A file that full_size_model.py wrote with --guess-recall has guesses that are as often wrong as a trained
model's.
"""

import argparse
import itertools
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from bench.device import describe
from bench.engine.gpu import numbers, write_model
from bench.full_size_forecast import SHORT_PROMPT, mean_context
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, add_result_options, write_result
from bench.runners import plan_with_workers
from coldstream.decoding import SamplingParams
from coldstream.engine import LLM, EngineConfig
from coldstream.errors import OutOfMemoryError
from coldstream.experts.gpu_statistics import PARTS
from coldstream.experts.prefetch import PrefetchStatistics
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import PlacementPlan, plan_placement
from coldstream.placement.plan_file import save_plan
from coldstream.placement.rates import Rates
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.machine import measured_hardware

GIB = 2**30
ROOM_BYTES = 5 * GIB  # for all but the experts
WARM_TOKENS, TIMED_TOKENS, TEXTS = 512, 256, 3
FIRST_ID, TEXT_STEP = 1000, 20_011  # of the first generated ids of texts
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Machine:
    """The settings common to all cases."""

    path: Path
    ctx_size: int
    vocab_size: int
    hardware: Hardware
    sizes: ModelSizes
    parallel: int = 1  # contexts


def plan_with(machine: Machine, expert_bytes: int) -> RunPlan:
    """The plan for the least memory, to a few MiB, in which about so many bytes of experts are resident."""
    wanted = min(expert_bytes, machine.sizes.all_expert_bytes)
    with GGUFFile.open(machine.path) as file:
        spec = read_spec(file.metadata, file.tensors)
        config = EngineConfig(
            str(machine.path),
            device="cuda",
            vram=wanted + ROOM_BYTES + machine.parallel * GIB // 4,
            ctx_size=machine.ctx_size,
            parallel=machine.parallel,
        )
        sources = Sources(file, spec, machine.hardware)
        fixed = plan_model(config, sources).plan.fixed
        low, high = fixed.total, fixed.total + 2 * machine.sizes.all_expert_bytes
        while high - low > 2**22:
            middle = (low + high) // 2
            try:
                is_enough = plan_placement(machine.sizes, fixed, middle).resident_bytes >= wanted
            except OutOfMemoryError:
                is_enough = False
            low, high = (low, middle) if is_enough else (middle, high)
        return plan_with_workers(RunPlan(plan_placement(machine.sizes, fixed, high), 0), config, sources)


def budget_with(
    path: Path,
    hardware: Hardware,
    ctx_size: int,
    parallel: int,
    expert_bytes: int,
    step: int = 2**24,
    chunk_size: int = 0,
) -> int:
    """The least budget, to `step` bytes, whose plan has so many bytes of experts resident, or all experts,
    and steps of at least `chunk_size` rows.
    """
    most = EngineConfig(str(path), device="cuda", vram=100 * GIB, ctx_size=ctx_size, parallel=parallel)
    with GGUFFile.open(path) as file:
        sources = Sources(file, read_spec(file.metadata, file.tensors), hardware)
        wanted = min(expert_bytes, plan_model(most, sources).plan.resident_bytes)
        low, high = 0, 100 * GIB
        while high - low > step:
            middle = (low + high) // 2
            try:
                plan = plan_model(replace(most, vram=middle), sources).plan
                is_enough = plan.resident_bytes >= wanted and plan.fixed.chunk_size >= chunk_size
            except OutOfMemoryError:
                is_enough = False
            low, high = (low, middle) if is_enough else (middle, high)
    return high


def generate(llm: LLM, next_id: int, num_prompt: int) -> dict[str, Any]:
    """Generates the text from an id on, after a prompt of any length: seconds per token, and counters."""
    runner = llm.opened.runner
    first_id = next_id - num_prompt
    prompt = [(first_id + i) % runner.spec.vocab_size for i in range(num_prompt)]
    llm.forget()
    context = list(prompt)
    for piece in llm.stream(prompt, replace(GREEDY, max_tokens=WARM_TOKENS + TIMED_TOKENS)):
        context += piece.token_ids
        if len(context) == num_prompt + WARM_TOKENS:
            before, start = counted(runner), time.perf_counter()
    seconds = (time.perf_counter() - start) / TIMED_TOKENS
    expected = [(first_id + i) % runner.spec.vocab_size for i in range(len(context))]
    if context != expected:
        raise RuntimeError(f"not a figure of this model: text from {first_id} left the walk")
    after = counted(runner)
    return {"seconds": seconds, **{name: (after[name] - before[name]) / TIMED_TOKENS for name in after}}


def counted(runner: Any) -> dict[str, float]:
    """Sums so far: uses that hit and missed, copies, requests to the CPU with their pairs and seconds,
    experts that the CPU was to expect, those of them and all that it was asked for, pairs that came over the
    bus, and seconds of the parts of all layers.
    """
    cache, on_gpu = runner.expert_cache, runner.gpu_experts
    if cache is None or on_gpu is None:
        return {}
    times = on_gpu.step_times
    counters = cache.counters
    return {
        "hits": float(counters.hits.sum()),
        "misses": float(counters.misses.sum()),
        "copies": float(counters.copies.sum()),
        "cpu_requests": float(sum(on_gpu.cpu_requests)),
        "cpu_pairs": float(sum(on_gpu.cpu_pairs)),
        "cpu_seconds": sum(on_gpu.cpu_s),
        "cpu_expected": float(sum(on_gpu.cpu_expected)),
        "cpu_right": float(sum(on_gpu.cpu_right)),
        "cpu_asked": float(sum(on_gpu.cpu_asked)),
        "bus_pairs": float(sum(times.bus_pairs)),
        **{f"{part}_seconds": seconds for part, seconds in times.parts.items()},
    }


def parts_of(texts: list[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds of a token in each part of its layers, and in the `rest` of it; {} if unknown."""
    if not all(f"{part}_seconds" in text for text in texts for part in PARTS):
        return {}
    parts = {part: statistics.mean(text[f"{part}_seconds"] for text in texts) for part in PARTS}
    whole = statistics.mean(text["seconds"] for text in texts)
    return {**parts, "rest": whole - sum(parts.values())}


def floor_seconds(machine: Machine, texts: list[dict[str, Any]], num_context: int) -> float:
    """Seconds of a token if every byte moved at the measured rates and nothing else took time."""
    sizes, rates = machine.sizes, Rates.of(machine.hardware)
    mean_bytes = statistics.mean(sizes.expert_bytes)
    misses = statistics.mean(text.get("misses", 0.0) for text in texts)
    hits = sizes.num_layers * sizes.num_experts_per_tok - misses
    dense = sizes.dense_token_bytes + num_context * sizes.kv_token_bytes + sizes.state_bytes
    both = max(rates.read_bytes_per_s, rates.read_beside_link + rates.link_beside_read)
    resident_s = hits * mean_bytes / rates.vram_bytes_per_s
    return dense / rates.vram_bytes_per_s + max(resident_s, misses * mean_bytes / both)


def measure(
    machine: Machine, gib: float | None, depths: list[int], prefetch: int | Literal["auto"]
) -> list[dict[str, Any]]:
    """All depths with one budget: GiB of experts, None for all of them. The texts are the same for each."""
    first_id = max(depths) + FIRST_ID
    last_id = machine.vocab_size - 10_000
    next_ids = [first_id + number * TEXT_STEP % (last_id - first_id) for number in range(TEXTS)]
    wanted = machine.sizes.all_expert_bytes if gib is None else int(gib * GIB)
    run = plan_with(machine, wanted)
    rows = []
    with TemporaryDirectory() as folder:
        kept = Path(folder) / "plan.json"
        save_plan(run, kept)
        for depth in depths:
            # Opened anew, so that the cache knows nothing of the texts.
            with LLM(machine.path, device="cuda", plan=str(kept), prefetch=prefetch) as llm:
                num_prompt = max(SHORT_PROMPT, depth)
                texts = [generate(llm, next_id, num_prompt) for next_id in next_ids]
                guesses, count = guesses_of(llm), llm.opened.config.prefetch
                experts = llm.opened.runner.gpu_experts
                shares = experts.shares if experts else None
            row = row_of(run.placement, machine, texts, mean_context(depth, WARM_TOKENS, TIMED_TOKENS))
            asked = {"depth": depth, "prefetch": count, "guesses": asdict(guesses) if guesses else None}
            asked |= {"guess_recall": guesses.recall if guesses else None, "ahead": llm.opened.plan.ahead}
            asked |= {"shares": asdict(shares) if shares else None}
            rows.append(asked | row)
            print({k: v for k, v in rows[-1].items() if k not in ("texts", "guesses")}, flush=True)
    return rows


def row_of(
    plan: PlacementPlan, machine: Machine, texts: list[dict[str, Any]], context: int
) -> dict[str, Any]:
    """The figures of one budget and depth."""
    seconds = statistics.median(text["seconds"] for text in texts)
    floor = floor_seconds(machine, texts, context)
    return {
        "experts_bytes": plan.resident_bytes,
        "experts_share": plan.resident_bytes / machine.sizes.all_expert_bytes,
        "vram_bytes": plan.total_bytes,
        "tok_s": 1 / seconds,
        "texts": texts,
        "parts_s": parts_of(texts),
        "hit_rate": statistics.mean(hit_rate(text) for text in texts),
        "floor_s": floor,
        "share_of_floor": floor / seconds,
    }


def guesses_of(llm: LLM) -> PrefetchStatistics | None:
    """Prefetch statistics of all texts so far; None without prefetching."""
    experts = llm.opened.runner.gpu_experts
    return experts.prefetch if experts else None


def hit_rate(text: dict[str, Any]) -> float:
    if not text.get("hits"):
        return 0.0 if text.get("misses") else 1.0
    return text["hits"] / (text["hits"] + text["misses"])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; see the module docstring."""
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    hardware = measured_hardware(find_gpu())
    ctx_size = max(options.depths) + SHORT_PROMPT + WARM_TOKENS + TIMED_TOKENS
    with GGUFFile.open(options.model) as file:
        spec = read_spec(file.metadata, file.tensors)
        config = EngineConfig(str(options.model), device="cuda", vram=100 * GIB, ctx_size=ctx_size)
        known = plan_model(config, Sources(file, spec, hardware)).known
    machine = Machine(options.model, ctx_size, spec.vocab_size, hardware, known.model)
    rows = []
    for gib, prefetch in itertools.product(options.experts, options.prefetch):
        rows += measure(machine, gib, options.depths, prefetch)
    rows += measure(machine, None, options.depths, prefetch=0)
    return {
        "command": command(options),
        "machine": describe("cuda"),
        "hardware": asdict(hardware),
        "texts": TEXTS,
        "warm_tokens": WARM_TOKENS,
        "timed_tokens": TIMED_TOKENS,
        "rows": rows,
    }


def command(options: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["python", "-m", "bench.engine.gpu_hybrid", options.model.name]
    for name in ("experts", "depths", "prefetch"):
        values = getattr(options, name)
        words += [f"--{name}", ",".join(v if isinstance(v, str) else f"{v:g}" for v in values)]
    return shlex.join(words)


def sizes(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def counts(text: str) -> list[int | Literal["auto"]]:
    return ["auto" if part == "auto" else int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "hybrid.json")
    parser.add_argument("--experts", type=sizes, default=[0, 1.5, 3, 6, 10, 10.67, 15], help="GiB, then all")
    parser.add_argument("--depths", type=numbers, default=[0, 8192])
    parser.add_argument(
        "--prefetch", type=counts, default=["auto"], help="experts of a layer that come ahead, or auto"
    )
    options = parser.parse_args()
    write_result(run(options), options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
