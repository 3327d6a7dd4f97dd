"""Prefill speed of the full-size model with memory for a part of its experts, beside what bandwidth allows.

    python -m bench.engine.gpu_streaming full.gguf       writes the model file first if it isn't there (21 GB)

For each budget of experts and length, prompts that are new to the model. Two floors stand beside a figure:
the missing experts that its tokens want, once, over the bus alone; and the same bytes read by bus and CPU
together, or the time with all experts resident where that is longer. What tokens want is counted where the
host shares experts out, which all prompts do first; `host_s` is the time of short ones that way, while
`tok_s` is always the product's. The token after a prompt is known in these files, so that every prompt is
checked.
"""

import argparse
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.device import describe
from bench.engine.gpu import numbers, write_model
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, add_result_options, write_result
from bench.runners import open_model_file, partial_plan, resident_plan
from coldstream.kernels.cuda.device import find_gpu
from coldstream.kernels.experts.mailbox import MAX_MAILBOX_ROWS
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.footprint import model_sizes
from coldstream.placement.cost import miss_times
from coldstream.placement.rates import Rates
from coldstream.planning.machine import measured_hardware

GIB, MIB = 2**30, 2**20
TEXT_STEP = 20_011  # from the first id of a text to that of the next


@dataclass(frozen=True)
class Setting:
    """The settings common to all cases."""

    path: Path
    rates: Rates
    threads: int
    ring_bytes: int
    chunk_size: int
    lengths: list[int]
    texts: int
    awake_s: list[float | None]  # see `ExpertServer.awake_s`, in turn; None: as the product has it


def open_runner(setting: Setting, gib: float | None) -> CudaRunner:
    """With so many GiB of experts, the same number of each layer; None: all of them."""
    file, spec = open_model_file(setting.path)
    ctx_size = max(setting.lengths) + 1
    if gib is None:
        return CudaRunner.load(file, spec, resident_plan(file, spec, ctx_size))
    sizes = model_sizes(spec, file.tensors, file.fingerprint, 0)
    plan = partial_plan(
        file,
        spec,
        int(gib * GIB / sizes.all_expert_bytes * spec.num_experts),
        context_length=ctx_size,
        chunk_size=setting.chunk_size,
        ring_bytes=setting.ring_bytes,
        threads=setting.threads,
    )
    plan = replace(plan, miss_times=miss_times(max(sizes.expert_bytes), setting.rates))
    return CudaRunner.load(file, spec, plan)


@contextmanager
def shared_out_by_the_host(runner: CudaRunner) -> Iterator[bool]:
    """All prompts within. Yields whether some of them are not, otherwise."""
    if runner.stream_counters is None:
        yield False
        return
    limits, decode = runner.limits, runner._loaded.ops.model_executor.decode
    runner.limits, decode.max_rows = replace(limits, shared_rows=MAX_MAILBOX_ROWS), MAX_MAILBOX_ROWS
    try:
        yield limits.shared_rows > MAX_MAILBOX_ROWS
    finally:
        runner.limits, decode.max_rows = limits, limits.shared_rows


def prefill(runner: CudaRunner, first_id: int, length: int) -> float:
    """Seconds of one prompt."""
    prompt = [(first_id + i) % runner.spec.vocab_size for i in range(length)]
    sequence = runner.new_sequence()
    start = time.perf_counter()
    logits = np.asarray(runner.extend(sequence, prompt))
    seconds = time.perf_counter() - start
    runner.release(sequence)
    if int(np.argmax(logits)) != (prompt[-1] + 1) % runner.spec.vocab_size:
        raise RuntimeError(f"not a figure of this model: {prompt[-1]} is not followed by the next id")
    return seconds


def counted_experts(runner: CudaRunner) -> dict[str, float]:
    """Sums so far, of all layers."""
    counters = runner.stream_counters
    return {} if counters is None else {name: float(each.sum()) for name, each in vars(counters).items()}


def measure(
    setting: Setting, gib: float | None, resident_s: dict[int, float], first_ids: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """All lengths with one budget."""
    with open_runner(setting, gib) as runner:
        sizes = model_sizes(runner.spec, runner.file.tensors, runner.file.fingerprint, 0)
        mean_bytes = statistics.mean(sizes.expert_bytes)
        awake = setting.awake_s if runner.stream_counters is not None else [None]
        for length, awake_s in itertools.product(setting.lengths, awake):
            if awake_s is not None:
                runner._partial_experts.host.bulk_server.awake_s = awake_s
            with shared_out_by_the_host(runner) as is_other:
                prefill(runner, next(first_ids), length)
                before = counted_experts(runner)
                samples = [prefill(runner, next(first_ids), length) for _ in range(setting.texts)]
                after = counted_experts(runner)
            host_s = statistics.median(samples)
            if is_other and length <= runner.limits.shared_rows:
                prefill(runner, next(first_ids), length)
                samples = [prefill(runner, next(first_ids), length) for _ in range(setting.texts)]
            seconds = statistics.median(samples)
            resident_s.setdefault(length, seconds)
            row = {
                "experts_gib": gib,
                "tokens": length,
                "tok_s": length / seconds,
                "samples_s": samples,
                "host_s": host_s,
                "resident_s": resident_s[length],
                "total_bytes": runner.plan.total,
                "awake_s": awake_s,
            }
            if after:
                row |= {name: (after[name] - before[name]) / setting.texts for name in after}
                row |= floors(setting.rates, row["wanted"] * mean_bytes, resident_s[length])
                row["share_of_floor"] = row["floor_s"] / seconds
            print({name: value for name, value in row.items() if name != "samples_s"}, flush=True)
            yield row


def floors(rates: Rates, num_bytes: float, resident_s: float) -> dict[str, float]:
    """See the module docstring."""
    together = max(rates.read_bytes_per_s, rates.read_beside_link + rates.link_beside_read)
    return {
        "wanted_bytes": num_bytes,
        "bus_alone_s": num_bytes / rates.link_bytes_per_s,
        "floor_s": max(num_bytes / together, resident_s),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; see the module docstring."""
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    hardware = measured_hardware(find_gpu())
    setting = Setting(
        path=options.model,
        rates=Rates.of(hardware),
        threads=options.threads or hardware.num_physical_cores - 1,
        ring_bytes=options.ring * MIB,
        chunk_size=options.chunk_size,
        lengths=options.prompts,
        texts=options.texts,
        awake_s=[each / 1e3 for each in options.awake_ms] or [None],
    )
    last = FULL_SHAPE.vocab - max(options.prompts)
    first_ids = (i * TEXT_STEP % last for i in itertools.count(1))
    rows: list[dict[str, Any]] = []
    resident_s: dict[int, float] = {}
    for gib in (None, *options.experts):
        rows += measure(setting, gib, resident_s, first_ids)
    words = ["python", "-m", "bench.engine.gpu_streaming", options.model.name]
    words += ["--experts", ",".join(f"{gib:g}" for gib in options.experts)]
    words += ["--prompts", ",".join(map(str, options.prompts)), "--texts", str(options.texts)]
    if options.awake_ms:
        words += ["--awake-ms", ",".join(map(str, options.awake_ms))]
    return {
        "command": shlex.join(words),
        "machine": describe("cuda"),
        "hardware": asdict(hardware),
        "threads": setting.threads,
        "ring_bytes": setting.ring_bytes,
        "chunk_size": setting.chunk_size,
        "rows": rows,
    }


def budgets(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "streaming.json")
    parser.add_argument("--experts", type=budgets, default=[0, 3, 10], help="GiB; all of them come first")
    parser.add_argument("--prompts", type=numbers, default=[168, 512, 2048, 8192])
    parser.add_argument("--ring", type=int, default=256, help="MiB")
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--threads", type=int, help="of the CPU's part")
    parser.add_argument("--texts", type=int, default=5)
    parser.add_argument(
        "--awake-ms",
        type=numbers,
        default=[],
        help="how long the CPU's threads poll between a prompt's requests, in turn, as in 0,5,0,5",
    )
    options = parser.parse_args()
    write_result(run(options), options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
