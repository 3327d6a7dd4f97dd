"""What drafts of the demo model bring on held-out files, through the engine: accepted tokens by depth.

The engine continues a piece of each held-out file, with drafts by the DFlash drafter, by the model's own
block and by n-grams, as chains and as trees of fixed sizes. Tokens that differ from those without drafts end
the run. How fast it is says `bench/engine/speculation.py`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coldstream import LLM, SamplingParams
from coldstream.decoding import Drafter, FixedSizes, Speculation, SpeculationStatistics, TokenTree
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.engine import EngineConfig, OpenedModel, open_model
from coldstream.models.cpu.runner import CpuRunner
from tools.train_demo.data import load_corpus

CHAIN_LENGTHS = (1, 2, 3, 4, 5, 7)
TREE_SIZES = (4, 8, 16)
MOST_NODES = 63  # of the tree whose likeliest line is a chain
PROMPT_CHARS = 600
NEW_TOKENS = 160
NUM_FILES = 45
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1, ignore_eos=True),
}


class Chain:
    """Drafts of another drafter without their forks: the likeliest token, then the likeliest after it."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.name, self.wants_hidden, self.aux_layers = inner.name, inner.wants_hidden, inner.aux_layers
        self.truncate, self.extend = inner.truncate, inner.extend

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """See `Drafter`."""
        tree = self._inner.propose(context, MOST_NODES)
        line: list[int] = []
        for node, parent in enumerate(tree.parents):  # the likeliest child of each node comes first
            if parent == (line[-1] if line else -1) and len(line) < budget:
                line.append(node)
        return TokenTree(
            tuple(tree.token_ids[node] for node in line),
            tuple(range(-1, len(line) - 1)),
            tuple(tree.log_probs[node] for node in line),
        )


@dataclass
class Way:
    """A way to draft, and what came of it."""

    name: str
    shape: str  # chain or tree
    num_nodes: int
    speculation: Speculation | None
    found: list[SpeculationStatistics] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        steps = sum(each.steps for each in self.found)
        deepest = max(len(each.accepted_by_depth) for each in self.found)
        accepted = [
            sum(each.accepted_by_depth[depth] for each in self.found if depth < len(each.accepted_by_depth))
            for depth in range(deepest)
        ]
        return {
            "drafter": self.name,
            "shape": self.shape,
            "nodes": self.num_nodes,
            "tokens_per_step": round(1 + sum(accepted) / steps, 3),
            "accepted_by_depth": [round(count / steps, 3) for count in accepted],
        }


@contextmanager
def opened_with(model: Path, drafter: Path, threads: int) -> Iterator[OpenedModel]:
    """The model on the CPU, which draws drafts from `drafter` unless something else drafts."""
    config = EngineConfig(
        str(model), device="cpu", threads=threads, ctx_size=2048, spec_type="dflash", model_draft=str(drafter)
    )
    opened = open_model(config)
    try:
        yield opened
    finally:
        opened.close()


def _ways(opened: OpenedModel) -> list[Way]:
    assert isinstance(opened.runner, CpuRunner)
    assert opened.speculation is not None
    new_dflash, block = opened.speculation.more, opened.runner.load_mtp()
    assert new_dflash is not None
    makers = {
        "dflash": new_dflash,
        "mtp": lambda: MtpDrafter(block.new_sequence(), max_steps=8, min_followed=0.0),
        "ngram": NgramDrafter,
    }
    chains = [
        Way(name, "chain", n, Speculation(Chain(make()), FixedSizes(n)))
        for name, make in makers.items()
        for n in CHAIN_LENGTHS
    ]
    trees = [
        Way(name, "tree", n, Speculation(make(), FixedSizes(n)))
        for name, make in makers.items()
        for n in TREE_SIZES
    ]
    return chains + trees


def _answer(opened: OpenedModel, way: Way, prompt: str, params: SamplingParams) -> tuple[int, ...]:
    llm = LLM.from_opened(replace(opened, speculation=way.speculation))
    (output,) = llm.generate(prompt, params)
    llm.forget()
    if output.statistics.speculation is not None:
        way.found.append(output.statistics.speculation)
    return output.token_ids


def evaluate_drafter(
    model: Path,
    drafter: Path,
    out: Path,
    *,
    new_tokens: int = NEW_TOKENS,
    num_files: int = NUM_FILES,
    threads: int = 2,
) -> list[dict[str, Any]]:
    """Write the figures of all ways to `out`, and return them. Raises SystemExit if tokens differ."""
    texts = [file.text for file in load_corpus().held_out]
    prompts = [text[len(text) // 3 :][:PROMPT_CHARS] for text in texts[:num_files]]
    results = []
    with opened_with(model, drafter, threads) as opened:
        for sampling, plain_params in SAMPLINGS.items():
            ways = [Way("none", "none", 0, None), *_ways(opened)]
            params = replace(plain_params, max_tokens=new_tokens)
            for number, prompt in enumerate(prompts, 1):
                if len({_answer(opened, way, prompt, params) for way in ways}) > 1:
                    raise SystemExit(f"drafts gave other tokens than none after {prompt!r}")
                print(f"{sampling}: {number} of {len(prompts)} files", file=sys.stderr)
            results += [{"sampling": sampling, **way.figures()} for way in ways[1:]]
    record = {
        "command": "python -m tools.train_demo drafter-evaluate"
        + (f" --files {num_files}" if num_files != NUM_FILES else ""),
        "bytes": drafter.stat().st_size,
        "held_out_files": len(prompts),
        "new_tokens": new_tokens,
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    for result in results:
        print(json.dumps(result))
    return results
