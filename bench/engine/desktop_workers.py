"""What each side of `desktop.py` measures, in a process of its own that may run on some CPUs.

Both compute the same prompts, which are new to the model, and decode behind them. A prompt's first run is not
counted unless it takes long: what it prepares is small then beside what it computes.
"""

import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.device import gpu_memory_used
from bench.engine.gpu import FIRST_ID
from bench.engine.gpu_hybrid import GIB, TEXT_STEP, budget_with
from bench.engine.gpu_streaming import prefill
from bench.engine.plan_forecast import Work, decoded_tok_s, expected
from bench.peers import gpu_peer
from bench.peers.gpu_peer_library import Context, Model, library_at
from coldstream.engine import LLM
from coldstream.kernels.cuda.device import find_gpu
from coldstream.placement.plan_file import save_plan
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import plan_by_name
from coldstream.planning.machine import measured_hardware
from coldstream.planning.planned import Planned

LONG_S = 4.0  # a first run of a prompt that counts
WARM_WITHOUT_EXPERTS = 128  # tokens before a text is timed, where only shares move meanwhile
LEAST_SHARE = 0.01  # of all experts, beside which a text's own bring nothing
CHUNK_SIZE = 2048  # rows of a prompt's steps, at least: in the least memory they are 512
NUM_DECODED = 2  # texts, or forks of one
SHORT = 64  # tokens before those that llama.cpp decodes
WORTH_TRYING = 1.25  # times a prompt's seconds: another way is not tried for longer prompts beyond it
Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The lines that one process of ours measures. budgets: of GPU memory, by GiB of experts, as known;
    `auto` for all there is. runs: of a prompt, of which the first does not count.
    """

    path: Path
    experts_gib: tuple[float, ...]
    budgets: Mapping[float, int | str]
    work: Work
    runs: int
    device: str = "cuda"


def ours(connection: Connection, asked: Asked) -> None:
    """Measures the machine's rates, which are kept as always. Sends a row for each amount of experts."""
    hardware = measured_hardware(find_gpu() if asked.device == "cuda" else None, again=True)
    for gib in asked.experts_gib:
        budget: int | str = "auto"
        if asked.device == "cuda":
            budget = asked.budgets.get(gib) or budget_with(
                asked.path, hardware, asked.work.ctx_size, 1, int(gib * GIB), chunk_size=CHUNK_SIZE
            )
        config = EngineConfig(
            str(asked.path),
            device=asked.device,
            vram=budget,
            ctx_size=asked.work.ctx_size,
            spec_type="none",
        )
        connection.send(_our_row(asked, plan_by_name(config)) | {"experts_gib": gib})


def _our_row(asked: Asked, planned: Planned) -> Row:
    work, prompts = asked.work, dict[str, Any]()
    if planned.plan.resident_bytes < LEAST_SHARE * planned.sizes.all_expert_bytes:
        work = replace(work, warm_tokens=WARM_WITHOUT_EXPERTS)  # no experts come in
    with TemporaryDirectory() as folder:
        kept = Path(folder) / "plan.json"
        save_plan(planned.run, kept)
        with LLM(asked.path, device=asked.device, plan=str(kept)) as llm:
            runner = llm.opened.runner
            first_ids = count(FIRST_ID, TEXT_STEP)
            for length in work.prompts:
                of_length = partial(_next_prompt, runner, first_ids, length)
                prompts[str(length)] = _of_prompt(length, of_length, asked.runs)
            step = runner.spec.vocab_size // (work.texts + 1)
            texts = [decoded_tok_s(llm, FIRST_ID + step * text, work) for text in range(work.texts)]
            uses = runner.expert_uses
    gpu = planned.hardware.gpu
    return {
        "vram_bytes": planned.plan.budget_bytes,
        "experts_share": planned.plan.resident_bytes / planned.sizes.all_expert_bytes,
        "hits_misses": uses,
        "has_pool": planned.run.pool is not None,  # RAM does not hold the file
        "figures": {"decode": _figure(texts), **prompts},
        "forecast": expected(planned, planned.known, work),
        "rates": asdict(planned.known.rates),
        "steps": asdict(gpu.steps) if gpu and gpu.steps else None,
    }


def _next_prompt(runner: Any, first_ids: Iterator[int], length: int) -> float:
    return prefill(runner, next(first_ids), length)


def _of_prompt(length: int, run: Callable[[], float], num_runs: int) -> Row:
    """Tokens a second of a prompt, by several runs that each take so many seconds."""
    seconds = [run()]
    if seconds[0] < LONG_S:
        seconds = [run() for _ in range(num_runs - 1)]
    return _figure([length / each for each in seconds])


def _figure(samples: Sequence[float]) -> Row:
    return {"tok_s": statistics.median(samples), "samples": list(samples)}


@dataclass(frozen=True)
class PeerAsked:
    """What one process of llama.cpp measures, with the experts of some layers on the CPU."""

    path: Path
    llama: Path
    cpu_layers: int
    prompts: tuple[int, ...]
    generate: int
    runs: int
    device: str = "cuda"


def theirs(connection: Connection, asked: PeerAsked) -> None:
    """Loads the model once. Sends a row for each collection of CPUs that it receives, until it gets None."""
    library = library_at(asked.llama)
    if asked.device == "cuda":
        library.require_gpu()
    before = gpu_memory_used()
    with Model(library, asked.path, -1 if asked.device == "cuda" else 0, asked.cpu_layers) as model:
        connection.send(library.about())
        while (cpus := connection.recv()) is not None:
            run_on(cpus)
            row = _their_row(model, asked, len(cpus), before)
            connection.send(row)


def run_on(cpus: Collection[int]) -> None:
    """All threads of this process."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)


def _their_row(model: Model, asked: PeerAsked, cores: int, before: int | None) -> Row:
    with Context(
        model,
        num_tokens=SHORT + max(asked.generate, gpu_peer.SWEEP_TOKENS) + 2,
        micro_batch=SHORT,
        num_sequences=2,
        are_forks=True,
        threads=cores,
    ) as context:
        gpu_peer.extend(context, {gpu_peer.MAIN: SHORT})
        threads, by_threads = gpu_peer.fastest_threads(context, [max(1, cores - 1), cores])
        context.set_threads(threads)
        decoded = gpu_peer.decode(context, asked.generate, NUM_DECODED)
    prompts, ways, used = dict[str, Any](), [True, False], 0
    for length in sorted(asked.prompts):
        tried = {way: _their_prompt(model, threads, length, asked.runs, copies_weights=way) for way in ways}
        best = max(tried, key=lambda way: tried[way]["tok_s"])
        used = max(used, *(found.pop("memory_used") for found in tried.values()))
        prompts[str(length)] = tried[best] | {
            "copies_weights": best,
            "tried_tok_s": {str(way): found["tok_s"] for way, found in tried.items()},
        }
        ways = [way for way in ways if WORTH_TRYING * tried[way]["tok_s"] >= tried[best]["tok_s"]]
    return {
        "cpu_layers": asked.cpu_layers,
        "experts_share": 1 - asked.cpu_layers / model.num_layers,
        "vram_bytes": used - (before or 0),
        "threads": threads,
        "threads_tok_s": by_threads,
        "figures": {"decode": _figure(decoded), **prompts},
    }


def _their_prompt(model: Model, threads: int, length: int, num_runs: int, *, copies_weights: bool) -> Row:
    with Context(
        model,
        num_tokens=length,
        micro_batch=length,
        num_sequences=1,
        are_forks=False,
        threads=threads,
        copies_weights=copies_weights,
    ) as context:

        def run() -> float:
            context.clear()
            return gpu_peer.extend(context, {gpu_peer.MAIN: length})

        return _of_prompt(length, run, num_runs) | {"memory_used": gpu_memory_used() or 0}
