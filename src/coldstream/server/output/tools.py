"""The tools of a request, as far as calls of them are concerned: names, and schemas of their parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from coldstream.engine.json_schema import LARK

Schema = Mapping[str, Any]

_MAX_LOOKED_INTO: Final = 200  # schemas of one tool; references may be circular


@dataclass(frozen=True)
class ToolSignatures:
    """By name, the JSON schema of a tool's arguments, in the order in which the tools were given.

    strict: the names of tools whose schema has to be held in full where a call is demanded.
    """

    schemas: Mapping[str, Schema]
    strict: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Tools in the shape of OpenAI's chat API (`function`), its responses API (`parameters`) or
        Anthropic's (`input_schema`). What has no name is no tool.
        """
        schemas: dict[str, Schema] = {}
        strict: set[str] = set()
        for tool in tools:
            function = tool.get("function")
            signature = function if isinstance(function, Mapping) else tool
            name = signature.get("name")
            schema = signature.get("parameters", signature.get("input_schema"))
            if isinstance(name, str) and name:
                schemas[name] = schema if isinstance(schema, Mapping) else {}
                if signature.get("strict") is True:
                    strict.add(name)
        return cls(schemas, frozenset(strict))

    def parameter(self, tool: str, name: str) -> tuple[Any, Schema]:
        """The schema of one parameter, and the whole one that its references are of. Any value fits an
        unknown one.
        """
        whole = self.schemas.get(tool, {})
        declared = [found[name] for found in _mappings(whole, "properties") if name in found]
        if not declared:
            declared = [
                schema for found in _mappings(whole, "patternProperties") for schema in found.values()
            ]
            declared += [
                part["additionalProperties"] for part in _parts(whole) if "additionalProperties" in part
            ]
        return (True if not declared else declared[0] if len(declared) == 1 else {"anyOf": declared}), whole

    @property
    def with_lark(self) -> str | None:
        """The first tool with a parameter that a Lark grammar describes."""
        for name, schema in self.schemas.items():
            values = [value for found in _mappings(schema, "properties") for value in found.values()]
            if any(isinstance(value, Mapping) and LARK in value for value in values):
                return name
        return None

    def parameters(self, tool: str) -> frozenset[str]:
        """The names of the parameters that a tool declares."""
        return frozenset(
            name for found in _mappings(self.schemas.get(tool, {}), "properties") for name in found
        )


def referred(reference: str, whole: Schema) -> Any:
    """What a local JSON pointer refers to; anything for another one."""
    value: Any = whole
    if reference == "#":
        return value
    if not reference.startswith("#/"):
        return True
    for part in reference[2:].split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return True if value is None else value


def _parts(whole: Schema) -> Iterator[Schema]:
    """A schema, and those that it refers to or is combined of, a bounded number of them."""
    waiting: list[Any] = [whole]
    for _ in range(_MAX_LOOKED_INTO):
        if not waiting:
            return
        schema = waiting.pop(0)
        if not isinstance(schema, Mapping):
            continue
        yield schema
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(referred(reference, whole))
        for key in ("allOf", "anyOf", "oneOf"):
            options = schema.get(key)
            waiting += options if isinstance(options, list) else ()


def _mappings(whole: Schema, key: str) -> Iterator[Mapping[str, Any]]:
    """What the parts of a schema say under `key`, where that is an object."""
    for part in _parts(whole):
        found = part.get(key)
        if isinstance(found, Mapping):
            yield found
