"""The tools of a request, as far as calls of them are concerned: names, and schemas of their parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

Schema = Mapping[str, Any]

# In the schema of a string parameter: a Lark grammar of its text, for which JSON Schema has no word.
LARK: Final = "x-lark"


@dataclass(frozen=True)
class ToolSignatures:
    """By name, the JSON schema of a tool's arguments, in the order in which the tools were given."""

    schemas: Mapping[str, Schema]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> Self:
        """Tools in the shape of OpenAI's chat API (`function`), its responses API (`parameters`) or
        Anthropic's (`input_schema`). What has no name is no tool.
        """
        schemas: dict[str, Schema] = {}
        for tool in tools:
            function = tool.get("function")
            signature = function if isinstance(function, Mapping) else tool
            name = signature.get("name")
            schema = signature.get("parameters", signature.get("input_schema"))
            if isinstance(name, str) and name:
                schemas[name] = schema if isinstance(schema, Mapping) else {}
        return cls(schemas)

    def parameter(self, tool: str, name: str) -> tuple[Any, Schema]:
        """The schema of one parameter, and the whole one that its references are of. Any value fits an
        unknown one.
        """
        whole = self.schemas.get(tool, {})
        properties = whole.get("properties")
        return (properties.get(name, True) if isinstance(properties, Mapping) else True), whole

    @property
    def with_lark(self) -> str | None:
        """The first tool with a parameter that a Lark grammar describes."""
        for name, schema in self.schemas.items():
            properties = schema.get("properties")
            values = properties.values() if isinstance(properties, Mapping) else ()
            if any(isinstance(value, Mapping) and LARK in value for value in values):
                return name
        return None
