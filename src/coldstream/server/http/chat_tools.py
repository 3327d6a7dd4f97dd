"""The tools of a chat request, and which of them may or must be called.

Whatever a client offers, the model is offered functions: a custom tool is one of a single text.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from coldstream.errors import shown
from coldstream.server.http.custom_tools import function_of_custom
from coldstream.server.http.fields import Body, Name, Text
from coldstream.server.http.problems import refused

MAX_TOOLS: Final = 512

MAX_NAME_CHARS: Final = 128
NAME_PATTERN: Final = rf"^[\w.:/-]{{1,{MAX_NAME_CHARS}}}$"

FunctionName = Annotated[str, Field(pattern=NAME_PATTERN)]


class FunctionDefinition(Body):
    """A function that may be called; `parameters` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A function that may be called."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _is_offered(cls, given: Any) -> Any:
        """Where something else is meant, the complaint says so and not which fields it lacks."""
        kind = _type_of(given)
        if isinstance(kind, str) and kind != "function":
            message = "tools of type {kind} are not offered here: leave it out, or describe a function"
            raise PydanticCustomError("tool_type", message, {"kind": shown(kind)})
        if isinstance(given, Mapping) and "name" in given and "function" not in given:
            message = "name, description and parameters belong into an object function, beside the type"
            raise PydanticCustomError("tool_fields", message)
        return given


class InputGrammar(Body):
    """What a text has to match."""

    syntax: Literal["lark", "regex"]
    definition: Text


class InputFormat(Body):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class CustomDefinition(Body):
    """A tool whose input is a text."""

    name: FunctionName
    description: Text | None = None
    format: InputFormat | None = None


class CustomTool(Body):
    """A custom tool that may be called."""

    type: Literal["custom"]
    custom: CustomDefinition

    def as_function(self) -> Tool:
        """The function that stands for it. Raises ProblemError for a grammar that is none."""
        tool, grammar = self.custom, self.custom.format.grammar if self.custom.format else None
        if tool.format is not None and tool.format.type == "grammar" and grammar is None:
            raise refused(f"tools: the format of {tool.name} needs its grammar", "tools")
        syntax, definition = (None, None) if grammar is None else (grammar.syntax, grammar.definition)
        function = function_of_custom(tool.name, tool.description, syntax, definition)
        return Tool.model_validate({"type": "function", "function": function})


def _type_of(given: Any) -> Any:
    return given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)


# Tags begin with a capital letter, so that errors name fields alone.
AnyTool = Annotated[
    Annotated[Tool, Tag("Function")] | Annotated[CustomTool, Tag("Custom")],
    Discriminator(lambda given: "Custom" if _type_of(given) == "custom" else "Function"),
]


class Named(Body):
    """A tool by its name."""

    name: Name


class NamedChoice(Body):
    """One tool, under the field of its type."""

    type: Literal["function", "custom"]
    function: Named | None = None
    custom: Named | None = None

    @property
    def name(self) -> str:
        """The tool's name. Raises ProblemError if it is not given."""
        named = self.function if self.type == "function" else self.custom
        if named is None:
            raise refused(f"tool_choice.{self.type}: a tool is chosen by its name", "tool_choice")
        return named.name


class AllowedTools(Body):
    """The tools that may be called, and whether one of them has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(max_length=MAX_TOOLS)]


class AllowedChoice(Body):
    """The tools of a request of which the model is offered no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


OneOrSome = Annotated[
    Annotated[NamedChoice, Tag("One")] | Annotated[AllowedChoice, Tag("Some")],
    Discriminator(lambda given: "Some" if _type_of(given) == "allowed_tools" else "One"),
]
ToolChoiceSetting = Literal["none", "auto", "required"] | OneOrSome


def offered(tools: Sequence[Tool | CustomTool], choice: ToolChoiceSetting | None) -> list[Tool]:
    """The tools that the answer may call, as functions. Raises ProblemError."""
    if choice == "none":
        return []
    if isinstance(choice, AllowedChoice):
        known = {_key(tool) for tool in tools}
        allowed = {_checked(each, known) for each in choice.allowed_tools.tools}
        tools = [tool for tool in tools if _key(tool) in allowed]
    return [tool if isinstance(tool, Tool) else tool.as_function() for tool in tools]


def demanded(tools: Sequence[Tool | CustomTool], choice: ToolChoiceSetting | None) -> str | bool:
    """The name of the function that has to be called, or whether any has to. Raises ProblemError."""
    if isinstance(choice, NamedChoice):
        return _checked(choice, {_key(tool) for tool in tools})[1]
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    if mode == "required" and not offered(tools, choice):
        raise refused("tool_choice: there are no tools to call", "tool_choice")
    return mode == "required"


def custom_names(tools: Sequence[Tool | CustomTool]) -> frozenset[str]:
    """The names of custom tools. Raises ProblemError if a function has one of them, too."""
    found = [tool.custom.name for tool in tools if isinstance(tool, CustomTool)]
    uses = Counter(_key(tool)[1] for tool in tools)
    if twice := next((name for name in found if uses[name] > 1), None):
        raise refused(f"tools: {twice} is the name of two tools", "tools")
    return frozenset(found)


def _key(tool: Tool | CustomTool) -> tuple[str, str]:
    """The type and the name of a tool."""
    return tool.type, tool.function.name if isinstance(tool, Tool) else tool.custom.name


def _checked(choice: NamedChoice, known: Collection[tuple[str, str]]) -> tuple[str, str]:
    """The key of the tool that is chosen. Raises ProblemError if it is not `known`."""
    key = choice.type, choice.name
    if key not in known:
        kind = "function" if choice.type == "function" else "custom tool"
        raise refused(f"tool_choice: the {kind} {shown(choice.name)} is not among tools", "tool_choice")
    return key
