"""Custom tools of OpenAI's APIs: their input is free text, where a function takes JSON.

The model is offered a function with the one parameter `input`. What it writes for that parameter is the input
of the tool, and calls of the history are shown to it in the same way. Knows no API's shapes.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from coldstream.server.output import LARK

PARAMETER: Final = "input"
_BEGINNING: Final = re.compile(rf'\s*\{{\s*"{PARAMETER}"\s*:\s*"')
# Characters of a JSON string that are complete: an escape sequence at the end may be incomplete.
_CHARACTERS: Final = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')
_SYNTAXES: Final = {"lark": "Lark grammar", "regex": "regular expression"}


def function_of_custom(
    name: str, description: str | None, syntax: str | None = None, definition: str | None = None
) -> dict[str, Any]:
    """The function that stands for a custom tool. syntax, definition: of the grammar that its input obeys."""
    text = {"type": "string", "description": "The whole input of the tool, as plain text."}
    if syntax is not None and definition is not None:
        text["description"] += f" It has to match this {_SYNTAXES[syntax]}."
        text |= {"pattern": f"^(?:{definition})$"} if syntax == "regex" else {LARK: definition}
    parameters = {
        "type": "object",
        "properties": {PARAMETER: text},
        "required": [PARAMETER],
        "additionalProperties": False,
    }
    described = {"description": description} if description else {}
    return {"name": name, **described, "parameters": parameters}


def arguments_of_input(text: str) -> str:
    """The arguments of a call whose input is `text`, as JSON."""
    return json.dumps({PARAMETER: text}, ensure_ascii=False)


class CustomInput:
    """Reads the input of one call out of its arguments, while these are written."""

    def __init__(self) -> None:
        self._arguments = ""
        self._position: int | None = None  # behind the characters of the input that were read
        self._has_ended = False
        self.text = ""

    def push(self, fragment: str) -> str:
        """The part of the input that a fragment of JSON adds, perhaps nothing yet."""
        self._arguments += fragment
        if self._has_ended:
            return ""
        if self._position is None:
            beginning = _BEGINNING.match(self._arguments)
            if beginning is None:
                return ""
            self._position = beginning.end()
        characters = _CHARACTERS.match(self._arguments, self._position)
        assert characters is not None, "it matches nothing, too"
        self._position = characters.end()
        self._has_ended = self._arguments.startswith('"', self._position)
        added: str = json.loads(f'"{characters[0]}"', strict=False)
        self.text += added
        return added

    def finish(self) -> str:
        """The rest of the input. Where the model did not begin with the parameter `input`, that is the input,
        or else the only value, or else the arguments as they are.
        """
        if self._position is not None:
            return ""
        values = json.loads(self._arguments or "{}")
        self.text = _input_of(values) if isinstance(values, Mapping) else self._arguments
        return self.text


def _input_of(values: Mapping[str, Any]) -> str:
    value = values.get(PARAMETER)
    if value is None and len(values) == 1:
        value = next(iter(values.values()))
    if value is None and not values:
        return ""
    return value if isinstance(value, str) else json.dumps(values, ensure_ascii=False)
