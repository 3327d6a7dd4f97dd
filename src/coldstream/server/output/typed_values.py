"""The values of a call's parameters: from the text that a model wrote to JSON, by the parameter's schema.

Formats that write values without quotes leave open what `5` is. A text is read in every way that it can be
meant, and the first reading that the schema allows is the value:

1. a string that the schema lists, as `none` in an `enum`;
2. JSON, in which strings may hold line breaks and tabs that are not escaped;
3. `True`, `False` and `None`, as chat templates write them;
4. the text itself, as a string;
5. a JSON string without its quotes, and these names in another case.

So a schema that allows strings only makes `5` a string, and any other one that allows a number makes it 5.
What fits nothing stays as the model wrote it, as JSON of a type that the schema names or as JSON at all,
otherwise as a string. A value is never lost, and the client's own validation says what is wrong with it.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from coldstream.json_text import dumped, mended
from coldstream.server.output.tools import Schema, referred

JSON_TYPES: Final = frozenset(("object", "array", "string", "number", "integer", "boolean", "null"))
_MAX_LOOKED_INTO: Final = 200  # schemas for one question; references may be circular
_MAX_LOOKED_INTO_DEEP: Final = 5000
_MAX_DEPTH: Final = 100
_TEMPLATE_NAMES: Final = {"True": "true", "False": "false", "None": "null"}
_OTHER_NAMES: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}


@dataclass(frozen=True)
class ValueSchema:
    """The schema of one parameter; `whole` is what its references are of."""

    schema: Any
    whole: Schema

    @property
    def types(self) -> frozenset[str]:
        """The JSON types that may be meant; all if the schema does not say."""
        return _Inspection(self.whole).types(self.schema) & JSON_TYPES or JSON_TYPES

    @property
    def is_any_string(self) -> bool:
        """Whether every text is itself the value, so that it can be emitted while it is written."""
        return self.types == frozenset(("string",)) and not _Inspection(self.whole).lists_values(self.schema)

    def allows(self, value: Any, *, is_deep: bool = False) -> bool:
        """Whether a value fits, apart from patterns; what is inside of it counts if `is_deep`."""
        return _Inspection(self.whole, is_deep=is_deep).allows(self.schema, value)

    def json(self, text: str) -> str:
        """`text` as JSON; see the module's docstring."""
        readings = list(_readings(text, self))
        for is_deep in (True, False):
            for value, written in readings:
                if self.allows(value, is_deep=is_deep):
                    return written
        types = self.types
        for value, written in readings:
            if types & _types_of_value(value):
                return written
        return next((written for value, written in readings if not isinstance(value, str)), quoted(text))


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return dumped(text)


def finite_json(text: str, *, is_strict: bool = True) -> Any:
    """The value of JSON text. Raises ValueError for anything else.

    is_strict: whether line breaks and other control characters have to be escaped in strings, and numbers
    beyond a double are refused; otherwise such a number is the largest double.
    """
    try:
        return (_STRICT if is_strict else _TOLERANT).decode(text)
    except RecursionError:
        raise ValueError("JSON too deeply nested") from None


def finite_json_at(text: str, start: int) -> tuple[Any, int]:
    """The value of JSON that begins at `start`, and where it ends, read as by `finite_json` without
    strictness. Raises ValueError.
    """
    try:
        return _TOLERANT.raw_decode(text, start)
    except RecursionError:
        raise ValueError("JSON too deeply nested") from None


def _readings(text: str, schema: ValueSchema) -> Iterator[tuple[Any, str]]:
    """The values that `text` may mean, with their JSON, the likeliest first."""
    stripped = text.strip()
    listed = _Inspection(schema.whole).listed_strings(schema.schema)
    for string in (text, stripped):
        if string in listed:
            yield string, quoted(string)
    found = _json_reading(stripped)
    if found is not None and not isinstance(found[0], str):
        yield found
        if isinstance(found[0], float) and found[0].is_integer():
            yield int(found[0]), str(int(found[0]))
    if stripped in _TEMPLATE_NAMES:
        yield _named(_TEMPLATE_NAMES[stripped])
    yield text, quoted(text)
    if found is not None and isinstance(found[0], str):
        yield found
    if stripped.lower() in _OTHER_NAMES:
        yield _named(_OTHER_NAMES[stripped.lower()])


def _named(name: str) -> tuple[Any, str]:
    return json.loads(name), name


def _json_reading(text: str) -> tuple[Any, str] | None:
    """The value of JSON and how it is written, if it is JSON."""
    try:
        value = finite_json(text)
        return value, mended(text, value)
    except ValueError:
        pass
    try:
        value = finite_json(text, is_strict=False)
    except ValueError:
        return None
    return (value, dumped(value)) if isinstance(value, list | dict | float) else None


class _Inspection:
    """One question to a schema, which looks into a bounded number of schemas in it."""

    def __init__(self, whole: Schema, *, is_deep: bool = False) -> None:
        self._whole, self._is_deep = whole, is_deep
        self._num_left = _MAX_LOOKED_INTO_DEEP if is_deep else _MAX_LOOKED_INTO
        self._depth = 0

    def types(self, schema: Any) -> frozenset[str]:
        """The types that a schema names, directly or by its values and parts; all if it names none."""
        if not self._may_look_into(schema):
            return JSON_TYPES
        if not schema:
            return JSON_TYPES
        found = JSON_TYPES
        names = schema.get("type")
        if isinstance(names, str | list):
            found = frozenset(
                name for name in ([names] if isinstance(names, str) else names) if isinstance(name, str)
            )
            found |= {"integer"} if "number" in found else frozenset()
        for values in _listed_values(schema):
            found &= frozenset().union(*map(_types_of_value, values))
        if isinstance(reference := schema.get("$ref"), str):
            found &= self.types(referred(reference, self._whole))
        for key in ("anyOf", "oneOf"):
            if options := _list(schema.get(key)):
                found &= frozenset().union(*map(self.types, options))
        for part in _list(schema.get("allOf")):
            found &= self.types(part)
        return found

    def lists_values(self, schema: Any) -> bool:
        """Whether a schema has an `enum` or a `const`, directly or in one of its parts."""
        if not self._may_look_into(schema):
            return False
        return bool(_listed_values(schema)) or any(map(self.lists_values, self._parts(schema)))

    def listed_strings(self, schema: Any) -> frozenset[str]:
        """The strings in the `enum` and `const` of a schema and its parts."""
        if not self._may_look_into(schema):
            return frozenset()
        own = (value for values in _listed_values(schema) for value in values if isinstance(value, str))
        return frozenset(own).union(*map(self.listed_strings, self._parts(schema)))

    def allows(self, schema: Any, value: Any) -> bool:
        """Whether the value fits; True where that takes too many schemas."""
        self._depth += 1
        is_allowed = self._depth > _MAX_DEPTH or self._allows(schema, value)
        self._depth -= 1
        return is_allowed

    def _allows(self, schema: Any, value: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        if not self._may_look_into(schema):
            return True
        names = schema.get("type")
        if isinstance(names, str | list) and not _types_of_value(value) & set(
            [names] if isinstance(names, str) else names
        ):
            return False
        if not all(any(_is_same(value, listed) for listed in values) for values in _listed_values(schema)):
            return False
        if not _is_in_bounds(value, schema):
            return False
        if isinstance(reference := schema.get("$ref"), str):
            target = referred(reference, self._whole)
            if not self.allows(target, value):
                return False
        options = [_list(schema.get(key)) for key in ("anyOf", "oneOf")]
        if any(each and not any(self.allows(option, value) for option in each) for each in options):
            return False
        if not all(self.allows(part, value) for part in _list(schema.get("allOf"))):
            return False
        return not self._is_deep or self._allows_inside(schema, value)

    def _allows_inside(self, schema: Schema, value: Any) -> bool:
        """Whether the items or properties of a value fit."""
        if isinstance(value, list):
            if not _number(schema, "minItems", 0) <= len(value) <= _number(schema, "maxItems", len(value)):
                return False
            first = _list(schema.get("prefixItems"))
            rest = schema.get("items", True)
            return all(
                self.allows(first[i] if i < len(first) else rest, item) for i, item in enumerate(value)
            )
        if not isinstance(value, dict):
            return True
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        rest = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
        has_required = all(name in value for name in _list(schema.get("required")))
        return has_required and all(
            self.allows(properties.get(name, rest), item) for name, item in value.items()
        )

    def _parts(self, schema: Schema) -> Iterator[Any]:
        if isinstance(reference := schema.get("$ref"), str):
            yield referred(reference, self._whole)
        for key in ("anyOf", "oneOf", "allOf"):
            yield from _list(schema.get(key))

    def _may_look_into(self, schema: Any) -> bool:
        self._num_left -= 1
        return isinstance(schema, Mapping) and self._num_left >= 0


def _listed_values(schema: Schema) -> list[list[Any]]:
    """The values of `enum` and of `const`, those of them that the schema has."""
    found = [schema["enum"]] if isinstance(schema.get("enum"), list) else []
    return [*found, [schema["const"]]] if "const" in schema else found


def _is_in_bounds(value: Any, schema: Schema) -> bool:
    """Whether a number or the length of a string keeps the bounds of a schema."""
    if isinstance(value, str):
        return bool(_number(schema, "minLength", 0) <= len(value) <= _number(schema, "maxLength", len(value)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high = _number(schema, "exclusiveMinimum", None), _number(schema, "exclusiveMaximum", None)
    if (low is not None and value <= low) or (high is not None and value >= high):
        return False
    step = _number(schema, "multipleOf", 0)
    if step > 0 and Fraction(str(value)) % Fraction(str(step)):
        return False
    return bool(_number(schema, "minimum", value) <= value <= _number(schema, "maximum", value))


def _number(schema: Schema, key: str, default: Any) -> Any:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _is_same(value: Any, listed: Any) -> bool:
    """Whether two values are equal as JSON: 1 is 1.0, and true is not 1."""
    return isinstance(value, bool) == isinstance(listed, bool) and bool(value == listed)


def _types_of_value(value: object) -> frozenset[str]:
    """The JSON types of a value, two for a whole number."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int):
        return frozenset(("integer", "number"))
    kinds = ((float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return frozenset((next((name for kind, name in kinds if isinstance(value, kind)), "null"),))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _double(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"{text[:40]} is beyond a double")
    return value


def _nearest_double(text: str) -> float:
    value = float(text)
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


_STRICT: Final = json.JSONDecoder(parse_constant=_no_number, parse_float=_double)
_TOLERANT: Final = json.JSONDecoder(parse_constant=_no_number, parse_float=_nearest_double, strict=False)
