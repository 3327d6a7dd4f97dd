"""Answers with drafts beside answers without: by kind of draft and size of its trees, how many are equal.

    python -m tests.audits.draft_equality [MODEL] --out FILE        the demo model, if none is given
    python -m tests.audits.draft_equality --device cuda --vram 475M --spec-type dflash

Each prompt is answered without drafts, and then with some of all pairs of a drafter and a number of nodes, so
that the pairs are used equally often; half of the prompts greedily, half drawing by a seed. Prompts are parts
of held-out source code for the demo model, and random tokens for others. Beside scripted drafts
(draft_kinds.py) the product's own drafters run, as far as the file and --spec-type have what they need: the
demo model's own drafter with dflash, and its block for multi-token prediction with mtp or, on a CPU, with
both. The exit code is 1 if any answer differs.
"""

import argparse
import itertools
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.results import add_result_options, write_result
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.decoding import Drafter, FixedSizes, Speculation, TokenTree
from coldstream.decoding.drafters import MtpDrafter, NgramDrafter
from coldstream.engine import EngineConfig, OpenedModel, open_model
from coldstream.errors import ColdstreamError
from coldstream.placement.hardware import Hardware
from tests.audits.draft_kinds import DRAFTS, Drafting

BUDGETS = (0, 1, 2, 3, 7, 8, 15, 16, 22, 64)
MAX_NODES = 63  # beside the root, which is a row of the step as well
PROMPT_TOKENS = 48
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, ignore_eos=True),
}


@dataclass
class KnownAnswer:
    """A drafter that knows the prompt and its answer, and drafts what its kind makes of them."""

    kind: str
    known: Sequence[int]
    vocab_size: int
    end_id: int
    name: str = "scripted"
    wants_hidden: bool = False
    aux_layers: tuple[int, ...] = ()

    def truncate(self, length: int) -> None:
        """Nothing to forget."""

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        """Nothing to learn."""

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        following = self.known[len(context) :]
        if tuple(context) != tuple(self.known[: len(context)]):
            raise AssertionError(f"asked after {len(context)} tokens that the plain answer does not have")
        return DRAFTS[self.kind](Drafting(context, following, self.vocab_size, self.end_id), budget)


def own_drafters(opened: OpenedModel) -> dict[str, Drafter]:
    """Those that the model was opened with what they need for."""
    found: dict[str, Drafter] = {"ngram": NgramDrafter()}
    if opened.speculation is not None and opened.planned.run.spec_type == "dflash":
        found["dflash"] = opened.speculation.drafter
    try:
        found["mtp"] = MtpDrafter(opened.runner.load_mtp().new_sequence())
    except ColdstreamError as error:
        print(f"without MTP: {error}", file=sys.stderr)
    return found


def prompts(opened: OpenedModel, count: int, speaks: bool) -> Iterator[list[int]]:
    """So many, of PROMPT_TOKENS tokens each."""
    rng = random.Random(1)
    if not speaks:
        for _ in range(count):
            yield [rng.randrange(opened.runner.spec.vocab_size) for _ in range(PROMPT_TOKENS)]
        return
    from tools.train_demo.data import load_corpus

    texts = [opened.tokenizer.encode(file.text) for file in load_corpus().held_out]
    texts = [text for text in texts if len(text) > 2 * PROMPT_TOKENS]
    for number in range(count):
        text = texts[number % len(texts)]
        start = rng.randrange(len(text) - PROMPT_TOKENS)
        yield list(text[start : start + PROMPT_TOKENS])


@dataclass
class Pair:
    """A kind of draft with a number of nodes, and what came of it."""

    kind: str
    budget: int
    answers: int = 0
    equal: int = 0
    tokens: int = 0


def drafter_of(pair: Pair, known: Sequence[int], opened: OpenedModel, own: dict[str, Drafter]) -> Drafter:
    if pair.kind in own:
        return own[pair.kind]
    end_id = min(opened.tokenizer.eos_ids, default=0)
    return KnownAnswer(pair.kind, known, opened.runner.spec.vocab_size, end_id)


def answer(
    opened: OpenedModel, speculation: Speculation | None, prompt: list[int], params: SamplingParams
) -> tuple[int, ...]:
    llm = LLM.from_opened(replace(opened, speculation=speculation))
    (output,) = llm.generate(prompt, params)
    llm.forget()
    return output.token_ids


def compare(
    opened: OpenedModel, pairs: Sequence[Pair], options: argparse.Namespace, own: dict[str, Drafter]
) -> None:
    """Answers all prompts without drafts, and with the next pairs in turn."""
    turns = itertools.cycle(pairs)
    texts = prompts(opened, options.prompts, speaks=options.model == demo_model_path())
    for number, prompt in enumerate(texts):
        params = replace(
            SAMPLINGS["drawn" if number % 2 else "greedy"], max_tokens=options.tokens, seed=number
        )
        plain = answer(opened, None, prompt, params)
        for pair in itertools.islice(turns, options.pairs):
            drafter = drafter_of(pair, [*prompt, *plain], opened, own)
            # Without nodes there is nothing to verify, but the drafter observes every token.
            speculation = Speculation(drafter, FixedSizes(min(pair.budget, MAX_NODES)))
            found = answer(opened, speculation, prompt, params)
            pair.answers += 1
            pair.equal += found == plain
            pair.tokens += len(found)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; see the module docstring."""
    settings = {name: getattr(options, name) for name in ("vram", "ram") if getattr(options, name)}
    is_demo = options.model == demo_model_path()
    settings["spec_type"] = options.spec_type or ("dflash" if is_demo and options.device == "cpu" else "mtp")
    if is_demo and settings["spec_type"] == "dflash":
        settings["model_draft"] = str(demo_drafter_path())
    config = EngineConfig(
        str(options.model),
        device=options.device,
        ctx_size=PROMPT_TOKENS + options.tokens + MAX_NODES + 1,
        **settings,
    )
    opened = open_model(config)
    try:
        own = own_drafters(opened)
        pairs = [Pair(kind, budget) for kind in (*own, *DRAFTS) for budget in BUDGETS]
        random.Random(2).shuffle(pairs)
        compare(opened, pairs, options, own)
        tier = opened.runner.tier
    finally:
        opened.close()
    pairs.sort(key=lambda pair: (pair.kind, pair.budget))
    return {
        "command": f"python -m tests.audits.draft_equality {shlex.join(options.words)}".strip(),
        "model": options.model.name,
        "tier": tier,
        "memory": " ".join(f"--{name} {settings[name]}" for name in ("vram", "ram") if name in settings),
        "cpu": Hardware.measure().cpu_name,
        "prompts": options.prompts,
        "tokens": options.tokens,
        "answers": sum(pair.answers for pair in pairs),
        "equal": sum(pair.equal for pair in pairs),
        "pairs": [
            {"kind": p.kind, "budget": p.budget, "answers": p.answers, "equal": p.equal, "tokens": p.tokens}
            for p in pairs
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=demo_model_path())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--vram")
    parser.add_argument("--ram")
    parser.add_argument(
        "--spec-type", choices=("mtp", "dflash", "ngram"), help="what has memory beside the model"
    )
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--pairs", type=int, default=2, help="of a drafter and a size, for each prompt")
    add_result_options(parser)
    options = parser.parse_args()
    options.words = [
        word if not word.endswith(".gguf") else Path(word).name
        for word, before in zip(sys.argv[1:], ["", *sys.argv[1:]], strict=False)
        if not {"--out", "--commit"} & {word, before}
    ]
    result = run(options)
    write_result(result, options.out, options.commit)
    return 0 if result["equal"] == result["answers"] else 1


if __name__ == "__main__":
    sys.exit(main())
