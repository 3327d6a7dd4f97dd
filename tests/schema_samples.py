"""Random JSON schemas over every keyword that grammars hold, and random texts along a grammar's own masks."""

import random
from typing import Any

from coldstream.engine.regular_languages import END_ID, byte_matcher

PATTERNS = ["^[a-c]{1,3}$", "\\d", "^x|y$", "^(?:ab|cd)+$", "[^\\s<>]+", "^\\S.*$", "é", "^$|^q"]
FORMATS = ["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
NAMES = ["a", "b", "key", "a b", "ünï", "x-1"]
WORDS: list[Any] = [
    "a",
    "none",
    "null",
    "5",
    "",
    "two\nlines",
    'q"',
    "é",
    1,
    2.5,
    -7,
    True,
    None,
    [1, "a"],
    {"k": 1},
]
_CLOSING = frozenset(b'"}]>\n')


class Schemas:
    """Makes schemas of one document, from a source of random numbers."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._num_definitions = choose.randrange(3)

    def parameters(self) -> dict[str, Any]:
        """The schema of a tool's arguments."""
        schema = self._object(2, is_root=True)
        if self._choose.random() < 0.25:
            schema = self._combined(schema, self._object(1, is_root=True))
        return self._with_definitions(schema)

    def document(self) -> dict[str, Any]:
        """The schema of any value."""
        schema = self.any(2)
        return self._with_definitions(schema if isinstance(schema, dict) else {"enum": ["x"]})

    def any(self, depth: int) -> Any:
        kinds = [self._string, self._number, self._listed, self._simple]
        if depth > 0:
            kinds += [
                self._object,
                self._array,
                self._alternatives,
                self._parts,
                self._reference,
                self._several_types,
            ]
        return self._choose.choice(kinds)(depth)

    def _with_definitions(self, schema: dict[str, Any]) -> dict[str, Any]:
        definitions = {f"d{i}": self.any(1) for i in range(self._num_definitions)}
        return {**schema, "$defs": definitions} if definitions else schema

    def _combined(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        if self._choose.random() < 0.5:
            return {"type": "object", "allOf": [first, second]}
        return {**first, "anyOf": [second, {"required": first.get("required", [])}]}

    def _string(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if self._choose.random() < 0.3:
            schema["pattern"] = self._choose.choice(PATTERNS)
        elif self._choose.random() < 0.2:
            schema["format"] = self._choose.choice(FORMATS)
        if self._choose.random() < 0.4:
            schema["maxLength"] = self._choose.randrange(1, 9)
        if self._choose.random() < 0.3:
            schema["minLength"] = self._choose.randrange(3)
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": self._choose.choice(["integer", "number"])}
        low = self._choose.randrange(-50, 50)
        if self._choose.random() < 0.6:
            schema[self._choose.choice(["minimum", "exclusiveMinimum"])] = low
        if self._choose.random() < 0.6:
            schema[self._choose.choice(["maximum", "exclusiveMaximum"])] = low + self._choose.randrange(40)
        if schema["type"] == "integer" and self._choose.random() < 0.3:
            schema["multipleOf"] = self._choose.choice([2, 5, 7])
        return schema

    def _listed(self, depth: int) -> dict[str, Any]:
        if self._choose.random() < 0.3:
            return {"const": self._choose.choice(WORDS)}
        return {"enum": self._choose.sample(WORDS, self._choose.randrange(1, 4))}

    def _simple(self, depth: int) -> Any:
        return self._choose.choice([{"type": "boolean"}, {"type": "null"}, {}, True, {"title": "any"}])

    def _several_types(self, depth: int) -> dict[str, Any]:
        types = ["string", "null", "integer", "boolean", "array"]
        return {"type": self._choose.sample(types, 2), "maxLength": 6, "maximum": 9, "maxItems": 2}

    def _object(self, depth: int, *, is_root: bool = False) -> dict[str, Any]:
        names = self._choose.sample(NAMES, self._choose.randrange(4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.any(depth - 1) for name in names},
        }
        required = [name for name in names if self._choose.random() < 0.5]
        if required or is_root:
            schema["required"] = required
        if self._choose.random() < 0.5:
            schema["additionalProperties"] = False
        elif self._choose.random() < 0.3:
            schema["additionalProperties"] = self.any(depth - 1)
        if self._choose.random() < 0.2:
            pattern = self._choose.choice(["^p_", "^a$", "^[a-c]+$"])
            schema["patternProperties"] = {pattern: self.any(depth - 1)}
        if self._choose.random() < 0.15:
            schema["maxProperties"] = len(required) + self._choose.randrange(2)
        if self._choose.random() < 0.1:
            schema["minProperties"] = len(required) + self._choose.randrange(2)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.any(depth - 1)}
        if self._choose.random() < 0.3:
            schema["prefixItems"] = [self.any(depth - 1)]
        if self._choose.random() < 0.4:
            schema["minItems"] = self._choose.randrange(3)
        if self._choose.random() < 0.6:
            schema["maxItems"] = schema.get("minItems", 0) + self._choose.randrange(2)
        return schema

    def _alternatives(self, depth: int) -> dict[str, Any]:
        key = self._choose.choice(["anyOf", "anyOf", "oneOf"])
        return {key: [self.any(depth - 1) for _ in range(self._choose.randrange(1, 4))]}

    def _parts(self, depth: int) -> dict[str, Any]:
        make = self._choose.choice([self._string, self._number, self._object])
        return {"allOf": [make(depth - 1), make(depth - 1)]}

    def _reference(self, depth: int) -> dict[str, Any]:
        if not self._num_definitions:
            return self._string(depth)
        return {"$ref": f"#/$defs/d{self._choose.randrange(self._num_definitions)}"}


def walked(source: str, choose: random.Random, most_bytes: int = 1500) -> str | None:
    """A text that a grammar matches, chosen byte by byte along its masks; None if it gets too long.

    Asserts that something may always follow.
    """
    matcher = byte_matcher(source)
    assert not matcher.is_error(), matcher.get_error()
    text = bytearray()
    while len(text) < most_bytes:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (matcher.get_error(), bytes(text))
        allowed = [8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        closing = [byte for byte in allowed if byte in _CLOSING or byte == END_ID]
        hurry = 0.3 + len(text) / most_bytes
        byte = choose.choice(closing if closing and choose.random() < hurry else allowed)
        if byte == END_ID or not matcher.consume_token(byte):
            assert not matcher.is_error() or byte == END_ID, (matcher.get_error(), bytes(text))
            return text.decode()
        text.append(byte)
    return None
