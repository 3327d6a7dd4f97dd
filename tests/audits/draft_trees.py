"""Draft trees and batches of sequences against plain decoding: every logit of every row, bit for bit.

    python -m tests.audits.draft_trees --out docs/results/trees_cpu.json
    python -m tests.audits.draft_trees --device cuda --out docs/results/gpu/trees.json

On the CPU with all weights in RAM, and with experts on the disk under a budget; on a GPU with all experts
there, and with a quarter of them, where the CPU computes what is missing, the GPU reads it over the bus, or
both do. Models are the demo model and tiny ones with random weights, made here. In each case random trees of
1 to 64 rows (chains, combs, full binary trees, stars, random ones) go through the model, five sequences with
a tree and two without in each step. Each row has to be what a CPU with all weights in RAM says of its path,
one token a step. Then a path of each tree is committed, and all sequences go on by 32 sampled tokens, which
have to be those of that CPU again. At the end 32 sequences of mixed lengths do in one batch.

The models, the trees and the comparison are those of tests/models. Exits with 1 at the first difference, and
names the seed, the tree, the row and the case.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from one_sequence import OneSequence, open_cpu
from runner_cases import MIXED_LAYERS_OF_A_GPU, VARIANTS, write_mixed_layers, write_variant
from tree_cases import (
    CONTEXT,
    LENGTHS,
    Compared,
    Difference,
    Oracle,
    Prompts,
    TokenByToken,
    check_batch_of_trees,
    check_mixed_lengths,
)

from bench.device import describe
from bench.results import add_result_options, write_result
from bench.runners import ram_needs
from coldstream.assets import demo_model_path
from coldstream.errors import ColdstreamError
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache import CacheSize
from coldstream.models.expert_stacks import expert_stacks
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import PlanOptions
from coldstream.planning.unknowns import RamShape

TREES_PER_STEP, SEQUENCES, NEXT_TOKENS = 5, 32, 32
SIZE = CacheSize.of(len(LENGTHS) + SEQUENCES, CONTEXT, num_trees=TREES_PER_STEP + 1)
DISK_SHARE = 0.25  # of experts that RAM holds beside those of one token
GPU_SHARE = 0.25  # of experts that begin in slots
DEMO = "demo model"
RESIDENT = {"cpu": "all in RAM", "cuda": "all on the GPU"}
ON_DISK = "experts on the disk"
# The share of what a token misses that the GPU reads over the bus; the CPU computes the rest.
STREAMED = {
    "the CPU computes missing experts": 0.0,
    "missing experts over the bus": 1.0,
    "half of the missing over the bus": 0.5,
}

Write = Callable[[Path], Path]  # a model into a folder


@dataclass(frozen=True)
class Model:
    name: str
    kv_type: str
    write: Write


@dataclass(frozen=True)
class Case:
    """A model, and where its experts are."""

    model: Model
    place: str
    open: Callable[[Path, Model], OneSequence]


def open_in_ram(path: Path, model: Model, threads: int) -> OneSequence:
    return open_cpu(path, threads=threads, context_length=CONTEXT, cache_size=SIZE, kv_type=model.kv_type)


def open_from_disk(path: Path, model: Model, threads: int) -> OneSequence:
    """With a budget of RAM for the experts of a token and a share of the others."""
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        needs = ram_needs(file, spec, RamShape(threads, "auto", CONTEXT, model.kv_type), SIZE)
        stacks = expert_stacks(file, spec)
        budget = needs.least_bytes(PlanOptions())
        budget += int(DISK_SHARE * sum(info.num_bytes for layer in stacks for info in layer))
    runner = open_cpu(
        path,
        threads=threads,
        context_length=CONTEXT,
        cache_size=SIZE,
        kv_type=model.kv_type,
        ram_bytes=budget,
    )
    assert runner.disk is not None, "the budget is for less than all experts"
    return runner


def open_resident(path: Path, model: Model) -> OneSequence:
    from cuda_runner_cases import open_cuda  # its imports need a GPU's packages

    return open_cuda(path, CONTEXT, model.kv_type, SIZE)


def open_hybrid(path: Path, model: Model, streamed: float) -> OneSequence:
    from cuda_runner_cases import open_partly

    return open_partly(path, GPU_SHARE, streamed=streamed, context_length=CONTEXT, cache_size=SIZE)


def demo(folder: Path) -> Path:
    return demo_model_path()


def cpu_cases(threads: int) -> list[Case]:
    """Every kind of model in both places, but for dense ones, which have no experts."""
    models = [Model(DEMO, "i16", demo)]
    models += [Model(name, "i16", partial(write_variant, name=name)) for name in VARIANTS]
    cases = []
    for model in models:
        cases.append(Case(model, RESIDENT["cpu"], partial(open_in_ram, threads=threads)))
        if not model.name.startswith("dense"):
            cases.append(Case(model, ON_DISK, partial(open_from_disk, threads=threads)))
    return cases


def cuda_cases() -> list[Case]:
    """Few models, since each has kernels to be compiled: one of every architecture wherever experts may be,
    and other types of cache with all experts resident.
    """
    models = [Model(DEMO, "i16", demo)]
    models += [
        Model(arch, kv_type, partial(write_mixed_layers, arch=arch))
        for arch, kv_type in MIXED_LAYERS_OF_A_GPU
    ]
    cases = []
    for model in models:
        cases.append(Case(model, RESIDENT["cuda"], open_resident))
        if model.kv_type == "i16":
            cases += [
                Case(model, place, partial(open_hybrid, streamed=streamed))
                for place, streamed in STREAMED.items()
            ]
    return cases


def compare(case: Case, path: Path, oracle: Oracle, num_batches: int, seed: int) -> Compared:
    """Batches of trees, and at the end one of sequences without. Raises Difference, which names all."""
    compared = Compared()
    with case.open(path, case.model) as runner:
        prompts = Prompts(runner)
        for number in range(num_batches + 1):
            text = f"{seed} {case.model.name} {case.place} {number}"
            try:
                if number < num_batches:
                    compared.add(
                        check_batch_of_trees(
                            prompts, oracle, Random(text), TREES_PER_STEP, num_next=NEXT_TOKENS
                        )
                    )
                else:
                    compared.add(check_mixed_lengths(prompts, oracle, Random(text), SEQUENCES, NEXT_TOKENS))
            except (Difference, ColdstreamError) as error:
                raise Difference(f"seed {text!r}, {case.model.name}, {case.place}: {error}") from error
        assert is_hybrid(runner) == (case.place not in RESIDENT.values()), "experts lie where the case says"
    return compared


def is_hybrid(runner: OneSequence) -> bool:
    """Whether experts were missing from fast memory."""
    uses = runner.expert_uses
    return uses is not None and uses[1] > 0


@contextmanager
def oracle_of(path: Path, model: Model) -> Iterator[Oracle]:
    """A CPU with all weights in RAM and other threads than the case, one row a step."""
    threads = max(1, Hardware.measure().num_physical_cores // 4)
    with open_in_ram(path, model, threads) as runner:
        yield TokenByToken(runner)


def batches_of(num_trees: int, num_cases: int) -> int:
    """Steps with trees in each case, so that all cases together have at least `num_trees`."""
    return -(-num_trees // (num_cases * TREES_PER_STEP))


def run(cases: Sequence[Case], num_trees: int, seed: int) -> list[dict[str, Any]]:
    """A row for each case. Raises Difference."""
    num_batches = batches_of(num_trees, len(cases))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, group in groupby(cases, key=lambda case: case.model):
            path = model.write(Path(folder))
            with oracle_of(path, model) as oracle:
                for case in group:
                    start = time.perf_counter()
                    compared = compare(case, path, oracle, num_batches, seed)
                    rows.append(
                        {
                            "model": model.name,
                            "place": case.place,
                            "cache_type": model.kv_type,
                            **asdict(compared),
                            "sequences": SEQUENCES,
                            "wall_s": round(time.perf_counter() - start, 1),
                        }
                    )
                    print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trees", type=int, default=500, help="at least so many in all cases together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU, where all is computed by it")
    parser.add_argument("--model", help="only this one, as the result names it")
    add_result_options(parser)
    options = parser.parse_args()
    cases = cuda_cases() if options.device == "cuda" else cpu_cases(options.threads)
    cases = [case for case in cases if options.model in (None, case.model.name)]
    if not cases:
        parser.error(f"no model is called {options.model}")
    words = ["python", "-m", "tests.audits.draft_trees", "--device", options.device]
    words += ["--trees", str(options.trees)]
    start = time.perf_counter()
    try:
        rows = run(cases, options.trees, options.seed)
    except Difference as difference:
        print(f"not plain decoding: {difference}", file=sys.stderr)
        return 1
    result = {
        "command": shlex.join(words),
        "machine": describe(options.device),
        "seed": options.seed,
        "next_tokens": NEXT_TOKENS,
        "rows": rows,
        "differences": 0,
        "wall_s": round(time.perf_counter() - start, 1),
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
