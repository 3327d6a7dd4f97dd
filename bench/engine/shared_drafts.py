"""Drafts for answers that share steps, on the CPU: seconds without over seconds with them, by how many run.

    python -m bench.engine.shared_drafts --out docs/results/cpu_shared_drafts.json

Lists of prompts of one kind are answered without drafts, and with each drafter by fixed sizes and by cost, in
changing order over one runner; answers that differ end the run. By cost, what was learned of a number of
answers is kept from list to list.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from bench.engine.speculation import texts
from bench.results import write_result
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.decoding import Drafter, FixedSizes, SizesByCost, Speculation, SpeculationStatistics
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.engine import EngineConfig, OpenedModel, open_model
from coldstream.placement.hardware import Hardware

COUNTS = (1, 2, 4, 8)
BUDGETS = (1, 3)
NEW_TOKENS = 96
NUM_LISTS = 6
KINDS = ("code", "structured")


@dataclass
class Way:
    """A way to answer lists, and what it took."""

    drafter: str  # none, mtp or ngram
    budget: int | str  # nodes of each tree, or "auto"
    speculation: Speculation | None
    seconds: list[float] = field(default_factory=list)  # of each list
    statistics: list[SpeculationStatistics] = field(default_factory=list)  # of each answer

    def run(
        self, opened: OpenedModel, prompts: Sequence[str], params: SamplingParams
    ) -> tuple[tuple[int, ...], ...]:
        """The tokens of each answer."""
        llm = LLM.from_opened(replace(opened, speculation=self.speculation))
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        self.seconds.append(time.perf_counter() - start)
        llm.forget()
        found = (output.statistics.speculation for output in outputs)
        self.statistics += [each for each in found if each is not None]
        return tuple(output.token_ids for output in outputs)

    def result(self, plain: "Way") -> dict[str, Any]:
        """Against the same lists without drafts."""
        steps = sum(each.steps for each in self.statistics) or 1
        return {
            "drafter": self.drafter,
            "budget": self.budget,
            "ratio": sum(plain.seconds) / sum(self.seconds),
            "tokens_per_step": 1 + sum(each.accepted for each in self.statistics) / steps,
            "nodes_per_step": sum(each.drafted for each in self.statistics) / steps,
        }


def ways(opened: OpenedModel, drafters: Sequence[str]) -> list[Way]:
    """Without drafts, and with each drafter by every size and by cost."""
    block = opened.runner.load_mtp() if "mtp" in drafters else None

    def drafter_of(name: str) -> Drafter:
        if name == "ngram":
            return NgramDrafter()
        assert block is not None
        return MtpDrafter(block.new_sequence())

    made = [Way("none", 0, None)]
    for name in drafters:
        for budget in (*BUDGETS, "auto"):
            sizes = SizesByCost(name) if isinstance(budget, str) else FixedSizes(budget)
            new = partial(drafter_of, name)
            made.append(Way(name, budget, Speculation(new(), sizes, new)))
    return made


def measure(
    opened: OpenedModel, prompts: Sequence[str], count: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Results for lists of `count`. Raises SystemExit if tokens differ."""
    random, made = Random(count), ways(opened, options.drafters)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    for number in range(options.lists):
        some = [prompts[(number * count + i) % len(prompts)][i:] for i in range(count)]
        answers = {way.run(opened, some, params) for way in random.sample(made, len(made))}
        if len(answers) > 1:
            raise SystemExit(f"drafts gave other tokens than none after {some!r}")
    plain = made[0]
    return {
        "answers": count,
        "tok_s": options.lists * count * options.tokens / sum(plain.seconds),
        "ways": [way.result(plain) for way in made[1:]],
    }


def command(words: Sequence[str]) -> str:
    """As typed, but for where the result goes."""
    pairs = zip(words, ["", *words], strict=False)
    kept = [word for word, before in pairs if "--out" not in (word, before)]
    return shlex.join(["python", "-m", "bench.engine.shared_drafts", *kept])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lists", type=int, default=NUM_LISTS, help="of each number of answers")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="of an answer")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--drafters", nargs="+", default=["mtp", "ngram"], choices=["mtp", "ngram"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = EngineConfig(
        str(options.model),
        device="cpu",
        threads=options.threads,
        ctx_size=1024,
        parallel=max(options.counts),
        spec_type="mtp" if "mtp" in options.drafters else "ngram",
    )
    opened, results = open_model(config), []
    try:
        prompts = texts(max(options.counts))
        for kind in KINDS:
            for count in options.counts:
                found = {"kind": kind, **measure(opened, prompts[kind], count, options)}
                results.append(found)
                print(
                    kind,
                    count,
                    [(w["drafter"], w["budget"], round(w["ratio"], 2)) for w in found["ways"]],
                    file=sys.stderr,
                )
        tier = opened.runner.tier
    finally:
        opened.close()
    result = {
        "command": command(sys.argv[1:]),
        "cpu": Hardware.measure().cpu_name,
        "threads": options.threads,
        "tier": tier,
        "new_tokens": options.tokens,
        "lists": options.lists,
        "results": results,
    }
    write_result(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
