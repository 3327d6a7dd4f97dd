"""How fast text becomes tokens, and messages a prompt: `python -m bench.engine.text [--json]`.

Loads a made-up vocabulary of the size of Qwen3.6's (248,320 tokens, 247,587 merges), encodes a mebibyte and
half a mebibyte of each class of text (twice the text may take at most 2.6 times as long, and a mebibyte 2 s),
and renders a chat. Figures are processor seconds of this process, except those of the renderer, which are
wall time.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.results import write_result
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.gguf.vocabulary import BYTE_ALPHABET, TokenKind

NUM_TOKENS, NUM_MERGES = 248_320, 247_587
MEBIBYTE = 1 << 20
CLASSES = {
    "letters": "a",
    "spaces": " ",
    "newlines": "\n",
    "dots": ".",
    "digits": "7",
    "CJK": "汉",
    "combining marks": "e\u0301",
    "emoji": "👩‍👩‍👧",
    "no-break spaces": "\u00a0",
    "source": "def f(x):\n\treturn 'I'll' + 汉字 e\u0301 12\n",
    "control tokens": "<|im_end|>",
}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def made_up_metadata() -> dict[str, Any]:
    """Random merges of earlier tokens, early ones more often, so that real text has some to do."""
    rng = random.Random(0)
    tokens, merges = list(BYTE_ALPHABET), []
    seen = set(tokens)
    while len(merges) < NUM_MERGES:
        left, right = (tokens[int(len(tokens) * rng.random() ** 3)] for _ in range(2))
        if left + right not in seen and len(left + right) <= 24:
            seen.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    padding = [f"[PAD{index}]" for index in range(NUM_TOKENS - len(tokens) - len(control))]
    kinds = (
        [TokenKind.NORMAL] * len(tokens)
        + [TokenKind.CONTROL] * len(control)
        + [TokenKind.UNUSED] * len(padding)
    )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*tokens, *control, *padding],
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        "tokenizer.chat_template": CHATML,
    }


def best_of(repeats: int, clock: Callable[[], float], work: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def measure() -> dict[str, float]:
    metadata = made_up_metadata()
    results = {"load_s": best_of(3, time.process_time, lambda: Tokenizer.from_metadata(metadata))}
    tokenizer = Tokenizer.from_metadata(metadata)
    for name, unit in CLASSES.items():
        half, whole = (unit * (size // len(unit.encode())) for size in (MEBIBYTE // 2, MEBIBYTE))
        half_s = best_of(3, time.process_time, lambda text=half: tokenizer.encode(text, parse_special=True))
        whole_s = best_of(3, time.process_time, lambda text=whole: tokenizer.encode(text, parse_special=True))
        results |= {f"{name}_s_per_mib": whole_s, f"{name}_ratio": whole_s / half_s}
    messages = [{"role": "user", "content": "Hello, how are you? " * 20}] * 8
    with ChatTemplate.from_metadata(metadata, tokenizer.vocabulary) as template:
        results["first_render_s"] = best_of(1, time.perf_counter, lambda: template.render(messages))
        results["render_s"] = best_of(50, time.perf_counter, lambda: template.render(messages))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    results = measure()
    if not arguments.json:
        print("| text | s/MiB | t(1 MiB) / t(½ MiB) |\n|---|---|---|")
        for name in CLASSES:
            print(f"| {name} | {results[f'{name}_s_per_mib']:.2f} | {results[f'{name}_ratio']:.2f} |")
        print(f"\nload: {results['load_s']:.2f} s for {NUM_TOKENS} tokens, {NUM_MERGES} merges")
        first_ms, then_ms = results["first_render_s"] * 1e3, results["render_s"] * 1e3
        print(f"render: {first_ms:.0f} ms the first time, then {then_ms:.2f} ms")
    write_result({key: round(value, 5) for key, value in results.items()}, arguments.out)


if __name__ == "__main__":
    main()
