"""The values of a call's parameters: from the text that a model wrote to JSON, by the parameter's schema.

Formats that write values without quotes leave open what `5` is: a schema that allows strings only makes it
"5", any other one that allows a number makes it 5. What fits no type that the schema names stays as the model
wrote it, as JSON if it is JSON, otherwise as a string: a value is never lost, and the client's own validation
says what is wrong with it.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from coldstream.server.output.tools import Schema

JSON_TYPES: Final = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_MAX_LOOKED_INTO: Final = 200  # schemas; references may go round in circles
_LITERALS: Final = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


def types_of(schema: Any, whole: Schema) -> frozenset[str]:
    """The JSON types that a schema may allow; all if it does not say. `whole` is what `$ref` refers to."""
    return _Types(whole).of(schema) & JSON_TYPES or JSON_TYPES


def typed_json(text: str, types: frozenset[str]) -> str:
    """`text` as JSON of one of `types` if it can be read so; see the module's docstring."""
    stripped = text.strip()
    literal = _LITERALS.get(stripped.lower())
    if literal in types:
        return "null" if literal == "null" else stripped.lower()
    kind, written = _read(stripped)
    if kind in types or (kind == "integer" and "number" in types):
        return written if kind != "string" else quoted(text)
    if kind == "number" and "integer" in types and float(written).is_integer():
        return str(int(float(written)))
    if kind is None or "string" in types:
        return quoted(text)
    return written


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def finite_json(text: str, *, is_strict: bool = True) -> Any:
    """The value of JSON text. Raises ValueError for anything else, numbers beyond a double included.

    is_strict: whether line breaks and other control characters have to be escaped in strings.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite, strict=is_strict)
    except RecursionError:
        raise ValueError("JSON too deeply nested") from None


class _Types:
    """Collects the types of a schema, looking into a bounded number of schemas in it."""

    def __init__(self, whole: Schema) -> None:
        self._whole = whole
        self._num_left = _MAX_LOOKED_INTO

    def of(self, schema: Any) -> frozenset[str]:
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0:
            return JSON_TYPES
        names = schema.get("type")
        if isinstance(names, str):
            return frozenset((names,))
        if isinstance(names, list):
            return frozenset(name for name in names if isinstance(name, str))
        if "const" in schema:
            return frozenset((_type_of(schema["const"]),))
        if isinstance(schema.get("enum"), list):
            return frozenset(map(_type_of, schema["enum"]))
        if isinstance(reference := schema.get("$ref"), str):
            return self.of(_referred(reference, self._whole))
        options = [self.of(option) for key in ("anyOf", "oneOf") for option in _list(schema.get(key))]
        if options:
            return frozenset.union(*options)
        return frozenset.intersection(JSON_TYPES, *map(self.of, _list(schema.get("allOf"))))


def _referred(reference: str, whole: Schema) -> Any:
    """What a local JSON pointer refers to; anything for another one."""
    value: Any = whole
    if not reference.startswith("#/"):
        return True
    for part in reference[2:].split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return True if value is None else value


def _read(text: str) -> tuple[str | None, str]:
    """The type of JSON text, and the text; no type for what is no JSON."""
    try:
        return _type_of(finite_json(text)), text
    except ValueError:
        return None, text


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    for kind, name in (
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, kind):
            return name
    return "null"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"{text[:40]} is beyond a double")
    return value
