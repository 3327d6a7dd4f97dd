"""What the host does around a step of a GPU that lacks experts: microseconds by part, without a GPU.

    python -m bench.engine.host_steps full.gguf              writes a file of the full-size shape first
    python -m bench.engine.host_steps full.gguf --old CHECKOUT --pairs 5

The engine, the runner, the cache of experts and all that moves them are the product's. The GPU computes
nothing (`bench/idle_gpu.py`), so that all time is the host's. In its place each step's experts are those that
the file's routers choose for the tokens of a text that walks through the vocabulary, and every fifth guess is
wrong. The file has holes in place of quantised weights, some 100 MB on the disk.

Times are of the thread that launches, without what stands in for the GPU: of means of some steps the one that
a tenth falls below, as other programs make most of them longer, and the slowest step in a hundred. Parts may
contain others, and are timed in a run of their own. --old is a checkout of another commit with its extension.
That runs in interleaved pairs with this one, in processes of their own, and ratios are printed too.
"""

import argparse
import ctypes
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from bench.results import ROOT, write_result

GIB: Final = 2**30
WARM_TOKENS, TIMED_TOKENS = 128, 768
GROUP: Final = 8  # steps whose mean is taken: two updates of shares
QUIET: Final = 0.1
CONTEXT: Final = 2048
VOCAB: Final = 32768  # fewer than the model's, as it takes seconds to make them
WRONG: Final = 0.2  # share of the guesses
FIRST_TOKEN: Final = 4000
# A missing expert on an H200 with 16 cores, in nanoseconds.
BUS_NS, CPU_NS, ANSWER_NS, LAYER_NS = 37_000, 24_000, 10_000, 42_000

PARTS: Final = (
    ("engine.engine", "Engine", "step"),
    ("models.cuda.runner", "CudaRunner", "_launch"),
    ("models.cuda.runner", "CudaRunner", "_ended"),
    ("experts.partial_experts", "PartialExperts", "start_step"),
    ("experts.partial_experts", "PartialExperts", "launched"),
    ("experts.partial_experts", "PartialExperts", "ended"),
    ("experts.partial_experts", "PartialExperts", "_prepare"),
    ("experts.prefetch", "GuessCounter", "count"),
    ("experts.slots.residency", "ExpertResidency", "prepare"),
    ("experts.slots.residency", "ExpertResidency", "_write_tables"),
    ("experts.slots.residency", "ExpertResidency", "_begin"),
    ("experts.slots.cache", "ExpertCache", "finish_step"),
    ("experts.slots.cache", "ExpertCache", "start_step"),
    ("experts.slots.cache", "ExpertCache", "_admit"),
    ("placement.policies", "DecayedFrequency", "observe"),
    ("placement.policies", "DecayedFrequency", "choose"),
    ("experts.miss_shares", "StampedShares", "ended"),
    ("experts.miss_shares", "StampedShares", "learn"),
    ("models.cuda.logits", "Sampler", "begin"),
    ("models.cuda.logits", "Sampler", "admit"),
)
NAMES: Final = [part[1:] for part in PARTS]

Row = dict[str, Any]


@dataclass
class Timers:
    """Nanoseconds of each step, by part, without those of the stand-in for a GPU."""

    excluded: int = 0
    now: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)

    def clock(self) -> int:
        return time.thread_time_ns() - self.excluded

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            begin = self.clock()
            try:
                return method(*args, **options)
            finally:
                self.now[part] = self.now.get(part, 0) + self.clock() - begin

        return timed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is inside is none of the host's."""
        begin = time.thread_time_ns()
        try:
            yield
        finally:
            self.excluded += time.thread_time_ns() - begin

    def end_step(self, nanoseconds: int) -> None:
        self.steps.append(self.now | {"all": nanoseconds})
        self.now = {}

    @contextmanager
    def of_parts(self) -> Iterator[None]:
        """Inside, all PARTS are timed."""
        with ExitStack() as patches:
            for module, owner, name in PARTS:
                of = getattr(importlib.import_module(f"coldstream.{module}"), owner)
                timed = self._timed(getattr(of, name), f"{owner}.{name}")
                patches.enter_context(patch.object(of, name, timed))
            yield


def write_model(path: Path, layers: int | None = None, vocab: int = VOCAB) -> None:
    """A file of the full-size shape with holes, if there is none."""
    from bench.full_size_model import FULL_SHAPE, FullSizeWriter

    if not path.exists():
        shape = replace(FULL_SHAPE, vocab=vocab, layers=layers or FULL_SHAPE.layers)
        FullSizeWriter(path, shape, 0, 1).write(is_for_plans=True)


def routing(path: Path, file: Any, spec: Any, num_tokens: int) -> np.ndarray:
    """What the file's routers choose for the tokens of a walk: int32 [tokens, layers, chosen]."""
    from bench.full_size_model import CODE, token_levels

    levels = token_levels(np.random.default_rng(0), spec.vocab_size)  # as `FullSizeWriter` draws them first
    code = np.roll(levels, -FIRST_TOKEN, axis=0)[:num_tokens, :CODE] - 7.5
    data = np.memmap(path, np.uint8, "r")
    chosen = np.empty((num_tokens, spec.num_layers, spec.num_experts_per_tok), np.int32)
    for layer in range(spec.num_layers):
        info = file.tensors[f"blk.{layer}.ffn_gate_inp.weight"]
        router = data[info.offset : info.offset + info.num_bytes].view(np.float32).reshape(info.shape)
        scores = code @ router[:, :CODE].T
        chosen[:, layer] = np.argsort(-scores, axis=1)[:, : spec.num_experts_per_tok]
    return chosen


class StandIn:
    """What the device and the CPU's server leave behind a step of one row."""

    def __init__(self, timers: Timers, partial: Any, chosen: np.ndarray) -> None:
        self._timers, self._partial, self._chosen = timers, partial, chosen
        self._rng = np.random.default_rng(1)
        self._num_steps = 0
        num_layers = chosen.shape[1]
        self._work = np.zeros((num_layers, 3))
        decode = partial._executor.decode
        self._used, self._guessed = (_on_host(each) for each in (decode.chosen.used, decode.chosen.guessed))
        self._stamps = _on_host(decode.stamps)
        self._server, partial.host.server = partial.host.server, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def work(self) -> list[tuple[int, int, float]]:
        return [(int(requests), int(pairs), seconds) for requests, pairs, seconds in self._work.tolist()]

    def expected(self) -> list[tuple[int, int, int]]:
        return [(0, 0, 0)] * len(self._work)

    def begin(self) -> None:
        """Nothing is asked for."""

    def end(self) -> None:
        """Nothing was asked for."""

    def check(self) -> None:
        self._server.check()

    def step(self) -> None:
        if self._partial._rows != 1 or self._partial._residency is None:
            return
        with self._timers.paused():
            self._step()

    def _step(self) -> None:
        used = self._chosen[self._num_steps % len(self._chosen)]
        self._num_steps += 1
        num_layers, num_experts = self._partial._residency.resident.shape
        self._used[:, 0] = used
        wrong = self._rng.random(used.shape) < WRONG
        self._guessed[:, 0] = np.where(wrong, self._rng.integers(0, num_experts, used.shape), used)
        resident = self._partial._residency.resident[np.arange(num_layers)[:, None], used]
        missing = (~resident).sum(axis=1)
        on_bus, on_cpu = missing > 4, np.minimum(missing, 4)
        noise = 1 + 0.1 * self._rng.random(num_layers)
        self._work += np.stack(
            (on_cpu > 0, on_cpu, 1e-9 * noise * (ANSWER_NS + on_cpu * CPU_NS) * (on_cpu > 0)), axis=1
        )
        self._stamps[:, 3] += missing - on_cpu
        sums = self._stamps[:, 4:].reshape(num_layers, 2, 6)
        begins = (self._num_steps * num_layers + np.arange(num_layers)) * 100_000
        spans = np.cumsum([0, 5_000, 20_000, 30_000, 5_000])
        sums[np.arange(num_layers), on_bus.astype(int), 0] += 1
        sums[np.arange(num_layers), on_bus.astype(int), 1:] += begins[:, None] + spans


def _on_host(array: Any) -> np.ndarray:
    """An array of the idle device, whose memory is the host's."""
    ctype = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}[array.dtype]
    return np.ctypeslib.as_array((ctype * array.numel()).from_address(array.data_ptr())).reshape(array.shape)


def open_partial(path: Path, gib: float) -> Any:
    """A runner with so many GiB of experts in slots, and shares that move from the beginning."""
    from bench.runners import open_model_file, partial_plan
    from coldstream.experts.prefetch import Prefetching
    from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
    from coldstream.kernels.experts.split import MissTimes
    from coldstream.kvcache import CacheSize
    from coldstream.models.cuda.runner import CudaRunner

    file, spec = open_model_file(path)
    num_bytes = sum(info.num_bytes for name, info in file.tensors.items() if "_exps." in name)
    plan = partial_plan(
        file,
        spec,
        round(gib * GIB / num_bytes * spec.num_experts),
        context_length=CONTEXT,
        chunk_size=512,
        ring_bytes=GIB // 4,
        threads=1,
        prefetching=Prefetching(2, 3),
    )
    times = MissTimes(BUS_NS, (CPU_NS,) * MAX_MAILBOX_ROWS, ANSWER_NS, layer=LAYER_NS)
    return CudaRunner.load(file, spec, replace(plan, miss_times=times), cache_size=CacheSize.of(2, CONTEXT))


def measure(path: Path, gib: float, num_warm: int = WARM_TOKENS, num_timed: int = TIMED_TOKENS) -> Row:
    """Of this process's sources: microseconds of a token by part."""
    from bench.idle_gpu import IdleDevice
    from coldstream.engine import LLM, SamplingParams
    from coldstream.placement.controls import Controls, Moves
    from tests.hash_runner import opened_with
    from tests.host_gpu import gpu_on

    timers, device = Timers(), IdleDevice()
    with gpu_on(device):  # type: ignore[arg-type]
        runner = open_partial(path, gib)
        chosen = routing(path, runner.file, runner.spec, num_warm + num_timed)
        device.driver.after_graph = StandIn(timers, runner._partial, chosen).step
        runner.control(Controls(Moves.ALWAYS, Moves.ALWAYS))
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_warm + num_timed)
        cache = runner.expert_cache
        loaded = int(cache.counters.copies.sum())
        with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
            for timed in (timers.of_parts(), nullcontext()):  # the clock takes time as well
                with timed:
                    begin = timers.clock()
                    for _ in llm.stream([1, 2, 3], params):
                        now = timers.clock()
                        timers.end_step(now - begin)
                        begin = now
            hits, misses = cache.counters.totals
            copies = int(cache.counters.copies.sum()) - loaded
    num_tokens = num_warm + num_timed
    of_parts, alone = timers.steps[num_warm : num_tokens - 2], timers.steps[num_tokens + num_warm : -2]
    by_part = {part: [step.get(part, 0) for step in of_parts] for part in map(".".join, NAMES)}
    by_part = {"all": [step["all"] for step in alone]} | by_part
    return {
        "experts_gib": gib,
        "hit_rate": hits / (hits + misses),
        "copies_per_token": copies / (2 * num_tokens),
        "us": {part: _usual(values) / 1e3 for part, values in by_part.items()},
        "slow_us": {part: sorted(values)[-1 - len(values) // 100] / 1e3 for part, values in by_part.items()},
    }


def _usual(values: list[int]) -> float:
    groups = [values[begin : begin + GROUP] for begin in range(0, len(values) - GROUP + 1, GROUP)]
    return float(np.quantile([statistics.mean(group) for group in groups], QUIET))


def measured_by(python: Path, path: Path, gib: float) -> Row:
    """What an interpreter's commit measures, in a process of its own. The benchmark is that of this one."""
    command = [str(python), "-m", "bench.engine.host_steps", str(path.resolve()), "--within", str(gib)]
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders}
    )
    if found.returncode:
        raise RuntimeError(found.stderr)
    measured: Row = json.loads(found.stdout.splitlines()[-1])
    return measured


def compare(path: Path, experts: list[float], old: Path | None, pairs: int) -> list[Row]:
    """A row for each size. With `old`, of both commits in turn: the medians, and the median of the ratios."""
    from tools.checkouts import make_environment

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        commits = {"new": Path(sys.executable)}
        if old is not None:
            commits["old"] = make_environment(Path(folder) / "venv", old.resolve() / "src")
        for gib in experts:
            found: dict[str, list[Row]] = {name: [] for name in commits}
            for number in range(pairs):
                for name in sorted(commits, reverse=bool(number % 2)):
                    found[name].append(measured_by(commits[name], path, gib))
            rows.append(_row(found))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _row(found: dict[str, list[Row]]) -> Row:
    row = {key: value for key, value in found["new"][0].items() if not key.endswith("us")}
    middle: Callable[[list[float]], float] = statistics.median
    for name, runs in found.items():
        for key in ("us", "slow_us"):
            row[f"{name}_{key}"] = {
                part: round(middle([run[key][part] for run in runs]), 1) for part in runs[0][key]
            }
    if "old" in found:
        pairs = zip(found["new"], found["old"], strict=True)
        row["ratio"] = middle([new["us"]["all"] / old["us"]["all"] for new, old in pairs])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--experts", type=float, nargs="+", default=[0.5, 3, 10.67], help="GiB on the GPU")
    parser.add_argument("--old", type=Path)
    parser.add_argument("--old-commit", help="of that checkout, where it is without its repository")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--within", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within is not None:
        print(json.dumps(measure(options.model, options.within)))
        return
    write_model(options.model)
    from bench.device import describe

    result = {
        "command": f"python -m bench.engine.host_steps {options.model.name}",
        "machine": describe("cpu"),
        "old_commit": options.old_commit,
        "rows": compare(options.model, options.experts, options.old, options.pairs),
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
