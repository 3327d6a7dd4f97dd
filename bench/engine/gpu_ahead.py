"""Generating with each step launched before the host has seen its token, against one step after the other.

    python -m bench.engine.gpu_ahead full.gguf           writes the model file first if it isn't there (21 GB)

All weights are on the GPU. Both ways generate the same texts in turn, and must choose the same tokens.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.device import describe
from bench.engine.gpu import FIRST_ID, write_model
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, add_result_options, write_result
from coldstream.decoding import Grammar
from coldstream.engine import LLM, SamplingParams

WARM_TOKENS = 16
SETTINGS = {
    "greedy": SamplingParams(temperature=0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1, ignore_eos=True),
    "penalised": SamplingParams(temperature=0, frequency_penalty=0.2, repeat_last_n=64, ignore_eos=True),
    "ranked": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1, ignore_eos=True, logprobs=5),
    # No answer is as long as that.
    "constrained": SamplingParams(temperature=0, grammar=Grammar("regex", "(?s:.){20000,}")),
}


@contextmanager
def one_by_one(llm: LLM) -> Iterator[None]:
    """Inside, the runner takes no token that the host does not know."""
    runner = llm.opened.runner
    limits = runner._limits
    runner._limits = replace(limits, num_chosen=0)
    try:
        yield
    finally:
        runner._limits = limits


def generate(llm: LLM, params: SamplingParams, num_prompt: int, num_tokens: int) -> tuple[float, list[int]]:
    """Seconds of a token, and the tokens."""
    prompt = [(FIRST_ID + i) % llm.opened.runner.spec.vocab_size for i in range(num_prompt)]
    llm.forget()
    tokens: list[int] = []
    for piece in llm.stream(prompt, replace(params, max_tokens=WARM_TOKENS + num_tokens)):
        tokens += piece.token_ids
        if len(tokens) == WARM_TOKENS:
            start = time.perf_counter()
    return (time.perf_counter() - start) / num_tokens, tokens


def compare(llm: LLM, name: str, num_prompt: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Both ways in turn. Raises RuntimeError if a token differs."""
    ahead, behind = [], []
    for _ in range(repeats):
        seconds, tokens = generate(llm, SETTINGS[name], num_prompt, num_tokens)
        ahead.append(seconds)
        with one_by_one(llm):
            seconds, expected = generate(llm, SETTINGS[name], num_prompt, num_tokens)
        behind.append(seconds)
        if tokens != expected:
            raise RuntimeError(f"{name}: {tokens} launched ahead, {expected} one by one")
    ratios = [slow / quick for slow, quick in zip(behind, ahead, strict=True)]
    return {
        "settings": name,
        "depth": num_prompt,
        "tokens": num_tokens,
        "repeats": repeats,
        "ahead_tok_s": 1 / statistics.median(ahead),
        "one_by_one_tok_s": 1 / statistics.median(behind),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", type=int, nargs="+", default=[512])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=FULL_SHAPE.layers)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "ahead.json")
    options = parser.parse_args()
    write_model(options.model, options.layers, FULL_SHAPE.vocab)
    ctx_size = max(options.depths) + WARM_TOKENS + options.tokens + 1
    with LLM(options.model, device="cuda", ctx_size=ctx_size) as llm:
        rows = [
            compare(llm, name, depth, options.tokens, options.repeats)
            for depth in options.depths
            for name in SETTINGS
        ]
    result = {
        "command": f"python -m bench.engine.gpu_ahead {options.model.name}",
        "machine": describe("cuda"),
        "rows": rows,
    }
    write_result(result, options.out, options.commit)


if __name__ == "__main__":
    main()
