"""The hit rate of each policy of residency for the demo model, by the number of slots.

    python -m bench.engine.policy_table --out docs/results/policies.json

The trace is of held-out files: windows of the model's context, evenly spaced, each from nothing. One pool
of slots serves all layers. Every policy begins with the experts that training files of the same library use
most; the static one keeps them. Belady's is the most that any policy could hold which copies only what it
missed. Ours besides with weights for the outer layers, of which the demo model has as large a share in two
as a model of 40 layers in its first six and last three.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.results import write_result
from bench.runners import open_cpu_runner
from coldstream.assets import demo_model_path
from coldstream.engine.routing_profile import record_routing
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.footprint import routed_model
from coldstream.placement import policies
from coldstream.placement.policies import Belady, DecayedFrequency, Lfu, Lru, Policy, Static, simulate
from coldstream.placement.routing_trace import RoutingTrace
from tools.train_demo.data import SourceFile, load_corpus

SHARES = (0.06, 0.12, 0.19, 0.25, 0.38, 0.50, 0.75)
WINDOW = 4096
OUTER_WEIGHTS = (0.5, 1.25, 1.5, 2.0, 4.0)
END_OF_TEXT = "<|endoftext|>"


def even_windows(tokenizer: Tokenizer, files: Sequence[SourceFile], count: int) -> list[int]:
    """`count` windows of the files' tokens, evenly spaced, joined; an end-of-text token before each file."""
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(END_OF_TEXT, parse_special=True)
        ids += tokenizer.encode(file.text)
    starts = np.linspace(0, len(ids) - WINDOW, count).astype(int)
    return [token_id for start in starts for token_id in ids[start : start + WINDOW]]


def record(num_windows: int, threads: int) -> tuple[RoutingTrace, RoutingTrace]:
    """Traces of held-out and of training files."""
    corpus = load_corpus()
    with open_cpu_runner(demo_model_path(), threads=threads, context_length=WINDOW) as runner:
        model = routed_model(runner.file, runner.spec)
        tokenizer = Tokenizer.from_metadata(runner.file.metadata)
        texts = [
            even_windows(tokenizer, files, num_windows) for files in (corpus.held_out, corpus.train[::16])
        ]
        held_out, training = (record_routing(runner, model, ids) for ids in texts)
    return held_out, training


def compare(trace: RoutingTrace, profile: np.ndarray) -> list[dict[str, Any]]:
    """One row per share of the experts: hit rate and copies a token, by policy."""
    by_name: dict[str, Policy] = {
        "lru": Lru(),
        "lfu": Lfu(),
        "static": Static(),
        "ours": DecayedFrequency(),
        "ours_4_copies": DecayedFrequency(max_copies=4),
        "belady": Belady(trace),
    }
    rows = []
    for share in SHARES:
        slots = round(share * profile.size)
        results = {name: simulate(trace, policy, slots, profile) for name, policy in by_name.items()}
        rows.append(
            {
                "share": share,
                "slots": slots,
                "hit_rate": {name: result.hit_rate for name, result in results.items()},
                "copies_per_token": {
                    name: float(result.copies.sum() / trace.num_steps) for name, result in results.items()
                },
            }
        )
    return rows


def weigh_outer_layers(trace: RoutingTrace, profile: np.ndarray) -> list[dict[str, Any]]:
    """One row per share of the experts: the hit rate of ours by what a use counts for in the outer layers."""
    num_layers, num_experts = profile.shape
    rows = []
    for share in SHARES:
        hit_rates = {}
        for weight in OUTER_WEIGHTS:
            weights = np.ones((num_layers, num_experts))
            weights[[0, -1]] = weight
            policy = DecayedFrequency(weights=weights.reshape(-1))
            result = simulate(trace, policy, round(share * profile.size), profile * weights)
            hit_rates[str(weight)] = result.hit_rate
        rows.append({"share": share, "hit_rate": hit_rates})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trace, training = record(options.windows, options.threads)
    profile = training.counts() / training.num_steps
    result = {
        "command": "python -m bench.engine.policy_table",
        "model": demo_model_path().name,
        "layers": trace.model.num_layers,
        "experts": trace.model.num_experts,
        "experts_per_token": trace.model.num_experts_per_tok,
        "tokens": trace.num_steps,
        "window_tokens": WINDOW,
        "constants": {
            name: getattr(policies, name)
            for name in ("DECAY", "RECENCY_DECAY", "RECENCY_WEIGHT", "HYSTERESIS", "PAYBACK")
        },
        "rows": compare(trace, profile),
        "outer_layers_weighted": weigh_outer_layers(trace, profile),
    }
    write_result(result, options.out)
    behind = [row["share"] for row in result["rows"] if row["hit_rate"]["ours"] < row["hit_rate"]["lru"]]
    if behind:
        print(f"below LRU at {behind}")
    return int(bool(behind))


if __name__ == "__main__":
    sys.exit(main())
