"""From the body of a chat request to what the engine computes, and to the parsers of its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from coldstream.decoding import Grammar, RepetitionStop
from coldstream.engine.answer import Request as EngineRequest
from coldstream.server.http.chat_answer import ChatAnswer
from coldstream.server.http.chat_request import (
    ChatRequest,
    check_served,
    messages_for_template,
    template_settings_of,
)
from coldstream.server.http.fields import sampling_of
from coldstream.server.http.models import context_errors
from coldstream.server.http.settings import ServerSettings
from coldstream.server.http.volatile_lines import without_volatile
from coldstream.server.output import (
    MAX_CALLS,
    OutputParser,
    call_format,
    forced_calls,
    output_parser,
    prompt_opens_thought,
    thought_after,
)
from coldstream.server.served_model import ServedModel

_TAIL_TOKENS: Final = 16  # last tokens of a prompt, which hold the tag that opens or closes a thought

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that can be computed."""

    body: ChatRequest
    served: ServedModel
    request: EngineRequest
    tools: Tools  # tools that the answer may call
    is_thinking: bool  # whether the prompt ends inside a thought
    _parsers: list[OutputParser] = field(default_factory=list)  # one parser for each answer

    @property
    def max_calls(self) -> int:
        """Calls of an answer, with which it is complete."""
        return most_calls(self.body)

    @property
    def is_complete(self) -> bool:
        """Whether every answer has as many calls as it may have, so that nothing is left to say."""
        return bool(self._parsers) and all(parser.is_complete for parser in self._parsers)

    def parser(self) -> OutputParser:
        """A parser for one answer."""
        source = self.served.template_source or ""
        self._parsers.append(
            output_parser(source, self.tools, is_thinking=self.is_thinking, max_calls=self.max_calls)
        )
        return self._parsers[-1]

    def answers(self) -> list[ChatAnswer]:
        """Empty answers, one for each that was asked for."""
        tokenizer, num_top = self.served.tokenizer, self.body.num_logprobs
        return [
            ChatAnswer(
                self.parser(),
                tokenizer,
                num_top,
                custom_names=self.body.custom_names,
            )
            for _ in range(self.request.params.n)
        ]


def read_chat(body: ChatRequest, served: ServedModel, settings: ServerSettings) -> ChatPrompt:
    """Render and encode a conversation; this blocks. Raises ProblemError and InvalidRequestError."""
    check_served(body)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.usable_tools]
    source = served.template_source or ""
    grammar = _grammar(body, tools, source)
    params = sampling_of(
        body,
        served.default_sampling,
        settings,
        max_tokens=body.most_tokens,
        logprobs=body.num_logprobs,
        grammar=grammar,
        repetition=RepetitionStop() if body.stop_repetition else None,
    )
    with context_errors(served, "messages"):
        messages, template_settings = _for_template(body, tools, settings)
        request = served.requests.of_chat(messages, params, template_settings)
    tail = served.tokenizer.decode(request.prompt_token_ids[-_TAIL_TOKENS:], skip_special=False)
    has_thought = not body.continue_final_message
    if has_thought and (grammar is not None or body.thinking_budget is not None):
        thought = thought_after(source, tail, budget=body.thinking_budget, tools=tools)
        request = replace(request, params=replace(params, thought=thought))
    return ChatPrompt(body, served, request, tools, prompt_opens_thought(tail))


def rendered_chat(body: ChatRequest, served: ServedModel, settings: ServerSettings) -> str:
    """The prompt that the chat template writes, of any length; this blocks. Raises ProblemError."""
    check_served(body)
    tools = [tool.model_dump(exclude_unset=True) for tool in body.usable_tools]
    messages, template_settings = _for_template(body, tools, settings)
    return served.chat_template.render(messages, **template_settings).text


def _for_template(
    body: ChatRequest, tools: Tools, settings: ServerSettings
) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The messages for the chat template, and its settings."""
    messages = messages_for_template(body)
    if settings.drop_volatile:
        messages = without_volatile(messages)
    return messages, template_settings_of(body, tools, settings.chat_template_kwargs)


def most_calls(body: ChatRequest) -> int:
    """The calls that an answer may have."""
    return 1 if body.parallel_tool_calls is False else MAX_CALLS


def _grammar(body: ChatRequest, tools: Tools, source: str) -> Grammar | None:
    """What the answer is made to match: a call that is demanded, or a format. With tools that may be called,
    it is text of the format or calls.
    """
    demanded = body.demanded_call
    if isinstance(demanded, str):
        return forced_calls(source, [tool for tool in tools if tool["function"]["name"] == demanded])
    if demanded:
        return forced_calls(source, tools, most_calls=most_calls(body))
    constraint = body.constraint
    if constraint is None or not tools or call_format(source) is None:
        return constraint
    return replace(constraint, calls=forced_calls(source, tools, most_calls=most_calls(body)).text)
