"""Tokens a second of a list of prompts: side by side against one after the other, on the demo model.

    python -m bench.engine.side_by_side --out docs/results/side_by_side.json

Both ways run in turn, in changing order, and every pair gives one ratio. Answers that differ end the run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.results import write_result
from coldstream import LLM, RequestOutput, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.placement.hardware import Hardware

COUNTS = (4, 16)  # prompts of a list
REPEATS = 9
PROMPT_CHARS = 100
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

Outputs = list[RequestOutput]


def prompts(count: int, repeat: int) -> list[str]:
    """Pieces of source text, other ones for every repeat, so that nothing is reused."""
    text = Path(argparse.__file__).read_text()
    starts = [(repeat * count + index) * 3 * PROMPT_CHARS for index in range(count)]
    return [text[start : start + PROMPT_CHARS] for start in (start % 80_000 for start in starts)]


def timed(action: Callable[[], Outputs]) -> tuple[float, Outputs]:
    start = time.perf_counter()
    outputs = action()
    return time.perf_counter() - start, outputs


def one_after_the_other(llm: LLM, texts: list[str]) -> Outputs:
    return [llm.generate(text, PARAMS)[0] for text in texts]


def side_by_side(llm: LLM, texts: list[str]) -> Outputs:
    return llm.generate(texts, PARAMS)


def measure_list(llm: LLM, count: int) -> dict[str, object]:
    """Figures of lists of `count` prompts. Raises SystemExit if the two ways give different tokens."""
    seconds: dict[str, list[float]] = {"apart": [], "together": []}
    ways = {"apart": one_after_the_other, "together": side_by_side}
    for repeat in range(REPEATS):
        texts = prompts(count, repeat)
        tokens = []
        for name in sorted(ways, reverse=bool(repeat % 2)):
            wall, outputs = timed(partial(ways[name], llm, texts))
            seconds[name].append(wall)
            tokens.append([output.token_ids for output in outputs])
        if tokens[0] != tokens[1]:
            raise SystemExit(f"{count} prompts side by side gave other tokens than one after the other")
    ratios = [apart / together for apart, together in zip(*seconds.values(), strict=True)]
    num_tokens = count * (PARAMS.max_tokens or 0)
    return {
        "num_prompts": count,
        "apart_tok_s": num_tokens / statistics.median(seconds["apart"]),
        "together_tok_s": num_tokens / statistics.median(seconds["together"]),
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with LLM(demo_model_path(), device="cpu", threads=options.threads) as llm:
        lists = [measure_list(llm, count) for count in COUNTS]
    result = {
        "command": "python -m bench.engine.side_by_side",
        "cpu": Hardware.measure().cpu_name,
        "threads": options.threads,
        "new_tokens": PARAMS.max_tokens,
        "lists": lists,
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
