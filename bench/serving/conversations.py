"""A long conversation: how soon the first token of a next turn comes, and what a changed line costs.

Each conversation has a system prompt of some thousand tokens of source code that no prompt had before. Its
first turn is computed from the start; the next ones find that prefix. Then its question is asked with one
line of the system prompt changed, at several depths: what comes before that line is known, and of that the
tokens since the last kept state are computed again. A header line that the server drops costs nothing.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

from bench.serving.load import Texts
from bench.serving.served import model_with_tools, served
from coldstream.kvcache.prefix.cache import MAX_REPLAY
from tests.audits.failure_answers import Fields

CONTEXT, PARALLEL = 16384, 4
ANSWER_TOKENS: Final = 24
MIN_RATIO: Final = 20.0
DEPTHS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the changed line in the system prompt
EXCERPT_CHARS: Final = 9000
REQUEST_S: Final = 600.0
HEADER: Final = "x-anthropic-billing-header: cc_version={}\n"


@dataclass(frozen=True)
class Turn:
    """One answer."""

    what: str
    first_s: float  # from sending the request to the first text
    prompt_tokens: int
    reused_tokens: int
    replayed_tokens: int  # of a prefix that some prompt had before, but of which no state was kept


def with_changed_line(text: str, depth: float) -> str:
    """`text` with another line in place of the one at a share of its lines; 0 is the first, 1 the last."""
    lines = text.split("\n")
    lines[round(depth * (len(lines) - 1))] = "# this line is another one"
    return "\n".join(lines)


async def system_prompt(http: httpx2.AsyncClient, texts: Texts, num_tokens: int) -> str:
    """So many tokens of source code."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        body = {"content": texts.some(EXCERPT_CHARS), "parse_special": False}
        tokens += (await http.post("/tokenize", json=body)).raise_for_status().json()["tokens"]
    found = await http.post("/detokenize", json={"tokens": tokens[:num_tokens]})
    return str(found.raise_for_status().json()["content"]).strip()


async def repeated(http: httpx2.AsyncClient) -> int:
    """Tokens that the server has computed again so far, although a prompt before began with them."""
    props = (await http.get("/props")).raise_for_status().json()
    return int(props["cache"]["prefixes"]["repeated_tokens"])


async def streamed_events(response: httpx2.Response) -> AsyncIterator[Fields]:
    """The JSON objects of a stream, without its comments and its end."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def turn(http: httpx2.AsyncClient, what: str, messages: Sequence[Fields]) -> tuple[Turn, str]:
    """A streamed answer, and its text. RuntimeError for one that has none, or ends in an error."""
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "enable_thinking": False}
    before = await repeated(http)
    start, first_s, texts, usage = time.perf_counter(), None, [], None
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for event in streamed_events(response):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                if text := choice["delta"].get("content"):
                    first_s = first_s or time.perf_counter() - start
                    texts.append(text)
    if first_s is None or usage is None:
        raise RuntimeError(f"{what}: no text, or no end")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    replayed = await repeated(http) - before
    return Turn(what, first_s, usage["prompt_tokens"], cached, replayed), "".join(texts)


async def conversation(http: httpx2.AsyncClient, system: str, number: int) -> list[Turn]:
    """The turns of one conversation, and then its first question again behind a changed line."""

    def begun(text: str, header: str) -> list[Fields]:
        content = HEADER.format(header) + text
        return [
            {"role": "system", "content": content},
            {"role": "user", "content": "Write read_lines(path)."},
        ]

    messages = begun(system, f"{number}.0")
    first, answer = await turn(http, "first turn", messages)
    turns = [first]
    for question in ("Now close the file.", "Add a docstring."):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        found, answer = await turn(http, "next turn", messages)
        turns.append(found)
    turns.append((await turn(http, "changed header", begun(system, f"{number}.1")))[0])
    for depth in sorted(DEPTHS, reverse=True):
        changed = begun(with_changed_line(system, depth), f"{number}.0")
        turns.append((await turn(http, f"changed line at {depth:.0%}", changed))[0])
    return turns


async def talked(url: str, num_tokens: int, count: int) -> list[Turn]:
    """All turns of `count` conversations."""
    texts = Texts(seed=3)
    async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_S) as http:
        return [
            found
            for number in range(count)
            for found in await conversation(http, await system_prompt(http, texts, num_tokens), number)
        ]


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """By kind of turn the medians, and the most that was replayed.

    `faults` are never right, `missed` is what took longer than asked.
    """
    kinds = {}
    for what in dict.fromkeys(each.what for each in turns):
        found = [each for each in turns if each.what == what]
        kinds[what] = {
            "first_s": statistics.median(each.first_s for each in found),
            "prompt_tokens": statistics.median(each.prompt_tokens for each in found),
            "reused_tokens": statistics.median(each.reused_tokens for each in found),
            "most_replayed_tokens": max(each.replayed_tokens for each in found),
        }
    ratio = kinds["first turn"]["first_s"] / kinds["next turn"]["first_s"]
    most = max(each.replayed_tokens for each in turns)
    return {
        "next_turn_ratio": ratio,
        "most_replayed_tokens": most,
        "kinds": kinds,
        "turns": [asdict(each) for each in turns],
        "faults": [f"{most} tokens are computed again"] if most > MAX_REPLAY else [],
        "missed": [] if ratio >= MIN_RATIO else [f"the next turn is {ratio:.1f} times as soon"],
    }


def turns(folder: Path, *, num_tokens: int, count: int, threads: int) -> dict[str, Any]:
    """The whole of it, over a server of its own, which drops header lines.

    The model is the bundled one with a chat template and a longer context than it was trained for: that
    changes what it says, and no time.
    """
    longer = model_with_tools(folder)
    command = [sys.executable, "-m", "gguf.scripts.gguf_set_metadata", "--force", str(longer)]
    command += ["qwen35moe.context_length", str(CONTEXT)]
    subprocess.run(command, check=True, capture_output=True)
    options = ("--ctx-size", str(CONTEXT), "--threads", str(threads), "--parallel", str(PARALLEL))
    with served(longer, folder / "turns.log", *options, "--drop-volatile") as server:
        result = figures(asyncio.run(talked(server.url, num_tokens, count)))
    if server.exit_code != 0:
        result["faults"].append(f"the server left with {server.exit_code}")
    return {"conversations": count, "system_tokens": num_tokens, **result}
