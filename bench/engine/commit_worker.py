"""One commit of a comparison: answers requests through the public interface that all commits have.

    python commit_worker.py '{"model": "model.gguf", "device": "cpu"}'

The argument has the keyword arguments of `LLM`. A line of JSON in, with `prompts` (lists of token ids) and
`new_tokens` of each, gives one out: seconds of the call, until the first token, and from there to the last.
With `prompt` instead, each line takes the next `new_tokens` of one text of that prompt, at most `longest`.
Imports nothing of `bench`, as it runs with the sources of another commit.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

from coldstream import LLM, SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def whole(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    """The texts of a list of prompts."""
    start = time.perf_counter()
    outputs = llm.generate(request["prompts"], greedy(request["new_tokens"]))
    return {
        "seconds": time.perf_counter() - start,
        "first_token_s": outputs[0].statistics.time_to_first_token_s,
        "generation_s": outputs[0].statistics.generation_s,
        "tokens": [list(output.token_ids) for output in outputs],
    }


def part(tokens: Iterator[int], request: dict[str, Any]) -> dict[str, Any]:
    """The next tokens of a text."""
    start = time.perf_counter()
    found = [next(tokens) for _ in range(request["new_tokens"])]
    return {"seconds": time.perf_counter() - start, "tokens": [found]}


def main() -> None:
    with LLM(**json.loads(sys.argv[1])) as llm, ExitStack() as streams:
        print(json.dumps({"ready": True}), flush=True)
        tokens: Iterator[int] | None = None
        for line in sys.stdin:
            request = json.loads(line)
            if "prompt" not in request:
                answer = whole(llm, request)
            else:
                if tokens is None:
                    stream = llm.stream(request["prompt"], greedy(request["longest"]))
                    streams.enter_context(closing(stream))
                    tokens = (token for piece in stream for token in piece.token_ids)
                answer = part(tokens, request)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
