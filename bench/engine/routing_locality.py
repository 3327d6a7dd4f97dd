"""Hit rates of LRU caches of experts over what a model's routers choose while it generates, and how many
experts neighbouring tokens use together, beside published ones.

    python -m bench.engine.routing_locality MODEL --out docs/results/routing_locality.json

MODEL is made by full_size_model.py; a few layers are enough, since no layer's routing depends on the
others:

    python -m bench.full_size_model routing.gguf --layers 4 --vocab 32768
    python -m bench.full_size_model popular.gguf --layers 4 --vocab 32768 --shared-popularity
    python -m bench.full_size_model neighbours.gguf --layers 4 --vocab 32768 --like-neighbours

The CPU engine generates greedily from several prompts; then the tokens go through the same kernels again,
and what their routers choose is kept. Each layer has a cache of its own, empty at the start, and every
first touch counts as a miss, as in the published figures.
"""

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.results import write_result
from bench.runners import open_cpu_runner
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import RoutingCpuOps
from coldstream.kernels.ops import Rows
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec

NUM_TOKENS = 256
NUM_PROMPTS = 16
PROMPT_TOKENS = 8
# Qwen3-30B-A3B, Q4_K_M, 256 tokens from an empty cache: share of the experts in the cache → hit rate.
PUBLISHED = {0.06: 0.366, 0.19: 0.741, 0.38: 0.894, 0.73: 0.962}
PUBLISHED_SOURCE = "https://github.com/kekzl/imp/pull/1374"
# What users of FreeToken report of eight texts side by side: share of the experts in the cache, and misses.
INTERLEAVED, INTERLEAVED_SHARE, PUBLISHED_MISSES = 8, 0.37, (0.06, 0.08)
PUBLISHED_MISSES_SOURCE = "https://github.com/FlashML-org/FreeToken/issues/231"
# Tokens in a row → their distinct experts, in those of one token. Of a trace of Qwen3-30B-A3B.
PUBLISHED_UNIONS = {2: 1.62, 4: 2.64, 8: 3.96, 16: 5.53}
# Share of a token's experts that the token before had, by model, and where it is published.
PUBLISHED_REUSE = {
    "Qwen3-30B-A3B": (0.38, "https://github.com/Helldez/BigMoeOnEdge/blob/main/docs/expert-prediction.md"),
    "GLM-4.7-Flash": (0.257, "https://github.com/ml-explore/mlx-lm/pull/1485"),
}


def generate(runner: CpuRunner, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` most likely tokens after `prompt`, one at a time."""
    sequence = runner.new_sequence()
    tokens = [int(runner.extend(sequence, prompt).argmax())]
    while len(tokens) < count:
        tokens.append(int(runner.extend(sequence, tokens[-1:]).argmax()))
    runner.release(sequence)
    return tokens


@dataclass(frozen=True)
class RoutingReader:
    """A model whose forward pass is called operation by operation, for its routing alone."""

    spec: ModelSpec
    ops: RoutingCpuOps
    model: CausalLM

    def topk_ids(self, token_ids: Sequence[int]) -> list[np.ndarray]:
        """The experts of each token, [T, K] per layer."""
        self.ops.topk_ids.clear()
        count = len(token_ids)
        cache = ModelCache(self.spec, self.ops, num_states=1, context_length=count, kv_type="f32")
        rows = Rows(self.ops.int_vector(range(count)), self.ops.int_vector([0] * count))
        self.model.forward(self.ops.int_vector(token_ids), rows, cache)
        return list(self.ops.topk_ids)


def lru_hit_rate(topk_ids: np.ndarray, num_slots: int) -> float:
    """Share of the choices [T, K] that an LRU cache of `num_slots` experts, empty at first, holds."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in topk_ids.ravel().tolist():
        if expert in cache:
            hits += 1
            cache.move_to_end(expert)
        else:
            cache[expert] = None
            if len(cache) > num_slots:
                cache.popitem(last=False)
    return hits / topk_ids.size


def interleaved(texts: Sequence[np.ndarray]) -> np.ndarray:
    """The choices [texts * T, K] of texts [T, K] that get a token each, one after the other."""
    return np.stack(texts, axis=1).reshape(-1, texts[0].shape[1])


def next_token_reuse(topk_ids: np.ndarray) -> float:
    """Share of a token's experts that the token before used too."""
    pairs = zip(topk_ids[:-1].tolist(), topk_ids[1:].tolist(), strict=True)
    shared = [len(set(one) & set(other)) for one, other in pairs]
    return float(np.mean(shared)) / topk_ids.shape[1]


def union(topk_ids: np.ndarray, num_tokens: int) -> float:
    """Distinct experts of so many tokens in a row, in those of one token."""
    firsts = range(len(topk_ids) - num_tokens + 1)
    return float(np.mean([len(np.unique(topk_ids[i : i + num_tokens])) for i in firsts])) / topk_ids.shape[1]


def measure(path: Path, threads: int) -> dict[str, object]:
    """All figures; see the module docstring."""
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        ops = RoutingCpuOps(threads)
        reader = RoutingReader(spec, ops, CausalLM.load(file, spec, ops))
    layers: list[np.ndarray] = []  # of all layers of a text, then of the next one
    walks = 0
    with open_cpu_runner(path, threads=threads, context_length=1024) as runner:
        for number in range(NUM_PROMPTS):
            first = number * (spec.vocab_size - 2 * NUM_TOKENS) // NUM_PROMPTS
            prompt = list(range(first, first + PROMPT_TOKENS))
            tokens = generate(runner, prompt, NUM_TOKENS)
            walks += tokens == list(range(prompt[-1] + 1, prompt[-1] + 1 + NUM_TOKENS))
            layers += reader.topk_ids(tokens)
    slots = round(INTERLEAVED_SHARE * spec.num_experts)
    interleaved_ids = [
        interleaved(layers[i :: spec.num_layers][:INTERLEAVED]) for i in range(spec.num_layers)
    ]
    uses = np.bincount(np.concatenate(layers).ravel(), minlength=spec.num_experts)
    return {
        "model": str(path.name),
        "command": f"python -m bench.engine.routing_locality {path.name}",
        "layers": spec.num_layers,
        "experts": spec.num_experts,
        "experts_per_token": spec.num_experts_per_tok,
        "prompts": NUM_PROMPTS,
        "tokens_per_prompt": NUM_TOKENS,
        "texts_that_walk": walks,
        "lru_hit_rate": {
            str(share): float(np.mean([lru_hit_rate(ids, round(share * spec.num_experts)) for ids in layers]))
            for share in PUBLISHED
        },
        "published_lru_hit_rate": {str(share): rate for share, rate in PUBLISHED.items()},
        "published_source": PUBLISHED_SOURCE,
        "texts_interleaved": INTERLEAVED,
        "interleaved_share": INTERLEAVED_SHARE,
        "interleaved_misses": 1 - float(np.mean([lru_hit_rate(ids, slots) for ids in interleaved_ids])),
        "published_interleaved_misses": PUBLISHED_MISSES,
        "published_misses_source": PUBLISHED_MISSES_SOURCE,
        "unions": {
            str(count): float(np.mean([union(ids, count) for ids in layers])) for count in PUBLISHED_UNIONS
        },
        "published_unions": {str(count): times for count, times in PUBLISHED_UNIONS.items()},
        "published_reuse": PUBLISHED_REUSE,
        "next_token_reuse": float(np.mean([next_token_reuse(ids) for ids in layers])),
        "experts_touched": float(np.mean([len(np.unique(ids)) for ids in layers])),
        "largest_share_of_one_expert": float(uses.max() / uses.sum()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options.model, options.threads)
    print(f"{result['texts_that_walk']} of {NUM_PROMPTS} texts walk through the vocabulary")
    print("experts in the cache   hit rate   published")
    for share, rate in dict(result["lru_hit_rate"]).items():
        print(f"{float(share):20.0%} {rate:10.1%} {PUBLISHED[float(share)]:11.1%}")
    print("tokens in a row   distinct experts / one token's   published")
    for count, times in dict(result["unions"]).items():
        print(f"{count:>15} {times:32.2f} {PUBLISHED_UNIONS[int(count)]:11.2f}")
    misses = result["interleaved_misses"]
    print(f"{INTERLEAVED} texts, interleaved, miss {misses:.1%} with {INTERLEAVED_SHARE:.0%} in the cache")
    write_result(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
