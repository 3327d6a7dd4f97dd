"""Drafts of the full-size model with few layers on a CPU: times as fast as none, by size and by cost.

    python -m bench.engine.cpu_drafts --out docs/results/cpu_shallow_drafts.json

Layers and the block for multi-token prediction are the full-size model's, with 16 experts of which a token
takes 4, and a vocabulary of 16,384; `vocab` has the whole one. Files that aren't there are written. Weights
are random: drafted tokens are right as often as published, or never (`wrong`); see `stated_drafts.py`. The
demo model drafts by its own block, after pieces of code.

For each text all ways run in turn, each time beginning with another, over one runner. `auto` is sizes by
cost whose losses are bounded, as by default; what they learned of a text they know in the next. On a machine
that others use, `--sizes-by-cpu-time` lets them decide as on one of their own. A ratio is of a text to itself
without drafts, timed twice. Beside wall time there is the CPU time of all threads, which others disturb less:
with one thread, that is, as several wait for each other. Tokens that differ end the run.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.engine.speculation import texts as demo_texts
from bench.engine.stated_drafts import ACCEPTED, FIRST_ID, Acceptance, StatedMtp
from bench.engine.versus_commit import median_interval
from bench.full_size_model import FULL_SHAPE, FullSizeWriter
from bench.results import ROOT, write_result
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.decoding import (
    Drafter,
    FixedSizes,
    SizesByCost,
    Speculation,
    SpeculationStatistics,
    TokenTree,
    TriedDraft,
)
from coldstream.decoding.drafters import MtpDrafter
from coldstream.engine import EngineConfig, OpenedModel, open_model
from coldstream.models.cpu.mtp import CpuMtp
from coldstream.models.cpu.runner import CpuRunner
from coldstream.placement.hardware import Hardware

_SHALLOW: Final = replace(FULL_SHAPE, experts=16, experts_per_token=4, vocab=16_384, has_nextn=True)
SHALLOW: Final = {
    "layers-4": replace(_SHALLOW, layers=4),
    "layers-8": replace(_SHALLOW, layers=8),
    "layers-12": replace(_SHALLOW, layers=12),
    "layers-40": replace(_SHALLOW, layers=40),
    "layers-12-vocab": replace(_SHALLOW, layers=12, vocab=FULL_SHAPE.vocab),
}
CASES: Final = (*SHALLOW, *(f"{name}-wrong" for name in SHALLOW), "demo")
WRONG: Final = Acceptance((0.0,))
PROMPT_TOKENS, CTX_SIZE = 64, 2048
Prompt = str | list[int]


class SizesByCpuTime(SizesByCost):
    """Sizes by what steps and drafts take of the CPU: the same decisions as on a machine of its own."""

    def budget(self, most: int, num_sequences: int = 1) -> int:
        self._begin_s = time.process_time()
        return super().budget(most, num_sequences)

    def sizes(self, trees: Sequence[TokenTree], draft_s: float) -> list[int]:
        begin_s, self._begin_s = self._begin_s, time.process_time()
        return super().sizes(trees, self._begin_s - begin_s)

    def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
        super().record(drafts, time.process_time() - self._begin_s, is_usual=is_usual)


@dataclass
class Way:
    """One size of drafts, and what its texts took."""

    budget: int | str  # nodes, or "auto"; 0: none
    speculation: Speculation | None
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    statistics: list[SpeculationStatistics] = field(default_factory=list)

    def run(self, opened: OpenedModel, prompt: Prompt, num_tokens: int) -> tuple[int, ...]:
        """Adds a text; the prompt's own time does not count."""
        llm = LLM.from_opened(replace(opened, speculation=self.speculation))
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        token_ids: list[int] = []
        stream = llm.stream(prompt, params)
        token_ids += next(stream).token_ids
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for piece in stream:
            token_ids += piece.token_ids
        self.wall_s.append(time.perf_counter() - begin_s)
        self.cpu_s.append(time.process_time() - begin_cpu_s)
        assert piece.statistics is not None, "the last piece has the statistics"
        if piece.statistics.speculation is not None:
            self.statistics.append(piece.statistics.speculation)
        llm.forget()
        return tuple(token_ids)

    def result(self, plain: Sequence["Way"], num_tokens: int) -> dict[str, Any]:
        """plain: the two ways without drafts."""
        steps, drafted = (sum(getattr(each, key) for each in self.statistics) for key in ("steps", "drafted"))
        found: dict[str, Any] = {"budget": self.budget}
        for key in ("wall_s", "cpu_s"):
            each = zip(*(getattr(way, key) for way in plain), getattr(self, key), strict=True)
            ratios = [(first + last) / 2 / own for first, last, own in each]
            name = key.removesuffix("_s")
            found |= {f"{name}_ratio": statistics.median(ratios), f"{name}_interval": median_interval(ratios)}
            found |= {
                f"{name}_ratios": ratios,
                f"{name}_ms": 1e3 * statistics.median(getattr(self, key)) / num_tokens,
            }
        if steps:
            found["tokens_per_step"] = 1 + sum(each.accepted for each in self.statistics) / steps
            found["nodes_per_step"] = drafted / steps
            for key in ("draft_s", "verify_s"):
                found[key.replace("_s", "_ms")] = (
                    1e3 * sum(getattr(each, key) for each in self.statistics) / steps
                )
        return found


class Case:
    """A model with its prompts."""

    def __init__(self, name: str, folder: Path, num_texts: int, num_tokens: int) -> None:
        self.name, self.num_tokens = name, num_tokens
        self.acceptance = None if name == "demo" else Acceptance(ACCEPTED["mtp"])
        self.prompts: list[Prompt]
        if name == "demo":
            self.path = Path(demo_model_path())
            self.prompts = list(demo_texts(num_texts)["code"])
            return
        if name.endswith("-wrong"):
            self.acceptance = WRONG
        shape = name.removesuffix("-wrong")
        self.path = folder / f"{shape}.gguf"
        if not self.path.exists():
            FullSizeWriter(self.path, SHALLOW[shape], 0, 2).write()
        # Wrong tokens begin at FIRST_ID, where no text may be.
        first, stride = FIRST_ID + 512, PROMPT_TOKENS + num_tokens
        assert first + num_texts * stride < SHALLOW[shape].vocab, "the texts fit into the vocabulary"
        self.prompts = [
            list(range(first + text * stride, first + text * stride + PROMPT_TOKENS))
            for text in range(num_texts)
        ]

    def drafter(self, block: CpuMtp) -> Drafter:
        """A new one of the block."""
        if self.acceptance is None:
            return MtpDrafter(block.new_sequence())
        stated = StatedMtp(block.new_sequence())
        stated.acceptance = self.acceptance
        return stated

    def measure(
        self, budgets: Sequence[int], threads: int, by_cost: type[SizesByCost] = SizesByCost
    ) -> dict[str, Any]:
        """by_cost: how `auto` decides. Raises RuntimeError if a text's tokens differ."""
        config = EngineConfig(
            str(self.path), device="cpu", threads=threads, ctx_size=CTX_SIZE, spec_type="mtp"
        )
        opened = open_model(config)
        try:
            assert isinstance(opened.runner, CpuRunner)
            block = opened.runner.load_mtp()
            ways = [Way(0, None)]
            ways += [Way(size, Speculation(self.drafter(block), FixedSizes(size))) for size in budgets]
            ways += [
                Way("auto", Speculation(self.drafter(block), by_cost("mtp", is_bounded=True))),
                Way(0, None),
            ]
            ways[0].run(opened, self.prompts[0], self.num_tokens // 4)  # the first text reads the file
            for kept in (ways[0].wall_s, ways[0].cpu_s):
                kept.clear()
            for turn, prompt in enumerate(self.prompts):
                at = turn % len(ways)
                answers = {way.run(opened, prompt, self.num_tokens) for way in (*ways[at:], *ways[:at])}
                if len(answers) > 1:
                    raise RuntimeError(f"{self.name}: drafts gave other tokens than none in text {turn}")
            tier = opened.runner.tier
        finally:
            opened.close()
        plain = ways[0], ways[-1]
        return {
            "name": self.name,
            "file_bytes": self.path.stat().st_size,
            "accepted": None if self.acceptance is None else self.acceptance.accepted,
            "tier": tier,
            "ways": [way.result(plain, self.num_tokens) for way in ways],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="of files with few layers")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=["layers-4", "layers-12", "layers-12-wrong"]
    )
    parser.add_argument("--budgets", nargs="+", type=int, default=[1, 2, 3, 5], help="fixed sizes, in nodes")
    parser.add_argument("--texts", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--sizes-by-cpu-time", action="store_true", help="auto decides by CPU time, with one thread"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    words = ["python", "-m", "bench.engine.cpu_drafts", "--cases", *options.cases]
    words += ["--budgets", *map(str, options.budgets), "--texts", str(options.texts)]
    words += ["--tokens", str(options.tokens), "--threads", str(options.threads)]
    words += ["--sizes-by-cpu-time"] * options.sizes_by_cpu_time
    by_cost = SizesByCpuTime if options.sizes_by_cpu_time else SizesByCost
    found = []
    for name in options.cases:
        case = Case(name, options.folder, options.texts, options.tokens)
        found.append(case.measure(options.budgets, options.threads, by_cost))
        for way in found[-1]["ways"]:
            ratios = ", ".join(f"{key} {way[f'{key}_ratio']:.2f}" for key in ("wall", "cpu"))
            print(
                name, way["budget"], ratios, f"{way.get('tokens_per_step', 1):.2f} tokens a step", flush=True
            )
    result = {
        "command": shlex.join(words),
        "machine": {"cpu": Hardware.measure().cpu_name, "threads": options.threads},
        "texts": options.texts,
        "tokens": options.tokens,
        "cases": found,
    }
    write_result(result, options.out and ROOT / options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
