"""The tools of a request, as far as calls of them are concerned: names, and schemas of their parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

Schema = Mapping[str, Any]


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
