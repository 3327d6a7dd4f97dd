"""Answers as models of several families write them, tools that they call, and what events of a parser say."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coldstream.gguf.tokenizer import marked
from coldstream.server.output import (
    Content,
    OutputEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolCallTruncated,
    output_parser,
)

# What the chat templates of the families show of their calls, shortened.
XML_TEMPLATE = """{{ '<think>\\n</think>' }}<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
</function>
</tool_call>"""
HERMES_TEMPLATE = """{{ '</think>' }}<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
# Laguna XS and GLM-4.5 break lines between the tags, Laguna S and GLM-4.7 do not.
LINES_TEMPLATE = """{{ '<think>' + thought + '\\n</think>\\n' }}<tool_call>function-name
<arg_key>argument-key</arg_key>\n<arg_value>value-of-argument-key</arg_value>\n</tool_call>"""
ARGS_TEMPLATE = (
    "{{ '<think>' + thought + '</think>' }}"
    "<tool_call>{function-name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
)
TEMPLATES = {
    "xml": XML_TEMPLATE,
    "hermes": HERMES_TEMPLATE,
    "lines": LINES_TEMPLATE,
    "args": ARGS_TEMPLATE,
}
FAMILIES = tuple(TEMPLATES)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "content": {"type": "string"},
                    "mode": {"type": "integer"},
                    "executable": {"type": "boolean"},
                    "owner": {"type": ["string", "null"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "ratio": {"type": "number"},
                    "options": {"$ref": "#/$defs/options"},
                },
                "required": ["path", "content"],
                "$defs": {"options": {"type": "object", "properties": {"deep": {"type": "boolean"}}}},
            },
        },
    },
    {"type": "function", "function": {"name": "list_files"}},
]

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class TokenFamily:
    """A family whose answers are divided by control tokens. source: what its template shows of them."""

    source: str
    tokens: tuple[str, ...]
    prompt_end: str = ""

    def as_written(self, text: str) -> str:
        """Text in which control tokens are marked; those behind § are plain text."""
        pattern = rf"(§?)({'|'.join(map(re.escape, self.tokens))})"
        return re.sub(pattern, lambda match: match[2] if match[1] else marked(match[2]), text)

    def events_of(
        self, text: str | Iterable[str], *, tools: Any = TOOLS, prompt_end: str | None = None, **more: Any
    ) -> list[OutputEvent]:
        """All events of an answer that comes in pieces; a string is one piece a character."""
        prompt_end = self.prompt_end if prompt_end is None else prompt_end
        parser = output_parser(self.source, tools, is_thinking=False, prompt_end=prompt_end, **more)
        pieces = self.as_written(text) if isinstance(text, str) else text
        return [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]


def rendered(family: str, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the family's template writes it into a conversation."""
    if family == "hermes":
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    parameters = ""
    line = "\n" if family == "lines" else ""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if family != "xml":
            parameters += f"<arg_key>{key}</arg_key>{line}<arg_value>{text}</arg_value>{line}"
            continue
        parameters += f"<parameter={key}>\n{text}\n</parameter>\n"
    if family != "xml":
        return f"<tool_call>{name}{line}{parameters}</tool_call>"
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def events_of(
    family: str,
    pieces: str | Iterable[str],
    *,
    is_thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] = TOOLS,
) -> list[OutputEvent]:
    """All events of an answer that comes in pieces; a string is one piece a character."""
    parser = output_parser(TEMPLATES.get(family, ""), tools, is_thinking=is_thinking)
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.finish()]


def joined(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """The events, with texts that follow each other in one, and no ids."""
    result: list[OutputEvent] = []
    for event in events:
        last = result[-1] if result else None
        match event, last:
            case Content(text), Content(before):
                result[-1] = Content(before + text)
            case Reasoning(text), Reasoning(before):
                result[-1] = Reasoning(before + text)
            case ToolCallArguments(index, fragment), ToolCallArguments(_, before):
                result[-1] = ToolCallArguments(index, before + fragment)
            case ToolCallStart(index, _, name), _:
                result.append(ToolCallStart(index, "", name))
            case _:
                result.append(event)
    return result


def content_of(events: Sequence[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def reasoning_of(events: Sequence[OutputEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls_of(events: Sequence[OutputEvent]) -> list[Call]:
    """The complete calls, their arguments read as JSON."""
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    ended: list[int] = []
    for event in events:
        match event:
            case ToolCallStart(index, _, name):
                assert index == len(names)
                names[index], texts[index] = name, ""
            case ToolCallArguments(index, fragment):
                texts[index] += fragment
            case ToolCallEnd(index):
                ended.append(index)
    return [(names[index], json.loads(texts[index])) for index in ended]


def summary(events: Sequence[OutputEvent]) -> tuple[str, str, list[Call]]:
    """The reasoning, the content and the complete calls."""
    return reasoning_of(events), content_of(events), calls_of(events)


def truncated_calls_of(events: Sequence[OutputEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, ToolCallTruncated)]


def is_json_prefix(text: str) -> bool:
    """Whether `text` is the beginning of a JSON object that ends between two characters or values."""
    for rest in ("", "}", '"}', "null}", "{}"):
        try:
            return isinstance(json.loads(text + rest), dict)
        except ValueError:
            continue
    return False


class _BytesAndTokens:
    """The attributes that llguidance reads of a tokenizer, over bytes and some control tokens."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = [
            *(bytes((value,)) for value in range(256)),
            *(token.encode() for token in tokens),
            b"<end>",
        ]
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def is_matched_with_tokens(source: str, text: str, tokens: Sequence[str]) -> bool:
    """Whether `text`, in which `tokens` are control tokens, is all of an answer that a grammar allows."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    vocabulary = _BytesAndTokens(tokens)
    table = LLTokenizer(TokenizerWrapper(vocabulary), len(vocabulary.tokens), [vocabulary.eos_token_id])
    matcher = LLMatcher(table, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, tokens))})", text):
        ids += [256 + tokens.index(part)] if part in tokens else part.encode()
    num_valid = matcher.validate_tokens(ids)
    matcher.consume_tokens(ids[:num_valid])
    return bool(num_valid == len(ids) and matcher.is_accepting())
