"""Brings JSON schemas into a form whose values a grammar can hold to, or says what of one cannot be held.

Unit of work: one schema as a client wrote it, in any draft from 4 on → a `HeldSchema`. In it `$ref` refers
to `#/$defs/NAME` only, `const` is an `enum`, `oneOf` whose options exclude each other is an `anyOf`, `format`
is a `pattern`, patterns match whole texts, and what no finite value can satisfy is `false`. Annotations are
gone. The work is bounded by the limits below. Knows neither tokens nor how a grammar writes values.
"""

import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from coldstream.engine.regular_languages import ANYTHING, is_empty, literal, occurs, term, whole_match
from coldstream.engine.schema_facts import SchemaFacts, are_disjoint, can_be_written
from coldstream.engine.schema_formats import ANNOTATION_FORMATS, FORMATS
from coldstream.errors import InvalidRequestError, shown

MAX_SCHEMAS: Final = 20_000  # objects in one schema, those behind references counted once
MAX_PROPERTIES: Final = 3000  # properties of all objects; the time of compiling is quadratic in them
MAX_DEFINITIONS: Final = 1000  # definitions that are referred to
MAX_DEPTH: Final = 100  # depth of a schema's JSON
TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

# In the schema of a string: a Lark grammar of its text, for which JSON schemas have no word. It is kept for
# those who write strings as plain text.
LARK: Final = "x-lark"

_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that limit values in a way that no grammar here can hold.
_NOT_HELD: Final = (
    "not",
    "if",
    "then",
    "else",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
# Values of these with which they limit nothing.
_IDLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "contains": (),
    "minContains": (0, 1),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}


@dataclass(frozen=True)
class HeldSchema:
    """A schema in the form that the module's docstring says."""

    root: Any  # an object, or true or false
    definitions: Mapping[str, Any]

    def alone(self, part: Any) -> dict[str, Any]:
        """A schema of this one, with the definitions that it needs."""
        needed: dict[str, Any] = {}
        waiting = [part]
        while waiting:
            for name in _references(waiting.pop()):
                if name not in needed:
                    needed[name] = self.definitions[name]
                    waiting.append(needed[name])
        schema = part if isinstance(part, dict) else {} if part else {"enum": []}
        return {**schema, "$defs": needed} if needed else schema

    def target(self, schema: Mapping[str, Any]) -> Any:
        """What the `$ref` of a schema refers to."""
        return self.definitions[schema["$ref"].removeprefix("#/$defs/")]


def held_schema(schema: Any, name: str, *, is_strict: bool) -> HeldSchema:
    """The held form of `schema`, which errors call `name`.

    is_strict: whether keywords that cannot be held are refused; otherwise they are left out. Raises
    InvalidRequestError that names the place in the schema: for these, for what is no schema, and if no finite
    value satisfies it.
    """
    return _SchemaReader(schema, name, is_strict=is_strict).read()


class _SchemaReader:
    """Reads one schema."""

    def __init__(self, whole: Any, name: str, *, is_strict: bool) -> None:
        self._whole, self._name, self._is_strict = whole, name, is_strict
        self._facts = SchemaFacts(self._target)
        self._names: dict[str, str] = {}  # names of definitions by their place
        self._definitions: dict[str, Any] = {}
        self._unread: list[str] = []  # places of definitions that are referred to
        self._places: dict[int, str] = {}  # of the schemas that were read, by the id of the held form
        self._num_schemas = self._num_properties = 0
        is_old = isinstance(whole, dict) and "draft-0" in str(whole.get("$schema", ""))
        self._ignores_beside_ref = is_old

    def read(self) -> HeldSchema:
        _check_depth(self._whole, self._name)
        _check_sayable(self._whole, self._name)
        root = self._schema(self._whole, "#")
        while self._unread:
            place = self._unread.pop()
            self._definitions[self._names[place]] = self._schema(self._at(place, place), place)
        writable = can_be_written(self._definitions)
        pruned = HeldSchema(
            _pruned(root, writable),
            {name: _pruned(each, writable) for name, each in self._definitions.items()},
        )
        if pruned.root is False:
            place = _place_of_fault([root, *self._definitions.values()], writable, self._places)
            raise self._refusal(place, "no answer can match it: no finite value satisfies this schema")
        return pruned

    def _refusal(self, place: str, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._name} at {place}: {reason}")

    def _not_held(self, place: str, reason: str) -> None:
        if self._is_strict:
            raise self._refusal(place, f"{reason}; leave it out, or send strict: false")

    # --- one schema --------------------------------------------------------------------------------------

    def _schema(self, schema: Any, place: str) -> Any:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise self._refusal("#", f"too large: more than {MAX_SCHEMAS} schemas in one")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._refusal(place, f"a schema is an object, or true or false, not {shown(schema)}")
        held: dict[str, Any] = {}
        self._places[id(held)] = place
        if "$ref" in schema:
            held["$ref"] = f"#/$defs/{self._definition(schema['$ref'], place)}"
            if self._ignores_beside_ref:
                return held
        for key, value in schema.items():
            read = _KEYWORDS.get(key)
            if read is not None:
                read(self, key, value, held, place)
        self._read_one_of(schema, held, place)
        self._read_items(schema, held, place)
        self._read_object(schema, held, place)
        self._check_not_held(schema, place)
        _repair_old_bounds(held)
        return held

    def _read_type(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names:
            raise self._refusal(place, f"type must be a name or a list of names, not {shown(value)}")
        for name in names:
            if name not in TYPES:
                raise self._refusal(place, f"type {shown(name)} is not one of {', '.join(TYPES)}")
        held["type"] = names[0] if len(names) == 1 else list(dict.fromkeys(names))

    def _read_values(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        values = [value] if key == "const" else value
        if not isinstance(values, list):
            raise self._refusal(place, f"enum must be a list, not {shown(value)}")
        _add(held, "enum", values)

    def _read_count(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise self._refusal(place, f"{key} must be a whole number from 0 on, not {shown(value)}")
        held[key] = int(value)

    def _read_bound(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        is_old = isinstance(value, bool) and key.startswith("exclusive")
        if not is_old and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self._refusal(place, f"{key} must be a number, not {shown(value)}")
        if key == "multipleOf" and value <= 0:
            raise self._refusal(place, f"multipleOf must be above 0, not {shown(value)}")
        held[key] = value

    def _read_pattern(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        if not isinstance(value, str):
            raise self._refusal(place, f"pattern must be a text, not {shown(value)}")
        try:
            _add(held, "pattern", f"^(?:{whole_match(value)})$")
        except ValueError as error:
            self._not_held(place, f"pattern {shown(value)} cannot be held: {error}")

    def _read_format(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        if not isinstance(value, str):
            raise self._refusal(place, f"format must be a name, not {shown(value)}")
        if value in FORMATS:
            _add(held, "pattern", f"^(?:{FORMATS[value]})$")
        elif value not in ANNOTATION_FORMATS:
            known = ", ".join(FORMATS)
            self._not_held(place, f"format {shown(value)} cannot be held; known are {known}")

    def _read_lark(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        if isinstance(value, str):
            held[LARK] = value

    def _read_parts(self, key: str, value: Any, held: dict[str, Any], place: str) -> None:
        parts = [
            self._schema(each, f"{place}/{key}/{i}") for i, each in enumerate(self._list(key, value, place))
        ]
        if not parts:
            raise self._refusal(place, f"{key} must hold at least one schema")
        if key == "allOf":
            held["allOf"] = [*held.get("allOf", ()), *parts]
        else:
            _add(held, "anyOf", parts)

    def _read_one_of(self, schema: dict[str, Any], held: dict[str, Any], place: str) -> None:
        if "oneOf" not in schema:
            return
        options = self._list("oneOf", schema["oneOf"], place)
        for i, first in enumerate(options):
            for j in range(i):
                if not are_disjoint(options[j], first, self._facts):
                    self._not_held(
                        place,
                        f"oneOf cannot be held: one value may satisfy options {j} and {i}: write anyOf, or "
                        "give each option a required property with a const of its own",
                    )
        self._read_parts("oneOf", options, held, place)

    def _read_items(self, schema: dict[str, Any], held: dict[str, Any], place: str) -> None:
        first, rest, rest_key = schema.get("prefixItems"), schema.get("items"), "items"
        if isinstance(rest, list):  # before draft 2020-12
            first, rest, rest_key = rest, schema.get("additionalItems"), "additionalItems"
        if first is not None:
            key = "prefixItems" if "prefixItems" in schema else "items"
            held["prefixItems"] = [
                self._schema(each, f"{place}/{key}/{i}")
                for i, each in enumerate(self._list(key, first, place))
            ]
        if rest is not None:
            held["items"] = self._schema(rest, f"{place}/{rest_key}")

    def _list(self, key: str, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._refusal(place, f"{key} must be a list of schemas, not {shown(value)}")
        return value

    def _check_not_held(self, schema: dict[str, Any], place: str) -> None:
        for key in _NOT_HELD:
            if key in schema and schema[key] not in _IDLE.get(key, ()):
                is_idle = (
                    (key in ("then", "else") and "if" not in schema)
                    or (key in ("minContains", "maxContains") and "contains" not in schema)
                    or (key == "propertyNames" and _names_of(schema) is not None)
                )
                if not is_idle:
                    self._not_held(place, f"{key} cannot be held")

    # --- objects -----------------------------------------------------------------------------------------

    def _read_object(self, schema: dict[str, Any], held: dict[str, Any], place: str) -> None:
        maps: dict[str, dict[str, Any]] = {}
        for key in ("properties", "patternProperties"):
            value = schema.get(key, {})
            if not isinstance(value, dict):
                raise self._refusal(place, f"{key} must be an object of schemas, not {shown(value)}")
            maps[key] = {name: self._schema(each, f"{place}/{key}/{name}") for name, each in value.items()}
        required = schema.get("required", [])
        if isinstance(required, bool):  # draft 3, and still written
            required = []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._refusal(place, f"required must be a list of names, not {shown(required)}")
        self._num_properties += len(required) + sum(map(len, maps.values()))
        if self._num_properties > MAX_PROPERTIES:
            raise self._refusal(
                "#", f"too large: more than {MAX_PROPERTIES} properties, patterns and required"
            )
        rest = schema.get("additionalProperties")
        rest = None if rest is None else self._schema(rest, f"{place}/additionalProperties")
        self._name_properties(schema, maps, rest)
        if "propertyNames" in schema and _names_of(schema) is not None:
            rest = False
        patterns = self._patterns(maps, place)
        if patterns and _covers_all(patterns):
            rest = False
        found = {"properties": maps["properties"], "patternProperties": patterns}
        held |= {key: value for key, value in found.items() if value}
        if required:
            held["required"] = list(dict.fromkeys(required))
        if rest is not None:
            held["additionalProperties"] = rest
        least = held.get("minProperties", 0)
        if least > len(set(required)) + 1 and (patterns or rest is not False):
            self._not_held(
                place, "minProperties cannot be held where names are free, as they may be repeated"
            )

    def _name_properties(self, schema: dict[str, Any], maps: dict[str, dict[str, Any]], rest: Any) -> None:
        """Says with properties or patterns what `propertyNames` says of a map."""
        names = _names_of(schema)
        value = True if rest is None else rest
        if isinstance(names, str):
            maps["patternProperties"] = {names: value}
        elif names is not None:
            maps["properties"] = dict.fromkeys(names, value)

    def _patterns(self, maps: dict[str, dict[str, Any]], place: str) -> dict[str, Any]:
        """The patterns of names in the form in which they match whole names and exclude the properties; what
        they say of properties is added to these.
        """
        properties, patterns = maps["properties"], {}
        for pattern, value in maps["patternProperties"].items():
            where = f"{place}/patternProperties/{pattern}"
            try:
                whole = whole_match(pattern)
                named = [name for name in properties if occurs(pattern, name)]
                others = "".join(f" & ~{literal(name)}" for name in named)
                is_used_up = bool(named) and is_empty(f"{term(whole)}{others}")
            except ValueError as error:
                self._not_held(where, f"the pattern {shown(pattern)} cannot be held: {error}")
                continue
            for name in named:
                properties[name] = _both(properties[name], value)
            if not is_used_up:
                patterns[f"^(?:{whole})$"] = value
        return patterns

    # --- references --------------------------------------------------------------------------------------

    def _definition(self, reference: Any, place: str) -> str:
        """The name of the definition that a reference means; it is read later."""
        if not isinstance(reference, str):
            raise self._refusal(place, f"$ref must be a text, not {shown(reference)}")
        target = self._place_of(reference, place)
        if target not in self._names:
            self._at(target, place)
            if len(self._names) == MAX_DEFINITIONS:
                raise self._refusal(place, f"more than {MAX_DEFINITIONS} schemas are referred to")
            self._names[target] = f"d{len(self._names)}"
            self._unread.append(target)
        return self._names[target]

    def _place_of(self, reference: str, place: str) -> str:
        """The JSON pointer that a reference within this schema means."""
        own = self._whole.get("$id", self._whole.get("id")) if isinstance(self._whole, dict) else None
        if isinstance(own, str) and own:
            reference = reference.removeprefix(own.removesuffix("#"))
        if not reference.startswith("#") and reference:
            raise self._refusal(
                place, f"$ref {shown(reference)} is not within this schema: put it into $defs"
            )
        pointer = urllib.parse.unquote(reference[1:])
        if not pointer or pointer.startswith("/"):
            return f"#{pointer.removesuffix('/') if pointer == '/' else pointer}"
        found = next((where for where, node in _objects(self._whole) if _is_anchor(node, pointer)), None)
        if found is None:
            raise self._refusal(place, f"$ref {shown(reference)} leads nowhere")
        return found

    def _at(self, pointer: str, place: str) -> Any:
        """What stands at a JSON pointer."""
        value = self._whole
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise self._refusal(place, f"$ref {shown(pointer)} leads nowhere")
        return value

    def _target(self, reference: Any) -> Any:
        try:
            return self._at(self._place_of(reference, "#"), "#") if isinstance(reference, str) else True
        except InvalidRequestError:
            return True


Read = Callable[[_SchemaReader, str, Any, dict[str, Any], str], None]
_KEYWORDS: Final[Mapping[str, Read]] = {
    "type": _SchemaReader._read_type,
    "enum": _SchemaReader._read_values,
    "const": _SchemaReader._read_values,
    "pattern": _SchemaReader._read_pattern,
    "format": _SchemaReader._read_format,
    LARK: _SchemaReader._read_lark,
    "allOf": _SchemaReader._read_parts,
    "anyOf": _SchemaReader._read_parts,
    **dict.fromkeys(_COUNTS, _SchemaReader._read_count),
    **dict.fromkeys(_BOUNDS, _SchemaReader._read_bound),
}


def _add(held: dict[str, Any], key: str, value: Any) -> None:
    """Adds a keyword to a schema that may have it already: both count."""
    if key in held:
        held["allOf"] = [*held.get("allOf", ()), {key: value}]
    else:
        held[key] = value


def _both(first: Any, second: Any) -> Any:
    return second if first is True else first if second is True else {"allOf": [first, second]}


def _repair_old_bounds(held: dict[str, Any]) -> None:
    """Exclusive bounds of draft 4 are true or false."""
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(held.get(key), bool):
            is_exclusive = held.pop(key)
            if is_exclusive and bound in held:
                held[key] = held.pop(bound)


def _names_of(schema: Mapping[str, Any]) -> str | list[str] | None:
    """The names that `propertyNames` allows a map of any names, as a pattern or a list; None if it has to be
    held in another way.
    """
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or schema.get("properties") or schema.get("patternProperties"):
        return None
    keys = set(names) - {"type", "title", "description"}
    if names.get("type", "string") != "string":
        return None
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        return str(names["pattern"])
    if keys == {"enum"} and isinstance(names["enum"], list):
        return [name for name in names["enum"] if isinstance(name, str)]
    return None


def _covers_all(patterns: Mapping[str, Any]) -> bool:
    """Whether every name matches one of the patterns."""
    others = "".join(f" & ~{term(pattern)}" for pattern in patterns)
    try:
        return is_empty(f"/{ANYTHING}/{others}")
    except ValueError:
        return False


def _pruned(schema: Any, is_writable: Callable[[Any], bool]) -> Any:
    """A schema in which what no finite value satisfies is `false`, and is no option."""
    if not isinstance(schema, dict):
        return schema
    if not is_writable(schema):
        return False
    pruned = dict(schema)
    for key in ("properties", "patternProperties"):
        if key in schema:
            pruned[key] = {name: _pruned(each, is_writable) for name, each in schema[key].items()}
    for key in ("allOf", "prefixItems"):
        if key in schema:
            pruned[key] = [_pruned(each, is_writable) for each in schema[key]]
    if "anyOf" in schema:
        options = (_pruned(each, is_writable) for each in schema["anyOf"])
        pruned["anyOf"] = [each for each in options if each is not False]
    for key in ("items", "additionalProperties"):
        if key in schema:
            pruned[key] = _pruned(schema[key], is_writable)
    return pruned


def _place_of_fault(schemas: list[Any], is_writable: Callable[[Any], bool], places: Mapping[int, str]) -> str:
    """Where the innermost schema stands that no finite value satisfies."""
    found, waiting = "#", schemas
    while waiting:
        faulty = [each for each in waiting if isinstance(each, dict) and not is_writable(each)]
        if not faulty:
            return found
        found = places.get(id(faulty[0]), found)
        waiting = list(_children(faulty[0]))
    return found


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that stand directly in a held one."""
    for key in ("properties", "patternProperties"):
        yield from schema.get(key, {}).values()
    for key in ("allOf", "anyOf", "prefixItems"):
        yield from schema.get(key, ())
    yield from (schema[key] for key in ("items", "additionalProperties") if key in schema)


def _references(schema: Any) -> Iterator[str]:
    """The names of the definitions that a held schema refers to."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        if "$ref" in node:
            yield node["$ref"].removeprefix("#/$defs/")
        waiting += _children(node)


def _objects(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in a JSON value, with its JSON pointer."""
    waiting: list[tuple[str, Any]] = [("#", value)]
    while waiting:
        pointer, value = waiting.pop()
        if isinstance(value, dict):
            yield pointer, value
            waiting += [(f"{pointer}/{key}", item) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{pointer}/{i}", item) for i, item in reversed(list(enumerate(value)))]


def _is_anchor(node: Mapping[str, Any], name: str) -> bool:
    return node.get("$anchor") == name or f"#{name}" in (node.get("$id"), node.get("id"))


def _check_depth(value: Any, name: str) -> None:
    waiting = [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"{name}: nested more than {MAX_DEPTH} deep")
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(item, depth + 1) for item in items]


def _check_sayable(value: Any, name: str) -> None:
    """Raises for what the JSON of a schema cannot say: NaN, infinities, and half a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise InvalidRequestError(
            f"{name}: it holds a number beyond JSON, or half a surrogate pair"
        ) from None
