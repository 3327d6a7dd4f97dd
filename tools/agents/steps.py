"""The steps of a conversation, and the small request by which the server takes each of them.

A step is what the model should do next. The bundled model would not, so the server is asked for it in a
request of a few lines, where `tool_choice` demands the call and the schema allows these arguments only, or
where a JSON schema allows one text only. What the agent gets is a real answer of the server in its API.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

Fields = dict[str, Any]

QUESTION: Final = "Go on."
MAX_TOKENS: Final = 4000
THINKING_TOKENS: Final = 16  # of what the bundled model takes for thoughts


@dataclass(frozen=True)
class Call:
    """A call of a tool. A namespace is that of a tool of an MCP server in the Responses API."""

    name: str
    arguments: Mapping[str, Any]
    namespace: str | None = None


@dataclass(frozen=True)
class CustomCall:
    """A call of a tool of type `custom`, whose input is a text."""

    name: str
    text: str


@dataclass(frozen=True)
class Say:
    """A text, with which the turn ends."""

    text: str


Step = Call | CustomCall | Say


def demanded(path: str, body: Fields, step: Step) -> Fields:
    """A body for the route at `path` that lets the server do nothing but `step`, streamed as `body` is."""
    common = {name: body[name] for name in ("model", "stream", "stream_options") if name in body}
    routes = {"/v1/messages": _message, "/v1/chat/completions": _chat, "/v1/responses": _response}
    return common | routes[path](step)


def only(value: Any) -> Fields:
    """The JSON schema of this value."""
    if isinstance(value, Mapping):
        properties = {name: only(each) for name, each in value.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(value),
            "additionalProperties": False,
        }
    return {"enum": [value]}


def _message(step: Step) -> Fields:
    fields: Fields = {
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": QUESTION}],
        "thinking": {"type": "enabled", "budget_tokens": THINKING_TOKENS},
    }
    if isinstance(step, Say):
        return fields | {"output_config": {"format": {"type": "json_schema", "schema": _said(step)}}}
    assert isinstance(step, Call)
    tool = {"name": step.name, "description": "Does it.", "input_schema": only(step.arguments)}
    choice = {"type": "tool", "name": step.name, "disable_parallel_tool_use": True}
    return fields | {"tools": [tool], "tool_choice": choice}


def _chat(step: Step) -> Fields:
    fields: Fields = {
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": QUESTION}],
        "thinking_budget": THINKING_TOKENS,
    }
    if isinstance(step, Say):
        schema = {"name": "said", "strict": True, "schema": _said(step)}
        return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert isinstance(step, Call)
    function = {"name": step.name, "description": "Does it.", "parameters": only(step.arguments)}
    choice = {"type": "function", "function": {"name": step.name}}
    return fields | {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }


def _response(step: Step) -> Fields:
    fields: Fields = {"max_output_tokens": MAX_TOKENS, "input": QUESTION, "store": False}
    fields |= {"reasoning": {"effort": "none"}, "thinking_budget": THINKING_TOKENS}
    if isinstance(step, Say):
        form = {"type": "json_schema", "name": "said", "strict": True, "schema": _said(step)}
        return fields | {"text": {"format": form}}
    assert isinstance(step, Call | CustomCall)
    tool: Fields
    if isinstance(step, CustomCall):
        form = {"type": "grammar", "syntax": "regex", "definition": re.escape(step.text)}
        tool = {"type": "custom", "name": step.name, "description": "Does it.", "format": form}
    else:
        tool = {"type": "function", "name": step.name, "parameters": only(step.arguments), "strict": True}
        if step.namespace:
            tool = {"type": "namespace", "name": step.namespace, "description": "Tools.", "tools": [tool]}
    return fields | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}


def _said(step: Say) -> Fields:
    return only({"said": step.text})
