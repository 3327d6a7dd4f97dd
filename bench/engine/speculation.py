"""Drafts on the CPU: seconds without over seconds with them, by kind of text, drafter and size of the tree.

    python -m bench.engine.speculation --out docs/results/cpu_speculation.json

The model continues texts of each kind, greedily and drawing by a seed. For each text all ways run in turn, in
changing order, over one runner; tokens that differ end the run. Code is files of the standard library that
the demo model was not trained on. With `--model-draft`, the model that it names drafts too.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from bench.results import ROOT, write_result
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.decoding import Drafter, FixedSizes, SizesByCost, Speculation, SpeculationStatistics
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.engine import EngineConfig, OpenedModel, open_model
from coldstream.models.cpu.runner import CpuRunner
from coldstream.placement.hardware import Hardware
from tools.train_demo.data import load_corpus

BUDGETS = (1, 2, 3, 4, 8, 12, 16, 22, 24, 32, 40)
DRAFTERS = ("mtp", "dflash", "ngram")
PROMPT_CHARS = 600
NEW_TOKENS = 160
NUM_TEXTS = 10
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
    "drawn": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True
    ),
}


def pieces(text: str, count: int) -> list[str]:
    """So many pieces of a text, spread over it."""
    stride = max(1, (len(text) - PROMPT_CHARS) // count)
    return [text[start * stride : start * stride + PROMPT_CHARS] for start in range(count)]


def texts(count: int) -> dict[str, list[str]]:
    """Prompts by kind."""
    code = [file.text for file in load_corpus().held_out if len(file.text) > 4 * PROMPT_CHARS]
    prose = "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
    results = [json.loads(path.read_text()) for path in sorted(ROOT.glob("docs/results/*.json"))]
    structured = "\n".join(json.dumps(each, indent=1)[: 2 * PROMPT_CHARS] for each in results)
    random = Random(1)
    calls = "\n".join(json.dumps(_call(random)) for _ in range(200))
    noise = "".join(chr(random.randrange(32, 127)) for _ in range(40 * PROMPT_CHARS))
    return {
        "code": [text[len(text) // 2 :][:PROMPT_CHARS] for text in code[:count]],
        "prose": pieces(prose, count),
        "structured": pieces(structured, count),
        "tool calls": pieces(calls, count),
        "random bytes": pieces(noise, count),
    }


def _call(random: Random) -> dict[str, Any]:
    """A made-up call of a tool."""
    names = ("read_file", "write_file", "search", "run_tests")
    path = f"src/{random.choice(('app', 'core', 'web'))}/module_{random.randrange(30)}.py"
    arguments = {"path": path, "line": random.randrange(400), "limit": random.choice((10, 50))}
    return {"name": random.choice(names), "arguments": arguments}


@dataclass
class Way:
    """A way to generate, and what it took."""

    drafter: str  # none, mtp, dflash or ngram
    budget: int | str  # nodes of a tree, or "auto"
    speculation: Speculation | None
    seconds: list[float] = field(default_factory=list)  # of each answer
    statistics: list[SpeculationStatistics] = field(default_factory=list)

    def run(self, opened: OpenedModel, prompt: str, params: SamplingParams) -> tuple[int, ...]:
        llm = LLM.from_opened(replace(opened, speculation=self.speculation))
        (output,) = llm.generate(prompt, params)
        llm.forget()
        self.seconds.append(output.statistics.generation_s)
        if output.statistics.speculation is not None:
            self.statistics.append(output.statistics.speculation)
        return output.token_ids

    def result(self, plain: Sequence[float]) -> dict[str, Any]:
        drafted = self.statistics
        steps = sum(each.steps for each in drafted) or 1
        total = sum(self.seconds)
        return {
            "drafter": self.drafter,
            "budget": self.budget,
            "ratio": sum(plain) / total,
            "tok_s": len(self.seconds) * (NEW_TOKENS - 1) / total,
            "tokens_per_step": 1 + sum(each.accepted for each in drafted) / steps,
            "nodes_per_step": sum(each.drafted for each in drafted) / steps,
            "accepted_by_depth": _sums(each.accepted_by_depth for each in drafted),
            "draft_share": sum(each.draft_s for each in drafted) / total,
        }


def _sums(rows: Iterator[tuple[int, ...]]) -> list[int]:
    total: list[int] = []
    for row in rows:
        total += [0] * (len(row) - len(total))
        for depth, count in enumerate(row):
            total[depth] += count
    return total


@contextmanager
def opened_model(model: Path, drafter: Path | None, threads: int) -> Iterator[OpenedModel]:
    config = EngineConfig(str(model), device="cpu", threads=threads, ctx_size=2048, spec_type="ngram")
    if drafter is not None:
        config = replace(config, spec_type="dflash", model_draft=str(drafter))
    opened = open_model(config)
    try:
        yield opened
    finally:
        opened.close()


def ways(opened: OpenedModel, drafters: Sequence[str], budgets: Sequence[int]) -> list[Way]:
    """Without drafts, twice, and with each drafter by every size and by cost."""
    assert isinstance(opened.runner, CpuRunner)
    made = [Way("none", 0, None), Way("none", 0, None)]
    block = opened.runner.load_mtp() if "mtp" in drafters else None
    own = opened.speculation

    def drafter_of(name: str) -> Drafter:
        if name == "ngram":
            return NgramDrafter()
        if name == "dflash":
            assert own is not None
            assert own.more is not None, "a drafter on the CPU is made for any number of sequences"
            return own.more()
        assert block is not None
        return MtpDrafter(block.new_sequence(), max_steps=8)

    for name in drafters:
        made += [Way(name, n, Speculation(drafter_of(name), FixedSizes(n))) for n in budgets]
        made.append(Way(name, "auto", Speculation(drafter_of(name), SizesByCost(name))))
    return made


def measure(
    opened: OpenedModel, prompts: Sequence[str], params: SamplingParams, all_ways: Sequence[Way], seed: int
) -> list[dict[str, Any]]:
    """Results of all ways over the prompts. Raises SystemExit if tokens differ."""
    random = Random(seed)
    for prompt in prompts:
        answers = set()
        for way in random.sample(all_ways, len(all_ways)):
            answers.add(way.run(opened, prompt, params))
        if len(answers) > 1:
            raise SystemExit(f"drafts gave other tokens than none after {prompt!r}")
    plain = [sum(pair) / 2 for pair in zip(all_ways[0].seconds, all_ways[1].seconds, strict=True)]
    return [way.result(plain) for way in all_ways[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=demo_model_path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=NUM_TEXTS)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS)
    parser.add_argument("--model-draft", type=Path, help="a DFlash drafter for the model")
    parser.add_argument("--kinds", nargs="+", help="of texts; all unless given")
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="sizes of trees, in nodes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    drafters = options.drafters or (["mtp", "ngram"] if options.model_draft is None else list(DRAFTERS))
    if "dflash" in drafters and options.model_draft is None:
        parser.error("dflash is drafts of another model: name it with --model-draft")
    results = []
    with opened_model(options.model, options.model_draft, options.threads) as opened:
        for kind, prompts in texts(options.texts).items():
            if options.kinds and kind not in options.kinds:
                continue
            for sampling, params in SAMPLINGS.items():
                made = ways(opened, drafters, options.budgets)
                found = measure(opened, prompts, params, made, len(results))
                results.append({"kind": kind, "sampling": sampling, "ways": found})
                print(kind, sampling, *(_line(each) for each in found), sep="\n  ", file=sys.stderr)
    result = {
        "command": f"python -m bench.engine.speculation{_given(options)}",
        "cpu": Hardware.measure().cpu_name,
        "threads": options.threads,
        "tier": opened.runner.tier,
        "new_tokens": NEW_TOKENS,
        "texts": options.texts,
        "results": results,
    }
    write_result(result, options.out)


def _line(way: dict[str, Any]) -> str:
    return (
        f"{way['drafter']} {way['budget']}: {way['ratio']:.2f}, {way['tokens_per_step']:.2f} tokens a step, "
        f"{way['draft_share']:.0%} drafting"
    )


def _given(options: argparse.Namespace) -> str:
    parts = [] if options.model == demo_model_path() else [options.model.name]
    for name, default in (("model_draft", None), ("texts", NUM_TEXTS), ("budgets", BUDGETS), ("kinds", None)):
        value = getattr(options, name)
        if value != default:
            words = value if isinstance(value, list) else [value]
            parts.append(" ".join(["--" + name.replace("_", "-"), *(str(word) for word in words)]))
    return "".join(f" {part}" for part in parts)


if __name__ == "__main__":
    main()
