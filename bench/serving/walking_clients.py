"""Clients of a server with a full-size file, whose greedy text is known: loads and long conversations.

Prompts are consecutive token ids, which these files continue with the next ones, so every answer is checked
(`full_size_model.py`).
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx2
import numpy as np

from bench.serving.conversations import DEPTHS, Turn, repeated, streamed_events

FIRST_ID: Final = 1000  # the ids before are pieces of text
TEXT_STEP: Final = 7919  # ids between the beginnings of two texts
REQUEST_S: Final = 600.0
CHANGED_TOKENS: Final = 8
QUESTION_TOKENS: Final = 64
ANSWER_TOKENS: Final = 24


class WrongTextError(RuntimeError):
    """A text that left its walk: whatever was measured is no figure of this model."""


@dataclass(frozen=True)
class Streamed:
    """An answer, piece by piece."""

    sent_s: float  # all times are of one clock
    times_s: tuple[float, ...]  # of its events with text
    usage: dict[str, Any]


async def stream(http: httpx2.AsyncClient, prompt: Sequence[int], count: int) -> Streamed:
    """A greedy answer of `count` tokens. WrongTextError if it is not the next ids."""
    body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    times, texts, usage, sent_s = [], [], {}, time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for event in streamed_events(response):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                if choice["text"]:
                    times.append(time.perf_counter())
                    texts.append(choice["text"])
    expected = [prompt[-1] + 1 + i for i in range(count)]
    if "".join(texts).split() != [str(each) for each in expected]:
        raise WrongTextError(f"after {prompt[-1]} came {''.join(texts)!r}")
    return Streamed(sent_s, tuple(times), usage)


def first_ids(vocab_size: int, longest: int) -> Iterator[int]:
    """Where texts begin, of up to `longest` tokens."""
    return (FIRST_ID + i * TEXT_STEP % (vocab_size - FIRST_ID - longest - 1) for i in itertools.count())


def load_figures(answers: Sequence[Streamed], start: float, end: float) -> dict[str, Any]:
    """Of the tokens between two moments: how many a second, the time between two, and to the first ones.

    RuntimeError if no answer began between them.
    """
    within = [[at for at in answer.times_s if start <= at < end] for answer in answers]
    gaps = np.concatenate([np.diff(each) for each in within] or [np.empty(0)])
    firsts = [each.times_s[0] - each.sent_s for each in answers if start <= each.times_s[0] < end]

    if not firsts:
        raise RuntimeError(f"no answer began within {end - start:.1f} s: measure for longer")

    def percentiles(seconds: Any) -> dict[str, float]:
        return {name: 1e3 * float(np.percentile(seconds, q)) for name, q in (("p50", 50), ("p95", 95))}

    return {
        "tok_s": sum(map(len, within)) / (end - start),
        "answers": len(firsts),
        "between_ms": percentiles(gaps),
        "first_token_ms": percentiles(firsts),
    }


async def load(
    http: httpx2.AsyncClient,
    firsts: Iterator[int],
    num_clients: int,
    num_prompt: int,
    count: int,
    seconds: float,
) -> dict[str, Any]:
    """Closed loop of so many clients, each with texts of its own; a quarter of the time is not counted.

    Their first answers are of different lengths, so that they do not all begin again at once for ever.
    """
    answers: list[Streamed] = []
    begin = time.perf_counter()
    start, end = begin + seconds / 4, begin + seconds

    async def client(num_tokens: int) -> None:
        while time.perf_counter() < end:
            first = next(firsts)
            answers.append(await stream(http, range(first, first + num_prompt), num_tokens))
            num_tokens = count

    await asyncio.gather(*(client(-(-count * place // num_clients)) for place in range(1, num_clients + 1)))
    return {"clients": num_clients, **load_figures(answers, start, end)}


async def turn(http: httpx2.AsyncClient, what: str, prompt: Sequence[int]) -> Turn:
    """An answer to a prompt, and what of that was known."""
    before = await repeated(http)
    found = await stream(http, prompt, ANSWER_TOKENS)
    cached = found.usage["prompt_tokens_details"]["cached_tokens"]
    replayed = await repeated(http) - before
    return Turn(what, found.times_s[0] - found.sent_s, len(prompt), cached, replayed)


async def conversation(http: httpx2.AsyncClient, first: int, num_tokens: int, vocab_size: int) -> list[Turn]:
    """Turns of a conversation that begins with so many tokens, and its first one again with a changed line.

    The line is `CHANGED_TOKENS` tokens at several depths, the deepest one first.
    """

    def walk(start: int, count: int) -> list[int]:
        return [FIRST_ID + (start - FIRST_ID + i) % (vocab_size - FIRST_ID - 1) for i in range(count)]

    begun = walk(first, num_tokens)
    turns, prompt = [await turn(http, "first turn", begun)], begun
    for number in (1, 2):
        answer = [prompt[-1] + 1 + i for i in range(ANSWER_TOKENS)]
        prompt = [*prompt, *answer, *walk(first // 2 + number * num_tokens, QUESTION_TOKENS)]
        turns.append(await turn(http, "next turn", prompt))
    for depth in sorted(DEPTHS, reverse=True):
        at = round(depth * (num_tokens - 2 * CHANGED_TOKENS))
        changed = [*begun[:at], *walk(first + num_tokens + at, CHANGED_TOKENS), *begun[at + CHANGED_TOKENS :]]
        turns.append(await turn(http, f"changed line at {depth:.0%}", changed))
    return turns


def run_client(url: str, wanted: Callable[[httpx2.AsyncClient], Any]) -> Any:
    """What a coroutine over a client of the server gives."""

    async def run() -> Any:
        limits = httpx2.Limits(max_connections=512, max_keepalive_connections=512)
        async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits) as http:
            return await wanted(http)

    return asyncio.run(run())
