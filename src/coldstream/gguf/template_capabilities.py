"""What a chat template accepts and knows, found out by rendering small conversations with it.

Templates do not describe themselves. One refuses a system message that is not the first, another one leaves
it out in silence, and a third one knows three words for efforts. So each question is asked by rendering: a
message is accepted if its text is in the prompt, between those of its neighbours. A question is asked when an
answer is needed first, and never again. Unit of work: one template. Knows nothing of the messages of callers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from coldstream.errors import TemplateError, TemplateLimitError

Message = Mapping[str, Any]
Render = Callable[..., str]  # (messages, **settings) → the prompt; TemplateError

# All words for efforts in the documentation of OpenAI and Anthropic, from the least on.
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What a template knows that prints any word it is given.
_USUAL_EFFORTS: Final = ("low", "medium", "high")
_NO_EFFORT: Final = "qvzweffort"
_WORDS: Final = tuple(f"qvzw{index}x" for index in range(6))  # in no template's own text
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
_ROLES: Final = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


class TemplateCapabilities:
    """The answers of one template. Properties raise `TemplateLimitError` if it could not be asked."""

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        self._source = source

    @cached_property
    def wants_parts(self) -> bool:
        """Whether contents are shown as lists of parts only, as in templates of models that see."""
        message = _message(0, "u")
        prompts = [self._attempted([each]) for each in (message, _with_parts(message))]
        return [_WORDS[0] in (prompt or "") for prompt in prompts] == [False, True]

    def with_contents(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages whose contents are texts, with contents as the template wants them."""
        return [_with_parts(message) for message in messages] if self.wants_parts else messages

    @cached_property
    def shows_turns(self) -> bool:
        """Whether a plain conversation is shown at all; nothing can be found out of a template otherwise."""
        return self._accepts("uau")

    @cached_property
    def accepts_system(self) -> bool:
        """Whether a system message may come first."""
        return self._accepts("su")

    @cached_property
    def accepts_late_system(self) -> bool:
        """Whether system messages may come anywhere and are shown where they are."""
        return self._accepts("usasus")

    @cached_property
    def accepts_repeated_user(self) -> bool:
        """Whether messages of the user may follow each other."""
        return self._accepts("uuauu")

    @cached_property
    def accepts_repeated_assistant(self) -> bool:
        """Whether messages of the assistant may follow each other."""
        return self._accepts("uaau")

    @cached_property
    def accepts_assistant_first(self) -> bool:
        """Whether a conversation may begin with the assistant's message."""
        return self._accepts("au")

    @cached_property
    def accepts_no_user(self) -> bool:
        """Whether a conversation may be without a message of the user."""
        return self._accepts("s" if self.accepts_system else "a")

    @cached_property
    def accepts_tools(self) -> bool:
        """Whether calls of the assistant and their results are shown."""
        name, argument, result = _WORDS[1], _WORDS[2], _WORDS[3]
        prompt = self._rendered([_message(0, "u"), _call(name, {"key": argument}), _result(result)])
        return prompt is not None and _in_order(prompt, (_WORDS[0], name, argument, result))

    @cached_property
    def accepts_several_calls(self) -> bool:
        """Whether all calls of one message are shown, and the results with their names."""
        first, second = (_call(name, {"key": name}) for name in (_WORDS[1], _WORDS[2]))
        calls = [*first["tool_calls"], {**second["tool_calls"][0], "id": "a1b2c3d4f"}]
        result = {**_result(_WORDS[4]), "name": _WORDS[2], "tool_call_id": "a1b2c3d4f"}
        prompt = self._rendered(
            [_message(0, "u"), {**first, "tool_calls": calls}, _result(_WORDS[3]), result]
        )
        return prompt is not None and _in_order(prompt, _WORDS[:5])

    @cached_property
    def accepts_text_beside_thoughts_of_calls(self) -> bool:
        """Whether a message may have a text, a thought and calls."""
        thought = {"reasoning_content": _WORDS[4], "thinking": _WORDS[4]}
        messages = [
            _message(0, "u"),
            {**_call(_WORDS[1], {}), **thought, "content": _WORDS[2]},
            _result(_WORDS[3]),
        ]
        prompt = self._rendered(messages)
        return prompt is not None and _WORDS[2] in prompt

    def with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
        """Tools as the template shows them: with a description, and without defaults of listed values, where
        it fails otherwise.
        """
        if not tools:
            return tools
        if not all(map(_has_description, tools)) and not self._accepts_tools_without_description:
            tools = list(map(_described, tools))
        if any(map(_has_listed_default, tools)) and not self._accepts_listed_defaults:
            tools = list(map(_without_listed_defaults, tools))
        return tools

    @cached_property
    def _accepts_tools_without_description(self) -> bool:
        tool = {"type": "function", "function": {"name": _WORDS[1], "parameters": _NO_PARAMETERS}}
        return self._rendered([_message(0, "u")], tools=[tool]) is not None

    @cached_property
    def _accepts_listed_defaults(self) -> bool:
        listed = {"type": "integer", "description": _WORDS[2], "enum": [1, 2], "default": 1}
        parameters = {"type": "object", "properties": {_WORDS[3]: listed}, "required": []}
        function = {"name": _WORDS[1], "description": _WORDS[4], "parameters": parameters}
        return (
            self._rendered([_message(0, "u")], tools=[{"type": "function", "function": function}]) is not None
        )

    @cached_property
    def drops_thoughts(self) -> bool:
        """Whether a message of the user, after the result of a tool, takes away the thoughts before it."""
        thought = _WORDS[4]
        turn = [
            _message(0, "u"),
            {**_call(_WORDS[1], {}), "reasoning_content": thought, "thinking": thought},
            _result(_WORDS[3]),
        ]
        before, after = self._rendered(turn), self._rendered([*turn, _message(5, "u")])
        return before is not None and thought in before and after is not None and thought not in after

    @cached_property
    def can_stop_thinking(self) -> bool:
        """Whether `enable_thinking` makes a difference."""
        prompts = [self._rendered([_message(0, "u")], enable_thinking=each) for each in (True, False)]
        return None not in prompts and prompts[0] != prompts[1]

    @cached_property
    def known_efforts(self) -> tuple[str, ...]:
        """Those of `EFFORTS` that make a difference of their own, from the least on."""
        prompts = {effort: self._with_effort(effort) for effort in (*EFFORTS, _NO_EFFORT)}
        other = prompts.pop(_NO_EFFORT)
        if other is None:
            return tuple(effort for effort, prompt in prompts.items() if prompt is not None)
        named = {effort for effort in EFFORTS if re.search(rf"""(['"]){effort}\1""", self._source)}
        if _NO_EFFORT in other:
            return tuple(effort for effort in EFFORTS if effort in named.union(_USUAL_EFFORTS))
        if all(prompt in (other, None) for prompt in prompts.values()):
            return ()
        return tuple(effort for effort in EFFORTS if prompts[effort] != other or effort in named)

    @cached_property
    def efforts(self) -> Mapping[str, Mapping[str, Any]]:
        """For each of `EFFORTS` the settings that the template is given for it, perhaps none."""
        return {effort: self._settings_of(effort, {}) for effort in EFFORTS}

    def with_known_effort(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """`settings`, whose effort is one of `EFFORTS` if there is one, with one that the template knows."""
        effort = settings.get("reasoning_effort")
        return dict(settings) if effort is None else self._settings_of(effort, settings)

    def _settings_of(self, effort: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The nearest effort that is known, the lesser one of two as near; for the least ones no thought."""
        rest = {name: value for name, value in settings.items() if name != "reasoning_effort"}
        known = self.known_efforts
        is_off = effort == "none" or (effort == "minimal" and not known)
        if is_off and self.can_stop_thinking and not rest.get("enable_thinking"):
            rest["enable_thinking"] = False
            known = (effort,) if effort in known else ()
        if known:
            rank = EFFORTS.index(effort)
            rest["reasoning_effort"] = min(known, key=lambda each: abs(EFFORTS.index(each) - rank))
        return rest

    def _with_effort(self, effort: str) -> str | None:
        on = {"enable_thinking": True, "thinking": True}  # some read the effort only then
        return self._rendered([_message(0, "u")], reasoning_effort=effort, **on)

    def _accepts(self, roles: str) -> bool:
        prompt = self._rendered([_message(index, role) for index, role in enumerate(roles)])
        return prompt is not None and _in_order(prompt, _WORDS[: len(roles)])

    def _rendered(self, messages: Sequence[Message], **settings: Any) -> str | None:
        """The prompt; None if the template refuses or fails."""
        return self._attempted(self.with_contents(messages), **settings)

    def _attempted(self, messages: Sequence[Message], **settings: Any) -> str | None:
        try:
            return self._render(messages, **settings)
        except TemplateLimitError:  # says nothing of the template
            raise
        except TemplateError:
            return None


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _has_description(tool: Mapping[str, Any]) -> bool:
    return not _function(tool) or isinstance(_function(tool).get("description"), str)


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool if _has_description(tool) else {**tool, "function": {**_function(tool), "description": ""}}


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _is_listed_default(schema: object) -> bool:
    return isinstance(schema, Mapping) and "enum" in schema and not isinstance(schema.get("default", ""), str)


def _has_listed_default(tool: Mapping[str, Any]) -> bool:
    return any(map(_is_listed_default, _properties(tool).values()))


def _without_listed_defaults(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if not _has_listed_default(tool):
        return tool
    properties = {
        name: {key: value for key, value in schema.items() if key != "default"}
        if _is_listed_default(schema)
        else schema
        for name, schema in _properties(tool).items()
    }
    parameters = {**_function(tool)["parameters"], "properties": properties}
    return {**tool, "function": {**_function(tool), "parameters": parameters}}


def _message(index: int, role: str) -> Message:
    return {"role": _ROLES[role], "content": _WORDS[index]}


def _with_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _call(name: str, arguments: Mapping[str, Any]) -> Message:
    function = {"name": name, "arguments": dict(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": function}],
    }


def _result(text: str) -> Message:
    return {"role": "tool", "content": text, "name": _WORDS[1], "tool_call_id": "a1b2c3d4e"}


def _in_order(prompt: str, words: tuple[str, ...]) -> bool:
    places = [prompt.find(word) for word in words]
    return -1 not in places and places == sorted(places)
