"""What JSON schemas say together: whether two exclude each other, and whether a finite value satisfies one.

Answers err on the safe side: "disjoint" is certain, and so is "cannot be written".
"""

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import product
from typing import Any, Final

_ALL_TYPES: Final = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_MAX_DEPTH: Final = 8  # of schemas in schemas that are compared
_MAX_COMBINED: Final = 64
_MAX_COMPARED: Final = 50_000  # pairs, for one schema


class SchemaFacts:
    """What a schema says of its values, through the schemas that it refers to and is combined of."""

    def __init__(self, target: Callable[[Any], Any]) -> None:
        """target: what a `$ref` means."""
        self._target = target
        self._num_left = _MAX_COMPARED

    def may_compare(self) -> bool:
        """Whether the work for one schema is still within its bound; counts one comparison."""
        self._num_left -= 1
        return self._num_left >= 0

    def alternatives(self, schema: Any, depth: int = 0) -> list[list[Mapping[str, Any]]]:
        """The schema as alternatives, each of which is several schemas without parts that all hold.

        Too many alternatives are one that says nothing.
        """
        if schema is False:
            return []
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return [[]]
        found: list[list[Mapping[str, Any]]] = [[schema]]
        parts = [self._target(schema["$ref"])] if "$ref" in schema else []
        parts += _list(schema.get("allOf"))
        groups = [self.alternatives(part, depth + 1) for part in parts]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                options = (self.alternatives(option, depth + 1) for option in _list(schema[key]))
                groups.append([each for option in options for each in option])
        for group in groups:
            if len(found) * len(group) > _MAX_COMBINED:
                return [[]]
            found = [[*first, *second] for first, second in product(found, group)]
        return found


def are_disjoint(first: Any, second: Any, facts: SchemaFacts, depth: int = 0) -> bool:
    """Whether certainly no value satisfies both schemas."""
    if depth > _MAX_DEPTH or not facts.may_compare():
        return False
    return all(
        facts.may_compare() and _excludes([*one, *other], facts, depth)
        for one, other in product(facts.alternatives(first), facts.alternatives(second))
    )


def _excludes(schemas: list[Mapping[str, Any]], facts: SchemaFacts, depth: int) -> bool:
    """Whether certainly no value satisfies all of several schemas without parts."""
    types = frozenset.intersection(_ALL_TYPES, *map(_types, schemas))
    listed = [list(values) for schema in schemas for values in _values(schema)]
    if listed:
        return not any(
            _types_of(value) & types
            and all(any(_is_same(value, each) for each in values) for values in listed)
            for value in listed[0]
        )
    if types:
        return types == {"object"} and _objects_exclude(schemas, facts, depth)
    return True


def _objects_exclude(schemas: list[Mapping[str, Any]], facts: SchemaFacts, depth: int) -> bool:
    required = {name for schema in schemas for name in _list(schema.get("required")) if isinstance(name, str)}
    for name in required:
        of_name = [_property(schema, name) for schema in schemas]
        if any(each is False for each in of_name):
            return True
        said = [each for each in of_name if each is not True]
        if any(are_disjoint(said[i], said[j], facts, depth + 1) for i in range(len(said)) for j in range(i)):
            return True
    return False


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not is_closed


# --- whether a value can be written ------------------------------------------------------------------------


def can_be_written(definitions: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Whether finite values satisfy parts of a held schema (see `json_schema.py`), as a function of a part.

    A schema that needs itself has no finite value: the definitions that have one are found from below.
    """
    writable: set[str] = set()
    waiting = list(definitions)
    while True:
        num_before = len(writable)
        for name in waiting:
            if _can_end(definitions[name], writable):
                writable.add(name)
        waiting = [name for name in reversed(waiting) if name not in writable]
        if len(writable) == num_before:
            return lambda schema: _can_end(schema, writable)


def _can_end(schema: Any, writable: set[str]) -> bool:
    """Whether a finite value satisfies a schema, if one satisfies the definitions `writable` alone."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in writable:
        return False
    if not all(_can_end(part, writable) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_can_end(option, writable) for option in schema["anyOf"]):
        return False
    types = _types(schema)
    if "enum" in schema:
        return any(_types_of(value) & types for value in schema["enum"])
    return any(_has_value(name, schema, writable) for name in types)


def _has_value(name: str, schema: Mapping[str, Any], writable: set[str]) -> bool:
    if name == "string":
        return bool(schema.get("minLength", 0) <= schema.get("maxLength", math.inf))
    if name in ("integer", "number"):
        return _has_number(schema, is_whole=name == "integer")
    if name == "array":
        least = schema.get("minItems", 0)
        items = list(_items(schema, least)) if least <= schema.get("maxItems", math.inf) else [False]
        return all(_can_end(item, writable) for item in items)
    if name == "object":
        return _has_object(schema, writable)
    return True


def _items(schema: Mapping[str, Any], count: int) -> Iterator[Any]:
    """The schemas of the first `count` items, those that are alike once."""
    first = schema.get("prefixItems", [])
    yield from first[:count]
    if count > len(first):
        yield schema.get("items", True)


def _has_object(schema: Mapping[str, Any], writable: set[str]) -> bool:
    required, properties = schema.get("required", []), schema.get("properties", {})
    rest, patterns = schema.get("additionalProperties", True), schema.get("patternProperties", {})
    most = schema.get("maxProperties", math.inf)
    if len(required) > most or schema.get("minProperties", 0) > most:
        return False
    is_free = bool(patterns) or _can_end(rest, writable)
    if not all(_can_end(properties[name], writable) if name in properties else is_free for name in required):
        return False
    num_named = sum(_can_end(each, writable) for each in properties.values())
    return bool(is_free or schema.get("minProperties", 0) <= num_named)


def _has_number(schema: Mapping[str, Any], *, is_whole: bool) -> bool:
    low, is_low_out = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, is_high_out = _bound(schema, "maximum", "exclusiveMaximum", min)
    step = Fraction(str(schema["multipleOf"])) if "multipleOf" in schema else None
    if is_whole:
        step = Fraction(1 if step is None else step.numerator)
    if low is None or high is None:
        return True
    if step is None:
        return low < high or (low == high and not is_low_out and not is_high_out)
    first = math.ceil(low / step)
    first += is_low_out and first * step == low
    return first * step < high or (first * step == high and not is_high_out)


def _bound(
    schema: Mapping[str, Any], inner: str, outer: str, choose: Callable[..., Any]
) -> tuple[Fraction | None, bool]:
    """The nearer one of two bounds, and whether it is excluded itself."""
    found = [(Fraction(str(schema[key])), key == outer) for key in (inner, outer) if key in schema]
    if not found:
        return None, False
    value = choose(value for value, _ in found)
    return value, any(is_out for each, is_out in found if each == value)


# --- values ------------------------------------------------------------------------------------------------


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    names = schema.get("type")
    named = [names] if isinstance(names, str) else names if isinstance(names, list) else _ALL_TYPES
    types = frozenset(name for name in named if isinstance(name, str))
    return types | {"integer"} if "number" in types else types


def _values(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    if isinstance(schema.get("enum"), list):
        yield schema["enum"]
    if "const" in schema:
        yield [schema["const"]]


def _types_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int | float):
        return frozenset(("integer", "number") if value == value // 1 else ("number",))
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return frozenset((next((name for kind, name in kinds if isinstance(value, kind)), "null"),))


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
