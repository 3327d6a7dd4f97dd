"""Tools of the responses API as functions that the model can call, and the names of the two.

Functions, custom tools, those of namespaces and `CLIENT_TOOLS` are offered as functions, each under its own
name. Tools that OpenAI's servers run are left out: nobody here could run them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from coldstream.errors import shown
from coldstream.server.http.chat_tools import MAX_NAME_CHARS, MAX_TOOLS, NAME_PATTERN
from coldstream.server.http.client_tools import CLIENT_TOOLS, is_run_by_client
from coldstream.server.http.custom_tools import function_of_custom
from coldstream.server.http.fields import Body, Flag, Name, Text
from coldstream.server.http.problems import refused

_MAX_GIVEN: Final = 8 * MAX_TOOLS  # many may be the same, found again and again
_SEPARATOR: Final = "__"
_NO_NAME_CHARS: Final = re.compile(r"[^\w.:/-]", re.ASCII)

_Identity = tuple[str, str | None, str]  # type, namespace and name of a tool


class ToolFormat(Body):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class FlatTool(Body):
    """A tool; which fields count depends on its `type`."""

    model_config = ConfigDict(extra="allow")

    type: Name
    name: Name | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    format: ToolFormat | None = None
    tools: Annotated[list["FlatTool"], Field(max_length=MAX_TOOLS)] | None = None
    execution: Name | None = None
    environment: dict[str, Any] | None = None


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the model may call; it knows the tool as `function["name"]`."""

    function: Mapping[str, Any]
    type: str
    name: str
    namespace: str | None = None

    @property
    def identity(self) -> "_Identity":
        """What no two tools share."""
        return self.type, self.namespace, self.name


class OfferedTools:
    """The tools of a request that can be offered, in their order. Raises ProblemError for one without a name.

    tools: of the request. loaded: by items of the conversation. What is given twice counts once.
    """

    def __init__(self, tools: Sequence[FlatTool], loaded: Sequence[FlatTool] = ()) -> None:
        num_given = sum(max(1, len(tool.tools or ())) for tool in (*tools, *loaded))
        if num_given > _MAX_GIVEN:
            raise refused(
                f"tools: {num_given} with those of namespaces, at most {_MAX_GIVEN} are read", "tools"
            )
        self.shown = [tool for tool in tools if _is_offered(tool)]
        self._by_name: dict[str, OfferedTool] = {}
        self._names: dict[_Identity, str] = {}
        self._numbers: dict[str, int] = {}  # by name: the last number that made it unique
        reserved = {tool.name for tool in tools if tool.type in ("function", "custom") and tool.name}
        for tool in (*tools, *loaded):
            for namespace, member in _members(tool):
                offered = _offered(member, namespace)
                if offered.identity not in self._names:
                    self._add(offered, reserved)

    def _add(self, tool: OfferedTool, reserved: set[str]) -> None:
        """Offers a tool under its own name, or one with a number behind it where that is another's."""
        name: str = tool.function["name"]
        is_own = tool.namespace is None and tool.type in ("function", "custom")
        if name in self._by_name or (name in reserved and not is_own):
            name = self._free(name, reserved)
        self._names[tool.identity] = name
        self._by_name[name] = replace(tool, function={**tool.function, "name": name})

    def _free(self, name: str, reserved: set[str]) -> str:
        """`name` with the first number behind it that makes it a name of its own.

        Names are never given up, so the search goes on where the last one ended: thousands may want one name.
        """
        number, free = self._numbers.get(name, 1), name
        while free in reserved or free in self._by_name:
            number += 1
            suffix = f"_{number}"
            free = f"{name[: MAX_NAME_CHARS - len(suffix)]}{suffix}"
        self._numbers[name] = number
        return free

    @property
    def all(self) -> Sequence[OfferedTool]:
        """The tools in their order."""
        return tuple(self._by_name.values())

    def as_functions(self) -> list[dict[str, Any]]:
        """The tools in the shape of chats."""
        return [{"type": "function", "function": tool.function} for tool in self._by_name.values()]

    def of(self, function: str) -> OfferedTool | None:
        """The tool that the model calls so; None for one that it made up."""
        return self._by_name.get(function)

    def function_name(self, kind: str, name: str, namespace: str | None = None) -> str:
        """The name under which the model knows a tool, whether it is still offered or not."""
        return self._names.get((kind, namespace, name)) or _joined(namespace, name)

    def chosen(self, choice: Mapping[str, Any]) -> list[OfferedTool]:
        """The tools that a choice means. Raises ProblemError if there are none, or two by one name."""
        kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
        every = self._by_name.values()
        if kind == "namespace":
            found = [tool for tool in every if tool.namespace == name]
        elif kind in CLIENT_TOOLS:
            found = [tool for tool in every if tool.type == kind]
        else:
            found = [tool for tool in every if (tool.type, tool.name) == (kind, name)]
            exact = [tool for tool in found if tool.namespace == namespace]
            found = exact or ([] if namespace is not None else found)
            if len(found) > 1:
                raise refused(
                    f"tool_choice: {name} is in several namespaces, give its namespace", "tool_choice"
                )
        if not found:
            what = f"{kind} {name}" if name else f"{kind}"
            raise refused(
                f"tool_choice: {what} is not among the tools that this server can offer", "tool_choice"
            )
        return found

    def only(self, kept: Iterable[OfferedTool]) -> "OfferedTools":
        """The same tools under the same names, of which only some may be called."""
        names = {tool.function["name"] for tool in kept}
        some = OfferedTools([])
        some.shown, some._names = self.shown, self._names
        some._by_name = {name: tool for name, tool in self._by_name.items() if name in names}
        return some


def is_offered_kind(kind: object) -> bool:
    """Whether tools of a type can be offered at all."""
    return kind in ("function", "custom", "namespace") or kind in CLIENT_TOOLS


def _is_offered(tool: FlatTool) -> bool:
    if tool.type in CLIENT_TOOLS:
        return is_run_by_client(tool.type, tool.execution, tool.environment)
    return is_offered_kind(tool.type)


def _members(tool: FlatTool) -> Iterator[tuple[str | None, FlatTool]]:
    """A tool, or those of a namespace, of which the first tells what the namespace is about."""
    if tool.type != "namespace":
        if _is_offered(tool):
            yield None, tool
        return
    if tool.name is None:
        raise refused("tools: a namespace has a name", "tools")
    about = [f"About {tool.name}: {tool.description}"] if tool.description else []
    for member in tool.tools or ():
        if member.type in ("function", "custom"):
            texts = [member.description] if member.description else []
            yield tool.name, member.model_copy(update={"description": "\n\n".join(texts + about) or None})
            about = []


def _offered(tool: FlatTool, namespace: str | None) -> OfferedTool:
    """A tool as a function, under a name that another tool may have, too."""
    if (known := CLIENT_TOOLS.get(tool.type)) is not None:
        function = {
            "name": tool.type,
            "description": tool.description or known.description,
            "parameters": tool.parameters or known.parameters,
        }
        return OfferedTool(function, tool.type, tool.type)
    if tool.name is None:
        raise refused(f"tools: a {tool.type} tool has a name", "tools")
    name = _joined(namespace, tool.name)
    if not re.fullmatch(NAME_PATTERN, name):
        raise refused(
            f"tools: {shown(name)}: a name has 1 to {MAX_NAME_CHARS} letters, digits and _.:/-", "tools"
        )
    if tool.type == "custom":
        form = tool.format or ToolFormat(type="text")
        if form.type == "grammar" and (form.syntax is None or form.definition is None):
            raise refused(f"tools: the grammar of {tool.name} needs its syntax and definition", "tools")
        function = function_of_custom(name, tool.description, form.syntax, form.definition)
        return OfferedTool(function, "custom", tool.name, namespace)
    fields = {"name": name, "description": tool.description, "parameters": tool.parameters}
    function = {name: value for name, value in fields.items() if value is not None}
    return OfferedTool(function, "function", tool.name, namespace)


def _joined(namespace: str | None, name: str) -> str:
    """One name for a tool of a namespace; clients write underscores around both of its parts."""
    if namespace is None:
        return name
    whole = f"{namespace.rstrip('_')}{_SEPARATOR}{name.lstrip('_')}"
    return _NO_NAME_CHARS.sub("_", whole)[:MAX_NAME_CHARS]
