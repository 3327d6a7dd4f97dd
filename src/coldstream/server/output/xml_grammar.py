"""The grammar of calls in XML that are demanded, see `xml_calls.py`."""

import json
from collections.abc import Mapping
from typing import Any

from coldstream.decoding import Grammar
from coldstream.server.output.call_format import lark_json
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import ValueSchema, quoted
from coldstream.server.output.xml_tags import CLOSE, FUNCTION, FUNCTION_END, OPEN, PARAMETER, PARAMETER_END


def xml_calls_grammar(tools: ToolSignatures, *, is_parallel: bool) -> Grammar:
    """What matches one call of one of `tools`, or several if `is_parallel`, and nothing else."""
    functions = [f"function_{i}" for i in range(len(tools.schemas))]
    head, end = quoted(f"{OPEN}\n"), quoted(f"{FUNCTION_END}\n{CLOSE}")
    rules = ['start: call ("\\n" call)*' if is_parallel else "start: call"]
    rules.append(f"call: {head} ({' | '.join(functions)}) {end}")
    for rule, (name, schema) in zip(functions, tools.schemas.items(), strict=True):
        rules += _function_rules(rule, name, schema)
    return Grammar("lark", "\n".join(rules))


def _function_rules(rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Rules of Lark for one function: its tag and its parameters."""
    properties = schema.get("properties")
    required = schema.get("required")
    rules, parts = [], [quoted(f"{FUNCTION}{name}>\n")]
    for i, (key, value) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
        part = f"{rule}_{i}"
        parts.append(part if isinstance(required, list) and key in required else f"{part}?")
        rules += _parameter_rules(part, key, value, schema)
    return [f"{rule}: {' '.join(parts)}", *rules]


def _parameter_rules(rule: str, key: str, schema: Any, whole: Mapping[str, Any]) -> list[str]:
    head, end = quoted(f"{PARAMETER}{key}>\n"), f"\n{PARAMETER_END}\n"
    if not isinstance(schema, Mapping) or "string" in ValueSchema(schema, whole).types:
        options = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(options, list) and options:
            texts = [option if isinstance(option, str) else json.dumps(option) for option in options]
            return [f"{rule}: {head} ({' | '.join(quoted(text + end) for text in texts)})"]
        return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={quoted(end)}]: /(?s:.*)/"]
    definitions = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    return [
        f"{rule}: {head} {rule}_json {quoted(end)}",
        f"{rule}_json: {lark_json({**schema, **definitions})}",
    ]
