"""What the residents of a plan are worth from the first token on: kept, and forgotten.

    python -m bench.engine.planned_residents --out docs/results/planned_residents.json
    python -m bench.engine.planned_residents full.gguf --device cuda --experts 3 --texts 5 \\
        --out docs/results/gpu/planned_residents.json

Without MODEL the demo model; a file of full_size_model.py that isn't there is written first (21 GB). Fast
memory, a GPU's or with `--device cpu` RAM, holds a part of the experts, others are computed by the CPU or
come over the bus or from the disk. Each text is decoded from its first token by models that were opened anew:

- kept: the plan's residents are in slots, and the uses that its profile expects protect them;
- forgotten: the same slots without what is expected. In RAM they begin empty; on a GPU the residents are
  loaded, and leave as soon as anything else is used;
- unprofiled (GPU): other residents, those of a plan that knows nothing.

The demo model's profile is the bundled one, of files that its held-out texts are not of. A walk through the
vocabulary (full_size_model.py) is profiled on the ids right before the text, since experts of far ids tell
nothing of it. The order of ways changes from text to text. Ways that do not choose the same tokens end the
run.
"""

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.device import describe
from bench.engine.gpu import write_model
from bench.engine.gpu_hybrid import GIB, GREEDY, ROOM_BYTES
from bench.full_size_model import FULL_SHAPE
from bench.results import add_result_options, write_result
from bench.runners import open_cpu_runner, plan_with_workers, ram_needs
from coldstream.assets import demo_model_path
from coldstream.decoding import TokenChooser
from coldstream.engine import LLM, EngineConfig
from coldstream.engine.routing_profile import record_routing
from coldstream.errors import OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.cuda.device import find_gpu
from coldstream.models.footprint import model_sizes, routed_model
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import PlacementPlan, PlanOptions, plan_placement
from coldstream.placement.plan_file import save_plan
from coldstream.placement.routing_trace import RoutingTrace
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.facts import expected_uses
from coldstream.planning.gather import Sources, bundled_profile, plan_model
from coldstream.planning.machine import measured_hardware
from coldstream.planning.unknowns import RamShape
from tools.train_demo.data import load_corpus

CONTEXT = 2048
TOKENS, FIRST_TOKENS = 64, 8
CAPTURED = 4  # tokens that are not timed on a GPU, whose steps are captured meanwhile
PROFILE_TOKENS = 256  # of a walk, before its text
FIRST_ID, TEXT_STEP = 1000, 20_011  # of the first ids of walks

WAYS = ("kept", "forgotten", "unprofiled")

Array = np.ndarray[Any, Any]
Place = Callable[[int, Array | None], PlacementPlan]  # by a budget and expected uses


@dataclass(frozen=True)
class Text:
    """Token ids, more than are decoded, and the routing that is known before them."""

    token_ids: Sequence[int]
    profile: RoutingTrace


@dataclass(frozen=True)
class Planner:
    """Makes plans of a model on a device for about so many bytes of experts in fast memory."""

    plan: Callable[[Array | None], RunPlan]  # by expected uses
    experts_bytes: int
    all_expert_bytes: int


def smallest_budget(place: Place, wanted: int, low: int, high: int) -> int:
    """Of those in (low, high], to a MiB, one in which residents without a profile have `wanted` bytes.

    `high` has to be enough.
    """
    while high - low > 2**20:
        middle = (low + high) // 2
        try:
            is_enough = place(middle, None).resident_bytes >= wanted
        except OutOfMemoryError:
            is_enough = False
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def planner(path: Path, device: str, threads: int, experts: str) -> Planner:
    """For the experts that `experts` says: GiB, or with % a share of all."""
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        if device == "cuda":
            return gpu_planner(path, file, spec, measured_hardware(find_gpu()), experts)
        needs = ram_needs(file, spec, RamShape(threads, "auto", CONTEXT, "i16"))

    def place(budget: int, uses: Array | None) -> PlacementPlan:
        return needs.place(budget, uses, PlanOptions())

    all_bytes = needs.in_slots.all_expert_bytes
    wanted, least = bytes_of(experts, all_bytes), needs.least_bytes(PlanOptions())
    budget = smallest_budget(place, wanted, least - 1, least + all_bytes)
    plan = place(budget, None)
    if plan.is_all_resident:
        sys.exit(f"--experts {experts}: a budget for so many holds the whole model")
    return Planner(
        lambda uses: RunPlan(place(budget, uses), threads, as_data(uses)), plan.resident_bytes, all_bytes
    )


def gpu_planner(path: Path, file: GGUFFile, spec: ModelSpec, hardware: Hardware, experts: str) -> Planner:
    sizes = model_sizes(spec, file.tensors, file.fingerprint, 0)
    wanted = bytes_of(experts, sizes.all_expert_bytes)
    # What steps and their workspace are follows from about what will be there.
    config = EngineConfig(str(path), device="cuda", vram=wanted + ROOM_BYTES, ctx_size=CONTEXT)
    planned = plan_model(config, Sources(file, spec, hardware))
    fixed, sizes = planned.plan.fixed, planned.sizes

    def place(budget: int, uses: Array | None) -> PlacementPlan:
        return plan_placement(sizes, fixed, budget, uses=uses)

    budget = smallest_budget(place, wanted, fixed.total, fixed.total + 2 * sizes.all_expert_bytes)

    def plan(uses: Array | None) -> RunPlan:
        run = RunPlan(place(budget, uses), 0, as_data(uses))
        with GGUFFile.open(path) as file:
            return plan_with_workers(run, config, Sources(file, spec, hardware))

    return Planner(plan, place(budget, None).resident_bytes, sizes.all_expert_bytes)


def bytes_of(experts: str, all_bytes: int) -> int:
    """What "3" (GiB) or "25%" means. Raises ValueError for anything else, and for all experts or none."""
    wanted = int(float(experts[:-1]) / 100 * all_bytes if experts.endswith("%") else float(experts) * GIB)
    if not 0 < wanted < all_bytes:
        raise ValueError(f"--experts {experts}: all are {all_bytes / GIB:.2f} GiB")
    return wanted


def as_data(uses: Array | None) -> tuple[tuple[float, ...], ...] | None:
    return None if uses is None else tuple(map(tuple, uses.tolist()))


def ways_of(planner: Planner, profile: RoutingTrace, device: str) -> dict[str, RunPlan]:
    """The plan of each way for a text with this profile; see the module docstring."""
    kept = planner.plan(expected_uses(profile))
    ways = {"kept": kept, "forgotten": replace(kept, uses=None)}
    if device == "cuda":
        ways["unprofiled"] = planner.plan(None)
    return ways


def texts_of(path: Path, count: int, threads: int) -> list[Text]:
    """Of a model with a bundled profile the beginnings of held-out files; of others stretches of a walk."""
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        bundled, model = bundled_profile(file, spec), routed_model(file, spec)
        if bundled is not None:
            tokenizer = Tokenizer.from_metadata(file.metadata)
            texts = [tokenizer.encode(each.text[: 16 * TOKENS]) for each in load_corpus().held_out]
            return [Text(ids, bundled) for ids in texts if len(ids) > TOKENS][:count]
    texts = []
    with open_cpu_runner(path, threads=threads, context_length=PROFILE_TOKENS) as runner:
        for first in first_ids(count, spec.vocab_size):
            before = range(first - PROFILE_TOKENS, first)
            texts.append(Text(range(first, first + TOKENS + 1), record_routing(runner, model, before)))
    return texts


def first_ids(count: int, vocab_size: int) -> list[int]:
    """Where walks begin, far from each other, with room for a profile before and a text behind."""
    low, high = FIRST_ID + PROFILE_TOKENS, vocab_size - TOKENS - 1
    if high - low < count * (PROFILE_TOKENS + TOKENS):
        raise ValueError(f"{vocab_size} ids are too few for {count} texts")
    step = min(TEXT_STEP, (high - low) // count)
    return [low + number * step for number in range(count)]


def decode(path: Path, device: str, run: RunPlan, token_ids: Sequence[int]) -> dict[str, Any]:
    """Decodes a text in a model that is opened anew: tokens a second, uses that hit and missed after the
    first tokens and after all (on a GPU the last one is not counted yet), and what was most likely.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "plan.json"
        save_plan(run, kept)
        with LLM(path, device=device, plan=str(kept)) as llm:
            runner, choose = llm.opened.runner, TokenChooser(GREEDY, 0, 0, ())
            sequence, chosen, uses = runner.new_sequence(), [], []
            first_timed = CAPTURED if device == "cuda" else 0
            for number in range(TOKENS):
                if number == first_timed:
                    start = time.perf_counter()
                logits = runner.extend(sequence, (token_ids[number],))
                chosen.append(choose(logits, token_ids[: number + 1]).token_id)
                uses.append(runner.expert_uses)
            seconds = time.perf_counter() - start
    return {
        "tok_s": (TOKENS - first_timed) / seconds,
        "first_uses": uses[FIRST_TOKENS - 1],
        "uses": uses[-1],
        "chosen": chosen,
    }


def orders(names: Sequence[str], count: int) -> Iterator[list[str]]:
    """The names, in each of `count` repeats another one first, and every other time backwards."""
    for number in range(count):
        turned = [*names[number % len(names) :], *names[: number % len(names)]]
        yield turned[::-1] if number // len(names) % 2 else turned


def measure(path: Path, device: str, planner: Planner, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """For each text its order, and by way what `decode` says. Raises RuntimeError if tokens differ."""
    repeats = []
    names = list(ways_of(planner, texts[0].profile, device))
    for text, order in zip(texts, orders(names, len(texts)), strict=True):
        plans = ways_of(planner, text.profile, device)
        ways = {name: decode(path, device, plans[name], text.token_ids) for name in order}
        chosen = [way.pop("chosen") for way in ways.values()]
        if any(each != chosen[0] for each in chosen):
            raise RuntimeError(f"ways in the order {order} choose different tokens: {chosen}")
        repeats.append({"order": order, "ways": ways})
        print({name: round(way["tok_s"], 1) for name, way in ways.items()}, flush=True)
    return repeats


def hit_rate(uses: Sequence[Sequence[int]]) -> float:
    """Of several texts' (hits, misses) together."""
    hits, misses = (sum(each) for each in zip(*uses, strict=True))
    return hits / (hits + misses)


def summary(repeats: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way: hit rates, the median speed, and that of `kept` over it text by text, rising."""
    rows = []
    for name in sorted(repeats[0]["ways"], key=WAYS.index):
        ways = [each["ways"][name] for each in repeats]
        ratios = [
            each["ways"]["kept"]["tok_s"] / way["tok_s"] for each, way in zip(repeats, ways, strict=True)
        ]
        rows.append(
            {
                "way": name,
                "first_hit_rate": hit_rate([way["first_uses"] for way in ways]),
                "hit_rate": hit_rate([way["uses"] for way in ways]),
                "tok_s": statistics.median(way["tok_s"] for way in ways),
                "kept_ratios": sorted(ratios),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=demo_model_path())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--experts", default="25%", help="in fast memory: GiB, or with %% a share of all")
    parser.add_argument("--texts", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of the CPU; default: one a core")
    add_result_options(parser)
    options = parser.parse_args()
    if not options.model.exists():
        write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    threads = options.threads or Hardware.measure().num_physical_cores
    plans = planner(options.model, options.device, threads, options.experts)
    texts = texts_of(options.model, options.texts, threads)
    repeats = measure(options.model, options.device, plans, texts)
    words = ["python", "-m", "bench.engine.planned_residents"]
    words += [] if options.model == demo_model_path() else [options.model.name]
    for name in ("device", "experts", "texts"):
        words += [f"--{name}", str(getattr(options, name))]
    run = plans.plan(expected_uses(texts[0].profile))
    result = {
        "command": shlex.join(words),
        "machine": describe(options.device),
        "model": options.model.name,
        "device": options.device,
        "experts_bytes": plans.experts_bytes,
        "experts_share": plans.experts_bytes / plans.all_expert_bytes,
        "threads": run.threads,
        "prefetch": run.prefetch,
        "texts": len(texts),
        "tokens": TOKENS,
        "first_tokens": FIRST_TOKENS,
        "profile_tokens": texts[0].profile.num_steps,
        "rows": summary(repeats),
        "repeats": repeats,
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
