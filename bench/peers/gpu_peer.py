"""Speed of llama.cpp on the full-size model, at its best settings, by the layers with experts on the CPU.

    python -m bench.peers.gpu_peer full.gguf --llama FOLDER     the file is written first if it isn't there
    python -m bench.peers.gpu_peer iq3.gguf --llama FOLDER --mix UD-IQ3_S       the same in other types

FOLDER holds a build of llama.cpp as shared libraries: libllama, libggml and its backends. What is asked of it
is what gpu.py, gpu_depth.py and gpu_hybrid.py ask of us: the same consecutive token ids, the logits after the
last row of a step brought to the host, medians after runs that aren't counted. Its settings: no mmap, so that
weights on the CPU are page-locked; flash attention; micro-batches of 2048 tokens, for a prompt of 8192 one of
8192; f16 keys and values; the number of threads that decodes fastest. The most likely token after each text
must be the next id, as these files make it.

A model is loaded once per placement. Steps of some rows and decoding continue forks of one text that is
filled once. `sequences` are steps of a token for each of several texts, each with its own memory: what bounds
a server. The result is written anew after each placement. It says how much memory of the GPU was in use, so
that a placement can be compared with a budget.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.device import describe, gpu_memory_used
from bench.engine.gpu import FIRST_ID, numbers, write_model
from bench.engine.gpu_depth import CHUNK, UNTIMED_STEPS
from bench.engine.gpu_hybrid import TEXT_STEP
from bench.full_size_mixes import MIXES, PLAIN, Mix, mix_named
from bench.full_size_model import FULL_SHAPE
from bench.memory_limit import filled_memory
from bench.peers.gpu_peer_library import Context, Model, library_at
from bench.results import ROOT, write_result
from coldstream.gguf.reader import GGUFFile
from coldstream.planning.config import parse_size

PARTS = ("prefill", "decode", "steps", "sequences")
SWEEP_TOKENS = 48  # decoded with each number of threads
MAIN, FORK = 0, 1  # sequences
LISTS = {
    "cpu_layers": ([0, 40, 34, 16], "layers whose experts or FFN are on the CPU: one placement each"),
    "prompts": ([168, 512, 2048, 8192], "tokens"),
    "decode_depths": ([0, 8192, 16384], ""),
    "step_depths": ([512, 32768, 131072], ""),
    "rows": ([1, 2, 4, 8, 9, 16, 24, 32, 64], "of steps"),
    "sequences": ([1, 4, 16, 32], "texts side by side"),
    "threads": ([8, 12, 16], "the fastest of these decodes"),
}


@dataclass(frozen=True)
class Work:
    """What is measured in one placement."""

    prompts: Sequence[int]
    decode_depths: Sequence[int]
    step_depths: Sequence[int]
    rows: Sequence[int]
    sequences: Sequence[int]
    sequence_depth: int
    generate: int
    threads: Sequence[int]
    repetitions: int

    @property
    def steps(self) -> int:
        """Steps of each number of rows, those that aren't counted among them."""
        return UNTIMED_STEPS + self.repetitions

    @property
    def stops(self) -> list[int]:
        """Depths at which something is measured, ascending."""
        return sorted({*self.decode_depths, *self.step_depths})

    @property
    def num_tokens(self) -> int:
        """Of the context in which texts are filled and fork."""
        more = max(self.steps * max(self.rows, default=0), self.generate + 1, SWEEP_TOKENS + 1)
        return max(self.stops, default=0) + more


def ids(context: Context, start: int, count: int, text: int = 0) -> list[int]:
    """Token ids of a text from a position on."""
    first = FIRST_ID + text * TEXT_STEP + start
    return [(first + i) % context.model.vocab_size for i in range(count)]


def append(context: Context, counts: dict[int, int]) -> float:
    """Seconds to append so many tokens of its text to each sequence; in a context of forks all have the
    same text.
    """
    texts = {s: 0 if context.are_forks else s for s in counts}
    return context.extend(
        {s: ids(context, context.lengths[s], count, texts[s]) for s, count in counts.items()}
    )


def check_walk(context: Context, sequences: Collection[int]) -> None:
    """Raises RuntimeError if the likeliest tokens behind what these have aren't the next of their texts."""
    texts = [0 if context.are_forks else s for s in sequences]
    expected = [
        ids(context, context.lengths[s], 1, text)[0] for s, text in zip(sequences, texts, strict=True)
    ]
    chosen = context.logits().argmax(axis=1).tolist()
    if chosen != expected:
        raise RuntimeError(f"not a figure of this model: {chosen} came where {expected} should")


def extend(context: Context, counts: dict[int, int]) -> float:
    """Seconds to append as `append` does. Raises RuntimeError if a text leaves the walk."""
    seconds = append(context, counts)
    check_walk(context, list(counts))
    return seconds


def figures(samples: Sequence[float]) -> dict[str, Any]:
    """The median with its spread, and what they come from."""
    median = statistics.median(samples)
    return {"median": median, "spread": (max(samples) - min(samples)) / median, "samples": list(samples)}


def prefill(model: Model, threads: int, count: int, repetitions: int) -> dict[str, Any]:
    """A prompt of `count` tokens, in tokens a second."""
    micro_batch = max(CHUNK, count)
    with Context(
        model,
        num_tokens=count,
        micro_batch=micro_batch,
        num_sequences=1,
        are_forks=False,
        threads=threads,
    ) as context:
        samples = []
        for _ in range(repetitions + 1):
            context.clear()
            samples.append(count / extend(context, {MAIN: count}))
    return {"tokens": count, "micro_batch": micro_batch, "tok_s": figures(samples[1:])}


def decode(context: Context, count: int, runs: int) -> list[float]:
    """Tokens a second of `count` tokens one by one behind one more than the text has, in `runs` forks."""
    samples = []
    for _ in range(runs):
        context.fork(MAIN, FORK)
        extend(context, {FORK: 1})
        samples.append(count / sum(append(context, {FORK: 1}) for _ in range(count)))
        check_walk(context, [FORK])
    return samples


def decode_step(context: Context, count: int, work: Work) -> dict[str, Any]:
    """Milliseconds of steps of `count` rows behind what the text has."""
    context.fork(MAIN, FORK)
    samples = [1e3 * extend(context, {FORK: count}) for _ in range(work.steps)]
    return figures(samples[UNTIMED_STEPS:])


def fastest_threads(context: Context, candidates: Sequence[int]) -> tuple[int, dict[str, float]]:
    """The number of threads that decodes fastest, and tokens a second of each."""
    rates: dict[int, float] = {}
    if len(candidates) == 1:
        return candidates[0], {}
    for threads in candidates:
        context.set_threads(threads)
        (rates[threads],) = decode(context, SWEEP_TOKENS, 1)
    best = max(rates, key=lambda threads: rates[threads])
    return best, {str(threads): rate for threads, rate in rates.items()}


def fill(context: Context, work: Work) -> list[dict[str, Any]]:
    """For each stop: seconds from an empty context to there, those of the last chunk, and figures there."""
    rows, spent, last = [], 0.0, 0.0
    for stop in work.stops:
        while context.lengths[MAIN] < stop:
            last = extend(context, {MAIN: min(CHUNK, stop - context.lengths[MAIN])})
            spent += last
        row: dict[str, Any] = {"depth": stop}
        if stop:
            row |= {"fill_tok_s": stop / spent, "last_chunk_ms": 1e3 * last}
        if stop in work.decode_depths:
            row["decode_tok_s"] = figures(decode(context, work.generate, max(1, work.repetitions // 2)))
        if stop in work.step_depths:
            row["step_ms"] = {str(count): decode_step(context, count, work) for count in work.rows}
        rows.append(row)
    return rows


def side_by_side(model: Model, threads: int, count: int, work: Work) -> dict[str, Any]:
    """Milliseconds of steps of a token for each of `count` texts."""
    with Context(
        model,
        num_tokens=count * (work.sequence_depth + 2 * work.steps),
        micro_batch=CHUNK,
        num_sequences=count,
        are_forks=False,
        threads=threads,
    ) as context:
        extend(context, dict.fromkeys(range(count), work.sequence_depth))
        each = dict.fromkeys(range(count), 1)
        samples = [1e3 * extend(context, each) for _ in range(2 * work.steps)]
    return {"sequences": count, "depth": work.sequence_depth, "step_ms": figures(samples[UNTIMED_STEPS:])}


def measure(model: Model, work: Work) -> dict[str, Any]:
    """One placement."""
    with Context(
        model,
        num_tokens=work.num_tokens,
        micro_batch=CHUNK,
        num_sequences=2,
        are_forks=True,
        threads=work.threads[0],
    ) as context:
        # Kernels are loaded when the clock starts.
        extend(context, {MAIN: min(CHUNK, work.num_tokens)})
        context.clear()
        threads, rates = fastest_threads(context, work.threads)
        context.set_threads(threads)
        depths = fill(context, work)
        used = gpu_memory_used()
    return {
        "gpu_memory_used_bytes": used,
        "threads": threads,
        "threads_tok_s": rates,
        "depths": depths,
        "prefill": [prefill(model, threads, count, work.repetitions) for count in work.prompts],
        "sequences": [side_by_side(model, threads, count, work) for count in work.sequences],
    }


def work_of(options: argparse.Namespace, cpu_layers: int, num_layers: int) -> Work:
    """What is asked for; with experts on the CPU not the deepest texts, and with those of some layers there
    no more than one prompt: filling takes the time of everything else.
    """
    is_between = 0 < cpu_layers < num_layers
    most = options.most_depth_cpu if cpu_layers else max(options.decode_depths + options.step_depths)
    parts = options.parts
    return Work(
        prompts=[n for n in options.prompts if not is_between or n == CHUNK] if "prefill" in parts else [],
        decode_depths=[n for n in options.decode_depths if n <= most] if "decode" in parts else [],
        step_depths=[n for n in options.step_depths if n <= most] if "steps" in parts else [],
        rows=options.rows,
        sequences=options.sequences if "sequences" in parts else [],
        sequence_depth=options.sequence_depth,
        generate=options.generate,
        threads=options.threads,
        repetitions=options.repetitions,
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; see the module docstring."""
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab, mix=options.mix)
    library = library_at(options.llama)
    if options.device == "cuda":
        library.require_gpu()
    result: dict[str, Any] = {
        "command": command(options),
        "model": model_name(options.model),
        "machine": describe(options.device),
        "gpu_memory_before_bytes": gpu_memory_used(),
        "llama_cpp": library.about(),
        "settings": {
            "flash_attention": True,
            "cache_type": "f16",
            "load_mode": "none" if options.ram is None else "mmap",
            "ram_bytes": options.ram,
        },
        "repetitions": options.repetitions,
        "generate": options.generate,
        "placements": [],
    }
    for number in options.cpu_layers:
        start = time.perf_counter()
        with (
            nullcontext() if options.ram is None else filled_memory(options.ram),
            Model(
                library, options.model, *placed(options, number), is_mapped=options.ram is not None
            ) as model,
        ):
            load_s = time.perf_counter() - start
            placement = {
                "cpu_expert_layers": number,
                "resident_share": 1 - number / model.num_layers,
                "load_s": load_s,
                "buffers_mib": model.buffers,
                **measure(model, work_of(options, number, model.num_layers)),
                "seconds": time.perf_counter() - start,
            }
        result["placements"].append(placement)
        write_result(result, options.out or default_out(options.mix), options.commit)
    return result


def model_name(path: Path) -> str:
    """The name that a file gives itself, which has its mix."""
    with GGUFFile.open(path) as file:
        return str(file.metadata["general.name"])


def default_out(mix: Mix) -> Path:
    """The file of results of a mix."""
    return ROOT / "docs" / "results" / "gpu" / ("peer.json" if mix == PLAIN else f"peer_{mix.name}.json")


def placed(options: argparse.Namespace, cpu_layers: int) -> tuple[int, int]:
    """The layers on the GPU, −1 for all, and those of them whose experts or FFN are not."""
    if options.device != "cuda":
        return 0, cpu_layers
    if options.whole_of is None or not cpu_layers:
        return -1, cpu_layers
    return options.whole_of - cpu_layers + 1, 0  # the head counts as one


def command(options: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["python", "-m", "bench.peers.gpu_peer", options.model.name, "--llama", options.llama.name]
    for name in LISTS:
        words += [f"--{name.replace('_', '-')}", ",".join(map(str, getattr(options, name)))]
    words += ["--parts", ",".join(options.parts)]
    if options.mix != PLAIN:
        words += ["--mix", options.mix.name]
    if options.ram is not None:
        words += ["--ram", str(options.ram)]
    if options.whole_of is not None:
        words += ["--whole-of", str(options.whole_of)]
    return shlex.join(words)


def parts_of(text: str) -> list[str]:
    """Names of parts. Raises argparse.ArgumentTypeError for one that there isn't."""
    parts = text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    return parts


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="a folder of shared libraries, or one")
    parser.add_argument("--mix", type=mix_named, default=PLAIN, help=", ".join(MIXES))
    parser.add_argument("--out", type=Path, help="docs/results/gpu/peer.json, or of another mix by its name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, (default, what) in LISTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=numbers, default=default, help=what)
    parser.add_argument("--parts", type=parts_of, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument(
        "--whole-of", type=int, metavar="LAYERS", help="layers are on the CPU whole, of so many in all"
    )
    parser.add_argument("--ram", type=parse_size, help="memory that is left to the mapped file and all else")
    parser.add_argument("--most-depth-cpu", type=int, default=8192, help="with experts on the CPU")
    parser.add_argument("--sequence-depth", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    return parser


def main() -> int:
    run(arguments().parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
