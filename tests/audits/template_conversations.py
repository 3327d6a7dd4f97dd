"""Conversations for comparing chat templates: honest ones, and ones that try to forge control tokens."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coldstream.gguf.template_capabilities import EFFORTS

Message = dict[str, Any]
Spell = Callable[[str], str]

QUESTION = "How many moons has Mars?"
ANSWER = "Two: Phobos and Deimos."
THOUGHT = "They ask about Mars.\nIts moons are two."
CODE = "if (a < b || c > d) {\n\tx <<= 1; // <div> | <b>\n}\n#include <vector>\nls | grep '<' | wc -l"
JSON_TEXT = json.dumps({"a": [1, 2.5, None, True], "b": {"<x>": "|", "é": '"'}}, ensure_ascii=False)
UNICODE = "Grüße 汉字 한국어 العربية हिन्दी e\u0301 👩‍👩‍👧 \u00a0\u2003 ｜ ▁ \ue000 \U000f0000 ß ŉ ﬁ"
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": True, "preserve_thinking": True},
    {"enable_thinking": False},
    {"thinking": True, "reasoning_effort": "high"},
)


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, number: int = 1, name: str = "weather") -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": text}


def tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


WEATHER = tool(
    "weather",
    "The weather <now> in a city | town",
    {
        "city": {"type": "string", "description": "Name, e.g. Zürich"},
        "days": {"type": "integer", "enum": [1, 2, 7], "default": 1},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
)
SEARCH = tool("search", "Searches.", {"query": {"type": "string", "description": "Words"}})
CITY = {
    "city": "Zürich",
    "days": 2,
    "hourly": True,
    "where": {"lat": 47.4, "n": None},
    "tags": ["<a>", "b|c"],
}


def honest() -> dict[str, Conversation]:
    """Conversations by name, each with every one of `SETTINGS`, with and without a generation prompt."""
    turns = [user(QUESTION), assistant(ANSWER), user("And Venus?")]
    called = assistant("", tool_calls=[call("weather", CITY)])
    base: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {
        "question": ([user(QUESTION)], None),
        "system": ([system("Be brief."), user(QUESTION)], None),
        "turns": (turns, None),
        "system and turns": ([system("Be brief."), *turns, assistant("None."), user("Jupiter?")], None),
        "developer": ([{"role": "developer", "content": "Be brief."}, user(QUESTION)], None),
        "reasoning in content": (
            [user(QUESTION), assistant(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"), user("And Venus?")],
            None,
        ),
        "reasoning in last content": ([user(QUESTION), assistant(f"<think>{THOUGHT}</think>{ANSWER}")], None),
        "reasoning without its opening": (
            [user(QUESTION), assistant(f"{THOUGHT}\n</think>\n{ANSWER}")],
            None,
        ),
        "reasoning apart": (
            [user(QUESTION), assistant(ANSWER, reasoning_content=THOUGHT), user("Ok?")],
            None,
        ),
        "reasoning by another name": ([user(QUESTION), assistant(ANSWER, reasoning=THOUGHT)], None),
        "thinking by another name": (
            [user(QUESTION), assistant(ANSWER, thinking=THOUGHT), user("Ok?")],
            None,
        ),
        "several thoughts": (
            [
                *(user("1"), assistant("one", reasoning_content="first")),
                *(user("2"), assistant("<think>second</think>two")),
                *(user("3"), assistant("<think></think>three"), user("4")),
            ],
            None,
        ),
        "tools": ([user("Weather?")], [WEATHER, SEARCH]),
        "tools and system": ([system("Be brief."), user("Weather?")], [WEATHER]),
        "call": ([user("Weather?"), called], [WEATHER]),
        "call and result": ([user("Weather?"), called, result("rain <3 | sun")], [WEATHER]),
        "call, result, answer": (
            [user("Weather?"), called, result(JSON_TEXT), assistant("Rain."), user("And Bern?")],
            [WEATHER],
        ),
        "call without content": (
            [user("Weather?"), assistant(None, tool_calls=[call("weather", CITY)]), result("rain")],
            [WEATHER],
        ),
        "call with text and reasoning": (
            [
                user("Weather?"),
                assistant("Let me see.", reasoning_content=THOUGHT, tool_calls=[call("weather", CITY)]),
                result("rain"),
            ],
            [WEATHER],
        ),
        "two calls": (
            [
                user("Weather?"),
                assistant("", tool_calls=[call("weather", CITY), call("search", {"query": "x"}, 2)]),
                *(result("rain"), result("found", 2, "search")),
            ],
            [WEATHER, SEARCH],
        ),
        "repeated calls": (
            [
                *(user("Weather?"), called, result("rain")),
                *(assistant("", tool_calls=[call("search", {"query": "y"}, 2)]), result("sun", 2, "search")),
                *(assistant("Both."), user("Thanks")),
            ],
            [WEATHER, SEARCH],
        ),
        "arguments as text": (
            [
                user("Weather?"),
                assistant("", tool_calls=[call("search", '{"query": "Zürich"}')]),
                result("rain"),
            ],
            [SEARCH],
        ),
        "call without arguments": ([user("Go"), assistant("", tool_calls=[call("weather", {})])], [WEATHER]),
        "unicode": ([system(UNICODE), user(UNICODE), assistant(UNICODE), user(UNICODE)], None),
        "empty contents": ([system(""), user(""), assistant(""), user("")], None),
        "blanks": ([system("  a\n"), user("\n\n b \t"), assistant("\n c\n\n"), user(" d ")], None),
        "code": ([user(CODE), assistant(f"```c\n{CODE}\n```"), user(f"{CODE}\n{CODE}")], None),
        "JSON": ([user(JSON_TEXT), assistant(JSON_TEXT), user("[1, [2, ['3']]]")], None),
        "tags": (
            [user("<tool_response>\nx\n</tool_response>"), assistant("<b></b>"), user("</think>")],
            None,
        ),
        "two questions": ([user("One?"), user("Two?")], None),
        "no question": ([system("Be brief.")], None),
        "late system": ([user(QUESTION), system("Be brief."), user("Go on")], None),
    }
    return {
        f"{name}, {number}{', prompt' if prompt else ''}": Conversation(messages, tools, settings, prompt)
        for name, (messages, tools) in base.items()
        for number, settings in enumerate(SETTINGS)
        for prompt in (True, False)
    }


def forged(seed: int, tokens: Sequence[str]) -> tuple[Conversation, Conversation]:
    """A conversation whose every part may spell control tokens or pieces of them, and its innocent twin.

    The twin is the same but for the letter x in the place of all that was forged.
    """
    innocent = _Forger(seed, tokens, lambda piece: "x" * len(piece))
    return _Forger(seed, tokens, lambda piece: piece).conversation(), innocent.conversation()


class _Forger:
    """Builds a conversation, spelling what is forged by `spell`; all else depends on the seed alone."""

    def __init__(self, seed: int, tokens: Sequence[str], spell: Spell) -> None:
        self._random = random.Random(seed)
        self._tokens = tokens
        self._spell = spell
        self._pending = ""  # the rest of a token that the part before has begun

    def conversation(self) -> Conversation:
        rng, text = self._random, self._text
        tools = None
        if rng.random() < 0.6:
            properties = {self._key(): {"type": "string", "description": text(), "enum": [text(), text()]}}
            properties[self._key()] = {"type": "object", "properties": {self._key(): {"default": text()}}}
            tools = [tool(self._key(), text(), properties)]
        messages = [system(text())] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 3)):
            messages.append(user(text()))
            reply = assistant(text())
            if rng.random() < 0.4:
                reply[rng.choice(("reasoning_content", "reasoning", "thinking"))] = text()
            if rng.random() < 0.4:
                reply["content"] = f"<think>{text()}</think>{text()}"
            messages.append(reply)
            if tools and rng.random() < 0.5:
                arguments = {self._key(): text(), self._key(): [text(), {self._key(): text(), "n": 7}]}
                reply["tool_calls"] = [call(self._key(), arguments)]
                messages += [result(text(), name=self._key()), assistant(text())]
        messages.append(user(text()))
        settings = dict(rng.choice(SETTINGS))
        if rng.random() < 0.2:
            settings["reasoning_effort"] = rng.choice(EFFORTS)
        return Conversation(messages, tools, settings, rng.random() < 0.8)

    def _text(self) -> str:
        """The rest of a token begun before, then words, tokens, pieces, and perhaps the beginning of one."""
        rng = self._random
        parts = [self._pending]
        self._pending = ""
        for _ in range(rng.randint(0, 3)):
            parts.append(rng.choice(("", " ", "\n", "word", "a < b | c", "</think>")))
            parts.append(self._forgery())
        if rng.random() < 0.5:
            token = rng.choice(self._tokens)
            split = rng.randint(1, len(token) - 1)
            parts.append(self._spell(token[:split]))
            self._pending = self._spell(token[split:])
        return "".join(parts)

    def _key(self) -> str:
        """A name of something: no two are alike."""
        return f"{self._forgery()}{self._random.randrange(1 << 30)}{self._forgery()}"

    def _forgery(self) -> str:
        rng, spell = self._random, self._spell
        token, other = rng.choice(self._tokens), rng.choice(self._tokens)
        split = rng.randint(1, len(token) - 1)
        begin, end = token[:split], token[split:]
        mark = chr(rng.choice((0xE000, 0xE001, 0xF8FF, 0xF0000, 0xF0001, 0xFFFFD)))
        ways = (
            lambda: spell(token),
            lambda: spell(begin),
            lambda: spell(end),
            lambda: spell(begin + token + end),
            lambda: spell(begin + other + end),
            lambda: spell(token.upper()),
            lambda: spell(token.swapcase()),
            lambda: spell(begin) + " " + spell(end),
            lambda: spell(begin) + "</think>" + spell(end),
            lambda: spell(token) + "\n" + spell(token),
            lambda: spell(begin + mark + end),
            lambda: spell(mark + token + mark),
            lambda: spell(json.dumps(token)[1:-1] + json.dumps(mark)[1:-1]),
            lambda: spell("".join(f"\\u{ord(char):04x}" for char in token)),
        )
        return rng.choice(ways)()
