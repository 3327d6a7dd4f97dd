"""Requests of the agents as files for tests: their shape, without texts that are not this project's.

Roles, types, names, numbers and schemas stay. Instructions, descriptions and thoughts become short filler,
what was said and what the tools found stays, and identifiers are numbered. So a file has no path, name or
date of the machine where it was recorded, and nothing of the agents' own prose.
"""

import json
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tools.agents.conversations import COLOUR, LOST, NOTE
from tools.agents.mcp_server import PIXEL
from tools.agents.proxy import Exchange
from tools.agents.talk import Talk

FILLER: Final = "Filler."
SPOKEN: Final = (COLOUR, NOTE, LOST, "no window")  # what tools find
MAX_SPOKEN: Final = 60  # characters of a prompt or of a word of a schema that is kept
# Keys whose values say what something is, or are its name.
KINDS: Final = (
    *("type", "role", "name", "tool_name", "namespace", "status", "effort", "display", "keep", "syntax"),
    *("media_type", "detail", "ttl", "summary", "tool_choice", "verbosity", "include"),
    *("format", "$schema", "$ref", "pattern", "required", "enum", "default", "const"),
)
IDENTIFIERS: Final = frozenset(("id", "call_id", "tool_use_id", "tool_call_id"))
OURS: Final = frozenset(("arguments", "input"))  # of calls: written by `conversations.py`
CALLS: Final = ("tool_use", "custom_tool_call", "function_call")
THOUGHTS: Final = ("thinking", "reasoning_content")
OPAQUE: Final = frozenset(("signature", "encrypted_content"))
LARK: Final = "start: /(.|\\n)+/"
LEFT_BEHIND: Final = re.compile(r"/tmp/|/root|/home/(?!agent)|\b20\d\d-\d\d-\d\d")
HEADERS: Final = ("x-anthropic-billing-header:",)  # lines of system prompts that the server knows
TAG: Final = re.compile(r"<([a-z_-]+)>")

Fields = dict[str, Any]


def record(path: Path, version: str, talks: Sequence[Talk]) -> None:
    """Write the requests of one agent. Raises ValueError if something of this machine is left in them."""
    of_one_template = [talk for talk in talks if talk.template == talks[0].template]
    requests: list[Fields] = []
    tool_sets: list[Any] = []
    for talk in of_one_template:
        for exchange in _chosen(talk):
            body = Cleaner(talk).cleaned(exchange.body)
            tools = body.pop("tools", None)
            if tools not in tool_sets:
                tool_sets.append(tools)
            request = {"path": exchange.path, "body": body, "tools": tool_sets.index(tools)}
            if request not in requests:
                requests.append(request)
    file = {"client": talks[0].client.name, "version": version, "tool_sets": tool_sets, "requests": requests}
    text = json.dumps(file, indent=1, ensure_ascii=False)
    names = [socket.gethostname(), *(str(talk.folder) for talk in of_one_template)]
    left = [name for name in names if name in text] + LEFT_BEHIND.findall(text)
    if left:
        raise ValueError(f"{path.name} would have {left} of this machine")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _chosen(talk: Talk) -> Iterator[Exchange]:
    """Of each turn, whose requests repeat each other, the last served one, and all that have no tools."""
    for exchanges in talk.exchanges:
        served = [exchange for exchange in exchanges if exchange.body and exchange.status == 200]
        for exchange in served:
            if exchange is served[-1] or not exchange.body.get("tools"):
                yield exchange


class Cleaner:
    """Takes out of the bodies of one conversation what is not ours."""

    def __init__(self, talk: Talk) -> None:
        self._paths = {str(talk.work): "/work", str(talk.home): "/home/agent"}
        prompts = [prompt for prompt in talk.prompts if len(prompt) <= MAX_SPOKEN]
        self._spoken = tuple(dict.fromkeys((*SPOKEN, *prompts)))
        self._numbers: dict[str, int] = {}

    def cleaned(self, body: Fields) -> Fields:
        """A body with filler in it."""
        found: Fields = self._value("", body | {"model": "demo"})
        return found | {"model": "demo"}

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            of_call = value.get("type") in CALLS or "arguments" in value
            return {
                name: self._ours(each) if of_call and name in OURS else self._value(name, each)
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [self._value(key, each) for each in value]
        return self._text(key, value) if isinstance(value, str) else value

    def _ours(self, value: Any) -> Any:
        text = json.dumps(value)
        for path, name in self._paths.items():
            text = text.replace(path, name)
        return json.loads(text)

    def _text(self, key: str, text: str) -> str:
        if key in KINDS and len(text) <= MAX_SPOKEN:
            return text
        if key in IDENTIFIERS:
            prefix = text.split("_")[0] if "_" in text else "id"
            return f"{prefix}_{self._numbers.setdefault(text, len(self._numbers))}"
        if key in THOUGHTS:
            return FILLER
        if key in OPAQUE:
            return text and "c2lnbmF0dXJl"
        if key == "definition":
            return LARK
        if PIXEL in text:
            return text if text.startswith("data:") or text == PIXEL else PIXEL
        return _said(text) or self._filler(text)

    def _filler(self, text: str) -> str:
        """Filler around what was said, with the tag or the header that the text begins with."""
        header = next((header for header in HEADERS if text.startswith(header)), None)
        tag = TAG.match(text)
        inner = " ".join(words for words in self._spoken if words in text)
        if inner and inner == text.strip('"\n'):
            return text
        filler = f"{inner} {FILLER}" if inner else FILLER
        if header:
            return f"{header} {filler}"
        return f"<{tag[1]}>{filler}</{tag[1]}>" if tag else filler


def _said(text: str) -> str | None:
    """A text that `steps.py` demanded, in one form; None for another one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return json.dumps(value) if isinstance(value, dict) and set(value) == {"said"} else None
