"""Requests of all kinds that share a server, against what each gets from one that it has for itself.

Prompts of many lengths, of which half begin alike; greedy and sampled answers, several to a prompt,
penalties, log-probabilities, stop strings, prompts that repeat themselves, whose text n-grams draft, and
JSON schemas. In every repeat all of them come at random moments in another order, between neighbours of which
some are given up. An answer has to be the one of the undisturbed server to the last bit of its
log-probabilities.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx2

from tests.audits.soak import SCHEMA

Fields = dict[str, Any]

SHARED_TOKENS: Final = 640  # that half of the prompts begin with
REPEATED_TOKENS, REPEATED_AGAIN = 64, 8  # a prompt that repeats itself ends so far in its second time
GIVEN_UP_SHARE: Final = 0.5  # neighbours, for each request
SPREAD_S: Final = 2.0  # in which a repeat's requests arrive
KINDS: Final[Sequence[Fields]] = (
    {"temperature": 0},
    {"temperature": 3, "top_k": 0, "logprobs": 2},
    {"temperature": 0, "repeats": True},
    {"temperature": 2, "n": 2, "top_k": 50},
    {"temperature": 1, "schema": True},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 2, "stop": ["7", "e"], "min_tokens": 3},
)


@dataclass(frozen=True)
class Wish:
    """A request."""

    path: str
    body: Fields


@dataclass(frozen=True)
class Differs:
    """An answer that is not the undisturbed one. Places are of the list of requests."""

    repeat: int
    place: int
    found: Any
    expected: Any


def wishes(count: int, vocab_size: int, longest: int, seed: int) -> list[Wish]:
    """So many requests, with prompts of consecutive token ids, which the full-size files continue.

    longest: tokens of a prompt beside those that half of them share.
    """
    chance = random.Random(seed)
    kinds: Iterator[Fields] = itertools.cycle(KINDS)
    shared = list(range(300, 300 + SHARED_TOKENS))
    found = []
    for number in range(count):
        kind = dict(next(kinds))
        kind |= {"seed": chance.randrange(2**31), "max_tokens": chance.randint(8, 64)}
        first = chance.randrange(300, vocab_size - longest - 128)
        walk = list(range(first, first + chance.randint(1, longest)))
        if kind.pop("repeats", False):
            walk = [*range(first, first + REPEATED_TOKENS), *range(first, first + REPEATED_AGAIN)]
        if kind.pop("schema", False):
            content = f"{first} " * chance.randint(1, longest // 16)
            form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
            chat = {"messages": [{"role": "user", "content": content}], "response_format": form, **kind}
            found.append(Wish("/v1/chat/completions", {**chat, "max_tokens": 64, "enable_thinking": False}))
            continue
        prompt = [*shared, *walk] if number % 2 else walk
        found.append(Wish("/v1/completions", {"prompt": prompt, **kind}))
    return found


def kept(answer: Mapping[str, Any]) -> Fields:
    """What must not depend on the server: the choices, and how many tokens they have."""
    counts = ("prompt_tokens", "completion_tokens")
    return {"choices": answer["choices"], **{name: answer["usage"][name] for name in counts}}


async def answered(http: httpx2.AsyncClient, wish: Wish) -> Fields:
    response = await http.post(wish.path, json=wish.body)
    return kept(response.raise_for_status().json())


async def given_up(http: httpx2.AsyncClient, wish: Wish, num_events: int) -> None:
    """Asks for a stream and leaves after some of its events."""
    body = {**wish.body, "stream": True, "max_tokens": 64}
    async with http.stream("POST", wish.path, json=body) as response:
        lines = response.aiter_lines()
        for _ in range(num_events):
            with suppress(StopAsyncIteration):
                await anext(lines)


async def alone(http: httpx2.AsyncClient, asked: Sequence[Wish]) -> list[Fields]:
    """What each gets, one after the other."""
    return [await answered(http, wish) for wish in asked]


async def _ask_all(http: httpx2.AsyncClient, asked: Sequence[Wish], chance: random.Random) -> list[Fields]:
    """All at random moments between neighbours that are given up: the answers, in the order of `asked`."""

    async def late(wish: Wish, delay: float) -> Fields:
        await asyncio.sleep(delay)
        return await answered(http, wish)

    async def leaves(wish: Wish, delay: float, num_events: int) -> None:
        await asyncio.sleep(delay)
        await given_up(http, wish, num_events)

    neighbours = [
        leaves(chance.choice(asked), chance.uniform(0, SPREAD_S), chance.randint(0, 12))
        for _ in asked
        if chance.random() < GIVEN_UP_SHARE
    ]
    answers = [late(wish, chance.uniform(0, SPREAD_S)) for wish in asked]
    found, _ = await asyncio.gather(asyncio.gather(*answers), asyncio.gather(*neighbours))
    return found


async def together(
    http: httpx2.AsyncClient, asked: Sequence[Wish], expected: Sequence[Fields], repeats: int, seed: int
) -> list[Differs]:
    """The answers that differ, of so many repeats."""
    chance = random.Random(seed)
    differs = []
    for number in range(repeats):
        answers = await _ask_all(http, asked, chance)
        pairs = zip(answers, expected, strict=True)
        differs += [
            Differs(number, place, found, wanted)
            for place, (found, wanted) in enumerate(pairs)
            if found != wanted
        ]
    return differs
