"""What n-grams cost a token of Qwen3.8-Flash-Next: decoding with them and without.

    python -m bench.family_models Qwen3.8-Flash-Next fn.gguf --layers 4 --vocab 8192 --ngram-rows 400000
    python -m bench.engine.ngram_cost fn.gguf --device cpu --out docs/results/ngram_cost.json
    python -m bench.engine.ngram_cost fn.gguf --vram 44G,12G,24G --out FILE       all layers, on a GPU

One file is open three times: without n-grams, with rows that RAM keeps by their use, and with rows that come
from the file for each token. Each decodes the same text in turn, which has to walk through the vocabulary.
Pages of the table are dropped before rows are read from the file, so that they come from the disk where the
file is on one. On a CPU one thread computes, and its seconds count. Reading shows in the seconds of a clock
alone. Each number is a median over the turns, in seconds a token.

A file of few layers has n-grams once, as the whole model has. So a result also has the share of a token of
all layers, each of which takes what one of the file takes.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from bench.device import describe
from bench.engine.gpu import FIRST_ID
from bench.engine.gpu_hybrid import GREEDY
from bench.family_models import FLASH_NEXT_SHAPE
from bench.results import add_result_options, write_result
from coldstream.engine import LLM
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.layer_tensors import NGRAM_TABLE
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.planning import draft_file

PROMPT_TOKENS: Final = 8
WITHOUT, CACHED, FROM_FILE = "without", "cached", "file"
VARIANTS: Final = (WITHOUT, CACHED, FROM_FILE)
Seconds = dict[str, float]


def without_ngrams(spec: ModelSpec) -> ModelSpec:
    """The model whose layers add none."""
    return replace(spec, layers=tuple(replace(layer, ngram=None) for layer in spec.layers))


@contextmanager
def opened(variant: str, options: argparse.Namespace, vram: str | None) -> Iterator[LLM]:
    """The model, with n-grams as the variant has them."""
    most = options.warm_tokens + options.timed_tokens + PROMPT_TOKENS
    settings: dict[str, Any] = {"device": options.device, "ctx_size": most, "spec_type": "none"}
    settings |= {"threads": 1} if options.device == "cpu" else {"vram": vram}
    with ExitStack() as stack:
        with ExitStack() as patches:
            if variant == WITHOUT:
                read = patch.object(draft_file, "read_spec", lambda *of: without_ngrams(read_spec(*of)))
                patches.enter_context(read)
            if variant == FROM_FILE:
                patches.enter_context(patch.object(CpuOps, "_ngram_cache_bytes", 0))
            llm = stack.enter_context(LLM(options.model, **settings))
            has_ngrams = llm.opened.runner.spec.ngram is not None
        if has_ngrams == (variant == WITHOUT):
            raise RuntimeError(f"{variant}: the model {'has' if has_ngrams else 'has no'} n-grams")
        yield llm


def drop_pages(path: Path) -> None:
    """Takes the table from the system's memory, where that keeps pages of a disk."""
    with GGUFFile.open(path) as file:
        table = file.tensors[NGRAM_TABLE]
        descriptor = os.open(file.paths[table.shard], os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, table.offset, table.num_bytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def decoded(llm: LLM, first_id: int, warm: int, timed: int) -> Seconds:
    """Seconds a token behind those that warm up. Raises RuntimeError if the text does not walk."""
    vocab = llm.opened.runner.spec.vocab_size
    llm.forget()
    tokens = [(first_id + i) % vocab for i in range(PROMPT_TOKENS)]
    expected = [(first_id + i) % vocab for i in range(PROMPT_TOKENS + warm + timed)]
    for piece in llm.stream(tokens[:], replace(GREEDY, max_tokens=warm + timed)):
        tokens += piece.token_ids
        if len(tokens) <= PROMPT_TOKENS + warm:
            wall, cpu, before = time.perf_counter(), time.process_time(), len(tokens)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if tokens != expected:
        raise RuntimeError(f"not a figure of this model: text from {first_id} left the walk")
    return {"clock_s": wall / (len(tokens) - before), "cpu_s": cpu / (len(tokens) - before)}


def measure(options: argparse.Namespace, vram: str | None) -> dict[str, Any]:
    """All variants with one budget of a GPU's memory, or on a CPU."""
    with ExitStack() as stack:
        llms = {name: stack.enter_context(opened(name, options, vram)) for name in options.variants}
        spec, plan = llms[WITHOUT].opened.runner.spec, llms[WITHOUT].opened.plan
        runs: dict[str, list[Seconds]] = {name: [] for name in llms}
        for turn in range(-1, options.turns):  # the first warms up
            for name in sorted(llms, key=options.variants.index, reverse=turn % 2 == 1):
                if name == FROM_FILE:
                    drop_pages(options.model)
                found = decoded(llms[name], FIRST_ID, options.warm_tokens, options.timed_tokens)
                if turn >= 0:
                    runs[name].append(found)
    counts = "cpu_s" if options.device == "cpu" else "clock_s"
    medians = {
        name: {each: statistics.median(run[each] for run in found) for each in ("clock_s", "cpu_s")}
        for name, found in runs.items()
    }
    shares = {
        name: statistics.median(
            with_them[counts] / plain[counts] - 1
            for with_them, plain in zip(runs[name], runs[WITHOUT], strict=True)
        )
        for name in medians
        if name != WITHOUT
    }
    return {
        "vram": vram,
        "resident_bytes": plan.placement.resident_bytes,
        "layers": spec.num_layers,
        "counts": counts,
        "added_share": shares,
        "share_of_all_layers": {
            name: share * spec.num_layers / FLASH_NEXT_SHAPE.layers for name, share in shares.items()
        },
        "medians": medians,
        "runs": runs,
    }


def line(row: dict[str, Any]) -> str:
    """For people."""
    counts = row["counts"]
    each = [f"{name} {1e6 * found[counts]:,.0f} us" for name, found in row["medians"].items()]
    shares = [f"{name} {share:+.2%}" for name, share in row["share_of_all_layers"].items()]
    return f"{row['vram'] or 'cpu'}, {row['layers']} layers: {', '.join(each)}; added: {', '.join(shares)}"


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Everything; see the module docstring."""
    until = time.monotonic() + options.seconds
    with GGUFFile.open(options.model) as file:
        table = file.tensors[NGRAM_TABLE]
        about = {
            "command": command(options),
            "model": str(file.metadata["general.name"]),
            "file_bytes": file.num_bytes,
            "table": {"rows": table.shape[0], "columns": table.shape[1], "type": table.quant_type.name},
            "machine": describe(options.device),
        }
    rows: list[dict[str, Any]] = []
    for vram in (None,) if options.device == "cpu" else options.vram.split(","):
        if time.monotonic() > until:
            break
        rows.append(measure(options, vram))
        print(line(rows[-1]), file=sys.stderr, flush=True)
        write_result(about | {"rows": rows}, options.out, options.commit)
    return rows


def command(options: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["python", "-m", "bench.engine.ngram_cost", options.model.name, "--device", options.device]
    if options.device == "cuda":
        words += ["--vram", options.vram]
    for name in ("warm_tokens", "timed_tokens", "turns"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return shlex.join([*words, "--variants", ",".join(options.variants)])


def variants(text: str) -> list[str]:
    found = text.split(",")
    if WITHOUT not in found or len(found) < 2 or not set(found) <= set(VARIANTS):
        raise argparse.ArgumentTypeError(f"{WITHOUT} and others of {', '.join(VARIANTS)}")
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--vram", default="44G", help="budgets, with commas between them")
    parser.add_argument("--variants", type=variants, default=list(VARIANTS))
    parser.add_argument("--warm-tokens", type=int, default=32, help="of a text, before it is timed")
    parser.add_argument("--timed-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no budget begins")
    add_result_options(parser)
    return parser


def main() -> int:
    run(arguments().parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
