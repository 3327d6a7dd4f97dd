"""Tools that OpenAI defines and the client runs: a shell, patches of files, a search for tools.

OpenAI's models know these tools by their type alone. Here the model is offered a function for each, and its
calls are answered as items of the tool's own type.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Fields = dict[str, Any]

_STRING: Final = {"type": "string"}
_STRINGS: Final = {"type": "array", "items": _STRING, "minItems": 1}
_INTEGER: Final = {"type": "integer"}


@dataclass(frozen=True)
class ClientTool:
    """How a tool is told to the model, and what item a call of it is.

    prefix: of the item's id. fields: the item's own fields, from a call's arguments; None if they do not fit.
    """

    description: str
    parameters: Mapping[str, Any]
    item_type: str
    prefix: str
    fields: Callable[[Mapping[str, Any]], Fields | None]


def _object(required: Sequence[str], **properties: Mapping[str, Any]) -> Fields:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _texts(value: Any) -> list[str] | None:
    is_fitting = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return value if is_fitting else None


def _kept(arguments: Mapping[str, Any], **kinds: type) -> Fields:
    """Those of the optional arguments that are there and of their type."""
    return {name: arguments[name] for name, kind in kinds.items() if type(arguments.get(name)) is kind}


def _local_shell(arguments: Mapping[str, Any]) -> Fields | None:
    command = arguments.get("command")
    texts = ["sh", "-c", command] if isinstance(command, str) else _texts(command)
    more = _kept(arguments, working_directory=str, timeout_ms=int)
    return None if texts is None else {"action": {"type": "exec", "command": texts, "env": {}, **more}}


def _shell(arguments: Mapping[str, Any]) -> Fields | None:
    commands = arguments.get("commands")
    texts = [commands] if isinstance(commands, str) else _texts(commands)
    more: Fields = {"timeout_ms": None, "max_output_length": None}
    more |= _kept(arguments, timeout_ms=int, max_output_length=int)
    return None if texts is None else {"action": {"commands": texts, **more}}


def _apply_patch(arguments: Mapping[str, Any]) -> Fields | None:
    kept = _kept(arguments, type=str, path=str, diff=str)
    needed = {"create_file": 3, "update_file": 3, "delete_file": 2}.get(kept.get("type", ""))
    if needed == 2:
        kept.pop("diff", None)
    return {"operation": kept} if len(kept) == needed else None


def _tool_search(arguments: Mapping[str, Any]) -> Fields:
    return {"arguments": dict(arguments), "execution": "client"}


CLIENT_TOOLS: Final[Mapping[str, ClientTool]] = {
    "local_shell": ClientTool(
        "Runs one program on the user's machine and returns what it prints.",
        _object(
            ["command"],
            command={**_STRINGS, "description": "The program and its arguments."},
            working_directory={**_STRING, "description": "The directory to run it in."},
            timeout_ms={**_INTEGER, "description": "Milliseconds after which it is stopped."},
        ),
        "local_shell_call",
        "lsh",
        _local_shell,
    ),
    "shell": ClientTool(
        "Runs commands in a shell on the user's machine and returns what they print.",
        _object(
            ["commands"],
            commands={**_STRINGS, "description": "The commands, each of which is run by itself."},
            timeout_ms={**_INTEGER, "description": "Milliseconds after which they are stopped."},
            max_output_length={**_INTEGER, "description": "Characters of output to return."},
        ),
        "shell_call",
        "sh",
        _shell,
    ),
    "apply_patch": ClientTool(
        "Creates, updates or deletes one file of the user.",
        _object(
            ["type", "path"],
            type={**_STRING, "enum": ["create_file", "update_file", "delete_file"]},
            path={**_STRING, "description": "The path of the file."},
            diff={**_STRING, "description": "The change as a unified diff, except to delete the file."},
        ),
        "apply_patch_call",
        "apc",
        _apply_patch,
    ),
    "tool_search": ClientTool(
        "Searches for tools that are not listed here, and makes those that it finds available.",
        _object(["query"], query={**_STRING, "description": "What the tool should do."}),
        "tool_search_call",
        "tsc",
        _tool_search,
    ),
}


def is_run_by_client(kind: str, execution: str | None, environment: Mapping[str, Any] | None) -> bool:
    """Whether a tool is the client's to run, from its type and two fields of its definition."""
    if kind == "tool_search":
        return execution == "client"
    if kind == "shell":
        return environment is None or environment.get("type") == "local"
    return kind in CLIENT_TOOLS
